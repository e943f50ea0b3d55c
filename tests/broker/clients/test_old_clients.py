"""Clients older than Kafka 0.11, which speak message sets of magic 0 and 1, against our broker.

The tests with hand-made requests and librdkafka also run against Apache Kafka 3.9.1, which converts the same way: that
checks the tests.
"""

from __future__ import annotations

import gzip
import re
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import kafka as kafka_python
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka.record import MemoryRecords
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from spark_klog.errors import ErrorCode
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.topics import learn_topic
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import Kafka
from tests.support.servers.shared_kafka import SharedKafkas

OLD_CODECS = ("none", "gzip", "snappy", "lz4")
CODECS = (*OLD_CODECS, "zstd")
NOW = 1_700_000_000_000
NONE, CREATE = -1, 0


class Line(NamedTuple):
    """A record as a client sees it; `kind` is the type of its timestamp."""

    offset: int
    kind: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def _lines(count: int = 40) -> list[Line]:
    """Awkward records: nulls, empty, binary, big."""
    keys = [None, b"", b"key", bytes(range(256))]
    values = [None, b"", b"value", b"\x00\xff" * 400, b"text " * 3000]
    return [
        Line(number, CREATE, NOW + 7 * (number ^ 3), keys[number % 4], values[number % 5]) for number in range(count)
    ]


def _without_times(lines: Sequence[Line], kind: int) -> list[Line]:
    return [line._replace(kind=kind, timestamp=-1) for line in lines]


class Server(NamedTuple):
    """A running broker, ours or Kafka's."""

    broker: KlogBroker | Kafka

    @property
    def servers(self) -> str:
        return self.broker.bootstrap_servers

    def client(self) -> RawClient:
        return RawClient(int(self.servers.split(":")[1]))

    def wait_for_log(self, text: str) -> None:
        """Wait for a line in our broker's log; Kafka does not log it."""
        if isinstance(self.broker, KlogBroker):
            self.broker.wait_for_log(text)


@pytest.fixture(
    scope="module", params=["klog", pytest.param("3.9.1", marks=[pytest.mark.peer, pytest.mark.test_all("version")])]
)
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    if request.param == "klog":
        with KlogBroker(module_server_dir / "klog") as broker:
            yield Server(broker)
        return
    yield Server(shared_kafkas.get("3.9.1"))


@pytest.fixture
def created(server: Server, topic: str) -> str:
    """A topic of one partition."""
    admin = AdminClient({"bootstrap.servers": server.servers, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    deadline = time.monotonic() + 60
    while all(entry.leader < 0 for entry in admin.list_topics(topic, 10).topics[topic].partitions.values()):
        assert time.monotonic() < deadline
    return topic


def _produce(servers: str, topic: str, lines: Sequence[Line], **settings: str | int) -> None:
    """Produce with confluent-kafka, in one batch by default; check that each record gets its line's offset."""
    given = {name.replace("_", "."): value for name, value in settings.items()}
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 60_000, "log_level": 0, **given})
    learn_topic(producer, topic)
    offsets: list[int | None] = []
    for line in lines:
        producer.produce(
            topic,
            line.value,
            line.key,
            0,
            timestamp=line.timestamp,
            headers=list(line.headers) or None,
            on_delivery=lambda error, message: offsets.append(None if error else message.offset()),
        )
    assert producer.flush(30) == 0
    assert offsets == [line.offset for line in lines]


def _consume(servers: str, topic: str, count: int, offset: int = 0, **settings: str | int) -> list[Line]:
    """Consume with confluent-kafka; fail if there are more than `count` records."""
    given = {name.replace("_", "."): value for name, value in settings.items()}
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "none",
            "enable.auto.commit": False,
            "check.crcs": True,
            "log_level": 0,
            **given,
        }
    )
    consumer.assign([TopicPartition(topic, 0, offset)])
    messages = consumer.consume(count, 30)
    assert [message.error() for message in messages] == [None] * count
    assert consumer.poll(0.1) is None
    consumer.close()
    return [
        Line(
            message.offset() or 0,
            message.timestamp()[0] - 1,
            message.timestamp()[1],
            message.key(),
            message.value(),
            tuple((name, value) for name, value in message.headers() or ()),
        )
        for message in messages
    ]


def _message_set(magic: int, codec: int, lines: Sequence[Line]) -> bytes:
    """Encode with kafka-python."""
    builder = LegacyRecordBatchBuilder(magic, codec, 1 << 30)
    for offset, line in enumerate(lines):
        assert builder.append(offset, line.timestamp, line.key, line.value) is not None
    return bytes(builder.build())


def _parsed(data: bytes, magic: int) -> list[Line]:
    """Decode with kafka-python; all must be message sets of that magic."""
    lines = []
    rest = MemoryRecords(data)
    while rest.has_next():
        batch = rest.next_batch()
        assert batch.validate_crc()
        assert batch.magic == magic
        for record in batch:
            assert record.validate_crc()
            kind, timestamp = (NONE, -1) if magic == 0 else (record.timestamp_type, record.timestamp)
            lines.append(Line(record.offset, kind, timestamp, record.key, record.value))
    return lines


@pytest.mark.parametrize("version", [0, 1, 2])
def test_produce_requests_with_message_sets(server: Server, created: str, version: int) -> None:
    wanted: list[Line] = []
    with server.client() as client:
        for magic in (0, 1):
            for codec in range(len(OLD_CODECS)):
                lines = _lines(20)
                records = _message_set(magic, codec, lines)
                assert client.produce(created, records, version) == (ErrorCode.NONE, len(wanted))
                if magic == 0:
                    lines = _without_times(lines, CREATE)
                wanted += [line._replace(offset=len(wanted) + line.offset) for line in lines]
    assert _consume(server.servers, created, len(wanted)) == wanted


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_fetch_requests_are_answered_with_message_sets(server: Server, created: str, version: int) -> None:
    magic = 0 if version < 2 else 1
    written: list[Line] = []
    for codec in OLD_CODECS:
        lines = [line._replace(offset=len(written) + line.offset, headers=(("h", b"x"),)) for line in _lines()]
        _produce(server.servers, created, lines, compression_type=codec, batch_num_messages=7)
        written += lines
    wanted = [line._replace(headers=()) for line in written]
    if magic == 0:
        wanted = _without_times(wanted, NONE)
    with server.client() as client:
        # before version 3 Apache Kafka returns a batch only if it fits
        for max_bytes in (1_000_000, 5_000 if version == 3 else 60_000):
            found: list[Line] = []
            while len(found) < len(wanted):
                code, records = client.fetch(created, len(found), version, max_bytes)
                assert code == ErrorCode.NONE
                lines = [line for line in _parsed(records, magic) if line.offset >= len(found)]
                assert lines
                found += lines
            assert found == wanted
        for first in (1, 6, 7, 39, 40, 61, 159):
            code, records = client.fetch(created, first, version)
            lines = _parsed(records, magic)
            # a compressed batch comes whole; a reader skips the records before its offset
            assert next(line for line in lines if line.offset >= first) == wanted[first]
            assert first - 7 < lines[0].offset <= first
            is_compressed = first >= len(_lines())
            assert is_compressed or lines[0].offset == first
        assert client.fetch(created, len(wanted), version) == (ErrorCode.NONE, b"")
        assert client.fetch(created, len(wanted) + 1, version) == (ErrorCode.OFFSET_OUT_OF_RANGE, b"")


def _message(magic: int, value: bytes | None, attributes: int = 0, offset: int = 0) -> bytes:
    """Encode a message by hand: offset, size, CRC, magic, attributes, (timestamp,) key, value."""
    body = struct.pack(">bb", magic, attributes) + (struct.pack(">q", NOW) if magic else b"")
    body += struct.pack(">i", -1) + (struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value)
    return struct.pack(">qiI", offset, len(body) + 4, zlib.crc32(body)) + body


def _wrapped(magic: int, inner: bytes, offset: int = 0) -> bytes:
    return _message(magic, gzip.compress(inner), 1, offset)


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


_BATCH = bytes(make_batch([(None, b"v")], [NOW]))
#: By name: version of Produce, records, error code.
_PRODUCED: dict[str, tuple[int, bytes, int]] = {
    "a batch of magic 2 in an old request": (2, _BATCH, ErrorCode.NONE),
    "magic 0 in a new request": (3, _message(0, b"v"), ErrorCode.INVALID_RECORD),
    "magic 1 in a new request": (9, _message(1, b"v"), ErrorCode.INVALID_RECORD),
    "magic 1 after magic 2 in a new request": (7, _BATCH + _message(1, b"v"), ErrorCode.INVALID_RECORD),
    "wrong CRC": (2, _flipped(_message(1, b"v")), ErrorCode.CORRUPT_MESSAGE),
    "wrong CRC of the second": (0, _message(0, b"v") + _flipped(_message(0, b"v")), ErrorCode.CORRUPT_MESSAGE),
    "wrong CRC inside, magic 0": (1, _wrapped(0, _flipped(_message(0, b"v"))), ErrorCode.CORRUPT_MESSAGE),
    "wrong CRC inside, magic 1": (2, _wrapped(1, _flipped(_message(1, b"v"))), ErrorCode.CORRUPT_MESSAGE),
    "magic 0 in magic 1": (2, _wrapped(1, _message(0, b"v")), ErrorCode.INVALID_RECORD),
    "magic 1 in magic 0": (2, _wrapped(0, _message(1, b"v")), ErrorCode.INVALID_RECORD),
    "a set in a set in a set": (2, _wrapped(1, _wrapped(1, _message(1, b"v"))), ErrorCode.INVALID_RECORD),
    "an empty set in a set": (2, _wrapped(1, b""), ErrorCode.INVALID_RECORD),
    "nothing in a set": (2, _message(1, None, 1), ErrorCode.INVALID_RECORD),
    "zstd in magic 1": (2, _message(1, b"v", 4), ErrorCode.INVALID_RECORD),
    "offsets inside that are all 0": (2, _wrapped(1, _message(1, b"v") * 3), ErrorCode.NONE),
    "offsets inside that are some": (2, _wrapped(0, _message(0, b"v", 0, 5) * 2, 99), ErrorCode.NONE),
}


@pytest.mark.parametrize("name", _PRODUCED)
def test_what_is_taken_and_what_is_refused(server: Server, created: str, name: str) -> None:
    version, records, code = _PRODUCED[name]
    with server.client() as client:
        assert client.produce(created, records, version) == (code, -1 if code else 0)
        count = {"offsets inside that are all 0": 3, "offsets inside that are some": 2}.get(name, 0 if code else 1)
    assert [line.value for line in _consume(server.servers, created, count)] == [b"v"] * count


def test_zstd_is_not_for_old_fetchers(server: Server, created: str) -> None:
    """Old fetchers get what precedes a zstd batch, and the error when they fetch from the batch on."""
    lines = _lines(30)
    for start, codec in ((0, "gzip"), (10, "zstd"), (20, "none")):
        _produce(server.servers, created, lines[start : start + 10], compression_type=codec)
    with server.client() as client:
        for version in range(4):
            magic = 0 if version < 2 else 1
            code, records = client.fetch(created, 0, version)
            assert code == ErrorCode.NONE
            wanted = lines[:10] if magic else _without_times(lines[:10], NONE)
            # Apache Kafka ends with the header of a batch that it leaves out
            assert _parsed(records[: _whole_size(records)], magic) == wanted
            for offset in (10, 15):
                assert client.fetch(created, offset, version) == (ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, b"")
            code, records = client.fetch(created, 20, version)
            assert code == ErrorCode.NONE
            assert [line.offset for line in _parsed(records, magic)] == list(range(20, 30))
    server.wait_for_log("batch of offset 10 as magic 0: zstd")


def _whole_size(data: bytes) -> int:
    """The size of the complete messages."""
    size = 0
    while len(data) - size >= 12:
        end = size + 12 + struct.unpack_from(">i", data, size + 8)[0]
        if end > len(data):
            break
        size = end
    return size


@pytest.mark.parametrize("fallback", ["0.8.2", "0.9.0"])
def test_old_librdkafka(server: Server, created: str, fallback: str) -> None:
    """librdkafka with `broker.version.fallback` does not ask for versions, and uses magic 0."""
    old = {"api_version_request": "false", "broker_version_fallback": fallback}
    wanted: list[Line] = []
    for codec in OLD_CODECS:
        for settings, headers in ((old, ()), ({}, (("h", b"x"), ("h", None)))):
            lines = [line._replace(offset=len(wanted) + line.offset, headers=headers) for line in _lines()]
            _produce(server.servers, created, lines, compression_type=codec, batch_num_messages=7, **settings)
            wanted += _without_times(lines, CREATE) if settings else lines
    assert _consume(server.servers, created, len(wanted)) == wanted
    expected = [line._replace(kind=NONE, timestamp=0, headers=()) for line in wanted]
    for first in (0, 100):
        assert _consume(server.servers, created, len(wanted) - first, first, **old) == expected[first:]
    if isinstance(server.broker, KlogBroker):
        log = server.broker.log.read_text()
        version = 0 if fallback == "0.8.2" else 1
        found = re.findall(rf"fetches {created}-0 with version {version}: left out (\d+) headers of (\d+) records", log)
        assert sum(int(headers) for headers, _ in found) >= len(wanted)


@pytest.mark.parametrize("server", ["klog"], indirect=True)
def test_zstd_is_an_error_for_old_librdkafka(server: Server, created: str) -> None:
    _produce(server.servers, created, _lines(10), compression_type="gzip")
    # all ten at once: librdkafka sends a batch uncompressed if compression would not shrink it
    _produce(server.servers, created, _lines(20)[10:], compression_type="zstd")
    settings = {"api.version.request": "false", "broker.version.fallback": "0.9.0", "log_level": 0}
    consumer = Consumer({"bootstrap.servers": server.servers, "group.id": "none", **settings})
    consumer.assign([TopicPartition(created, 0, 0)])
    *messages, last = consumer.consume(11, 30)
    assert [message.value() for message in messages] == [line.value for line in _lines(10)]
    error = last.error()
    assert error is not None
    assert error.code() == KafkaError.UNSUPPORTED_COMPRESSION_TYPE
    consumer.close()


@pytest.mark.parametrize("api", [(0, 8, 2), (0, 9), (0, 10, 0), (0, 10, 2)], ids=str)
def test_old_kafka_python(server: Server, created: str, api: tuple[int, ...]) -> None:
    """kafka-python with `api_version` uses message sets of magic 0, from 0.10 on of magic 1."""
    has_times = api >= (0, 10)
    wanted: list[Line] = []
    for codec in OLD_CODECS:
        producer = kafka_python.KafkaProducer(
            bootstrap_servers=server.servers,
            api_version=api,
            compression_type=None if codec == "none" else codec,
            linger_ms=20,
            enable_idempotence=False,
        )
        old = [line for line in _lines() if line.key is not None or line.value is not None]
        old = [line._replace(offset=len(wanted) + number) for number, line in enumerate(old)]
        sent = [producer.send(created, line.value, line.key, None, 0, line.timestamp) for line in old]
        assert [entry.get(20).offset for entry in sent] == [line.offset for line in old]
        producer.close(10)
        wanted += old if has_times else _without_times(old, CREATE)
        modern = [line._replace(offset=len(wanted) + line.offset, headers=(("h", b"x"),)) for line in _lines()]
        _produce(server.servers, created, modern, compression_type=codec, batch_num_messages=7)
        wanted += modern
    assert _consume(server.servers, created, len(wanted)) == wanted

    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=server.servers, api_version=api, consumer_timeout_ms=20_000, check_crcs=True
    )
    partition = kafka_python.TopicPartition(created, 0)
    consumer.assign([partition])
    consumer.seek(partition, 5)
    expected = [line._replace(headers=()) for line in wanted[5:]]
    found = []
    for record in consumer:
        assert record.headers == []
        kind, timestamp = (NONE, -1) if record.timestamp is None else (record.timestamp_type, record.timestamp)
        found.append(Line(record.offset, kind, timestamp, record.key, record.value))
        if len(found) == len(expected):
            break
    assert found == (expected if has_times else _without_times(expected, NONE))
    assert consumer.end_offsets([partition]) == {partition: len(wanted)}
    consumer.close()


@pytest.mark.test_all("version")
@pytest.mark.peer
@pytest.mark.parametrize("server", ["klog"], indirect=True)
def test_java_clients_of_kafka_0_10(server: Server, created: str, server_dir: Path) -> None:
    """Its producers (also the old Scala one) and its consumers work with our broker."""
    java = Kafka("0.10.2.2", server_dir)

    def run(tool: str, *arguments: str, stdin: str = "") -> str:
        done = java.tool(f"kafka.tools.{tool}", *arguments, stdin=stdin)
        assert (done.returncode, "ERROR" in done.stderr) == (0, False), done
        return done.stdout

    texts: list[tuple[str, str]] = []
    for producer, codec in [*(("new", codec) for codec in OLD_CODECS), ("old", "snappy")]:
        given = [(f"{producer}-{codec}-{number}", "value " * (number % 20)) for number in range(100)]
        run(
            "ConsoleProducer",
            *("--broker-list", server.servers, "--topic", created, "--compression-codec", codec),
            *("--property", "parse.key=true"),
            *(["--old-producer"] if producer == "old" else []),
            stdin="".join(f"{key}\t{value}\n" for key, value in given),
        )
        texts += given
    lines = _consume(server.servers, created, len(texts))
    assert [((line.key or b"").decode(), (line.value or b"").decode()) for line in lines] == texts
    assert {line.kind for line in lines} == {CREATE}
    for codec in OLD_CODECS:
        added = [
            Line(len(lines) + number, CREATE, NOW + number, b"modern", f"{codec}-{number}".encode(), (("h", b"x"),))
            for number in range(50)
        ]
        _produce(server.servers, created, added, compression_type=codec)
        lines += added

    expected = [
        f"CreateTime:{line.timestamp}\t{(line.key or b'').decode()}\t{(line.value or b'').decode()}" for line in lines
    ]
    printed = ("--property", "print.key=true", "--property", "print.timestamp=true", "--max-messages", str(len(lines)))
    place = ("--topic", created, "--partition", "0", *printed)
    by_consumer = run("ConsoleConsumer", "--bootstrap-server", server.servers, "--offset", "earliest", *place)
    assert by_consumer.splitlines() == expected
    by_shell = run("SimpleConsumerShell", "--broker-list", server.servers, "--offset", "-2", *place)
    assert by_shell.splitlines() == expected
    for moment, offset in (("-2", 0), ("-1", len(lines))):
        told = run("GetOffsetShell", "--broker-list", server.servers, "--topic", created, "--time", moment)
        assert told.strip() == f"{created}:0:{offset}"
