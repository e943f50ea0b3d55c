"""The consumer's fetch sessions against our broker's, and fetches from the preferred read replica."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from spark_klog.broker import fetches
from spark_klog.client import Consumer
from spark_klog.client.consumer.fetches import FetchSession
from spark_klog.client.fetch.entries import FetchParameters
from spark_klog.errors import DecodeError, ErrorCode, ProtocolError
from tests.support.brokers.scripted_broker import ScriptedCluster

_KEYS = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3))
_WANTED = st.builds(
    FetchParameters, st.integers(0, 3), st.sampled_from([100, 200]), st.integers(-1, 1), topic_id=st.none()
)
#: Each topic's id (a recreated topic has another one); None: brokers without topic ids.
_LIVES = st.one_of(st.none(), st.fixed_dictionaries({"a": st.integers(1, 2), "b": st.integers(3, 4)}))
_STEPS = st.lists(
    st.tuples(st.dictionaries(_KEYS, _WANTED, min_size=1), _LIVES, st.sampled_from(["", "lost", "evicted"]))
)


def _key(topic: dict[str, Any], partition: int, *, has_ids: bool) -> fetches.PartitionKey:
    if has_ids:
        return fetches.PartitionKey("", topic["topic_id"], partition)
    return fetches.PartitionKey(topic["topic"], UUID(int=0), partition)


def _ask(sessions: Any, client: FetchSession, wanted: dict[tuple[str, int], FetchParameters], now: float) -> Any:
    """Give the client's request to the broker's sessions; return the session, or an error code."""
    request = client.request(wanted)
    entries = [
        (_key(topic, entry["partition"], has_ids=client.has_ids), entry)
        for topic in request["topics"]
        for entry in topic["partitions"]
    ]
    forgotten = [
        _key(topic, partition, has_ids=client.has_ids)
        for topic in request["forgotten_topics_data"]
        for partition in topic["partitions"]
    ]
    session_id, epoch = request["session_id"], request["session_epoch"]
    return sessions.find(session_id, epoch, entries, forgotten, now, has_ids=client.has_ids)


@given(_STEPS)
def test_the_broker_fetches_what_the_client_wants(
    steps: list[tuple[dict[tuple[str, int], FetchParameters], dict[str, int] | None, str]],
) -> None:
    sessions = fetches.FetchSessions(10, 0)
    client = FetchSession()
    for number, (asked, lives, trouble) in enumerate(steps):
        ids = {topic: UUID(int=life) for topic, life in (lives or {}).items()}
        wanted = {key: item._replace(topic_id=ids.get(key[0])) for key, item in asked.items()}
        if trouble == "evicted":
            sessions._sessions.clear()
        found = _ask(sessions, client, wanted, number)
        if isinstance(found, ErrorCode):
            assert trouble == "evicted"
            with pytest.raises(ProtocolError):
                client.accept({"error_code": found, "responses": []}, "fetch")
            client.restart()
            found = _ask(sessions, client, wanted, number)
        session, is_incremental = found
        fetched = {
            (key.topic or key.topic_id, key.partition): (entry["fetch_offset"], entry["partition_max_bytes"])
            for key, entry in session.partitions
        }
        assert fetched == {(ids.get(key[0], key[0]), key[1]): item[:2] for key, item in wanted.items()}
        if trouble == "lost":
            client.restart()
            continue
        told = {} if is_incremental else wanted
        responses = [
            {"topic": topic, "topic_id": ids.get(topic), "partitions": [{"partition_index": number}]}
            for topic, number in told
        ]
        answer = {"error_code": 0, "session_id": session.id, "responses": responses, "throttle_time_ms": 0}
        assert client.accept(answer, "fetch").keys() == told.keys()


def test_an_answer_about_another_partition() -> None:
    client = FetchSession()
    client.request({("a", 0): FetchParameters(0, 1, -1)})
    answer = {"error_code": 0, "session_id": 7, "responses": [{"topic": "b", "partitions": [{"partition_index": 0}]}]}
    with pytest.raises(DecodeError, match="b-0, not asked for"):
        client.accept(answer, "fetch")


class _WithReplicas(ScriptedCluster):
    """Node 1 leads t-0 and sends consumers in rack "r" to node 0; once `has_moved` is set, node 0 rejects fetches."""

    has_moved = False

    def _on_Fetch(self, node: int, asked: dict[str, Any], is_applied: bool) -> dict[str, Any]:
        leader = self.leaders["t", 0]
        if node == leader and asked["rack_id"] == "r" and not self.has_moved:
            entry = {"partition_index": 0, "error_code": 0, "high_watermark": 20, "records": b""}
            return {
                "error_code": 0,
                "responses": [{"topic": "t", "partitions": [entry | {"preferred_read_replica": 0}]}],
            }
        return super()._on_Fetch(node, asked, is_applied)

    def _leader_error(self, node: int, key: tuple[str, int]) -> int:
        return super()._leader_error(node, key) if self.has_moved else 0


def _fetched_from(brokers: ScriptedCluster) -> list[int]:
    return [asked.node for asked in list(brokers.asked) if asked.name == "Fetch"]


@pytest.mark.usefixtures("driver")
def test_the_nearest_replica_is_read_until_it_refuses() -> None:
    with _WithReplicas({"t": 1}, nodes=2) as brokers:
        brokers.leaders["t", 0] = 1
        brokers.append("t", 0, [b"%d" % number for number in range(20)], size=10)
        settings = {"bootstrap.servers": brokers.bootstrap_servers, "client.rack": "r", "fetch.max.wait.ms": 50}
        with Consumer(settings) as consumer:
            consumer.assign([("t", 0, 0)])
            found: list[bytes | None] = []
            deadline = time.monotonic() + 60
            while len(found) < 20 and time.monotonic() < deadline:
                found += [record.value for record in consumer.poll(1.0)]
            nodes = _fetched_from(brokers)
            assert nodes[0] == 1
            assert set(nodes[1:]) == {0}
            brokers.has_moved = True
            while _fetched_from(brokers)[-1] != 1 and time.monotonic() < deadline:
                assert consumer.poll(0.1) == []
            brokers.append("t", 0, [b"20"])
            while len(found) < 21 and time.monotonic() < deadline:
                found += [record.value for record in consumer.poll(1.0)]
        assert found == [b"%d" % number for number in range(21)]
        assert _fetched_from(brokers)[-1] == 1
