"""Our client against Apache Kafka 0.10.2.2 (message sets of magic 0 or 1), checked by librdkafka and kafka-python.

Our broker gets requests of those versions, too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import kafka as kafka_python
import pytest
from confluent_kafka import Consumer, Producer as ConfluentProducer, TopicPartition

from spark_klog.client import Consumer as KlogConsumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.net.connection import Connection
from spark_klog.client.offsets import GroupOffsets, list_offsets, offset_range
from spark_klog.client.producer.producer import Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode, OffsetOutOfRange, ProtocolError, UnsupportedVersionError
from spark_klog.protocol.apis import FETCH, METADATA, PRODUCE
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from tests.support.brokers.batches import read_records
from tests.support.clients.topics import create_topic, delete_topic, list_topics
from tests.support.servers.kafka import Kafka
from tests.support.servers.shared_kafka import SharedKafkas

CODECS = ("none", "gzip", "snappy", "lz4")
NOW = 1_700_000_000_000
NONE, CREATE, APPEND = -1, 0, 1
#: Topic settings by magic.
TOPICS = {0: {"message.format.version": "0.9.0"}, 1: {"message.format.version": "0.10.2"}}


_Broker = Kafka | EmbeddedCluster


class Line(NamedTuple):
    """A record as a client sees it; `kind` is the type of its timestamp."""

    offset: int
    kind: int
    timestamp: int
    key: bytes | None
    value: bytes | None


def _lines(count: int = 40) -> list[Line]:
    """Awkward records: nulls, empty, binary, big."""
    keys = [None, b"", b"key", bytes(range(256))]
    values = [None, b"", b"value", b"\x00\xff" * 400, b"text " * 3000]
    return [
        Line(number, CREATE, NOW + 7 * (number ^ 3), keys[number % 4], values[number % 5]) for number in range(count)
    ]


def _stored(lines: Sequence[Line], magic: int) -> list[Line]:
    """The lines as a topic of that magic stores them."""
    return list(lines) if magic else [line._replace(kind=NONE, timestamp=-1) for line in lines]


@pytest.fixture(
    scope="module", params=[pytest.param("0.10.2.2", marks=[pytest.mark.peer, pytest.mark.test_all("version")])]
)
def kafka(request: pytest.FixtureRequest, shared_kafkas: SharedKafkas) -> Kafka:
    return shared_kafkas.get(request.param)


@pytest.fixture(params=TOPICS, ids=lambda magic: f"magic{magic}")
def magic(request: pytest.FixtureRequest) -> int:
    chosen: int = request.param
    return chosen


@pytest.fixture
def created(kafka: Kafka, magic: int) -> str:
    """A topic of one partition."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    kafka.create_topic(name, configs=TOPICS[magic])
    return name


def _connect(kafka: _Broker, **settings: str) -> Cluster:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    return Cluster.connect({"bootstrap.servers": kafka.bootstrap_servers, **given})


def _send(cluster: Cluster, topic: str, lines: Sequence[Line]) -> None:
    producer = Producer.of_cluster(cluster)
    for line in lines:
        producer.send(topic, line.value, line.key, 0, line.timestamp)
    producer.flush()


def _read(cluster: Cluster, topic: str, start: int, end: int) -> list[Line]:
    lines = []
    for fetched in fetch_range(cluster, topic, 0, start, end):
        for record in read_records(bytes(fetched.data)):
            assert record.headers == ()
            if start <= record.offset < end:
                line = Line(record.offset, record.timestamp_type, record.timestamp, record.key, record.value)
                lines.append(line)
    return lines


def _confluent_send(kafka: Kafka, topic: str, lines: Sequence[Line], codec: str) -> None:
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "compression.type": codec, "log_level": 0}
    producer = ConfluentProducer({**settings, "linger.ms": 20, "batch.num.messages": 7})
    for line in lines:
        producer.produce(topic, line.value, line.key, 0, timestamp=line.timestamp)
    assert producer.flush(30) == 0


def _confluent_read(kafka: _Broker, topic: str, count: int) -> list[Line]:
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "enable.auto.commit": False, "check.crcs": True}
    consumer = Consumer({**settings, "group.id": "none", "log_level": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    lines = []
    for message in consumer.consume(count, 30):
        assert message.error() is None, message.error()
        kind, timestamp = message.timestamp()
        # librdkafka returns 0 if there is no timestamp
        lines.append(Line(message.offset() or 0, kind - 1, timestamp if kind else -1, message.key(), message.value()))
    assert consumer.poll(0.1) is None
    consumer.close()
    return lines


def _python_send(kafka: Kafka, topic: str, lines: Sequence[Line], codec: str) -> None:
    producer = kafka_python.KafkaProducer(
        bootstrap_servers=kafka.bootstrap_servers,
        compression_type=None if codec == "none" else codec,
        linger_ms=20,
        enable_idempotence=False,
    )
    sent = [producer.send(topic, line.value, line.key, None, 0, line.timestamp) for line in lines]
    assert [entry.get(20).offset for entry in sent] == [line.offset for line in lines]
    producer.close(10)


def _python_read(kafka: Kafka, topic: str, count: int) -> list[Line]:
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=kafka.bootstrap_servers, consumer_timeout_ms=20_000)
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    lines: list[Line] = []
    while len(lines) < count:
        record = next(consumer)
        kind, timestamp = (NONE, -1) if record.timestamp is None else (record.timestamp_type, record.timestamp)
        lines.append(Line(record.offset, kind, timestamp, record.key, record.value))
    assert consumer.end_offsets([partition]) == {partition: count}
    consumer.close()
    return lines


@pytest.mark.parametrize("codec", CODECS)
def test_what_we_produce(kafka: Kafka, created: str, magic: int, codec: str) -> None:
    with _connect(kafka, compression_type=codec, batch_size="4000") as cluster:
        _send(cluster, created, _lines())
        wanted = _stored(_lines(), magic)
        assert _confluent_read(kafka, created, len(wanted)) == wanted
        assert _python_read(kafka, created, len(wanted)) == wanted
        assert _read(cluster, created, 0, len(wanted)) == wanted


@pytest.mark.parametrize("codec", CODECS)
def test_what_others_produce(kafka: Kafka, created: str, magic: int, codec: str) -> None:
    _confluent_send(kafka, created, _lines(), codec)
    by_python = [line for line in _lines() if line.key is not None or line.value is not None]
    by_python = [line._replace(offset=40 + number) for number, line in enumerate(by_python)]
    _python_send(kafka, created, by_python, codec)
    wanted = _stored([*_lines(), *by_python], magic)
    with _connect(kafka) as cluster:
        assert _read(cluster, created, 0, len(wanted)) == wanted
        for start, end in ((5, 30), (7, 7), (33, 44), (len(wanted) - 1, len(wanted))):
            assert _read(cluster, created, start, end) == wanted[start:end]
    with _connect(kafka, fetch_max_bytes="1000", max_partition_fetch_bytes="500") as cluster:
        assert _read(cluster, created, 0, len(wanted)) == wanted


def test_log_append_time(kafka: Kafka) -> None:
    topic = f"t-{uuid.uuid4().hex[:10]}"
    kafka.create_topic(topic, configs={"message.timestamp.type": "LogAppendTime"})
    for codec in CODECS:
        with _connect(kafka, compression_type=codec, batch_size="4000") as cluster:
            _send(cluster, topic, _lines())
    with _connect(kafka) as cluster:
        found = _read(cluster, topic, 0, len(CODECS) * len(_lines()))
    assert found == _confluent_read(kafka, topic, len(found))
    assert [(line.key, line.value) for line in found] == [(line.key, line.value) for line in _lines()] * len(CODECS)
    assert {line.kind for line in found} == {APPEND}
    assert min(line.timestamp for line in found) > max(line.timestamp for line in _lines())


@pytest.mark.parametrize("codec", CODECS)
def test_headers_are_refused_before_anything_is_sent(kafka: Kafka, codec: str) -> None:
    topic = f"t-{uuid.uuid4().hex[:10]}"
    kafka.create_topic(topic)
    with _connect(kafka, compression_type=codec, linger_ms="60000") as cluster:  # all of them in one batch
        producer = Producer.of_cluster(cluster)
        for number in range(10):
            producer.send(topic, b"v", partition=0, headers=(("h", b"x"),) if number == 7 else ())
        with pytest.raises(
            UnsupportedVersionError, match=f"records for {topic}-0 have headers.*Produce 2.*leave them out"
        ):
            producer.flush()
        assert offset_range(cluster, topic, 0) == (0, 0)
        _send(cluster, topic, _lines())
        assert _read(cluster, topic, 0, len(_lines())) == _lines()


def test_zstd_is_refused(kafka: Kafka, created: str) -> None:
    with _connect(kafka, compression_type="zstd") as cluster:
        with pytest.raises(ProtocolError, match="zstd") as failed:
            _send(cluster, created, _lines())
        assert failed.value.code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
        assert offset_range(cluster, created, 0) == (0, 0)


def test_too_large_a_message_is_refused(kafka: Kafka, created: str) -> None:
    with _connect(kafka, max_request_size="2000000") as cluster:
        with pytest.raises(ProtocolError, match=rf"produce to {created}-0.*MESSAGE_TOO_LARGE"):
            _send(cluster, created, [Line(0, CREATE, NOW, None, bytes(1_100_000))])
        _send(cluster, created, [Line(0, CREATE, NOW, None, bytes(900_000))])
        assert offset_range(cluster, created, 0) == (0, 1)


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_acks(kafka: Kafka, created: str, acks: str) -> None:
    with _connect(kafka, acks=acks, batch_size="500") as cluster:
        _send(cluster, created, _lines(200))
    found = [line.value or b"" for line in _confluent_read(kafka, created, 200)]
    wanted = [line.value or b"" for line in _lines(200)]
    if acks == "0":  # this broker may handle requests with acks=0 out of order
        found, wanted = sorted(found), sorted(wanted)
    assert found == wanted


def test_offsets(kafka: Kafka, created: str, magic: int) -> None:
    key = created, 0
    times = [NOW + step for step in (0, 10, 10, 5, 30, 20, 40)]
    with _connect(kafka) as cluster, _connect(kafka, isolation_level="read_committed") as careful:
        assert offset_range(cluster, created, 0) == (0, 0)
        for timestamp in times:
            _send(cluster, created, [Line(0, CREATE, timestamp, None, b"v")])
        for each in (cluster, careful):
            assert list_offsets(each, {key: EARLIEST}) == {key: 0}
            assert list_offsets(each, {key: LATEST}) == {key: 7}
            assert _read(each, created, 0, 7) == _read(cluster, created, 0, 7)
        if magic == 0:  # there are no timestamps to search
            assert list_offsets(cluster, {key: NOW}) == {key: -1}
        else:
            for wanted in range(NOW - 1, NOW + 42, 3):
                expected = next((offset for offset, timestamp in enumerate(times) if timestamp >= wanted), -1)
                assert list_offsets(cluster, {key: wanted}) == {key: expected}
        with pytest.raises(OffsetOutOfRange) as failed:
            _read(cluster, created, 5, 20)
        assert (failed.value.requested, failed.value.available) == ((7, 20), (0, 7))


def test_group_offsets(kafka: Kafka, created: str) -> None:
    group = f"group-{uuid.uuid4().hex[:10]}"
    key = created, 0
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": group, "enable.auto.commit": False}
    consumer = Consumer({**settings, "log_level": 0})
    with _connect(kafka) as cluster:
        ours = GroupOffsets(cluster, group)
        assert ours.fetch([key]) == {}
        for offset in (5, 3):
            ours.commit({key: offset})
            assert ours.fetch([key]) == {key: offset}
            assert consumer.committed([TopicPartition(created, 0)], 20)[0].offset == offset
        consumer.commit(offsets=[TopicPartition(created, 0, 42)], asynchronous=False)
        assert ours.fetch([key, (created, 1)]) == {key: 42}
    consumer.close()


def test_topics(kafka: Kafka) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    with _connect(kafka) as cluster:
        create_topic(cluster, name, 3)
        assert name in list_topics(cluster)
        assert cluster.partitions([name]) == {name: [0, 1, 2]}
        with pytest.raises(ProtocolError, match="TOPIC_ALREADY_EXISTS"):
            create_topic(cluster, name)
        delete_topic(cluster, name)
        assert name not in list_topics(cluster)
        made = f"{name}-made"
        _send(cluster, made, _lines(3))
    assert _confluent_read(kafka, made, 3) == _lines(3)


def _speaks(monkeypatch: pytest.MonkeyPatch, api: Api, version: int) -> None:
    """Cap the version of `api` on all connections, as with an older broker."""
    negotiated = Connection.version_of

    def capped(self: Connection, wanted: Api) -> int:
        return min(version, negotiated(self, wanted)) if wanted is api else negotiated(self, wanted)

    monkeypatch.setattr(Connection, "version_of", capped)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a_message_larger_than_a_fetch(
    kafka: Kafka, created: str, magic: int, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Fetch 3 a broker returns only the first part of the message."""
    lines = [Line(number, CREATE, NOW, b"k", b"v" * size) for number, size in enumerate((10, 3000, 10, 90_000, 10, 50))]
    for codec in ("none", "gzip"):
        with _connect(kafka, compression_type=codec, batch_size="1") as cluster:
            _send(cluster, created, lines)
    wanted = _stored([*lines, *(line._replace(offset=6 + line.offset) for line in lines)], magic if version > 1 else 0)
    _speaks(monkeypatch, FETCH, version)
    with _connect(kafka, max_partition_fetch_bytes="500", fetch_max_bytes="700") as cluster:
        assert _read(cluster, created, 0, 12) == wanted
        assert _read(cluster, created, 3, 5) == wanted[3:5]
    with _connect(kafka, max_partition_fetch_bytes="10") as cluster:
        # 10 bytes do not include the message's size: the client asks for more
        assert _read(cluster, created, 0, 12) == wanted


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("codec", CODECS)
def test_old_produce_requests(
    kafka: Kafka, created: str, magic: int, version: int, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _speaks(monkeypatch, PRODUCE, version)
    with _connect(kafka, compression_type=codec) as cluster:
        _send(cluster, created, _lines())
    wanted = _stored(_lines(), magic)
    if magic > 0 and version < 2:
        # the broker converts magic 0 and stores no timestamp
        wanted = [line._replace(timestamp=-1) for line in wanted]
    found = _confluent_read(kafka, created, len(wanted))
    assert found == wanted


def test_a_group_gives_up_a_deleted_topic(
    cluster: EmbeddedCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a broker that is asked for all topics, as one before Kafka 0.11 is, names no missing one."""
    _speaks(monkeypatch, METADATA, 3)
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": topic, "metadata.max.age.ms": "100"}
    with _connect(cluster) as connected, KlogConsumer(settings) as consumer:
        gone = f"{topic}-gone"
        for name in (topic, gone):
            create_topic(connected, name)
        consumer.subscribe([topic, gone])
        for wanted in ([(topic, 0), (gone, 0)], [(topic, 0)]):
            deadline = time.monotonic() + 60
            while consumer.assignment() != wanted:
                assert time.monotonic() < deadline
                consumer.poll(0.1)
            if len(wanted) > 1:
                delete_topic(connected, gone)


@pytest.mark.parametrize("fetch", range(4))
@pytest.mark.parametrize("produce", range(3))
def test_old_requests_to_our_broker(
    cluster: EmbeddedCluster, topic: str, produce: int, fetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores magic 2, and converts: Produce 0 and 1 have magic 0, as have answers to Fetch 0 and 1."""
    _speaks(monkeypatch, PRODUCE, produce)
    _speaks(monkeypatch, FETCH, fetch)
    for codec in CODECS:
        with _connect(cluster, compression_type=codec, batch_size="4000") as client:
            _send(client, topic, _lines())
    lines = [line._replace(offset=40 * turn + line.offset) for turn in range(len(CODECS)) for line in _lines()]
    wanted = lines if produce > 1 else [line._replace(timestamp=-1) for line in lines]
    assert _confluent_read(cluster, topic, len(wanted)) == wanted
    wanted = _stored(wanted, magic=fetch // 2)
    with _connect(cluster, max_partition_fetch_bytes="500", fetch_max_bytes="700") as client:
        assert _read(client, topic, 0, len(wanted)) == wanted
        assert _read(client, topic, 35, 93) == wanted[35:93]
