"""Transactions as clients see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spark_klog.broker.faults import Drop, Fault
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.protocol.codec import decode_response, encode_request
from tests.support.brokers.producer_batches import batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.transactional.confluent import ConfluentClient
from tests.support.clients.transactional.java import JavaClient, JavaError
from tests.support.clients.transactional.readers import by_confluent, by_kafka_python
from tests.support.servers.kafka import NEWEST, Version

SETTINGS = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
    "transactional.id.expiration.ms": "20000",
    "transaction.max.timeout.ms": "60000",
}
#: The version of the Java client that also reads what the others write.
JAVA: Version = NEWEST
FENCED = "ProducerFenced|newer producer|_FENCED|fenced by a newer"


class Client(Protocol):
    def ask(self, *words: str) -> list[str]: ...


@pytest.fixture(scope="module")
def cluster(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(data_dir=module_server_dir / "cluster", settings=SETTINGS, faults=[]) as running:
        yield running


@pytest.fixture(scope="module")
def java(cluster: EmbeddedCluster, module_server_dir: Path) -> Iterator[JavaClient]:
    with JavaClient(JAVA, cluster.bootstrap_servers, module_server_dir / "java.log") as running:
        yield running


def _open(kind: str, servers: str, log: Path) -> AbstractContextManager[Client]:
    return ConfluentClient(servers) if kind == "confluent" else JavaClient(kind, servers, log)  # type: ignore[arg-type]


@pytest.fixture(
    scope="module",
    params=[
        "confluent",
        JAVA,
        *(pytest.param(old, marks=pytest.mark.test_all("version")) for old in ("4.1.0", "3.9.1")),
    ],
)
def client(
    request: pytest.FixtureRequest, cluster: EmbeddedCluster, java: JavaClient, module_server_dir: Path
) -> Iterator[Client]:
    if request.param == JAVA:
        yield java
        return
    log = module_server_dir / f"{request.param}.log"
    with _open(request.param, cluster.bootstrap_servers, log) as running:
        yield running


@pytest.fixture
def raw(cluster: EmbeddedCluster) -> Iterator[RawClient]:
    with RawClient(int(cluster.bootstrap_servers.rsplit(":", 1)[1])) as connected:
        yield connected


def _create(cluster: EmbeddedCluster, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(10)


def test_an_idempotent_producer_whose_answers_are_lost_writes_once(
    cluster: EmbeddedCluster, client: Client, topic: str
) -> None:
    """With the default settings of the Java client."""
    client.ask("open", "plain")
    sent = client.ask("send", "plain", topic, "0", "a", "b")
    for sent_bytes in (0, 10):
        fault = Fault(Drop(after=True, sent=sent_bytes), api="Produce", topic=topic, count=1)
        cluster.inject(fault)
        sent += client.ask("send", "plain", topic, "0", f"c{sent_bytes}", f"d{sent_bytes}")
        assert cluster.faults_fired()[fault] == 1
        cluster.clear_faults()
    assert sent == ["0", "1", "2", "3", "4", "5"]
    expected = ["a", "b", "c0", "d0", "c10", "d10"]
    assert by_confluent(cluster.bootstrap_servers, topic, 0, committed=False) == expected


def test_committed_is_read_and_aborted_is_not(
    cluster: EmbeddedCluster, client: Client, java: JavaClient, topic: str
) -> None:
    _create(cluster, topic, 2)
    client.ask("open", "writer", f"transactional.id={topic}")
    client.ask("init", "writer")
    expected: dict[int, list[str]] = {0: [], 1: []}
    for number, end in enumerate(["commit", "abort", "commit", "abort", "commit"]):
        client.ask("begin", "writer")
        for partition in (0, 1) if number % 3 else (0,):
            values = [f"{number}-{partition}-{item}" for item in range(3)]
            client.ask("send", "writer", topic, str(partition), *values[:2])
            client.ask("send", "writer", topic, str(partition), *values[2:])
            expected[partition] += values if end == "commit" else []
        client.ask(end, "writer")
    servers = cluster.bootstrap_servers
    for partition, values in expected.items():
        assert by_confluent(servers, topic, partition) == values
        assert by_kafka_python(servers, topic, partition) == values
        assert java.ask("read", topic, str(partition), "isolation.level=read_committed") == values
        everything = by_confluent(servers, topic, partition, committed=False)
        assert set(everything) > set(values)
        assert java.ask("read", topic, str(partition)) == everything


def test_offsets_are_committed_with_the_transaction(cluster: EmbeddedCluster, client: Client, topic: str) -> None:
    _create(cluster, topic)
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": topic})
    client.ask("open", "offsets", f"transactional.id={topic}")
    client.ask("init", "offsets")
    seen = []
    for offset, end in [("5", "commit"), ("7", "abort"), ("9", "commit")]:
        client.ask("begin", "offsets")
        client.ask("send", "offsets", topic, "0", offset)
        client.ask("offsets", "offsets", topic, topic, "0", offset)
        client.ask(end, "offsets")
        seen.append(consumer.committed([TopicPartition(topic, 0)], 10)[0].offset)
    consumer.close()
    assert seen == [5, 5, 9]


def test_a_zombie_is_fenced_and_what_it_left_open_aborted(cluster: EmbeddedCluster, client: Client, topic: str) -> None:
    for name in ("zombie", "next"):
        client.ask("open", name, f"transactional.id={topic}")
    client.ask("init", "zombie")
    client.ask("begin", "zombie")
    client.ask("send", "zombie", topic, "0", "lost")
    client.ask("init", "next")
    client.ask("begin", "next")
    client.ask("send", "next", topic, "0", "kept")
    with pytest.raises((JavaError, KafkaException), match=FENCED):
        client.ask("commit", "zombie")
    client.ask("commit", "next")
    assert by_confluent(cluster.bootstrap_servers, topic, 0) == ["kept"]


def test_a_transaction_is_aborted_after_its_time(cluster: EmbeddedCluster, client: Client, topic: str) -> None:
    _create(cluster, topic)
    client.ask("open", "slow", f"transactional.id={topic}", "transaction.timeout.ms=2000")
    client.ask("init", "slow")
    client.ask("begin", "slow")
    client.ask("send", "slow", topic, "0", "late")
    assert by_confluent(cluster.bootstrap_servers, topic, 0) == []
    deadline = time.monotonic() + 60
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "x", "isolation.level": "read_committed"}
    )
    while consumer.get_watermark_offsets(TopicPartition(topic, 0), 10)[1] < 2:  # the last stable offset
        assert time.monotonic() < deadline
        time.sleep(0.05)
    consumer.close()
    # clients of transaction.version 2 learn that the transaction has ended the other way, and may go on (KIP-890)
    expected = f"{FENCED}|InvalidProducerEpoch|old epoch|timed out|InvalidTxnState"
    with pytest.raises((JavaError, KafkaException), match=expected):
        client.ask("commit", "slow")
    assert by_confluent(cluster.bootstrap_servers, topic, 0) == []


def test_lost_answers_of_each_api(
    cluster: EmbeddedCluster, client: Client, topic: str, request: pytest.FixtureRequest
) -> None:
    """Each request is carried out, but its answer is lost: the producer retries, and all takes effect once."""
    client.ask("open", "patient", f"transactional.id={topic}", "retry.backoff.ms=20")
    apis_of_transactions = ["InitProducerId", "AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit"]
    for api in [*apis_of_transactions, "EndTxn"]:
        cluster.inject(Fault(Drop(after=True), api=api, count=1))
    client.ask("init", "patient")
    client.ask("begin", "patient")
    client.ask("send", "patient", topic, "0", "once")
    client.ask("offsets", "patient", topic, topic, "0", "1")
    client.ask("commit", "patient")
    fired = {fault.api for fault, count in cluster.faults_fired().items() if count == 1}
    cluster.clear_faults()
    added = {"AddPartitionsToTxn", "AddOffsetsToTxn"}  # by the brokers for clients of transaction.version 2
    is_of_2 = request.node.callspec.params["client"] in (JAVA, "4.1.0")
    assert fired == {*apis_of_transactions, "EndTxn"} - (added if is_of_2 else set())
    assert by_confluent(cluster.bootstrap_servers, topic, 0) == ["once"]


def _init(raw: RawClient, transactional_id: str | None, version: int = 4, **more: Any) -> dict[str, Any]:
    request = {"transactional_id": transactional_id, "transaction_timeout_ms": 30_000, **more}
    return raw.request(apis.INIT_PRODUCER_ID, version, request)


def _begin(raw: RawClient, transactional_id: str, *topics: str) -> dict[str, Any]:
    """Begin a transaction with partition 0 of each topic; return the producer's id and epoch."""
    producer, added = _try_begin(raw, transactional_id, *topics)
    assert added == dict.fromkeys(topics, 0)
    return producer


def _try_begin(raw: RawClient, transactional_id: str, *topics: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Try to begin one with partition 0 of each topic; return the producer's id and epoch, and the error codes."""
    deadline = time.monotonic() + 60
    while (found := _init(raw, transactional_id))["error_code"] in (14, 15, 16, 51):
        assert time.monotonic() < deadline
    producer = {key: found[key] for key in ("producer_id", "producer_epoch")}
    return producer, _add(raw, transactional_id, producer, *topics)


def _add(
    raw: RawClient, transactional_id: str, producer: dict[str, Any], *topics: str, version: int = 3
) -> dict[str, int]:
    request = {
        "v3_and_below_transactional_id": transactional_id,
        **{f"v3_and_below_{key}": value for key, value in producer.items()},
        "v3_and_below_topics": [{"name": topic, "partitions": [0]} for topic in topics],
    }
    answer = raw.request(apis.ADD_PARTITIONS_TO_TXN, version, request)
    return {
        topic["name"]: topic["results_by_partition"][0]["partition_error_code"]
        for topic in answer["results_by_topic_v3_and_below"]
    }


def _end(raw: RawClient, transactional_id: str, producer: dict[str, Any], committed: bool, version: int = 3) -> int:
    request = {"transactional_id": transactional_id, **producer, "committed": committed}
    return int(raw.request(apis.END_TXN, version, request)["error_code"])


def _produce(raw: RawClient, topic: str, transactional_id: str | None, records: bytes, version: int = 9) -> int:
    data = [{"name": topic, "partition_data": [{"index": 0, "records": records}]}]
    request = {"transactional_id": transactional_id, "acks": -1, "timeout_ms": 1000, "topic_data": data}
    answer = raw.request(apis.PRODUCE, version, request)
    return int(answer["responses"][0]["partition_responses"][0]["error_code"])


def test_only_what_was_added_is_written_to(cluster: EmbeddedCluster, raw: RawClient, topic: str) -> None:
    other = f"{topic}-other"
    _create(cluster, topic)
    _create(cluster, other)
    producer = _begin(raw, topic, topic)
    pid, epoch = producer["producer_id"], producer["producer_epoch"]
    records = bytes(batch(pid, epoch, 0, 1))
    assert _produce(raw, other, topic, records) == ErrorCode.INVALID_TXN_STATE
    assert _produce(raw, other, topic, records, 11) == ErrorCode.TRANSACTION_ABORTABLE
    assert _produce(raw, topic, None, records) == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert _produce(raw, topic, "unknown", records) == ErrorCode.INVALID_TXN_STATE
    assert _produce(raw, topic, topic, bytes(batch(pid, epoch + 1, 0, 1))) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert _produce(raw, topic, topic, records) == 0
    assert _end(raw, topic, producer, True) == 0
    # a batch that comes late, after the marker, would open a transaction that nobody ends
    assert _produce(raw, topic, topic, bytes(batch(pid, epoch, 1, 1))) == ErrorCode.INVALID_TXN_STATE
    assert by_confluent(cluster.bootstrap_servers, topic, 0) == ["v"]
    assert by_confluent(cluster.bootstrap_servers, other, 0, committed=False) == []


def test_the_end_of_a_transaction_wakes_a_fetch_of_committed_records(
    cluster: EmbeddedCluster, raw: RawClient, topic: str
) -> None:
    _create(cluster, topic)
    producer = _begin(raw, topic, topic)
    records = bytes(batch(producer["producer_id"], producer["producer_epoch"], 0, 1))
    assert _produce(raw, topic, topic, records) == 0
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    request = {
        "max_wait_ms": 100_000,
        "min_bytes": 1,
        "isolation_level": 1,
        "topics": [{"topic": topic, "partitions": [partition]}],
    }
    with RawClient(int(cluster.bootstrap_servers.rsplit(":", 1)[1]), timeout=30) as reader:
        reader.send_frame(encode_request(apis.FETCH, 11, 1, "reader", request).to_bytes())
        assert _end(raw, topic, producer, True) == 0
        _, answer = decode_response(apis.FETCH, 11, reader.receive_frame())
    [entry] = answer["responses"][0]["partitions"]
    assert (entry["error_code"], entry["last_stable_offset"]) == (0, 2)
    assert bytes(entry["records"])


def test_no_batch_overtakes_one_that_was_refused(cluster: EmbeddedCluster, raw: RawClient, topic: str) -> None:
    """Of batches in flight the first may come before its partition is added, and the second after."""
    _create(cluster, topic)
    producer = {key: _init(raw, topic)[key] for key in ("producer_id", "producer_epoch")}
    first, second = (bytes(batch(*producer.values(), sequence, 5)) for sequence in (0, 5))
    assert _produce(raw, topic, topic, first) == ErrorCode.INVALID_TXN_STATE
    assert _add(raw, topic, producer, topic) == {topic: 0}
    assert _produce(raw, topic, topic, second) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert [_produce(raw, topic, topic, records) for records in (first, second)] == [0, 0]
    assert _end(raw, topic, producer, True) == 0
    assert len(by_confluent(cluster.bootstrap_servers, topic, 0)) == 10


def test_errors_of_the_coordinator(cluster: EmbeddedCluster, raw: RawClient, topic: str) -> None:
    _create(cluster, topic)
    assert _init(raw, "")["error_code"] == ErrorCode.INVALID_REQUEST
    assert _init(raw, topic, transaction_timeout_ms=60_001)["error_code"] == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert _init(raw, topic, transaction_timeout_ms=0)["error_code"] == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    _init(raw, topic)
    producer = _begin(raw, topic, topic)
    older = producer | {"producer_epoch": producer["producer_epoch"] - 1}
    stranger = producer | {"producer_id": producer["producer_id"] + 10_000}
    assert _end(raw, topic, older, True) == ErrorCode.PRODUCER_FENCED
    assert _end(raw, topic, older, True, version=1) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert _end(raw, topic, stranger, True) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert _end(raw, "nobody", producer, True) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert _add(raw, topic, older, topic) == {topic: ErrorCode.PRODUCER_FENCED}
    assert _add(raw, topic, older, topic, version=1) == {topic: ErrorCode.INVALID_PRODUCER_EPOCH}
    assert _add(raw, topic, producer, topic, "missing") == {
        topic: ErrorCode.OPERATION_NOT_ATTEMPTED,
        "missing": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert _end(raw, topic, producer, False) == 0
    assert _end(raw, topic, producer, False) == 0
    assert _end(raw, topic, producer, True) == ErrorCode.INVALID_TXN_STATE
    assert _init(raw, topic, version=4, **older)["error_code"] == ErrorCode.PRODUCER_FENCED
    assert _init(raw, topic, version=3, **older)["error_code"] == ErrorCode.INVALID_PRODUCER_EPOCH
    bumped = _init(raw, topic, **producer)
    assert (bumped["producer_id"], bumped["producer_epoch"]) == (
        producer["producer_id"],
        producer["producer_epoch"] + 1,
    )


def test_transactions_are_listed_and_described(cluster: EmbeddedCluster, raw: RawClient, topic: str) -> None:
    _create(cluster, topic)
    producer = _begin(raw, topic, topic)
    assert _produce(raw, topic, topic, bytes(batch(*producer.values(), 0, 2))) == 0

    def described() -> dict[str, Any]:
        answer = raw.request(apis.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [topic]})
        (state,) = answer["transaction_states"]
        return dict(state)

    state = described()
    assert (state["transaction_state"], state["topics"]) == ("Ongoing", [{"topic": topic, "partitions": [0]}])
    assert (state["producer_id"], state["producer_epoch"]) == tuple(producer.values())
    request = {"state_filters": ["Ongoing", "Odd"], "producer_id_filters": [producer["producer_id"]]}
    listed = raw.request(apis.LIST_TRANSACTIONS, 1, request)
    assert [entry["transactional_id"] for entry in listed["transaction_states"]] == [topic]
    assert listed["unknown_state_filters"] == ["Odd"]
    wanted = {"topics": [{"name": topic, "partition_indexes": [0]}]}
    (entry,) = raw.request(apis.DESCRIBE_PRODUCERS, 0, wanted)["topics"][0]["partitions"]
    (active,) = entry["active_producers"]
    assert (active["producer_id"], active["last_sequence"], active["current_txn_start_offset"]) == (
        producer["producer_id"],
        1,
        0,
    )
    assert _end(raw, topic, producer, True) == 0
    assert described()["transaction_state"] == "CompleteCommit"
    (entry,) = raw.request(apis.DESCRIBE_PRODUCERS, 0, wanted)["topics"][0]["partitions"]
    assert entry["active_producers"][0]["current_txn_start_offset"] == -1
    missing = raw.request(apis.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["nobody"]})
    assert missing["transaction_states"][0]["error_code"] == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


def test_an_id_that_is_not_used_is_forgotten(make_cluster: Callable[..., EmbeddedCluster], topic: str) -> None:
    cluster = make_cluster(settings=SETTINGS | {"transactional.id.expiration.ms": "300"})
    with RawClient(int(cluster.bootstrap_servers.rsplit(":", 1)[1])) as raw:
        _create(cluster, topic)
        deadline = time.monotonic() + 60
        # on a busy machine an id may be forgotten before its transaction begins
        while (found := _try_begin(raw, topic, topic))[1][topic] == ErrorCode.INVALID_PRODUCER_ID_MAPPING:
            assert time.monotonic() < deadline
        producer, added = found
        assert added == {topic: 0}
        time.sleep(0.5)  # an id with an open transaction stays
        assert _end(raw, topic, producer, True) == 0
        deadline = time.monotonic() + 60
        while _end(raw, topic, producer, True) != ErrorCode.INVALID_PRODUCER_ID_MAPPING:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert _init(raw, topic)["producer_epoch"] == 0
