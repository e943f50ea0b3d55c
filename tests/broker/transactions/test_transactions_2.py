"""Transactions of transaction.version 2 (KIP-890, KIP-1228), request by request: our broker answers as Kafka does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from spark_klog.base.names import TRANSACTION_VERSION
from spark_klog.broker.metadata.internal_topics import TRANSACTIONS_TOPIC
from spark_klog.broker.metadata.registry import Registry
from spark_klog.broker.transactions.transaction import State
from spark_klog.client.net.connection import SOFTWARE
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.protocol.codec import decode_versioned, encode_versioned
from spark_klog.protocol.tables.groups import GROUP, TRANSACTION
from spark_klog.protocol.tables.transactions import TRANSACTION_LOG_KEY, TRANSACTION_LOG_VALUE
from spark_klog.trees.memory import MemoryTree
from spark_klog.trees.paths import Endpoint
from tests.support.brokers.producer_batches import batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.topics import make_topic
from tests.support.clients.transactional.readers import by_confluent
from tests.support.runs.soak import in_soak
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import NEWEST, versions
from tests.support.servers.shared_kafka import SharedKafkas

PARTITIONS = 2
_SECONDS = 30
_LAST_EPOCH = 32_766
#: Answers that a client does not show its user: a leader or coordinator is not there yet, or ends the one before.
_PASSING = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
}
FENCED, INVALID = ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_TXN_STATE
LATE = ErrorCode.INVALID_PRODUCER_EPOCH


@pytest.fixture(
    scope="module",
    params=["ours", *(pytest.param(version, marks=pytest.mark.peer) for version in versions(NEWEST, "4.3.1"))],
)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with serving(request.param, module_server_dir, shared_kafkas) as address:
        yield address


class Raw:
    """One producer's requests, each asked again while the answer is a passing one. It leads all its topics."""

    def __init__(self, servers: str, transactional_id: str) -> None:
        self.client = RawClient(int(servers.rsplit(":", 1)[1]))
        self.name = transactional_id
        self.producer_id, self.epoch = -1, -1
        self.find(self.name, TRANSACTION)

    def find(self, key: str, kind: int) -> None:
        """Ask for a coordinator until there is one."""
        request = {"coordinator_keys": [key], "key_type": kind}

        def ask() -> tuple[int, Any]:
            (found,) = self.client.request(apis.FIND_COORDINATOR, 4, request)["coordinators"]
            return found["error_code"], None

        assert self._patiently(ask)[0] == 0

    def _patiently(self, ask: Any) -> Any:
        deadline = time.monotonic() + _SECONDS
        while (answer := ask())[0] in _PASSING:
            assert time.monotonic() < deadline, ErrorCode(answer[0])
            time.sleep(0.02)
        return answer

    def init(self, timeout_ms: int = 30_000, producer_id: int = -1, epoch: int = -1) -> int:
        request = {
            "transactional_id": self.name,
            "transaction_timeout_ms": timeout_ms,
            "producer_id": producer_id,
            "producer_epoch": epoch,
        }

        def ask() -> tuple[int, Any]:
            answer = self.client.request(apis.INIT_PRODUCER_ID, 5, request)
            return answer["error_code"], answer

        code, answer = self._patiently(ask)
        if not code:
            self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
        return int(code)

    def produce(self, topic: str, partition: int, epoch: int, sequence: int = 0, version: int = 12) -> int:
        data = {"index": partition, "records": bytes(batch(self.producer_id, epoch, sequence, 1))}
        request = {
            "transactional_id": self.name,
            "acks": -1,
            "timeout_ms": 1000,
            "topic_data": [{"name": topic, "partition_data": [data]}],
        }

        def ask() -> tuple[int, Any]:
            answer = self.client.request(apis.PRODUCE, version, request)
            return answer["responses"][0]["partition_responses"][0]["error_code"], None

        return int(self._patiently(ask)[0])

    def add(self, topic: str, partition: int, epoch: int) -> int:
        """AddPartitionsToTxn of earlier clients."""
        fields = {
            "transactional_id": self.name,
            "producer_id": self.producer_id,
            "producer_epoch": epoch,
            "topics": [{"name": topic, "partitions": [partition]}],
        }
        request = {f"v3_and_below_{name}": value for name, value in fields.items()}

        def ask() -> tuple[int, Any]:
            (found,) = self.client.request(apis.ADD_PARTITIONS_TO_TXN, 3, request)["results_by_topic_v3_and_below"]
            return found["results_by_partition"][0]["partition_error_code"], None

        return int(self._patiently(ask)[0])

    def end(self, epoch: int, *, commits: bool, version: int = 5, producer_id: int = -1) -> tuple[int, int, int]:
        """(error code, producer id, epoch)."""
        request = {
            "transactional_id": self.name,
            "producer_id": self.producer_id if producer_id < 0 else producer_id,
            "producer_epoch": epoch,
            "committed": commits,
        }

        def ask() -> tuple[int, Any]:
            answer = self.client.request(apis.END_TXN, version, request)
            return answer["error_code"], answer

        code, answer = self._patiently(ask)
        return int(code), answer["producer_id"], answer["producer_epoch"]

    def commit_offset(self, topic: str, group: str, epoch: int) -> int:
        offset = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
        request = {
            "transactional_id": self.name,
            "group_id": group,
            "producer_id": self.producer_id,
            "producer_epoch": epoch,
            "topics": [{"name": topic, "partitions": [offset]}],
        }

        def ask() -> tuple[int, Any]:
            answer = self.client.request(apis.TXN_OFFSET_COMMIT, 5, request)
            return answer["topics"][0]["partitions"][0]["error_code"], None

        return int(self._patiently(ask)[0])

    def described(self) -> tuple[str, int, int, list[int]]:
        """State, producer id, epoch and partitions."""
        request = {"transactional_ids": [self.name]}
        (state,) = self.client.request(apis.DESCRIBE_TRANSACTIONS, 0, request)["transaction_states"]
        partitions = [number for topic in state["topics"] for number in topic["partitions"]]
        return state["transaction_state"], state["producer_id"], state["producer_epoch"], sorted(partitions)

    def wait_for(self, state: str) -> tuple[str, int, int, list[int]]:
        deadline = time.monotonic() + _SECONDS
        while (found := self.described())[0] != state:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found

    def producers(self, topic: str, partition: int) -> dict[str, Any]:
        """What the leader knows of the producer."""
        request = {"topics": [{"name": topic, "partition_indexes": [partition]}]}
        (entry,) = self.client.request(apis.DESCRIBE_PRODUCERS, 0, request)["topics"][0]["partitions"]
        (found,) = [one for one in entry["active_producers"] if one["producer_id"] == self.producer_id]
        return dict(found)

    def write_marker(self, topic: str, partition: int, epoch: int, *, commits: bool, version: int) -> int:
        marker = {
            "producer_id": self.producer_id,
            "producer_epoch": epoch,
            "transaction_result": commits,
            "topics": [{"name": topic, "partition_indexes": [partition]}],
            "coordinator_epoch": self.producers(topic, partition)["coordinator_epoch"],
            "transaction_version": version,
        }
        answer = self.client.request(apis.WRITE_TXN_MARKERS, 2, {"markers": [marker]})
        return int(answer["markers"][0]["topics"][0]["partitions"][0]["error_code"])


@pytest.fixture
def raw(servers: str, topic: str) -> Iterator[Raw]:
    make_topic(servers, topic, PARTITIONS)
    made = Raw(servers, topic)
    with made.client:
        assert made.init() == 0
        yield made


def _committed(servers: str, topic: str, partition: int = 0) -> int:
    return len(by_confluent(servers, topic, partition))


def test_the_level_is_finalized(servers: str, raw: Raw) -> None:
    for version in (3, 4):
        answer = raw.client.request(apis.API_VERSIONS, version, SOFTWARE)
        finalized = {one["name"]: one["max_version_level"] for one in answer["finalized_features"]}
        supported = {one["name"]: (one["min_version"], one["max_version"]) for one in answer["supported_features"]}
        assert finalized[TRANSACTION_VERSION] == 2
        assert answer["finalized_features_epoch"] >= 0
        assert supported.get(TRANSACTION_VERSION) == ((0, 2) if version == 4 else None)


def test_ids_are_listed_by_a_pattern(servers: str, topic: str) -> None:
    """ListTransactions 2 (KIP-1152): whole ids, in RE2's syntax; "" is no pattern."""
    names = [f"{topic}:a/1", f"{topic}:a/22", f"{topic}:\xe4\u4e2d", f"{topic}-b c"]
    raws = [Raw(servers, name) for name in names]
    for raw in raws:
        assert raw.init() == 0

    def listed(pattern: str | None) -> tuple[int, list[str]]:
        request = {"state_filters": [], "producer_id_filters": [], "transactional_id_pattern": pattern}
        answer = raws[0].client.request(apis.LIST_TRANSACTIONS, 2, request)
        ids = sorted(one["transactional_id"] for one in answer["transaction_states"])
        return answer["error_code"], [name for name in names if name in ids]

    beginning = re.escape(topic)
    assert listed(None) == listed("") == listed(".*") == (0, names)
    assert listed(f"{beginning}:a/[0-9]+") == listed(f"{beginning}:\\w/\\d*") == (0, names[:2])
    assert listed(f"{beginning}:[^a-z]+") == listed(f"{beginning}:..") == (0, names[2:3])
    assert listed(f"{beginning}[[:punct:]]b\\sc") == (0, names[3:])
    assert listed(topic) == (0, [])
    assert listed("*") == listed("(a") == (ErrorCode.INVALID_REGULAR_EXPRESSION, [])
    for raw in raws:
        raw.client.socket.close()


def test_an_end_raises_the_epoch_and_is_repeated(servers: str, raw: Raw, topic: str) -> None:
    first, pid = raw.epoch, raw.producer_id
    assert raw.produce(topic, 0, first) == 0  # without AddPartitionsToTxn
    assert raw.described() == ("Ongoing", pid, first, [0])
    assert raw.end(first, commits=True) == (0, pid, first + 1)
    assert raw.end(first, commits=True) == (0, pid, first + 1)
    assert raw.end(first, commits=False)[0] == INVALID
    assert raw.wait_for("CompleteCommit")[1:] == (pid, first + 1, [])
    assert raw.produce(topic, 1, first + 1) == 0
    assert raw.end(first, commits=True)[0] == FENCED  # the next one has begun
    assert raw.end(first + 1, commits=False) == (0, pid, first + 2)
    assert raw.end(first + 1, commits=False) == (0, pid, first + 2)
    assert raw.end(first + 1, commits=True)[0] == INVALID
    assert raw.end(first, commits=True)[0] == FENCED
    assert raw.end(first + 3, commits=True)[0] == FENCED
    assert raw.end(first + 2, commits=True, producer_id=pid + 10_000)[0] == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert (_committed(servers, topic), _committed(servers, topic, 1)) == (1, 0)


def test_a_transaction_that_has_not_begun(raw: Raw, topic: str) -> None:
    """Its abort raises the epoch, for what its producer may have sent."""
    first, pid = raw.epoch, raw.producer_id
    assert raw.end(first, commits=True)[0] == INVALID
    assert raw.end(first, commits=False) == (0, pid, first + 1)
    assert raw.end(first, commits=False) == (0, pid, first + 1)
    assert raw.produce(topic, 0, first) == LATE
    assert raw.produce(topic, 0, first + 1) == 0
    assert raw.end(first + 1, commits=True) == (0, pid, first + 2)
    assert raw.end(first + 2, commits=True)[0] == INVALID
    assert raw.end(first + 2, commits=False) == (0, pid, first + 3)
    assert raw.produce(topic, 0, first + 2) == LATE


def test_what_comes_late_does_not_touch_the_next_transaction(servers: str, raw: Raw, topic: str) -> None:
    first, pid = raw.epoch, raw.producer_id
    assert raw.produce(topic, 0, first) == 0
    assert raw.end(first, commits=True) == (0, pid, first + 1)
    raw.wait_for("CompleteCommit")
    assert raw.produce(topic, 0, first, sequence=1) == LATE
    assert raw.produce(topic, 1, first) == LATE  # nor does it begin one where there was none
    # a coordinator that has lost the leader's answer writes its marker again
    assert raw.write_marker(topic, 0, first + 1, commits=True, version=2) == 0
    assert raw.produce(topic, 0, first + 1) == 0
    assert raw.write_marker(topic, 0, first + 1, commits=True, version=2) == LATE
    assert raw.write_marker(topic, 0, first, commits=True, version=2) == LATE
    assert raw.write_marker(topic, 0, first, commits=True, version=0) == LATE
    assert raw.producers(topic, 0)["current_txn_start_offset"] >= 0
    assert _committed(servers, topic) == 1
    assert raw.end(first + 1, commits=False) == (0, pid, first + 2)
    raw.wait_for("CompleteAbort")
    assert _committed(servers, topic) == 1


def test_offsets_begin_a_transaction(raw: Raw, topic: str) -> None:
    first = raw.epoch
    raw.find(topic, GROUP)
    assert raw.commit_offset(topic, topic, first) == 0
    assert raw.described()[0] == "Ongoing"
    assert raw.end(first, commits=True)[0] == 0
    raw.wait_for("CompleteCommit")
    request = {"groups": [{"group_id": topic, "topics": [{"name": topic, "partition_indexes": [0]}]}]}
    (group,) = raw.client.request(apis.OFFSET_FETCH, 8, request)["groups"]
    assert group["topics"][0]["partitions"][0]["committed_offset"] == 1
    assert raw.commit_offset(topic, topic, first) == LATE


def test_earlier_clients_keep_their_epoch(raw: Raw, topic: str) -> None:
    first, pid = raw.epoch, raw.producer_id
    assert raw.produce(topic, 0, first, version=11) == ErrorCode.TRANSACTION_ABORTABLE
    assert raw.produce(topic, 0, first) == 0
    assert raw.end(first, commits=True, version=4)[0] == 0
    assert raw.end(first, commits=True, version=4)[0] == 0
    assert raw.wait_for("CompleteCommit")[1:] == (pid, first, [])
    # the epoch is that of the next transaction for a later client, which can't say that it repeats the commit
    assert raw.end(first, commits=True)[0] == INVALID
    assert raw.produce(topic, 0, first, sequence=1) == 0
    assert raw.end(first, commits=True) == (0, pid, first + 1)
    raw.wait_for("CompleteCommit")
    assert raw.end(first, commits=True, version=4)[0] == FENCED


def test_a_new_instance_fences(raw: Raw, topic: str) -> None:
    first, pid = raw.epoch, raw.producer_id
    assert raw.produce(topic, 0, first) == 0
    assert raw.init() == 0
    assert (raw.producer_id, raw.epoch) == (pid, first + 2)
    assert raw.end(first, commits=True)[0] == FENCED
    assert raw.end(first, commits=False)[0] == FENCED
    assert raw.produce(topic, 0, first, sequence=1) == LATE
    assert raw.init(producer_id=pid, epoch=first + 1) == FENCED
    assert raw.init(producer_id=pid, epoch=first + 2) == 0
    assert raw.epoch == first + 3
    assert raw.init(producer_id=pid, epoch=first + 2) == 0  # its answer was lost
    assert raw.epoch == first + 3


def test_a_producer_whose_transaction_has_timed_out_goes_on(raw: Raw, topic: str) -> None:
    assert raw.init(timeout_ms=1000) == 0
    first, pid = raw.epoch, raw.producer_id
    assert raw.produce(topic, 0, first) == 0
    assert raw.wait_for("CompleteAbort")[1:] == (pid, first + 1, [])
    assert raw.produce(topic, 0, first, sequence=1) == LATE
    assert raw.end(first, commits=True)[0] == INVALID
    assert raw.end(first, commits=False) == (0, pid, first + 1)
    assert raw.produce(topic, 0, first + 1) == 0
    assert raw.end(first + 1, commits=True) == (0, pid, first + 2)


def test_an_unknown_producer(servers: str, raw: Raw, topic: str) -> None:
    stranger = Raw(servers, f"{topic}-unknown")
    stranger.producer_id = raw.producer_id
    with stranger.client:
        assert stranger.end(0, commits=True)[0] == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert stranger.produce(topic, 0, 0) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        stranger.find(topic, GROUP)
        assert stranger.commit_offset(topic, topic, 0) == ErrorCode.INVALID_PRODUCER_ID_MAPPING


def _records(servers: str, name: str) -> list[dict[str, Any]]:
    """The records of a transactional id in __transaction_state, all in the bytes that our broker would write."""
    found = []
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "state", "enable.partition.eof": True})
    try:
        numbers = consumer.list_topics(TRANSACTIONS_TOPIC, _SECONDS).topics[TRANSACTIONS_TOPIC].partitions
        for number in numbers:
            consumer.assign([TopicPartition(TRANSACTIONS_TOPIC, number, 0)])
            while (message := consumer.poll(_SECONDS)) is not None and message.error() is None:
                key, value = message.key(), message.value()
                assert isinstance(key, bytes)
                assert isinstance(value, bytes)
                if decode_versioned(TRANSACTION_LOG_KEY, key)["transactional_id"] == name:
                    found.append(decode_versioned(TRANSACTION_LOG_VALUE, value))
                    assert encode_versioned(TRANSACTION_LOG_VALUE, 1, found[-1]) == value
    finally:
        consumer.close()
    return found


def test_the_states_records_are_kafkas(servers: str, raw: Raw, topic: str) -> None:
    first, pid = raw.epoch, raw.producer_id
    assert raw.produce(topic, 0, first) == 0
    assert raw.end(first, commits=True)[0] == 0
    raw.wait_for("CompleteCommit")
    assert raw.end(first + 1, commits=False)[0] == 0
    raw.wait_for("CompleteAbort")
    assert raw.produce(topic, 1, first + 2) == 0
    assert raw.init() == 0
    assert raw.add(topic, 0, first + 4) == 0
    assert raw.end(first + 4, commits=True, version=4)[0] == 0
    raw.wait_for("CompleteCommit")
    assert raw.produce(topic, 0, first + 4) == 0
    assert raw.end(first + 4, commits=False, version=4)[0] == 0
    raw.wait_for("CompleteAbort")
    found = [
        (
            State(one["transaction_status"]).text,
            one["producer_epoch"] - first,
            one["client_transaction_version"],
            [number for entry in one["transaction_partitions"] or () for number in entry["partition_ids"]],
        )
        for one in _records(servers, topic)
    ]
    assert found == [
        ("Empty", 0, 0, []),
        ("Ongoing", 0, 2, [0]),
        ("PrepareCommit", 1, 2, [0]),
        ("CompleteCommit", 1, 2, []),
        ("PrepareAbort", 2, 2, []),
        ("CompleteAbort", 2, 2, []),
        ("Ongoing", 2, 2, [1]),
        ("PrepareAbort", 3, 2, [1]),
        ("CompleteAbort", 3, 2, []),
        ("Empty", 4, 2, []),
        ("Ongoing", 4, 0, [0]),
        ("PrepareCommit", 4, 0, [0]),
        ("CompleteCommit", 4, 0, []),
        ("Ongoing", 4, 2, [0]),
        ("PrepareAbort", 4, 0, [0]),
        ("CompleteAbort", 4, 0, []),
    ]
    ids = {
        (one["producer_id"], one["previous_producer_id"], one["next_producer_id"]) for one in _records(servers, topic)
    }
    assert ids == {(pid, pid, -1)}


def test_the_level_is_that_of_the_least_broker() -> None:
    """A broker of an earlier version keeps the cluster from version 2; clients believe what is told last."""
    tree = MemoryTree()
    new, old, lower = (Registry(tree, number) for number in range(3))
    new.registration.register([Endpoint("PLAINTEXT", "PLAINTEXT", "a", 1)], 2)
    seen = []
    for step in (
        lambda: None,
        lambda: old.registration.register([Endpoint("PLAINTEXT", "PLAINTEXT", "b", 1)]),
        lambda: lower.registration.register([Endpoint("PLAINTEXT", "PLAINTEXT", "c", 1)], 1),
        old.registration.unregister,
        lower.registration.unregister,
    ):
        step()
        new.refresh()
        new.refresh()
        seen.append((new.transaction_version, new.features_since_ms))
    assert [level for level, _ in seen] == [2, 0, 0, 1, 2]
    times = [time for _, time in seen]
    assert times[1] == times[2]
    assert [*dict.fromkeys(times)] == sorted(set(times))
    assert len(set(times)) == 4


@pytest.mark.test_all("long")
@pytest.mark.parametrize("servers", ["ours", pytest.param(NEWEST, marks=[pytest.mark.peer, in_soak])], indirect=True)
def test_after_the_last_epoch_another_producer_id_follows(servers: str, raw: Raw, topic: str) -> None:
    pid = raw.producer_id
    while raw.epoch < _LAST_EPOCH:
        code, its_id, raw.epoch = raw.end(raw.epoch, commits=False)
        assert (code, its_id) == (0, pid)
    assert raw.produce(topic, 0, _LAST_EPOCH) == 0
    code, other, epoch = raw.end(_LAST_EPOCH, commits=True)
    assert (code, epoch) == (0, 0)
    assert other != pid
    assert raw.end(_LAST_EPOCH, commits=True) == (0, other, 0)
    assert raw.end(_LAST_EPOCH, commits=False)[0] == INVALID
    assert raw.wait_for("CompleteCommit")[1:] == (other, 0, [])
    assert raw.producers(topic, 0)["producer_epoch"] == _LAST_EPOCH + 1
    assert raw.produce(topic, 0, _LAST_EPOCH, sequence=1) == LATE
    raw.producer_id = other
    assert raw.produce(topic, 0, 0) == 0
    assert raw.end(0, commits=True) == (0, other, 1)
    raw.wait_for("CompleteCommit")
    assert _committed(servers, topic) == 2


def test_the_state_survives_a_restart(tmp_path: Path, topic: str) -> None:
    """A repeated end has the same answer, and an older broker's setting is kept to."""
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    ended: tuple[int, int, int] = (0, 0, 0)
    for level in ("2", "1", "2", "0"):
        with EmbeddedCluster(data_dir=tmp_path, settings=settings | {TRANSACTION_VERSION: level}) as cluster:
            if ended == (0, 0, 0):
                make_topic(cluster.bootstrap_servers, topic, PARTITIONS)
            raw = Raw(cluster.bootstrap_servers, topic)
            with raw.client:
                answer = raw.client.request(apis.API_VERSIONS, 4, SOFTWARE)
                finalized = {one["name"]: one["max_version_level"] for one in answer["finalized_features"]}
                assert finalized.get(TRANSACTION_VERSION, 0) == int(level)
                if ended == (0, 0, 0):
                    assert raw.init() == 0
                    assert raw.produce(topic, 0, raw.epoch) == 0
                    ended = raw.end(raw.epoch, commits=True)
                    continue
                _, raw.producer_id, epoch = ended
                assert raw.end(epoch - 1, commits=True) == ended
                assert raw.produce(topic, 0, epoch - 1, sequence=1) == LATE
                assert raw.produce(topic, 0, epoch) == 0
                ended = raw.end(epoch, commits=True)
                assert ended == (0, raw.producer_id, epoch + 1)
    with EmbeddedCluster(data_dir=tmp_path, settings=settings) as cluster:
        assert _committed(cluster.bootstrap_servers, topic) == 4
