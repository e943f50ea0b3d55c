"""Answers of the group and transaction coordinators if they can't serve a request, or not yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from spark_klog.broker.faults import ErrorAnswer, Fault
from spark_klog.broker.groups.records import Committed, OffsetKey, encode_offset, encode_offset_key
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol import apis
from spark_klog.protocol.schema import Api
from tests.support.brokers.batches import make_batch
from tests.support.brokers.producer_batches import batch
from tests.support.brokers.raw_client import RawClient, error_codes
from tests.support.clients.transactional.confluent import ConfluentClient
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.broker import KlogBroker

GROUP, ID = "g", "t"
OFFSET = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
_COMMIT = [{"name": "t", "partitions": [OFFSET]}]
_MEMBER = {"group_id": GROUP, "generation_id": 1, "member_id": "m"}
_JOIN = {
    "group_id": GROUP,
    "session_timeout_ms": 10_000,
    "rebalance_timeout_ms": 10_000,
    "member_id": "m",
    "protocol_type": "consumer",
    "protocols": [{"name": "range", "metadata": b""}],
}
_PRODUCER = {"producer_id": 1, "producer_epoch": 0}
_OF_ID = {"transactional_id": ID, **_PRODUCER}
_TXN_COMMIT = {**_OF_ID, "group_id": GROUP, "topics": _COMMIT}
_ADD = {
    **{f"v3_and_below_{name}": value for name, value in _OF_ID.items()},
    "v3_and_below_topics": [{"name": "t", "partitions": [0]}],
}
_FETCH = [{"name": "t", "partition_indexes": [0]}]

#: Requests that only the coordinator carries out.
GROUP_REQUESTS: list[tuple[Api, int, dict[str, Any]]] = [
    (apis.OFFSET_COMMIT, 7, {"group_id": GROUP, "generation_id_or_member_epoch": -1, "topics": _COMMIT}),
    (apis.OFFSET_FETCH, 1, {"group_id": GROUP, "topics": _FETCH}),
    (apis.OFFSET_FETCH, 7, {"group_id": GROUP, "topics": _FETCH, "require_stable": True}),
    (apis.OFFSET_FETCH, 8, {"groups": [{"group_id": GROUP, "topics": _FETCH}], "require_stable": False}),
    (apis.JOIN_GROUP, 5, _JOIN),
    (apis.SYNC_GROUP, 3, _MEMBER | {"assignments": []}),
    (apis.HEARTBEAT, 3, _MEMBER),
    (apis.LEAVE_GROUP, 2, {"group_id": GROUP, "member_id": "m"}),
    (apis.LEAVE_GROUP, 3, {"group_id": GROUP, "members": [{"member_id": "m"}]}),
    (apis.DESCRIBE_GROUPS, 4, {"groups": [GROUP], "include_authorized_operations": False}),
    (apis.OFFSET_DELETE, 0, {"group_id": GROUP, "topics": [{"name": "t", "partitions": [{"partition_index": 1}]}]}),
    (apis.DELETE_GROUPS, 1, {"groups_names": ["nobody"]}),
    (apis.TXN_OFFSET_COMMIT, 2, _TXN_COMMIT),
    (apis.TXN_OFFSET_COMMIT, 3, _TXN_COMMIT | {"generation_id": -1, "member_id": ""}),
]
TRANSACTION_REQUESTS: list[tuple[Api, int, dict[str, Any]]] = [
    (apis.INIT_PRODUCER_ID, 4, {"transactional_id": ID, "transaction_timeout_ms": 1000}),
    (apis.ADD_PARTITIONS_TO_TXN, 3, _ADD),
    (apis.ADD_OFFSETS_TO_TXN, 3, {**_OF_ID, "group_id": GROUP}),
    (apis.END_TXN, 3, {**_OF_ID, "committed": True}),
    (apis.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [ID]}),
]


def _refusals(client: RawClient, requests: list[tuple[Api, int, dict[str, Any]]]) -> list[tuple[str, int, set[int]]]:
    """Send each request; return its API, its version and its error codes without NONE."""
    return [
        (api.name, version, set(error_codes(client.request(api, version, message))) - {0})
        for api, version, message in requests
    ]


def _port(servers: str) -> int:
    return int(servers.rsplit(":", 1)[1])


def _create(client: RawClient, topic: str, partitions: int = 1, **settings: str) -> None:
    configs = [{"name": name.replace("_", "."), "value": value} for name, value in settings.items()]
    entry = {"name": topic, "num_partitions": partitions, "replication_factor": 1, "configs": configs}
    assert set(error_codes(client.request(apis.CREATE_TOPICS, 4, {"topics": [entry], "timeout_ms": 5000}))) == {0}


def _limit(client: RawClient, topic: str, size: int) -> None:
    config = {"name": "max.message.bytes", "config_operation": 0, "value": str(size)}
    resource = {"resource_type": 2, "resource_name": topic, "configs": [config]}
    request = {"resources": [resource], "validate_only": False}
    assert set(error_codes(client.request(apis.INCREMENTAL_ALTER_CONFIGS, 0, request))) == {0}


def _begun(client: RawClient, transactional_id: str, topic: str) -> dict[str, int]:
    """Begin a transaction on partition 0 of the topic; return the producer's id and epoch."""
    request = {"transactional_id": transactional_id, "transaction_timeout_ms": 60_000}
    deadline = time.monotonic() + 60
    while (found := client.request(apis.INIT_PRODUCER_ID, 4, request))["error_code"]:
        assert time.monotonic() < deadline, found
    producer = {name: found[name] for name in ("producer_id", "producer_epoch")}
    of_id = {
        f"v3_and_below_{name}": value for name, value in {"transactional_id": transactional_id, **producer}.items()
    }
    topics = {"v3_and_below_topics": [{"name": topic, "partitions": [0]}]}
    assert set(error_codes(client.request(apis.ADD_PARTITIONS_TO_TXN, 3, of_id | topics))) == {0}
    return producer


def _fetched(client: RawClient, topic: str, version: int, *, stable: bool, everything: bool = False) -> list[Any]:
    """What group `topic` has committed for the topic of that name: (partition, offset, error)."""
    topics = None if everything else [{"name": topic, "partition_indexes": [0, 1]}]
    request: dict[str, Any] = {"group_id": topic, "topics": topics, "require_stable": stable}
    if version >= 8:
        request = {"groups": [{"group_id": topic, "topics": topics}], "require_stable": stable}
    answer = client.request(apis.OFFSET_FETCH, version, request)
    (found,) = (answer["groups"][0] if version >= 8 else answer)["topics"]
    return [(entry["partition_index"], entry["committed_offset"], entry["error_code"]) for entry in found["partitions"]]


@pytest.fixture(scope="module")
def client(cluster: EmbeddedCluster) -> Iterator[RawClient]:
    with RawClient(_port(cluster.bootstrap_servers)) as connected:
        yield connected


# ----- while the coordinators load

_BATCHES, _ROWS = 700, 1000


def _fill(data_dir: Path) -> None:
    """Write so many commits that reading them takes some time; the last one is of `GROUP`."""
    log = PartitionLog(data_dir / "__consumer_offsets-0", LogConfig(), clean=True)
    names = [encode_offset_key(OffsetKey("others", "t", number)) for number in range(_ROWS)]
    value = encode_offset(Committed(7, -1, "", 1))
    filler = make_batch([(name, value) for name in names], [1] * _ROWS)
    for _ in range(_BATCHES):
        log.append(memoryview(bytearray(filler)))
    last = encode_offset(Committed(42, -1, "", time.time_ns() // 1_000_000))
    log.append(memoryview(make_batch([(encode_offset_key(OffsetKey(GROUP, "t", 0)), last)], [1])))
    log.flush()
    log.close()


def test_groups_and_transactions_while_they_are_loaded(server_dir: Path) -> None:
    """Each request gets COORDINATOR_LOAD_IN_PROGRESS; afterwards the coordinators serve what they loaded."""
    broker = KlogBroker(server_dir, "--set", "group.initial.rebalance.delay.ms=0")
    with broker, RawClient(broker.port) as client:
        _create(client, "t", 2)
        with ConfluentClient(broker.bootstrap_servers) as producer:
            producer.ask("open", "p", f"transactional.id={ID}")
            producer.ask("init", "p")
        _refusals(client, GROUP_REQUESTS[:1])  # creates __consumer_offsets
    _fill(broker.data_dir)
    with broker, RawClient(broker.port) as client:
        found = _refusals(client, [*GROUP_REQUESTS, *TRANSACTION_REQUESTS, (apis.LIST_GROUPS, 3, {})])
        found += _refusals(client, [(apis.LIST_TRANSACTIONS, 0, {"state_filters": [], "producer_id_filters": []})])
        old = _refusals(client, [(apis.TXN_OFFSET_COMMIT, 1, _TXN_COMMIT)])
        (last,) = _refusals(client, GROUP_REQUESTS[1:2])
        assert last[2] == {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}, "it has been loaded already: make the log larger"
        assert [entry for entry in found if entry[2] != {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}] == []
        # KAFKA-7296: COORDINATOR_LOAD_IN_PROGRESS is a fatal error for producers of these versions
        assert old == [("TxnOffsetCommit", 1, {ErrorCode.COORDINATOR_NOT_AVAILABLE})]
        # clients wait until the load is over
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": GROUP})
        assert [place.offset for place in consumer.committed([TopicPartition("t", 0)], 30)] == [42]
        consumer.close()
        with ConfluentClient(broker.bootstrap_servers) as producer:
            producer.ask("open", "p", f"transactional.id={ID}")
            producer.ask("init", "p")
        later = {code for _, _, codes in _refusals(client, [*GROUP_REQUESTS, *TRANSACTION_REQUESTS]) for code in codes}
        assert not later & {
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
            ErrorCode.COORDINATOR_NOT_AVAILABLE,
            ErrorCode.NOT_COORDINATOR,
        }


def test_clients_wait_for_coordinators_that_load(make_cluster: Callable[..., EmbeddedCluster], topic: str) -> None:
    names = ["InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"]
    names += ["JoinGroup", "SyncGroup", "OffsetFetch", "OffsetCommit"]
    faults = [Fault(ErrorAnswer("COORDINATOR_LOAD_IN_PROGRESS"), api=name, count=1) for name in names]
    cluster = make_cluster(faults=faults, settings={"group.initial.rebalance.delay.ms": "0"})
    with ConfluentClient(cluster.bootstrap_servers) as producer:
        producer.ask("open", "p", f"transactional.id={topic}", "retry.backoff.ms=20")
        producer.ask("init", "p")
        producer.ask("begin", "p")
        producer.ask("send", "p", topic, "0", "a")
        producer.ask("offsets", "p", "other", topic, "0", "1")
        producer.ask("commit", "p")
    settings = {"auto.offset.reset": "earliest", "enable.auto.commit": False, "retry.backoff.ms": 20}
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "members", **settings})
    consumer.subscribe([topic])
    (message,) = consumer.consume(1, 20)
    assert message.value() == b"a"
    committed = consumer.commit(message, asynchronous=False)
    assert [(place.offset, place.error) for place in committed or ()] == [(1, None)]
    consumer.close()
    assert cluster.faults_fired() == dict.fromkeys(faults, 1)


def test_a_damaged_log_of_offsets_is_not_served(server_dir: Path) -> None:
    """Without its offsets a group would read everything again, or skip what it missed."""
    broker = KlogBroker(server_dir)
    with broker, RawClient(broker.port) as client:
        _create(client, "t", 2)
        assert _commit(client, "t", OFFSET) == 0
    (path,) = (broker.data_dir / "__consumer_offsets-0").glob("*.log")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with broker, RawClient(broker.port) as client:
        broker.wait_for_log("can't be read, and are not served")
        answers = _refusals(client, GROUP_REQUESTS)
        assert [entry for entry in answers if entry[2] != {ErrorCode.COORDINATOR_NOT_AVAILABLE}] == []
    data[-1] ^= 1
    path.write_bytes(data)
    with broker, RawClient(broker.port) as client:
        assert _offset(client, "t") == 1


# ----- the wrong broker


def test_brokers_that_do_not_coordinate_say_so(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    """Other brokers answer NOT_COORDINATOR to each request; FindCoordinator names the same broker on all of them."""
    cluster = make_cluster(3)
    ports = [_port(server) for server in cluster.bootstrap_servers.split(",")]
    with RawClient(ports[0]) as client:
        _create(client, "t", 2)
    for key_type, key, requests in ((0, GROUP, GROUP_REQUESTS), (1, ID, TRANSACTION_REQUESTS)):
        coordinators = set()
        for number, port in enumerate(ports):
            with RawClient(port) as client:
                found = client.request(apis.FIND_COORDINATOR, 2, {"key": key, "key_type": key_type})
                coordinators.add(found["node_id"])
                expected = {ErrorCode.NOT_COORDINATOR}
                answers = _refusals(client, requests)
                if found["node_id"] == number:
                    assert not [entry for entry in answers if entry[2] & expected]
                else:
                    assert [entry for entry in answers if entry[2] != expected] == []
        assert len(coordinators) == 1


# ----- offsets in transactions


def _stage(client: RawClient, topic: str, producer: dict[str, int], entry: dict[str, Any], version: int = 3) -> int:
    """Send TxnOffsetCommit with `topic` as group, transactional id and topic; return the error code."""
    of_id = {"transactional_id": topic, "group_id": topic, **producer}
    request = of_id | {"generation_id": -1, "member_id": "", "topics": [{"name": topic, "partitions": [entry]}]}
    (code,) = error_codes(client.request(apis.TXN_OFFSET_COMMIT, version, request))
    return code


def _add_offsets(client: RawClient, topic: str, producer: dict[str, int]) -> None:
    request = {"transactional_id": topic, "group_id": topic, **producer}
    assert client.request(apis.ADD_OFFSETS_TO_TXN, 3, request)["error_code"] == 0


def _commit(client: RawClient, topic: str, entry: dict[str, Any], version: int = 7, **more: int) -> int:
    request = {"group_id": topic, "generation_id_or_member_epoch": -1, "member_id": "", **more}
    topics = [{"name": topic, "partitions": [entry]}]
    (code,) = error_codes(client.request(apis.OFFSET_COMMIT, version, request | {"topics": topics}))
    return code


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
def test_offsets_of_an_open_transaction_are_unstable(
    cluster: EmbeddedCluster, client: RawClient, topic: str, commits: bool
) -> None:
    """KIP-447: with require_stable a client waits for the end; without, it gets the offset committed before."""
    _create(client, topic, 2)
    for index in (0, 1):
        assert _commit(client, topic, OFFSET | {"partition_index": index}) == 0
    producer = _begun(client, topic, topic)
    _add_offsets(client, topic, producer)
    assert _stage(client, topic, producer, OFFSET | {"committed_offset": 5}) == 0
    before, unstable = [(0, 1, 0), (1, 1, 0)], [(0, -1, ErrorCode.UNSTABLE_OFFSET_COMMIT), (1, 1, 0)]
    for version in (5, 7, 8, 9):
        assert _fetched(client, topic, version, stable=False) == before
    for version in (7, 8, 9):
        assert _fetched(client, topic, version, stable=True) == unstable
        assert _fetched(client, topic, version, stable=True, everything=True) == unstable
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": topic, "isolation.level": "read_committed"}
    )
    seen: list[int] = []
    asking = threading.Thread(
        target=lambda: seen.extend(place.offset for place in consumer.committed([TopicPartition(topic, 0)], 20))
    )
    asking.start()
    asking.join(0.5)
    assert seen == []
    assert asking.is_alive()
    assert client.request(apis.END_TXN, 3, {"transactional_id": topic, **producer, "committed": commits}) == {
        "throttle_time_ms": 0,
        "error_code": 0,
        "producer_id": -1,  # from version 5 on
        "producer_epoch": -1,
    }
    asking.join(20)
    consumer.close()
    assert seen == [5 if commits else 1]
    assert _fetched(client, topic, 7, stable=True) == [(0, seen[0], 0), (1, 1, 0)]


def test_commits_that_are_too_large_are_refused(client: RawClient, topic: str) -> None:
    """max.message.bytes of __consumer_offsets limits them, in a transaction or not; the connection stays open."""
    _create(client, topic)
    producer = _begun(client, topic, topic)
    _add_offsets(client, topic, producer)
    large = OFFSET | {"committed_metadata": "m" * 1000}
    _limit(client, "__consumer_offsets", 500)
    assert _stage(client, topic, producer, large) == ErrorCode.INVALID_COMMIT_OFFSET_SIZE
    assert _commit(client, topic, large) == ErrorCode.INVALID_COMMIT_OFFSET_SIZE
    assert _stage(client, topic, producer, OFFSET) == 0
    assert _commit(client, topic, OFFSET) == 0
    _limit(client, "__consumer_offsets", 1_000_000)
    assert _stage(client, topic, producer, large) == 0


def test_what_no_transaction_has_is_told_as_the_client_knows_it(client: RawClient, topic: str) -> None:
    """TxnOffsetCommit without AddOffsetsToTxn fails; from version 4 on with TRANSACTION_ABORTABLE (KIP-890)."""
    _create(client, topic)
    producer = _begun(client, topic, topic)
    assert _stage(client, topic, producer, OFFSET, 3) == ErrorCode.INVALID_TXN_STATE
    assert _stage(client, topic, producer, OFFSET, 4) == ErrorCode.TRANSACTION_ABORTABLE


def test_a_marker_that_is_too_large_is_written_when_it_may_be(
    cluster: EmbeddedCluster, client: RawClient, topic: str
) -> None:
    """A marker above max.message.bytes waits until the limit allows it; other transactions do not wait for it."""
    other = f"{topic}-other"
    _create(client, topic)
    _create(client, other)
    for name in (topic, other):
        producer = _begun(client, name, name)
        records = bytes(batch(producer["producer_id"], producer["producer_epoch"], 0, 1))
        data = [{"name": name, "partition_data": [{"index": 0, "records": records}]}]
        request = {"transactional_id": name, "acks": -1, "timeout_ms": 1000, "topic_data": data}
        assert set(error_codes(client.request(apis.PRODUCE, 9, request))) == {0}
        _limit(client, topic, 50)
        assert (
            client.request(apis.END_TXN, 3, {"transactional_id": name, **producer, "committed": True})["error_code"]
            == 0
        )
    assert by_confluent(cluster.bootstrap_servers, other, 0) == ["v"]
    assert by_confluent(cluster.bootstrap_servers, topic, 0) == []
    _limit(client, topic, 1_000_000)
    deadline = time.monotonic() + 60
    while by_confluent(cluster.bootstrap_servers, topic, 0) != ["v"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ----- retention of offsets


def test_offsets_live_as_long_as_the_client_asked(server_dir: Path) -> None:
    """OffsetCommit 2-4 sends a retention time; for -1 and later versions the broker's applies (default: 7 days)."""
    with KlogBroker(server_dir, "--set", "offsets.retention.check.interval.ms=100") as broker:
        with RawClient(broker.port) as client:
            for number, (version, retention) in enumerate([(2, 1), (3, -1), (4, 600_000), (4, (1 << 63) - 1), (4, -1)]):
                topic = f"t{number}"
                _create(client, topic)
                assert _commit(client, topic, OFFSET, version, retention_time_ms=retention) == 0
            deadline = time.monotonic() + 60
            while _offset(client, "t0") != -1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert [_offset(client, f"t{number}") for number in range(5)] == [-1, 1, 1, 1, 1]
            assert _commit(client, "t0", OFFSET, 4, retention_time_ms=2000) == 0
        broker.kill()
        broker.start()
        with RawClient(broker.port) as client:
            deadline = time.monotonic() + 60
            while _offset(client, "t0") != -1:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert [_offset(client, f"t{number}") for number in range(5)] == [-1, 1, 1, 1, 1]


def _offset(client: RawClient, topic: str) -> int:
    request = {"group_id": topic, "topics": [{"name": topic, "partition_indexes": [0]}]}
    deadline = time.monotonic() + 60
    while (answer := client.request(apis.OFFSET_FETCH, 3, request))["error_code"]:
        assert time.monotonic() < deadline
    return int(answer["topics"][0]["partitions"][0]["committed_offset"])
