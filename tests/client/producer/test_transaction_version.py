"""The producer's transactions by the cluster's transaction.version (KIP-890), at our broker and Kafka's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.base.names import TRANSACTION_VERSION
from spark_klog.broker.faults import Drop, ErrorAnswer, Fault
from spark_klog.client.admin.admin import Admin
from spark_klog.client.offsets import GroupOffsets
from spark_klog.client.producer.producer import Producer
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode, ProducerFenced, ProtocolError, TransactionAbortable
from tests.support.clients.topics import make_topic
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import NEWEST, Kafka, free_port, versions
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")

_SECONDS = 60
#: What brokers do themselves for clients of version 2.
ADDS = ("AddPartitionsToTxn", "AddOffsetsToTxn")


_PEERS = [pytest.mark.peer, pytest.mark.test_all("version")]


@pytest.fixture(
    scope="module",
    params=["ours", *(pytest.param(version, marks=_PEERS) for version in versions(NEWEST, "4.1.0"))],
)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with serving(request.param, module_server_dir, shared_kafkas) as address:
        yield address


def connect(servers: str, name: str, **settings: str) -> Producer:
    producer = Producer(
        {"bootstrap.servers": servers, "transactional.id": name}
        | {key.replace("_", "."): value for key, value in settings.items()}
    )
    producer.init_transactions()
    return producer


def write(producer: Producer, topic: str, *values: bytes) -> PreparedTransaction:
    """Write in a new transaction, and return what the brokers know it by."""
    producer.begin_transaction()
    for value in values:
        producer.send(topic, value)
    producer.flush()
    under_way = producer.transaction_under_way()
    assert under_way is not None
    return under_way


def test_each_end_raises_the_epoch(servers: str, topic: str) -> None:
    make_topic(servers, topic, 1)
    with connect(servers, topic) as producer, Admin({"bootstrap.servers": servers}) as admin:
        epochs = []
        for number in range(6):
            epochs.append(write(producer, topic, b"%d" % number).epoch)
            if number % 3 == 2:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
        assert epochs == list(range(epochs[0], epochs[0] + 6))
        assert admin.describe_transactions([topic])[topic].producer_epoch == epochs[-1] + 1
    assert by_confluent(servers, topic, 0) == ["0", "1", "3", "4"]


def test_offsets_of_a_group(servers: str, topic: str) -> None:
    make_topic(servers, topic, 1)
    with connect(servers, topic) as producer:
        for offset, commits in ((3, True), (5, False), (7, True)):
            producer.begin_transaction()
            producer.send_offsets_to_transaction({(topic, 0): offset}, topic)
            if commits:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
    with Admin({"bootstrap.servers": servers}) as admin:
        deadline = time.monotonic() + _SECONDS
        while GroupOffsets(admin.cluster, topic).fetch([(topic, 0)]) != {(topic, 0): 7}:
            assert time.monotonic() < deadline


def test_a_producer_goes_on_after_its_transaction_has_timed_out(servers: str, topic: str) -> None:
    make_topic(servers, topic, 1)
    with (
        connect(servers, topic, transaction_timeout_ms="1000") as producer,
        Admin({"bootstrap.servers": servers}) as admin,
    ):
        first = write(producer, topic, b"late")
        deadline = time.monotonic() + _SECONDS
        while admin.describe_transactions([topic])[topic].state != "CompleteAbort":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(ProtocolError, match="INVALID_TXN_STATE"):
            producer.commit_transaction()
        producer.abort_transaction()
        assert write(producer, topic, b"in time").epoch == first.epoch + 1
        producer.commit_transaction()
    assert by_confluent(servers, topic, 0) == ["in time"]


def test_a_new_instance_fences(servers: str, topic: str) -> None:
    make_topic(servers, topic, 1)
    with connect(servers, topic) as first:
        write(first, topic, b"lost")
        with connect(servers, topic) as second:
            with pytest.raises(ProducerFenced):
                first.commit_transaction()
            write(second, topic, b"kept")
            second.commit_transaction()
    assert by_confluent(servers, topic, 0) == ["kept"]


@pytest.mark.parametrize("call", ["flush", "offsets"])
def test_a_fenced_producer_says_so_from_the_first_call_on(servers: str, topic: str, call: str) -> None:
    """A leader and a group's coordinator know only that its epoch is outdated."""
    make_topic(servers, topic, 1)
    with connect(servers, topic) as first:
        first.begin_transaction()
        with connect(servers, topic):
            if call == "flush":
                assert isinstance(first.send(topic, b"late").exception(_SECONDS), ProducerFenced)
            with pytest.raises(ProducerFenced):
                first.send_offsets_to_transaction({(topic, 0): 1}, topic)
        with pytest.raises(ProducerFenced):
            first.abort_transaction()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(data_dir=tmp_path, faults=[]) as running:
        yield running


def test_lost_answers(cluster: EmbeddedCluster, topic: str) -> None:
    """Of each request of a transaction, of which there are only these."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    apis = ("InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn")
    faults = [Fault(Drop(after=True), api=api, count=1) for api in apis]
    forbidden = [Fault(ErrorAnswer(ErrorCode.INVALID_REQUEST), api=api) for api in ADDS]
    cluster.inject(*faults, *forbidden)
    with connect(servers, topic) as producer:
        for number in range(2):
            producer.begin_transaction()
            producer.send(topic, b"%d" % number)
            producer.send_offsets_to_transaction({(topic, 0): number}, topic)
            producer.commit_transaction()
    fired = cluster.faults_fired()
    assert [fired[fault] for fault in faults] == [1] * len(faults)
    assert [fired[fault] for fault in forbidden] == [0] * len(forbidden)
    assert by_confluent(servers, topic, 0) == ["0", "1"]


def test_transaction_abortable(cluster: EmbeddedCluster, topic: str) -> None:
    """The error has a name of its own, and the producer goes on after an abort."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    with connect(servers, topic) as producer:
        cluster.inject(Fault(ErrorAnswer(ErrorCode.TRANSACTION_ABORTABLE), api="Produce", count=1))
        producer.begin_transaction()
        producer.send(topic, b"lost")
        with pytest.raises(TransactionAbortable, match="abort the transaction and repeat it"):
            producer.commit_transaction()
        producer.abort_transaction()
        write(producer, topic, b"kept")
        producer.commit_transaction()
    assert by_confluent(servers, topic, 0) == ["kept"]


@pytest.mark.test_all("long")
def test_the_level_changes_between_transactions(tmp_path: Path, topic: str) -> None:
    """A producer outlives brokers of version 0, then 2, then 1: each of its transactions is of the cluster's."""
    epochs: list[int] = []
    producer: Producer | None = None
    listen = f"127.0.0.1:{free_port()}"
    for number, level in enumerate(("0", "2", "1")):
        with EmbeddedCluster(data_dir=tmp_path, settings={TRANSACTION_VERSION: level}, listen=listen) as cluster:
            servers = cluster.bootstrap_servers
            if producer is None:
                make_topic(servers, topic, 1)
                producer = connect(servers, topic)
            for turn in range(2):
                epochs.append(write(producer, topic, b"%d %d" % (number, turn)).epoch)
                producer.commit_transaction()
            if number == 2:
                assert by_confluent(servers, topic, 0) == [f"{n} {turn}" for n in range(3) for turn in range(2)]
                producer.close()
    first = epochs[0]
    assert [epoch - first for epoch in epochs] == [0, 0, 0, 1, 2, 2]


def test_over_several_brokers(tmp_path: Path, topic: str) -> None:
    """Leaders ask other brokers to add partitions, coordinators write markers there, and answers are lost."""
    with EmbeddedCluster(brokers=3, data_dir=tmp_path, faults=[]) as cluster:
        servers = cluster.bootstrap_servers
        make_topic(servers, topic, 6)
        faults = [Fault(Drop(after=True), api=api, count=2) for api in ("AddPartitionsToTxn", "WriteTxnMarkers")]
        cluster.inject(*faults)
        with connect(servers, f"{topic}-a") as first, connect(servers, f"{topic}-b") as second:
            for turn in range(4):
                for name, producer in (("a", first), ("b", second)):
                    producer.begin_transaction()
                    for partition in range(6):
                        producer.send(topic, f"{name} {turn}".encode(), partition=partition)
                    producer.send_offsets_to_transaction({(topic, 0): turn}, f"{topic}-{name}")
                    if turn == 2:
                        producer.abort_transaction()
                    else:
                        producer.commit_transaction()
        fired = cluster.faults_fired()
        assert all(fired[fault] >= 2 for fault in faults)  # of each broker
        expected = [f"{name} {turn}" for turn in (0, 1, 3) for name in "ab"]
        deadline = time.monotonic() + _SECONDS
        for partition in range(6):
            while sorted(found := by_confluent(servers, topic, partition)) != sorted(expected):
                assert time.monotonic() < deadline, found


@pytest.mark.peer
@pytest.mark.test_all("version")
def test_kafkas_level_changes_while_it_runs(tmp_path: Path, topic: str) -> None:
    """By kafka-features; the producer looks again after metadata.max.age.ms, without a new connection."""
    with Kafka(NEWEST, tmp_path) as kafka:
        servers = kafka.bootstrap_servers
        make_topic(servers, topic, 1)
        epochs: list[int] = []
        with connect(servers, topic, metadata_max_age_ms="1") as producer:
            for change in ("", "downgrade", "upgrade"):
                if change:
                    level = f"{TRANSACTION_VERSION}={1 if change == 'downgrade' else 2}"
                    command = ("--bootstrap-server", servers, change, "--feature", level)
                    done = kafka.tool("org.apache.kafka.tools.FeatureCommand", *command)
                    assert done.returncode == 0, done.stdout + done.stderr
                for turn in range(2):
                    epochs.append(write(producer, topic, f"{change} {turn}".encode()).epoch)
                    producer.commit_transaction()
        assert [epoch - epochs[0] for epoch in epochs] == [0, 1, 2, 2, 2, 3]
        expected = [f"{change} {turn}" for change in ("", "downgrade", "upgrade") for turn in range(2)]
        assert by_confluent(servers, topic, 0) == expected
