"""Third-party clients against our broker: kcat, confluent-kafka, kafka-python."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import kafka as kafka_python
import lz4.frame
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka.record import default_records

from spark_klog.client.producer.producer import Producer as KlogProducer
from spark_klog.embedded import EmbeddedCluster
from tests.support.clients.tools import ToolFailed, kcat
from tests.support.waiting import wait_until

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NOW = 1_700_000_000_000
#: (partition, key, value, headers, timestamp)
Line = tuple[int, "bytes | None", "bytes | None", "list[tuple[str, bytes | None]]", int]


def _lines() -> list[Line]:
    """Awkward records over three partitions: nulls, empty, text, binary, big, headers that repeat and are null."""
    keys = [None, b"", b"key", "ключ".encode(), bytes(range(256))]
    values = [None, b"", b"value", b"\x00\xff" * 40, b"long " * 4000]
    headers: list[list[tuple[str, bytes | None]]] = [[], [("a", b"1")], [("a", b"1"), ("a", None), ("ü", b"")]]
    return [
        (number % 3, keys[number % 5], values[number % 4 if number != 17 else 4], headers[number % 3], NOW + 7 * number)
        for number in range(60)
    ]


def _produce(servers: str, topic: str, lines: list[Line], **settings: Any) -> Producer:
    """Write the lines. With acks=0 they may be on the way for as long as the producer lives, which the caller gets."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20, **settings})
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Any) -> None:
        if error is not None:
            failures.append(error)

    for partition, key, value, headers, timestamp in lines:
        producer.produce(
            topic, value, key, partition, headers=headers or None, timestamp=timestamp, on_delivery=delivered
        )
    assert producer.flush(30) == 0
    assert failures == []
    return producer


def _consume(servers: str, topic: str, count: int, partitions: int = 3, offset: int = 0) -> list[Line]:
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "none", "enable.auto.commit": False, "check.crcs": True}
    )
    consumer.assign([TopicPartition(topic, partition, offset) for partition in range(partitions)])
    lines: list[Line] = []
    deadline = time.monotonic() + 60
    while len(lines) < count and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is not None:
            assert message.error() is None, message.error()
            _, timestamp = message.timestamp()
            headers = list(message.headers() or [])
            lines.append((message.partition(), message.key(), message.value(), headers, timestamp))
    assert consumer.poll(0.2) is None
    consumer.close()
    return lines


def _by_partition(lines: list[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line[0])


@pytest.fixture
def make_topic(cluster: EmbeddedCluster, topic: str) -> Callable[[int], str]:
    """Create the test's topic with confluent-kafka's admin client."""

    def make(partitions: int) -> str:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(10)
        assert len(admin.list_topics(topic, 10).topics[topic].partitions) == partitions
        return topic

    return make


def test_create_topics_answers_with_the_settings(cluster: EmbeddedCluster, topic: str) -> None:
    """kafka-python sends the newest version; that of confluent-kafka has no settings in the answer."""
    admin = kafka_python.KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers)
    wanted = {"num_partitions": 2, "replication_factor": 1, "configs": {"retention.ms": "1000"}}
    (created,) = admin.create_topics({topic: wanted})["topics"]
    admin.close()
    assert (created["error_code"], created["num_partitions"]) == (0, 2)
    assert created["configs"]["retention.ms"]["value"] == "1000"
    assert created["configs"]["cleanup.policy"]["value"] == "delete"


@pytest.mark.parametrize("codec", CODECS)
def test_confluent_round_trip(cluster: EmbeddedCluster, make_topic: Callable[[int], str], codec: str) -> None:
    topic = make_topic(3)
    _produce(cluster.bootstrap_servers, topic, _lines(), **{"compression.type": codec})
    found = _consume(cluster.bootstrap_servers, topic, len(_lines()))
    assert _by_partition(found) == _by_partition(_lines())
    assert _consume(cluster.bootstrap_servers, topic, 3, offset=19) == [line for line in found if line in _lines()[57:]]


@pytest.mark.parametrize(
    "codec", [pytest.param(name, marks=[] if name == "lz4" else pytest.mark.test_all("codec")) for name in CODECS]
)
def test_kcat_round_trip(cluster: EmbeddedCluster, make_topic: Callable[[int], str], codec: str) -> None:
    topic = make_topic(1)
    servers = ("-b", cluster.bootstrap_servers, "-t", topic, "-p", "0")
    text = b"".join(b"k%d:value %d\n" % (number, number) for number in range(500)) + b"null:\n"
    kcat("-P", *servers, "-z", codec, "-K", ":", "-Z", "-H", "one=1", "-H", "two=2", stdin=text)
    lines = kcat("-C", *servers, "-o", "beginning", "-e", "-q", "-J").splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["offset"] for line in found] == list(range(501))
    assert [line["key"] for line in found] == [*(f"k{number}" for number in range(500)), "null"]
    assert [line["payload"] for line in found] == [*(f"value {number}" for number in range(500)), None]
    assert all(line["headers"] == ["one", "1", "two", "2"] for line in found)
    assert kcat("-C", *servers, "-o", "-2", "-e", "-q", "-f", "%o ") == b"499 500 "


def test_offsets_by_time(cluster: EmbeddedCluster, make_topic: Callable[[int], str]) -> None:
    topic = make_topic(1)
    times = [NOW + step for step in (0, 10, 10, 5, 30, 20, 40)]
    for timestamp in times:  # a batch each
        _produce(cluster.bootstrap_servers, topic, [(0, None, b"v", [], timestamp)])
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "none"})
    for wanted in range(NOW - 1, NOW + 42):
        (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, wanted)], 10)
        expected = next((offset for offset, timestamp in enumerate(times) if timestamp >= wanted), -1)
        assert (found.offset, found.error) == (expected, None), wanted
        if wanted % 10 == 0:
            answer = kcat("-Q", "-b", cluster.bootstrap_servers, "-t", f"{topic}:0:{wanted}")
            assert answer.decode().split() == [topic, "[0]", "offset", str(expected)]
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), 10) == (0, 7)
    consumer.close()


def test_commits_of_confluent(cluster: EmbeddedCluster, make_topic: Callable[[int], str]) -> None:
    topic, group = make_topic(2), f"group-{uuid.uuid4()}"

    def consumer() -> Consumer:
        return Consumer(
            {"bootstrap.servers": cluster.bootstrap_servers, "group.id": group, "enable.auto.commit": False}
        )

    asked = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    first = consumer()
    assert [entry.offset for entry in first.committed(asked, 10)] == [-1001, -1001]
    first.assign([TopicPartition(topic, 0, 0)])
    for offset in (5, 3):
        commit = TopicPartition(topic, 0, offset, metadata="a note")
        (done,) = first.commit(offsets=[commit], asynchronous=False)
        assert done.error is None
        second = consumer()
        found = second.committed(asked, 10)
        assert [entry.offset for entry in found] == [offset, -1001]
        assert found[0].metadata == "a note"
        second.close()
    with pytest.raises(KafkaException) as failed:
        first.commit(offsets=[TopicPartition(topic, 7, 1)], asynchronous=False)
    assert failed.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    first.close()


def test_reading_goes_on_from_the_commit(cluster: EmbeddedCluster, make_topic: Callable[[int], str]) -> None:
    topic, group = make_topic(1), f"group-{uuid.uuid4()}"
    _produce(cluster.bootstrap_servers, topic, [(0, None, b"%d" % number, [], NOW) for number in range(10)])
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": group, "enable.auto.commit": False}
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(4, 20)
    assert [message.value() for message in messages] == [b"0", b"1", b"2", b"3"]
    consumer.commit(messages[-1], asynchronous=False)
    consumer.close()
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, 0)])  # start at the committed offset
    assert [message.value() for message in consumer.consume(6, 20)] == [b"%d" % number for number in range(4, 10)]
    consumer.close()


def test_commits_outlive_the_broker(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    cluster = make_cluster()
    _produce(cluster.bootstrap_servers, "t", [(0, None, b"v", [], NOW)])
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "enable.auto.commit": False}
    consumer = Consumer(settings)
    for offset in range(20):
        consumer.commit(offsets=[TopicPartition("t", 0, offset)], asynchronous=False)
    consumer.close()
    cluster.kill(0)
    cluster.restart(0)
    consumer = Consumer(settings)
    assert [entry.offset for entry in consumer.committed([TopicPartition("t", 0)], 20)] == [19]
    consumer.close()


@pytest.fixture(params=[None, "gzip", "snappy", "lz4", "zstd"])
def python_producer(request: pytest.FixtureRequest, cluster: EmbeddedCluster) -> Iterator[Any]:
    producer = kafka_python.KafkaProducer(
        bootstrap_servers=cluster.bootstrap_servers,
        compression_type=request.param,
        acks="all",
        linger_ms=20,
    )
    yield producer
    producer.close(10)


def test_kafka_python_round_trip(
    cluster: EmbeddedCluster, make_topic: Callable[[int], str], python_producer: Any
) -> None:
    topic = make_topic(3)
    lines = [
        (partition, key, value, [(name, data or b"") for name, data in headers], timestamp)
        for partition, key, value, headers, timestamp in _lines()
        if key is not None or value is not None
    ]
    sent = [
        python_producer.send(topic, value, key, headers, partition, timestamp)
        for partition, key, value, headers, timestamp in lines
    ]
    assert sorted((entry.get(20).partition, entry.get(20).offset) for entry in sent) == [
        (partition, offset)
        for partition in range(3)
        for offset in range(len([line for line in lines if line[0] == partition]))
    ]
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=cluster.bootstrap_servers, consumer_timeout_ms=20_000)
    partitions = [kafka_python.TopicPartition(topic, partition) for partition in range(3)]
    consumer.assign(partitions)
    consumer.seek_to_beginning()
    assert sum(consumer.end_offsets(partitions).values()) == len(lines)
    found: list[Line] = []
    for record in consumer:
        found.append((record.partition, record.key, record.value, list(record.headers), record.timestamp))
        if len(found) == len(lines):
            break
    assert _by_partition(found) == _by_partition(lines)
    wanted = lines[30][4]
    by_time = consumer.offsets_for_times(dict.fromkeys(partitions, wanted))
    for partition in partitions:
        times = [line[4] for line in lines if line[0] == partition.partition]
        first = next((offset, time_) for offset, time_ in enumerate(times) if time_ >= wanted)
        assert (by_time[partition].offset, by_time[partition].timestamp) == first
    consumer.close()


def test_lz4_of_linked_blocks_is_refused(
    cluster: EmbeddedCluster, make_topic: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's consumers can't read them. Apache Kafka 3.9.1 refuses them as well, with UNKNOWN_SERVER_ERROR."""
    topic = make_topic(1)
    value = bytes(range(256)) * 1000

    def send(linked: bool) -> int:
        def compressed(data: bytes) -> bytes:
            return lz4.frame.compress(bytes(data), block_size=lz4.frame.BLOCKSIZE_MAX64KB, block_linked=linked)

        monkeypatch.setattr(default_records, "lz4_encode", compressed)
        producer = kafka_python.KafkaProducer(
            bootstrap_servers=cluster.bootstrap_servers, compression_type="lz4", enable_idempotence=False
        )
        try:
            offset: int = producer.send(topic, value).get(20).offset
        finally:
            producer.close(10)
        return offset

    with pytest.raises(kafka_python.errors.InvalidRecordError):
        send(linked=True)
    assert send(linked=False) == 0


def _read_by_kafka_python(servers: str, topic: str, count: int) -> list[Line]:
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=servers, consumer_timeout_ms=20_000, check_crcs=True)
    consumer.assign([kafka_python.TopicPartition(topic, partition) for partition in range(3)])
    consumer.seek_to_beginning()
    lines: list[Line] = []
    while len(lines) < count:
        record = next(consumer)
        lines.append((record.partition, record.key, record.value, list(record.headers), record.timestamp))
    consumer.close()
    return lines


@pytest.mark.parametrize(
    ("codec", "levels"),
    [
        ("none", [None]),
        ("gzip", [1, None, -1, 9]),
        ("snappy", [None]),
        ("lz4", [None, 9, 1, 17]),
        ("zstd", [-131072, -5, 1, None, 3, 22]),
    ],
)
def test_what_our_producer_writes(
    cluster: EmbeddedCluster, make_topic: Callable[[int], str], codec: str, levels: list[int | None]
) -> None:
    """Other clients read it; each level gives no more than the one before. After None comes the default level."""
    topic = make_topic(3)
    sizes = [0]
    for level in levels:
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "compression.type": codec, "linger.ms": "60000"}
        if level is not None:  # one batch a partition at each level: sent at the end
            settings[f"compression.{codec}.level"] = str(level)
        with KlogProducer(settings) as producer:
            for partition, key, value, headers, timestamp in _lines():
                producer.send(topic, value, key, partition, timestamp, tuple(headers))
        sizes.append(sum(path.stat().st_size for path in cluster.data_dir.glob(f"broker-0/{topic}-?/*.log")))
    written = [after - before for before, after in pairwise(sizes)]
    assert written == sorted(written, reverse=True)
    if len(levels) > 1:
        assert written[0] > written[-1]
        assert written[levels.index(None)] == written[levels.index(None) + 1]
    lines = _by_partition(_lines() * len(levels))
    assert _by_partition(_consume(cluster.bootstrap_servers, topic, len(lines))) == lines
    assert _by_partition(_read_by_kafka_python(cluster.bootstrap_servers, topic, len(lines))) == lines


def test_topics_are_made_when_they_are_written_to(cluster: EmbeddedCluster, topic: str) -> None:
    _produce(cluster.bootstrap_servers, topic, [(0, b"k", b"v", [], NOW)])
    assert _consume(cluster.bootstrap_servers, topic, 1, partitions=1) == [(0, b"k", b"v", [], NOW)]


def test_no_topics_are_made_where_that_is_off(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    cluster = make_cluster(settings={"auto.create.topics.enable": "false"})
    patience = ("-X", "topic.metadata.propagation.max.ms=500")
    with pytest.raises(ToolFailed, match="Unknown topic"):
        kcat("-P", "-b", cluster.bootstrap_servers, "-t", "not-there", *patience, stdin=b"x\n")
    assert AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(timeout=60).topics == {}


def test_delete_and_create_again(cluster: EmbeddedCluster, make_topic: Callable[[int], str]) -> None:
    topic = make_topic(2)
    lines: list[Line] = [(1, None, b"old", [], NOW)]
    _produce(cluster.bootstrap_servers, topic, lines)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(10)
    assert topic not in admin.list_topics(timeout=60).topics
    assert not list(cluster.data_dir.glob(f"broker-0/{topic}-?"))
    # renamed first, and removed soon
    wait_until(lambda: not list(cluster.data_dir.glob(f"broker-0/{topic}-*")), seconds=30)
    with pytest.raises(KafkaException) as failed:
        admin.delete_topics([topic])[topic].result(10)
    assert failed.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    make_topic(2)
    _produce(cluster.bootstrap_servers, topic, [(1, None, b"new", [], NOW)])
    assert _consume(cluster.bootstrap_servers, topic, 1, partitions=2) == [(1, None, b"new", [], NOW)]


@pytest.mark.parametrize(
    ("name", "partitions", "replicas", "config", "code"),
    [
        ("bad name", 1, 1, {}, KafkaError.TOPIC_EXCEPTION),
        ("two-replicas", 1, 2, {}, KafkaError.INVALID_REPLICATION_FACTOR),
        ("unknown-config", 1, 1, {"cleanup.policy": "shrink"}, KafkaError.INVALID_CONFIG),
        ("bad-config", 1, 1, {"segment.bytes": "many"}, KafkaError.INVALID_CONFIG),
        ("no-partitions", 0, 1, {}, KafkaError.INVALID_PARTITIONS),
    ],
)
def test_topics_that_are_refused(
    cluster: EmbeddedCluster, name: str, partitions: int, replicas: int, config: dict[str, str], code: int
) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    with pytest.raises(KafkaException) as failed:
        admin.create_topics([NewTopic(name, partitions, replicas, config=config)])[name].result(10)
    assert failed.value.args[0].code() == code
    assert name not in admin.list_topics(timeout=60).topics


def test_a_topic_exists_once(cluster: EmbeddedCluster, make_topic: Callable[[int], str]) -> None:
    make_topic(1)
    with pytest.raises(KafkaException) as failed:
        make_topic(1)
    assert failed.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS


def test_metadata(cluster: EmbeddedCluster, make_topic: Callable[[int], str]) -> None:
    topic = make_topic(4)
    metadata = json.loads(kcat("-L", "-J", "-b", cluster.bootstrap_servers, "-t", topic))
    assert metadata["brokers"] == [{"id": 0, "name": cluster.bootstrap_servers}]
    assert metadata["controllerid"] == 0
    (found,) = metadata["topics"]
    assert found["topic"] == topic
    partition = {"leader": 0, "replicas": [{"id": 0}], "isrs": [{"id": 0}]}
    assert found["partitions"] == [{"partition": number, **partition} for number in range(4)]
    listed = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(timeout=60)
    assert topic in listed.topics
    meta = (cluster.data_dir / "broker-0" / "meta.properties").read_text()
    assert f"cluster.id={listed.cluster_id}\n" in meta


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_acks(cluster: EmbeddedCluster, make_topic: Callable[[int], str], acks: str) -> None:
    topic = make_topic(1)
    lines: list[Line] = [(0, None, b"%d" % number, [], NOW) for number in range(200)]
    producer = _produce(cluster.bootstrap_servers, topic, lines, acks=acks, **{"batch.num.messages": 10})
    assert _consume(cluster.bootstrap_servers, topic, 200, partitions=1) == lines
    del producer


def test_a_program_without_acknowledgements_that_ends(
    cluster: EmbeddedCluster, make_topic: Callable[[int], str]
) -> None:
    """The broker still has many of its requests to serve when the connection ends."""
    topic = make_topic(1)
    lines: list[Line] = [(0, None, b"%d" % number, [], NOW) for number in range(2000)]
    _produce(cluster.bootstrap_servers, topic, lines, acks="0", **{"batch.num.messages": 10})
    assert _consume(cluster.bootstrap_servers, topic, 2000, partitions=1) == lines


def test_too_large_a_message_is_refused(cluster: EmbeddedCluster, make_topic: Callable[[int], str]) -> None:
    topic = make_topic(1)
    errors: list[KafkaError] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "message.max.bytes": 5_000_000})
    producer.produce(topic, bytes(2_000_000), on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(30) == 0
    assert [error.code() for error in errors] == [KafkaError.MSG_SIZE_TOO_LARGE]
