"""How often, and where, clients look up coordinators, also when one has moved."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from spark_klog.client import Consumer, Producer, requests
from spark_klog.client.admin import admin as admin_module
from spark_klog.client.admin.admin import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import find_coordinator, finding_coordinators
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.client.requests import run
from spark_klog.errors import ErrorCode, ProtocolError, RequestTimedOut
from spark_klog.protocol.apis import END_TXN
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import GROUP, TRANSACTION
from tests.support.brokers.faults import Fault, late
from tests.support.brokers.kafka_python_wire import Message
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.brokers.sound_brokers import NOT_COORDINATOR
from tests.support.waiting import wait_until

REFUSED = "refused"
_GROUP_AUTHORIZATION_FAILED, _TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 30, 53


class Brokers(ScriptedCluster):
    """Two brokers whose coordinator answers EndTxn. Clients are not authorized for the transactional id `refused`."""

    def _on_FindCoordinator(self, node: int, asked: Message, is_applied: bool) -> Message:
        answer = super()._on_FindCoordinator(node, asked, is_applied)
        for entry in answer.get("coordinators", ()):
            if entry["key"] == REFUSED:
                entry |= {"error_code": _TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "node_id": -1, "host": "", "port": -1}
        return answer

    def _on_EndTxn(self, node: int, asked: Message, is_applied: bool) -> Message:
        code = 0 if node == self.coordinator else NOT_COORDINATOR
        return {"error_code": code, "producer_id": asked["producer_id"], "producer_epoch": asked["producer_epoch"]}


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    with Brokers({"t": 1}, nodes=2) as made:
        yield made


def cluster_of(brokers: ScriptedCluster, **more: str) -> Cluster:
    return Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers, "retry.backoff.ms": "20", **more})


def transactions(*names: str) -> list[PreparedTransaction]:
    return [PreparedTransaction(name, number, 0) for number, name in enumerate(names)]


def test_many_in_one_request(brokers: Brokers) -> None:
    with cluster_of(brokers) as cluster:
        found = run(finding_coordinators(cluster, ["a", REFUSED, "b"], TRANSACTION))
    refusal = found.pop(REFUSED)
    assert found == {"a": 1, "b": 1}
    assert isinstance(refusal, ProtocolError)
    assert refusal.code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert f"coordinator of transactional id {REFUSED}" in str(refusal)
    (asked,) = [one for one in brokers.asked if one.name == "FindCoordinator"]
    assert asked.message["coordinator_keys"] == ["a", REFUSED, "b"]


def test_one_request_each_before_kafka_3() -> None:
    with ScriptedCluster({"t": 1}, versions={"FindCoordinator": (0, 3)}) as brokers, cluster_of(brokers) as cluster:
        before = brokers.count("Metadata")
        assert run(finding_coordinators(cluster, ["a", "b", "c"], GROUP)) == {"a": 0, "b": 0, "c": 0}
        assert run(finding_coordinators(cluster, [], GROUP)) == {}
        assert brokers.count("FindCoordinator") == 3
        assert brokers.count("Metadata") == before + 1


def test_calls_look_up_anew(brokers: Brokers) -> None:
    """Every call looks up coordinators again, as they may have moved since the last call."""
    with Admin({"bootstrap.servers": brokers.bootstrap_servers}) as admin:
        for number in (1, 2):
            admin.end_transactions(transactions("a", "b", "c"), commits=True).check()
            # by their keys: a client of another test may still look for the broker that had this port before
            asked = [one for one in brokers.asked if one.name == "FindCoordinator"]
            assert sum(one.message.get("coordinator_keys") == ["a", "b", "c"] for one in asked) == number
    assert brokers.count("EndTxn") == 6


def test_transactions_end_without_waiting_for_each_other(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    send, receive = Connection.send, Connection.receive

    def sending(self: Connection, api: Api, message: Any, **more: Any) -> Handle | None:
        steps.extend(["sent"] * (api is END_TXN))
        return send(self, api, message, **more)

    def receiving(self: Connection, handle: Handle, *more: Any) -> Any:
        steps.extend(["received"] * (handle.api is END_TXN))
        return receive(self, handle, *more)

    with cluster_of(brokers) as cluster, Admin(cluster) as admin:
        monkeypatch.setattr(Connection, "send", sending)
        monkeypatch.setattr(Connection, "receive", receiving)
        refused = admin.end_transactions(transactions("a", "b", REFUSED, "c"), commits=True)
        monkeypatch.undo()
    assert [one.transactional_id for one in refused.failures] == [REFUSED]
    assert steps == ["sent"] * 3 + ["received"] * 3


def test_many_have_a_deadline_for_each_group(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take longer than request.timeout.ms. A coordinator that is silent then ends the call soon."""
    monkeypatch.setattr(admin_module, "_MOST_IN_FLIGHT", 5)
    many = transactions(*(f"id-{number}" for number in range(40)))
    brokers.always("EndTxn", Fault(delay=0.1))
    with cluster_of(brokers, **{"request.timeout.ms": "3000"}) as cluster, Admin(cluster) as admin:
        begin = time.monotonic()
        assert not admin.end_transactions(many, commits=True).failures
        assert time.monotonic() - begin > 3.5
        brokers.on("EndTxn", *[Fault()] * 15)
        brokers.always("EndTxn", Fault(times=0))
        begin = time.monotonic()
        outcomes = admin.end_transactions(many, commits=True)
        assert time.monotonic() - begin < 12
    assert list(outcomes) == many
    assert set(outcomes.failures) == set(many[15:])
    assert all(isinstance(error, RequestTimedOut) for error in outcomes.failures.values())


def test_answers_that_come_between_two_looks(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poll for the last response also reads the earlier ones: the client must not wait for them."""
    polled: list[Handle | None] = []
    poll = Connection.poll

    def polling(self: Connection, handle: Handle | None) -> bool:
        if handle is None or handle.api is not END_TXN:
            return poll(self, handle)
        polled.append(handle)
        if len(polled) < 3:  # as if no response had arrived
            return False
        while not poll(self, handle):
            select.select([self], [], [], 20)
        return True

    def waiting(*_: object) -> None:
        assert len(polled) < 3, "waits for an answer that is there"

    with cluster_of(brokers) as cluster, Admin(cluster) as admin, admin.same_coordinators():
        admin.end_transactions(transactions("a", "b", "c"), commits=True).check()
        monkeypatch.setattr(Connection, "poll", polling)
        monkeypatch.setattr(requests, "wait_until_ready", waiting)
        admin.end_transactions(transactions("a", "b", "c"), commits=True).check()
    assert brokers.count("EndTxn") == 6


def test_calls_that_share_coordinators(brokers: Brokers) -> None:
    with cluster_of(brokers) as cluster, Admin(cluster) as admin:
        with admin.same_coordinators():
            for one in transactions("a", "a", "a"):
                admin.end_transactions([one], commits=True).check()
            assert brokers.count("FindCoordinator") == 1
            brokers.coordinator = 0
            for one in transactions("a", "a"):
                admin.end_transactions([one], commits=True).check()
            assert brokers.count("FindCoordinator") == 2
        assert [one.node for one in brokers.asked if one.name == "EndTxn"] == [1, 1, 1, 1, 0, 0]
        refused = admin.end_transactions(transactions("a", REFUSED), commits=True)
        assert [one.transactional_id for one in refused.failures] == [REFUSED]


@pytest.mark.parametrize(("first", "second"), [(4, 3), (3, 4)])
def test_brokers_of_two_versions_that_are_asked_at_once(first: int, second: int) -> None:
    """As in a rolling upgrade: the answer is that of the broker that was asked first, after the other one was asked."""
    with (
        ScriptedCluster({"t": 1}, versions={"FindCoordinator": (0, first)}) as slow,
        ScriptedCluster({"t": 1}, versions={"FindCoordinator": (0, second)}) as silent,
    ):
        slow.on("FindCoordinator", late(0.7))
        silent.on("FindCoordinator", late(5))
        settings = {"bootstrap.servers": f"{slow.bootstrap_servers},{silent.bootstrap_servers}"}
        with Cluster.connect(settings) as cluster, cluster.within(1000):
            assert find_coordinator(cluster, "g") == 0
        assert silent.count("FindCoordinator") == 1


class Moved(ScriptedCluster):
    """Broker 2 coordinates, and refuses members; broker 0, which is asked first, still names broker 1."""

    def _on_FindCoordinator(self, node: int, asked: Message, is_applied: bool) -> Message:
        answer = super()._on_FindCoordinator(node, asked, is_applied)
        for entry in answer.get("coordinators", [answer]):
            entry["node_id"] = entry["node_id"] if node else 1
            entry["port"] = self.ports[entry["node_id"]]
        return answer

    def _on_JoinGroup(self, node: int, asked: Message, is_applied: bool) -> Message:
        code = _GROUP_AUTHORIZATION_FAILED if node == self.coordinator else NOT_COORDINATOR
        there = {"generation_id": -1, "protocol_name": "", "leader": "", "member_id": "", "members": []}
        return {"error_code": code, **there}


@pytest.fixture
def moved() -> Iterator[dict[str, str]]:
    """The settings of clients that ask for a coordinator that has moved."""
    with Moved({"t": 1}, nodes=3) as brokers:
        yield {"bootstrap.servers": brokers.bootstrap_servers.split(",")[0], "max.block.ms": "5000"}


def test_another_broker_is_asked_for_a_coordinator_that_refuses_a_transaction(moved: dict[str, str]) -> None:
    with Producer({**moved, "transactional.id": "x"}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("t", b"x")
        begin = time.monotonic()
        producer.commit_transaction()
    assert time.monotonic() - begin < 3


def test_another_broker_is_asked_for_a_coordinator_that_refuses_a_member(moved: dict[str, str]) -> None:
    with Consumer({**moved, "group.id": "g"}) as consumer:
        consumer.subscribe(["t"])
        with pytest.raises(ProtocolError, match="GROUP_AUTHORIZATION_FAILED"):
            wait_until(lambda: consumer.poll(0.5), seconds=3)
