"""Transactions of the producer, seen by confluent-kafka's read_committed consumer at our broker and Kafka's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from spark_klog.broker.faults import Drop, ErrorAnswer, Fault
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import (
    ConfigError,
    InvalidTransactionState,
    KlogError,
    ProducerClosed,
    ProducerFenced,
    ProtocolError,
    RequestTimedOut,
)
from tests.support.clients.topics import make_topic
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import NEWEST, versions
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")

PARTITIONS = 3
_SECONDS = 30


@pytest.fixture(
    scope="module",
    params=["ours", *(pytest.param(version, marks=pytest.mark.peer) for version in versions(NEWEST, "3.9.1"))],
)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with serving(request.param, module_server_dir, shared_kafkas) as address:
        yield address


def connect(servers: str, name: str, **settings: str) -> Producer:
    return Producer(
        {"bootstrap.servers": servers, "transactional.id": name}
        | {key.replace("_", "."): value for key, value in settings.items()}
    )


def committed(servers: str, topic: str) -> list[bytes]:
    """All values up to the last stable offset, sorted."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "g", "isolation.level": "read_committed", "log_level": 0}
        | {"enable.partition.eof": True, "enable.auto.commit": False, "fetch.wait.max.ms": 20}
    )
    found: list[bytes] = []
    try:
        for partition in range(PARTITIONS):
            consumer.assign([TopicPartition(topic, partition, 0)])
            deadline = time.monotonic() + _SECONDS
            while True:
                assert time.monotonic() < deadline
                message = consumer.poll(1)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    found.append(message.value() or b"")
                elif error.name() == "_PARTITION_EOF":
                    break
                else:
                    raise KafkaException(error)
    finally:
        consumer.close()
    return sorted(found)


def send(producer: Producer, topic: str, *values: bytes) -> None:
    for number, value in enumerate(values):
        producer.send(topic, value, partition=number % PARTITIONS)


def test_all_or_nothing(servers: str, topic: str) -> None:
    make_topic(servers, topic, PARTITIONS)
    with connect(servers, topic) as producer:
        producer.init_transactions()
        for number in range(6):
            producer.begin_transaction()
            values = [b"%d %d" % (number, item) for item in range(10)]
            send(producer, topic, *values)
            if number % 3 == 0:
                producer.flush()  # aborted records are in the log, too
            if number % 2:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
        producer.begin_transaction()  # an empty transaction
        producer.commit_transaction()
        producer.begin_transaction()
        send(producer, topic, b"open")
        producer.flush()
        expected = sorted(b"%d %d" % (number, item) for number in (0, 2, 4) for item in range(10))
        assert committed(servers, topic) == expected
    assert committed(servers, topic) == expected  # close has aborted the open transaction


@pytest.mark.parametrize("is_known", [False, True], ids=["found by the commit", "known before"])
def test_another_producer_fences(servers: str, topic: str, is_known: bool) -> None:
    """The commit raises the record's error, whether or not the producer's thread has met it before."""
    make_topic(servers, topic, PARTITIONS)
    first = connect(servers, topic)
    first.init_transactions()
    first.begin_transaction()
    send(first, topic, b"first")
    first.flush()
    with connect(servers, topic) as second:
        second.init_transactions()
        second.begin_transaction()
        send(second, topic, b"second", b"second too")
        late = first.send(topic, b"late")
        if is_known:
            with pytest.raises((ProducerFenced, ProtocolError)):
                late.result(_SECONDS)
            with pytest.raises((ProducerFenced, ProtocolError)):
                first.send_offsets_to_transaction({(topic, 0): 1}, "g")
        with pytest.raises((ProducerFenced, ProtocolError)):
            first.commit_transaction()
        with pytest.raises(KlogError):
            first.abort_transaction()
        with pytest.raises(ProducerFenced, match=f"transactional.id={topic}"):
            first.begin_transaction()
        second.commit_transaction()
    first.abort()
    assert committed(servers, topic) == [b"second", b"second too"]


def test_offsets_are_committed_with_the_records(servers: str, topic: str) -> None:
    make_topic(servers, topic, PARTITIONS)
    group = f"{topic}-group"
    with connect(servers, topic) as producer, Cluster(client_config({"bootstrap.servers": servers})) as cluster:
        offsets = GroupOffsets(cluster, group)
        producer.init_transactions()
        for commits in (True, False):
            producer.begin_transaction()
            send(producer, topic, b"%d" % commits)
            with pytest.raises(ConfigError, match=rf"offset -1001 of {topic}-0 must be from 0 "):
                producer.send_offsets_to_transaction({(topic, 0): -1001}, group)
            with pytest.raises(TypeError, match=r"must be \(topic, partition\)"):
                producer.send_offsets_to_transaction({topic: 1}, group)  # type: ignore[dict-item]
            producer.send_offsets_to_transaction({(topic, 0): 10 + commits, (topic, 2): 20 + commits}, group)
            if commits:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
            deadline = time.monotonic() + _SECONDS
            while offsets.fetch([(topic, 0), (topic, 2)]) != {(topic, 0): 11, (topic, 2): 21}:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    assert committed(servers, topic) == [b"1"]


def test_calls_out_of_order(topic: str, cluster: EmbeddedCluster) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, PARTITIONS)
    producer = connect(servers, topic)
    with pytest.raises(InvalidTransactionState, match="init_transactions first"):
        producer.begin_transaction()
    producer.init_transactions()
    with pytest.raises(InvalidTransactionState, match="is ready"):
        producer.init_transactions()
    with pytest.raises(InvalidTransactionState, match=r"send: .*begin_transaction first"):
        producer.send(topic, b"x")
    with pytest.raises(InvalidTransactionState, match="begin_transaction first"):
        producer.commit_transaction()
    producer.begin_transaction()
    with pytest.raises(InvalidTransactionState, match="end the transaction first"):
        producer.begin_transaction()
    producer.close()
    producer.close()
    for call in (lambda: producer.send(topic, b"x"), producer.flush):
        with pytest.raises(ProducerClosed):
            call()
    aborted = connect(servers, topic)
    aborted.init_transactions()
    aborted.begin_transaction()
    aborted.abort()
    for call in (
        *(aborted.abort_transaction, aborted.commit_transaction, aborted.prepare_transaction),
        lambda: aborted.send_offsets_to_transaction({(topic, 0): 1}, "g"),
    ):
        with pytest.raises(ProducerClosed, match="_transaction: the producer is closed"):
            call()
    with (
        Producer({"bootstrap.servers": servers}) as plain,
        pytest.raises(ConfigError, match=r"transactional\.id"),
    ):
        plain.begin_transaction()
    with pytest.raises(ConfigError, match=r"transactional\.id needs .*acks=all"):
        connect(servers, topic, acks="1")


def _go_on(producer: Producer, topic: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        time.sleep(1)
        producer.send(topic, b"later", partition=0)
        producer.flush()


def test_a_transaction_that_took_too_long(servers: str, topic: str) -> None:
    """The coordinator aborts it; the producer goes on after an abort, or raises ProducerFenced."""
    make_topic(servers, topic, PARTITIONS)
    with connect(servers, topic, transaction_timeout_ms="3000") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        send(producer, topic, b"late")
        producer.flush()
        with pytest.raises((ProtocolError, ProducerFenced)):
            _go_on(producer, topic)
        try:
            producer.abort_transaction()
        except ProducerFenced:
            return  # as Java's producer would
        producer.begin_transaction()
        send(producer, topic, b"again", b"and again")
        producer.commit_transaction()
    assert committed(servers, topic) == [b"again", b"and again"]


def test_goes_on_after_a_refused_record(servers: str, topic: str) -> None:
    """An abort drops the records sent before it; the producer goes on in another epoch."""
    make_topic(servers, topic, PARTITIONS)
    with connect(servers, topic, max_request_size="4000000") as producer:
        producer.init_transactions()
        for number in range(3):
            producer.begin_transaction()
            send(producer, topic, b"aborted %d" % number, b"aborted too")
            producer.send(topic, bytes(3_000_000), partition=0)
            with pytest.raises(
                ProtocolError, match=r"MESSAGE_TOO_LARGE.* the record.* is larger than the topic's max\.message\.bytes"
            ):
                producer.flush()
            with pytest.raises(KlogError):
                producer.commit_transaction()
            producer.abort_transaction()
            producer.begin_transaction()
            send(producer, topic, b"%d" % number)
            producer.commit_transaction()
    assert committed(servers, topic) == [b"0", b"1", b"2"]


def test_an_exception_aborts(servers: str, topic: str) -> None:
    """An exception in the block aborts, so that read_committed readers do not wait for the transaction's timeout."""
    make_topic(servers, topic, PARTITIONS)
    with suppress(ZeroDivisionError), connect(servers, topic, transaction_timeout_ms="600000") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        send(producer, topic, b"1")
        producer.flush()
        _ = 1 // 0
    with connect(servers, f"{topic}-2") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        send(producer, topic, b"2")
        producer.commit_transaction()
    deadline = time.monotonic() + _SECONDS
    while committed(servers, topic) != [b"2"]:
        assert time.monotonic() < deadline


def test_a_commit_that_may_be_decided_is_not_given_up(topic: str) -> None:
    """The response of EndTxn is lost, and the coordinator is loading until max.block.ms is over."""
    faults = [
        Fault(Drop(after=True), api="EndTxn", count=1),
        Fault(ErrorAnswer("COORDINATOR_LOAD_IN_PROGRESS"), api="EndTxn", skip=1, count=12),
    ]
    with EmbeddedCluster(faults=faults) as cluster:
        make_topic(cluster.bootstrap_servers, topic, PARTITIONS)
        with connect(cluster.bootstrap_servers, topic, max_block_ms="2000") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            send(producer, topic, b"1")
            producer.flush()
            deadline = time.monotonic() + _SECONDS
            refused = 0
            while time.monotonic() < deadline:
                try:
                    producer.commit_transaction()
                    break
                except KlogError:
                    refused += 1
                    with pytest.raises(InvalidTransactionState, match="commit_transaction again"):
                        producer.abort_transaction()
            assert refused
            producer.begin_transaction()
            send(producer, topic, b"2")
            producer.commit_transaction()
        assert committed(cluster.bootstrap_servers, topic) == [b"1", b"2"]


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_that_are_lost(seed: int, topic: str) -> None:
    """Whatever is lost, the log has each transaction that `commit_transaction` confirmed once, and no other record."""
    choose = random.Random(seed)
    apis = ["InitProducerId", "AddPartitionsToTxn", "Produce", "EndTxn", "FindCoordinator", "AddOffsetsToTxn"]
    faults = [
        Fault(
            choose.choice(
                [
                    Drop(after=True),
                    Drop(),
                    ErrorAnswer(choose.choice(["NOT_COORDINATOR", "CONCURRENT_TRANSACTIONS", "UNKNOWN_SERVER_ERROR"])),
                ]
            ),
            api=choose.choice(apis),
            skip=choose.randrange(10),
            count=choose.randrange(1, 3),
        )
        for _ in range(10)
    ]
    expected: list[bytes] = []
    with EmbeddedCluster(faults=faults) as cluster:
        servers = cluster.bootstrap_servers
        make_topic(servers, topic, PARTITIONS)
        producer: Producer | None = None
        done = 0
        deadline = time.monotonic() + 4 * _SECONDS
        while done < 20:
            assert time.monotonic() < deadline
            values = [b"%d %d" % (done, number) for number in range(choose.randrange(1, 8))]
            try:
                if producer is None:
                    producer = connect(servers, topic, request_timeout_ms="2000", max_block_ms="3000")
                    producer.init_transactions()
                producer.begin_transaction()
                send(producer, topic, *values)
                if choose.random() < 0.3:
                    producer.send_offsets_to_transaction({(topic, 0): done}, "g")
                if choose.random() < 0.3:
                    producer.abort_transaction()
                    continue
                producer.flush()
            except KlogError:
                if producer is not None:
                    try:
                        producer.abort_transaction()
                    except KlogError:
                        producer.abort()
                        producer = None
                continue
            while True:  # the outcome is known only when this returns
                assert time.monotonic() < deadline
                try:
                    producer.commit_transaction()
                except (RequestTimedOut, ProtocolError):
                    continue
                else:
                    expected += values
                    done += 1
                    break
        assert producer is not None
        producer.close()
        assert committed(servers, topic) == sorted(expected)
