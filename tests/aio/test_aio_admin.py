"""What only the asyncio admin client promises: turns, cancellation, loops; its calls are tested by `admin`."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from spark_klog.aio import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import AdminClosed, ConcurrentUse, ConfigError, ConnectionFailed, ProtocolError, RequestTimedOut
from tests.support.brokers.faults import late
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.clients.on_loop import Rounds, run


def test_calls_take_turns() -> None:
    async def main(brokers: ScriptedCluster) -> None:
        async with Admin({"bootstrap.servers": brokers.bootstrap_servers}) as admin:
            listed = await asyncio.gather(*(admin.list_topics() for _ in range(20)))
            assert [[topic.name for topic in topics] for topics in listed] == [["t"]] * 20
            found = await admin.describe_topics(["t", "u"])
            assert found["t"].partitions[0].leader == 0  # type: ignore[union-attr]
            with pytest.raises(ProtocolError, match="UNKNOWN_TOPIC_OR_PARTITION"):
                await admin.describe_topic("u")
            with pytest.raises(TypeError, match="NewTopic"):
                await admin.create_topics(["t"])  # type: ignore[list-item]
        with pytest.raises(AdminClosed):
            await admin.list_topics()

    with ScriptedCluster({"t": 1}) as brokers:
        run(main(brokers))


def test_a_turn_that_does_not_come() -> None:
    async def main(brokers: ScriptedCluster) -> None:
        times = {"request.timeout.ms": "3000", "default.api.timeout.ms": "3000"}
        async with Admin({"bootstrap.servers": brokers.bootstrap_servers, **times}) as admin:
            brokers.always("Metadata", late(60))
            outcomes = await asyncio.gather(*(admin.list_topics() for _ in range(3)), return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} <= {RequestTimedOut, ConnectionFailed}
            waiting = asyncio.create_task(admin.list_topics())
            await asyncio.sleep(0)
            await admin.close()
            with pytest.raises(AdminClosed):
                await waiting

    with ScriptedCluster({"t": 1}) as brokers:
        run(main(brokers))


def test_loops() -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        admin = Admin({"bootstrap.servers": brokers.bootstrap_servers})

        async def main() -> None:
            await admin.list_topics()

        asyncio.run(main())
        with pytest.raises(ConcurrentUse, match="another event loop"):
            asyncio.run(main())
        with pytest.raises(ConfigError, match=r"where asyncio's loop runs"):
            admin.list_topics().send(None)


def test_calls_that_are_cancelled_at_any_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are cancelled at each round of the driver: the next ones find the connections in order."""
    rounds = Rounds(monkeypatch)

    async def calls(admin: Admin, name: str) -> None:
        await admin.create_topic(name, 2)
        await admin.alter_configs({("topic", name): {"retention.ms": "1000"}})
        await admin.alter_group_offsets("g", {(name, 0): 0})
        await admin.describe_groups(["g", "h"])
        await admin.list_offsets({(name, 0): "latest", (name, 1): "earliest"})

    async def main(servers: str) -> None:
        async with Admin({"bootstrap.servers": servers}) as admin:
            for number in count():
                is_cancelled = await rounds.cancelled(calls(admin, f"t{number}"), number + 1)
                assert (await admin.list_group_offsets("none")) == {}
                if not is_cancelled:
                    break
            assert f"t{number}" in {topic.name for topic in await admin.list_topics()}

    with EmbeddedCluster() as cluster:
        run(main(cluster.bootstrap_servers))
