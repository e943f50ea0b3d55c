"""Faults on demand, as clients see them."""

from __future__ import annotations

import contextlib
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kafka as kafka_python
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka.errors import CorruptRecordError

from spark_klog.broker.faults import Corrupt, Delay, Drop, ErrorAnswer, Fault, Truncate
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, CorruptBatchError, ErrorCode
from spark_klog.protocol.apis import API_VERSIONS, FETCH, METADATA, PRODUCE
from spark_klog.protocol.codec import encode_request
from tests.support.brokers.batches import make_batch, read_records
from tests.support.brokers.raw_client import CLIENT_ID, RawClient
from tests.support.waiting import wait_until

NOW = 1_700_000_000_000
FIRST, SECOND = (bytes(make_batch([(None, value)], [NOW])) for value in (b"first", b"second"))


@pytest.fixture(scope="module")
def shared(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(data_dir=module_server_dir / "faulty", faults=[]) as running:
        yield running


@pytest.fixture
def faulty(shared: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    """A broker without faults so far."""
    yield shared
    shared.clear_faults()


@pytest.fixture
def partition(faulty: EmbeddedCluster, topic: str) -> str:
    """A topic with one partition."""
    return _create(faulty, topic)


@pytest.fixture
def client(faulty: EmbeddedCluster) -> Iterator[RawClient]:
    with RawClient(_port(faulty)) as connected:
        yield connected


def _port(cluster: EmbeddedCluster) -> int:
    return int(cluster.bootstrap_servers.rsplit(":", 1)[1])


def _create(cluster: EmbeddedCluster, topic: str, partitions: int = 1) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(10)
    return topic


def _produce(cluster: EmbeddedCluster, topic: str, value: bytes, **settings: Any) -> KafkaError | None:
    """Produce a record with confluent-kafka; return the error of its delivery."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "retry.backoff.ms": 20, **settings})
    told: list[KafkaError | None] = []
    producer.produce(topic, value, on_delivery=lambda error, _: told.append(error))
    assert producer.flush(20) == 0
    (error,) = told
    return error


def _values(cluster: EmbeddedCluster, topic: str, partition: int = 0) -> list[bytes | None]:
    """All values of a partition, by kafka-python."""
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=cluster.bootstrap_servers, consumer_timeout_ms=5000)
    with contextlib.closing(consumer):
        place = kafka_python.TopicPartition(topic, partition)
        consumer.assign([place])
        consumer.seek_to_beginning(place)
        end = consumer.end_offsets([place])[place]
        values: list[bytes | None] = []
        while len(values) < end:
            values.append(next(consumer).value)
        return values


@pytest.mark.parametrize("code", ["NOT_LEADER_OR_FOLLOWER", 6])
def test_confluent_tries_again_where_the_leader_is_said_to_be_elsewhere(
    faulty: EmbeddedCluster, partition: str, code: str | int
) -> None:
    fault = Fault(ErrorAnswer(code), api="Produce", topic=partition, count=2)
    faulty.inject(fault)
    assert _produce(faulty, partition, b"v") is None
    assert faulty.faults_fired() == {fault: 2}
    assert _values(faulty, partition) == [b"v"]


@pytest.mark.parametrize(
    ("action", "times"),
    [
        (Drop(), 1),
        (Drop(after=True), 2),
        (Drop(sent=10), 2),
        (ErrorAnswer("NOT_LEADER_OR_FOLLOWER"), 1),
        (ErrorAnswer("REQUEST_TIMED_OUT", after=True), 2),
    ],
)
def test_a_record_is_there_twice_where_its_answer_was_lost(
    faulty: EmbeddedCluster, partition: str, action: Drop | ErrorAnswer, times: int
) -> None:
    fault = Fault(action, api="Produce", topic=partition, count=1)
    faulty.inject(fault)
    assert _produce(faulty, partition, b"v") is None
    assert faulty.faults_fired() == {fault: 1}
    assert _values(faulty, partition) == [b"v"] * times


def test_an_error_that_does_not_pass_is_told_and_nothing_is_appended(faulty: EmbeddedCluster, partition: str) -> None:
    fault = Fault(ErrorAnswer("TOPIC_AUTHORIZATION_FAILED"), api="Produce", topic=partition)
    faulty.inject(fault)
    error = _produce(faulty, partition, b"v")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert faulty.faults_fired() == {fault: 1}
    assert _values(faulty, partition) == []


def test_other_topics_partitions_and_clients_go_well(faulty: EmbeddedCluster, topic: str, client: RawClient) -> None:
    _create(faulty, topic, 2)
    other = _create(faulty, f"{topic}-other")
    faulty.inject(Fault(ErrorAnswer("KAFKA_STORAGE_ERROR"), "Produce", topic, 1, CLIENT_ID))
    data = [
        {"name": topic, "partition_data": [{"index": 0, "records": FIRST}, {"index": 1, "records": FIRST}]},
        {"name": other, "partition_data": [{"index": 0, "records": SECOND}]},
    ]
    answer = client.request(PRODUCE, 8, {"acks": -1, "timeout_ms": 1000, "topic_data": data})
    found = {
        (entry["name"], item["index"]): (item["error_code"], item["base_offset"])
        for entry in answer["responses"]
        for item in entry["partition_responses"]
    }
    assert found == {(topic, 0): (0, 0), (topic, 1): (ErrorCode.KAFKA_STORAGE_ERROR, -1), (other, 0): (0, 0)}
    assert _values(faulty, topic, 0) == [b"first"]
    assert _values(faulty, topic, 1) == []
    assert _values(faulty, other) == [b"second"]
    producer = Producer({"bootstrap.servers": faulty.bootstrap_servers})
    producer.produce(topic, b"of another client", partition=1)
    assert producer.flush(20) == 0
    assert _values(faulty, topic, 1) == [b"of another client"]


def test_who_wants_no_answer_is_disconnected(faulty: EmbeddedCluster, partition: str, client: RawClient) -> None:
    faulty.inject(Fault(ErrorAnswer("NOT_LEADER_OR_FOLLOWER"), api="Produce", topic=partition, count=1))
    data = [{"name": partition, "partition_data": [{"index": 0, "records": FIRST}]}]
    request = {"acks": 0, "timeout_ms": 1000, "topic_data": data}
    client.send_frame(encode_request(PRODUCE, 8, 1, CLIENT_ID, request).to_bytes())
    assert client.is_closed()
    assert _values(faulty, partition) == []


def test_skip_and_count(faulty: EmbeddedCluster, partition: str, client: RawClient) -> None:
    fault = Fault(ErrorAnswer("KAFKA_STORAGE_ERROR"), api="Produce", topic=partition, skip=2, count=3)
    faulty.inject(fault)
    codes = [client.produce(partition, FIRST, 8)[0] for _ in range(7)]
    assert codes == [0, 0, 56, 56, 56, 0, 0]
    assert faulty.faults_fired() == {fault: 3}
    assert len(_values(faulty, partition)) == 4


def test_faults_hold_as_soon_as_inject_returns(faulty: EmbeddedCluster, partition: str, client: RawClient) -> None:
    for _ in range(50):
        faulty.inject(Fault(ErrorAnswer("KAFKA_STORAGE_ERROR"), api="Produce", topic=partition))
        assert client.produce(partition, FIRST, 8)[0] == ErrorCode.KAFKA_STORAGE_ERROR
        faulty.clear_faults()
        assert client.produce(partition, FIRST, 8)[0] == 0


def _end_offset(cluster: EmbeddedCluster, topic: str) -> int:
    with RawClient(_port(cluster)) as other:
        return sum(1 for _ in read_records(other.fetch(topic, 0, 11)[1]))


def _has_answer(client: RawClient) -> bool:
    return bool(select.select([client.socket], [], [], 0)[0])


@pytest.mark.parametrize("after", [False, True])
def test_delays(faulty: EmbeddedCluster, partition: str, client: RawClient, after: bool) -> None:
    fault = Fault(Delay(1500, after=after), api="Produce", topic=partition, count=1)
    faulty.inject(fault)
    began = time.monotonic()
    data = [{"name": partition, "partition_data": [{"index": 0, "records": FIRST}]}]
    frame = encode_request(PRODUCE, 8, 1, CLIENT_ID, {"acks": 1, "timeout_ms": 1000, "topic_data": data}).to_bytes()
    client.send_frame(frame)
    wait_until(lambda: faulty.faults_fired() == {fault: 1})
    # others are served meanwhile
    while after and not _end_offset(faulty, partition):
        assert not _has_answer(client)
    assert _end_offset(faulty, partition) == int(after)
    assert not _has_answer(client)
    client.receive_frame()
    assert time.monotonic() - began >= 1.5
    assert _end_offset(faulty, partition) == 1
    client.produce(partition, FIRST, 8)
    assert faulty.faults_fired() == {fault: 1}


def _true_answer(client: RawClient) -> bytes:
    client.send_frame(encode_request(API_VERSIONS, 0, 1, CLIENT_ID, {}).to_bytes())
    return client.receive_frame()


@pytest.mark.parametrize("sent", [1, 4, 9])
def test_an_answer_that_breaks_off(faulty: EmbeddedCluster, client: RawClient, sent: int) -> None:
    whole = _true_answer(client)
    faulty.inject(Fault(Drop(sent=sent), api="ApiVersions", client_id=CLIENT_ID, count=1))
    client.send_frame(encode_request(API_VERSIONS, 0, 1, CLIENT_ID, {}).to_bytes())
    received = b""
    while data := client.socket.recv(4096):
        received += data
    assert received == (struct.pack(">i", len(whole)) + whole)[:sent]


def test_an_answer_that_is_cut_short(faulty: EmbeddedCluster, client: RawClient) -> None:
    whole = _true_answer(client)
    faulty.inject(Fault(Truncate(5), api="ApiVersions", client_id=CLIENT_ID, count=1))
    assert _true_answer(client) == whole[:-5]
    assert _true_answer(client) == whole


def test_corrupt_answers_are_the_same_ones_for_a_seed(faulty: EmbeddedCluster, client: RawClient) -> None:
    whole = int.from_bytes(_true_answer(client), "big")
    rounds = []
    for seed in (1, 1, 2):
        faulty.clear_faults()
        faulty.inject(Fault(Corrupt("answer", bits=3, seed=seed), api="ApiVersions", client_id=CLIENT_ID))
        rounds.append([int.from_bytes(_true_answer(client), "big") ^ whole for _ in range(4)])
    assert rounds[0] == rounds[1] != rounds[2]
    assert all(difference.bit_count() == 3 for found in rounds for difference in found)
    assert len(set(rounds[0])) == 4


def _fill(cluster: EmbeddedCluster, topic: str) -> None:
    with RawClient(_port(cluster)) as client:
        assert client.produce(topic, FIRST, 8) == (0, 0)
        assert client.produce(topic, SECOND, 8) == (0, 1)


def test_corrupt_records_and_kafka_python(faulty: EmbeddedCluster, partition: str) -> None:
    _fill(faulty, partition)
    faulty.inject(Fault(Corrupt(), api="Fetch", topic=partition))
    with pytest.raises(CorruptRecordError):
        _values(faulty, partition)
    faulty.clear_faults()
    assert _values(faulty, partition) == [b"first", b"second"]


def test_corrupt_records_and_librdkafka(faulty: EmbeddedCluster, partition: str) -> None:
    _fill(faulty, partition)
    fault = Fault(Corrupt(), api="Fetch", topic=partition, count=1)
    faulty.inject(fault)
    settings = {"bootstrap.servers": faulty.bootstrap_servers, "group.id": "none", "check.crcs": True}
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(partition, 0, 0)])
    found = [consumer.poll(10) for _ in range(2)]
    consumer.close()
    assert found[0] is not None
    error = found[0].error()
    assert error is not None
    assert error.code() == KafkaError._BAD_MSG
    assert "CRC" in error.str()
    assert faulty.faults_fired() == {fault: 1}


def test_corrupt_records_and_our_client(faulty: EmbeddedCluster, partition: str) -> None:
    _fill(faulty, partition)
    faulty.inject(Fault(Corrupt(), api="Fetch", topic=partition, count=1))
    with Cluster.connect({"bootstrap.servers": faulty.bootstrap_servers}) as cluster:
        with pytest.raises(CorruptBatchError):
            list(read_records(bytes(next(fetch_range(cluster, partition, 0, 0, 2)).data)))
        (fetched,) = fetch_range(cluster, partition, 0, 0, 2)
        assert [record.value for record in read_records(bytes(fetched.data))] == [b"first", b"second"]


@pytest.mark.parametrize("version", [0, 2, 4, 12])
def test_a_batch_differs_where_its_checksum_looks(
    faulty: EmbeddedCluster, partition: str, client: RawClient, version: int
) -> None:
    _fill(faulty, partition)
    code, sound = client.fetch(partition, 0, version)
    assert code == 0
    faulty.inject(Fault(Corrupt(bits=2), api="Fetch", topic=partition))
    code, corrupt = client.fetch(partition, 0, version)
    differing = [at for at, (one, other) in enumerate(zip(sound, corrupt, strict=True)) if one != other]
    assert code == 0
    first_size = 12 + struct.unpack_from(">i", sound, 8)[0]
    assert 1 <= len(differing) <= 2
    assert all(16 < at < first_size for at in differing)
    with pytest.raises(CorruptBatchError):
        list(read_records(corrupt))


def test_corruption_waits_for_records(faulty: EmbeddedCluster, partition: str, client: RawClient) -> None:
    fault = Fault(Corrupt(), api="Fetch", topic=partition, count=1)
    faulty.inject(fault)
    assert client.fetch(partition, 0, 11) == (0, b"")
    assert faulty.faults_fired() == {fault: 0}
    _fill(faulty, partition)
    assert client.fetch(partition, 0, 11)[1] != client.fetch(partition, 0, 11)[1]
    assert faulty.faults_fired() == {fault: 1}


def test_fetch_sessions_do_not_hide_topics(faulty: EmbeddedCluster, partition: str, client: RawClient) -> None:
    faulty.inject(Fault(ErrorAnswer("NOT_LEADER_OR_FOLLOWER"), api="Fetch", topic=partition, skip=1))
    entry = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}
    request = {"max_wait_ms": 0, "min_bytes": 0, "session_epoch": 0}
    topics = [{"topic": partition, "partitions": [entry]}]
    first = client.request(FETCH, 11, request | {"topics": topics})
    # KIP-227: a client that gets no session names its partitions again
    assert (first["session_id"], first["error_code"]) == (0, 0)
    again = client.request(FETCH, 11, request | {"topics": topics})
    assert again["responses"][0]["partitions"][0]["error_code"] == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_metadata_of_one_topic(faulty: EmbeddedCluster, partition: str, client: RawClient) -> None:
    other = _create(faulty, f"{partition}-other")
    faulty.inject(Fault(ErrorAnswer("LEADER_NOT_AVAILABLE"), api="Metadata", topic=partition))
    for topics in ([{"name": partition}, {"name": other}], None):
        answer = client.request(METADATA, 4, {"topics": topics})
        codes = {entry["name"]: entry["error_code"] for entry in answer["topics"]}
        assert (codes[partition], codes[other]) == (ErrorCode.LEADER_NOT_AVAILABLE, 0)
        assert len(answer["brokers"]) == 1


@pytest.mark.parametrize(
    ("api", "code"),
    [
        ("FindCoordinator", "COORDINATOR_NOT_AVAILABLE"),
        ("OffsetFetch", "COORDINATOR_LOAD_IN_PROGRESS"),
        ("OffsetCommit", 14),
    ],
)
def test_a_group_waits_for_its_coordinator(faulty: EmbeddedCluster, partition: str, api: str, code: str | int) -> None:
    fault = Fault(ErrorAnswer(code), api=api, count=1)
    faulty.inject(fault)
    consumer = Consumer({"bootstrap.servers": faulty.bootstrap_servers, "group.id": partition})
    consumer.assign([TopicPartition(partition, 0, 0)])
    committed = consumer.commit(offsets=[TopicPartition(partition, 0, 7)], asynchronous=False)
    assert [(entry.offset, entry.error) for entry in committed] == [(7, None)]
    assert [entry.offset for entry in consumer.committed([TopicPartition(partition, 0)], 20)] == [7]
    consumer.close()
    assert faulty.faults_fired() == {fault: 1}


def test_a_broker_without_faults_takes_none(cluster: EmbeddedCluster) -> None:
    for change in (lambda: cluster.inject(Fault(Drop())), cluster.clear_faults, cluster.faults_fired):
        with pytest.raises(ConfigError, match="faults="):
            change()
    command = Path(f"/proc/{cluster.pid(0)}/cmdline").read_text()
    assert "--stop-with-stdin" in command
    assert "--faults" not in command


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, spark_klog.embedded, spark_klog.cli.main, spark_klog.broker.net.server\n"
        "print({'pyspark', 'pandas', 'pyarrow', 'spark_klog.broker.faults.faulty_server'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_each_broker_has_its_own_faults_and_has_them_again_after_a_restart(
    make_cluster: Callable[..., EmbeddedCluster],
) -> None:
    of_one = Fault(ErrorAnswer(77), api="ApiVersions", client_id=CLIENT_ID, count=1, broker=1)
    of_all = Fault(ErrorAnswer(78), api="ApiVersions", client_id=CLIENT_ID, count=1)
    cluster = make_cluster(brokers=2, faults=[of_one])
    ports = [int(server.rsplit(":", 1)[1]) for server in cluster.bootstrap_servers.split(",")]

    def codes(port: int) -> list[int]:
        with RawClient(port) as client:
            return [client.request(API_VERSIONS, 0, {})["error_code"] for _ in range(3)]

    cluster.inject(of_all)
    assert [codes(port) for port in ports] == [[78, 0, 0], [77, 78, 0]]
    assert cluster.faults_fired() == {of_one: 1, of_all: 2}
    cluster.kill(1)
    assert cluster.faults_fired() == {of_all: 1}
    cluster.restart(1)
    assert codes(ports[1]) == [77, 78, 0]
    with pytest.raises(ConfigError, match="broker 2"):
        cluster.inject(Fault(Drop(), broker=2))
