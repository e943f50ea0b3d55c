"""Requests of several steps: the driver waits for what they say, and a caller may step them by itself."""

from __future__ import annotations

import time

import pytest

from spark_klog.client import requests
from spark_klog.client.cluster import Cluster
from spark_klog.client.net import connection as connections, dial
from spark_klog.client.net.waiting import wait_until_ready
from spark_klog.client.requests import PendingRequest, Steps, Wait, each, paused, run
from spark_klog.client.settings import client_config
from spark_klog.errors import ConnectionFailed
from spark_klog.protocol.codec import Message
from tests.support.brokers.faults import late, silent
from tests.support.brokers.scripted_broker import ScriptedCluster


def _after(seconds: float, result: str) -> Steps[str]:
    yield from paused(time.monotonic() + seconds)
    return result


def _failing(seconds: float) -> Steps[str]:
    yield from paused(time.monotonic() + seconds)
    raise ConnectionFailed("no")


def test_one_request() -> None:
    begin = time.monotonic()
    assert run(_after(0.1, "done")) == "done"
    assert time.monotonic() - begin >= 0.1
    with pytest.raises(ConnectionFailed, match="no"):
        run(_failing(0.0))


def test_several_at_once() -> None:
    begin = time.monotonic()
    results = run(each({"slow": _after(0.3, "a"), "failing": _failing(0.0), "other": _after(0.3, "b")}))
    assert 0.3 <= time.monotonic() - begin < 10
    assert (results["slow"], results["other"]) == ("a", "b")
    assert isinstance(results["failing"], ConnectionFailed)


def test_an_interrupt_ends_all() -> None:
    ended: list[str] = []

    def waiting() -> Steps[str]:
        try:
            while True:
                yield Wait(None, 0.0)
        finally:
            ended.append("waiting")

    def interrupted() -> Steps[str]:
        yield Wait(None, 0.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(each({1: waiting(), 2: interrupted()}))
    assert ended == ["waiting"]


def test_steps_begin_again_after_an_interrupt() -> None:
    begun: list[int] = []

    def begin() -> Steps[int]:
        begun.append(1)
        yield Wait(None, 0.0)
        if len(begun) == 1:
            raise KeyboardInterrupt
        return len(begun)

    request: PendingRequest[int] = PendingRequest()
    assert request.step(begin) is None
    with pytest.raises(KeyboardInterrupt):
        request.step(begin)
    assert request.step(begin) is None
    assert request.step(begin) == 2
    assert request.connections == []


def test_steps_begin_again_after_an_error() -> None:
    """A request that has failed fails again, or succeeds, when it is stepped again; it does not wait for nothing."""
    outcomes = iter([_failing(0.0), _failing(0.0), _after(0.0, "done")])
    request: PendingRequest[str] = PendingRequest()

    def result() -> str:
        while (found := request.step(lambda: next(outcomes))) is None:
            pass
        return found

    for _ in range(2):
        with pytest.raises(ConnectionFailed, match="no"):
            result()
    assert result() == "done"


def test_steps_that_come_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a busy event loop: each request has time for its answer, as it would time out again and again."""
    for module in (connections, dial, requests):
        monkeypatch.setattr(module, "LEAST_ANSWER", 60.0)
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.always("ApiVersions", late(0.05))
        brokers.always("Metadata", late(0.05))
        with Cluster(client_config({"bootstrap.servers": brokers.bootstrap_servers})) as cluster, cluster.within(-1000):
            assert list(cluster.metadata(["t"])) == ["t"]


def test_a_broker_that_gives_no_answer_after_the_deadline() -> None:
    with (
        ScriptedCluster({"t": 1}) as brokers,
        Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers}) as cluster,
    ):
        brokers.always("Metadata", silent())
        with cluster.within(-1000), pytest.raises(ConnectionFailed, match="did not answer"):
            cluster.metadata(["t"])


def test_another_thread_may_have_taken_the_event_of_a_connection_that_opens() -> None:
    """It is looked at again soon, whatever the deadline of opening it is."""

    def opening() -> Steps[str]:
        yield Wait(connection, time.monotonic() + 1000)
        return "open"

    with (
        ScriptedCluster({"t": 1}) as brokers,
        Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers}) as cluster,
    ):
        connection = cluster.connection(0)
        request: PendingRequest[str] = PendingRequest()
        assert request.step(opening) is None
        assert request.look_at < time.monotonic() + 10


def test_another_thread_may_have_read_the_answer_of_any_broker() -> None:
    """It came with that to another request: no event tells of it, and it is looked for soon, whatever the deadline."""
    with (
        ScriptedCluster({"t": 1}) as brokers,
        Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers, "request.timeout.ms": "1000000"}) as cluster,
    ):
        waiting, other = PendingRequest[dict[str, Message]](), PendingRequest[dict[str, Message]]()
        assert waiting.step(lambda: cluster.asking_metadata(["t"])) is None
        while other.step(lambda: cluster.asking_metadata(["t"])) is None:
            wait_until_ready(other.connections, 60.0)
        assert waiting.look_at < time.monotonic() + 10
        assert "t" in (waiting.step(lambda: cluster.asking_metadata(["t"])) or ())
