"""Logs of magic 0 and 1 by Apache Kafka 0.10.2.2, against the produced records; our files, read by Kafka."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Message, Producer
from kafka.record import MemoryRecords

from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import FULL
from spark_klog.records.building.assignment import assign_offsets
from spark_klog.records.building.conversion import batch_of, down_convert, up_convert
from spark_klog.records.contract import Headers, Record
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.wire.codecs import Codec, codec_by_name
from tests.support.brokers.batches import read_records
from tests.support.clients.dump import DumpedRecord, dump_log, dumped_batches, dumped_records
from tests.support.servers.kafka import NEWEST, Kafka, Version

pytestmark = pytest.mark.peer
OTHER = pytest.mark.test_all("version")

CODECS = ("none", "gzip", "snappy", "lz4")
ALL_CODECS = (*CODECS, "zstd")
#: Compression levels: the lowest, the highest, and some in between.
LEVELS = {"gzip": (1, 6, 9), "lz4": (1, 8, 17), "zstd": (-131072, -1, 1, 22)}
KERNELS = ["reference", *(["native"] if find_spec("spark_klog.records.kernels._kernel") else [])]
TYPES = {"NoTimestampType": -1, "CreateTime": 0, "LogAppendTime": 1}
NAMES = {number: name for name, number in TYPES.items()}
PER_CODEC = 50
NOW = 1_700_000_000_000


class Topic(NamedTuple):
    magic: int
    timestamp_type: str
    configs: dict[str, str]
    client: dict[str, str]


_MAGIC_0 = {"message.format.version": "0.9.0"}
_OLD_CLIENT = {"api.version.request": "false", "broker.version.fallback": "0.9.0"}
TOPICS = {
    "magic-0": Topic(0, "NoTimestampType", _MAGIC_0, {}),
    "magic-0-old-client": Topic(0, "NoTimestampType", _MAGIC_0, _OLD_CLIENT),
    "magic-1": Topic(1, "CreateTime", {}, {}),
    "magic-1-append-time": Topic(1, "LogAppendTime", {"message.timestamp.type": "LogAppendTime"}, {}),
}

#: By name: a .log file and the records expected in it.
Logs = dict[str, tuple[Path, list[DumpedRecord]]]


@pytest.fixture(scope="module")
def old_logs(module_server_dir: Path) -> Logs:
    """By topic: the only segment of its only partition, and the records produced to it. The broker has stopped."""
    logs: Logs = {}
    with Kafka("0.10.2.2", module_server_dir / "kafka") as kafka:
        for name, topic in TOPICS.items():
            kafka.create_topic(name, configs=topic.configs)
            records = [record for codec in CODECS for record in _produce(kafka.bootstrap_servers, name, codec)]
            logs[name] = (kafka.log_dir / f"{name}-0" / f"{0:020}.log", records)
    return logs


def _produce(servers: str, topic: str, codec: str) -> list[DumpedRecord]:
    """Produce records in several batches, some without key, value or both; return them as expected in the log."""
    magic, timestamp_type, _, client = TOPICS[topic]
    rng = random.Random(f"{topic} {codec}")
    settings = {"bootstrap.servers": servers, "compression.type": codec, "linger.ms": 50, "batch.num.messages": 10}
    producer = Producer({**settings, **client})
    stored: list[DumpedRecord] = []

    def on_delivery(error: object, message: Message) -> None:
        offset = message.offset()
        assert error is None
        assert offset is not None
        timestamp = message.timestamp()[1] if magic else -1
        key, value = (None if data is None else data.decode() for data in (message.key(), message.value()))
        stored.append(DumpedRecord(offset, magic, timestamp_type, timestamp, key, value))

    for number in range(PER_CODEC):
        key = None if number % 3 == 0 else f"k{number % 10}"
        value = None if number % 7 == 0 else "".join(rng.choices("ab cd", k=rng.choice((0, 1, 20, 200))))
        producer.produce(topic, value, key, timestamp=NOW + rng.randrange(10_000), on_delivery=on_delivery)
    assert producer.flush(30) == 0
    return stored


@pytest.mark.test_all("version")  # test_vectors.py reads bytes that such a broker wrote
@pytest.mark.parametrize("version", ["0.10.2.2", "3.9.1", NEWEST])
def test_kafka_dumps_what_was_produced(old_logs: Logs, version: Version) -> None:
    paths = [path for path, _ in old_logs.values()]
    produced = [record for _, records in old_logs.values() for record in records]
    assert len(produced) == len(TOPICS) * len(CODECS) * PER_CODEC
    assert dumped_records(dump_log(version, *paths)) == _as_dumped(version, produced)
    batches = dumped_batches(dump_log(version, *paths, deep=False))
    assert {(batch.magic, batch.codec) for batch in batches} == {(magic, codec) for magic in (0, 1) for codec in CODECS}


def _as_dumped(version: Version, records: Sequence[DumpedRecord]) -> list[DumpedRecord]:
    if version != "0.10.2.2":
        return list(records)
    return [record if record.value is not None else record._replace(key=None) for record in records]


def _dumped(record: Record, magic: int) -> DumpedRecord:
    """Our record as the dump shows it."""
    key, value = (None if data is None else data.decode() for data in (record.key, record.value))
    return DumpedRecord(record.offset, magic, NAMES[record.timestamp_type], record.timestamp, key, value)


@pytest.mark.test_all("version")
@pytest.mark.parametrize("topic", TOPICS)
def test_we_read_what_was_produced(old_logs: Logs, topic: str) -> None:
    path, produced = old_logs[topic]
    found = list(read_records(path.read_bytes()))
    assert [_dumped(record, TOPICS[topic].magic) for record in found] == produced
    assert all(record.headers == () for record in found)


@pytest.mark.test_all("version")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("topic", TOPICS)
def test_columns_of_what_was_produced(old_logs: Logs, topic: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_KLOG_KERNEL", kernel)
    path, produced = old_logs[topic]
    rows = [
        {
            "key": None if record.key is None else record.key.encode(),
            "value": None if record.value is None else record.value.encode(),
            "topic": topic,
            "partition": 3,
            "offset": record.offset,
            "timestamp": datetime.fromtimestamp(0, timezone.utc) + timedelta(milliseconds=record.timestamp),
            "timestampType": TYPES[record.timestamp_type],
            "headers": None,
        }
        for record in produced
    ]
    data = path.read_bytes()
    for first, end in ((0, 1 << 60), (0, len(rows)), (7, 8), (13, 137), (49, 51), (120, 1 << 60), (len(rows), 1 << 60)):
        decoder = PartitionDecoder(topic, 3, FULL)
        batches = [*decoder.decode(data, first, end), *decoder.finish()]
        assert [row for batch in batches for row in batch.to_pylist()] == rows[first:end]


class Written:
    """Logs that we write, named "magic-codec-more", and the records expected in them."""

    def __init__(self, folder: Path) -> None:
        self.logs: dict[str, tuple[Path, list[Record]]] = {}
        self._folder = folder

    def add(self, name: str, data: bytes | bytearray, records: list[Record]) -> None:
        path = self._folder / name / f"{0:020}.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        self.logs[name] = path, records

    @property
    def paths(self) -> list[Path]:
        return [path for path, _ in self.logs.values()]

    @property
    def dumped(self) -> list[DumpedRecord]:
        return [_dumped(record, int(name[0])) for name, (_, records) in self.logs.items() for record in records]


#: (magic, timestamp type) of message sets. Then the number of records of a log, and of each set or batch in it.
KINDS = ((0, -1), (1, 0), (1, 1))
COUNT, CHUNK = 60, 12


def _records(timestamp_type: int, headers: bool = False) -> list[Record]:
    """Printable records; with log append time the records of a chunk share one timestamp."""
    rng = random.Random(timestamp_type)
    records = []
    for offset in range(COUNT):
        key = None if offset % 3 == 0 else b"k" * (offset % 5)
        value = None if offset % 7 == 0 else bytes(rng.choices(b"ab cd", k=rng.choice((0, 1, 20, 200, 3000))))
        timestamp = {-1: -1, 0: NOW + rng.randrange(-9000, 9000), 1: NOW + offset // CHUNK}[timestamp_type]
        kept: Headers = (("h", b"x"), ("g", None), ("h", b""))[: offset % 4] if headers else ()
        records.append(Record(offset, timestamp, timestamp_type, key, value, kept))
    return records


def _chunks(records: Sequence[Record]) -> list[Sequence[Record]]:
    return [records[start : start + CHUNK] for start in range(0, len(records), CHUNK)]


def _produced_sets(magic: int, codec: Codec, records: Sequence[Record]) -> bytearray:
    """The records as a broker stores them if a producer sends them by chunks, with other offsets and create times."""
    data = bytearray()
    for number, chunk in enumerate(_chunks(records)):
        append_time = chunk[0].timestamp if chunk[0].timestamp_type == 1 else None
        sent = [
            record._replace(
                offset=number * delta,
                timestamp=record.timestamp if append_time is None else NOW - delta,
                timestamp_type=0,
            )
            for delta, record in enumerate(chunk)
        ]
        produced = bytearray(build_message_set(sent, magic, codec))
        assigned = assign_offsets(memoryview(produced), number * CHUNK, append_time=append_time)
        assert assigned.next_offset == (number + 1) * CHUNK
        data += assigned.data
    return data


def _converted_batches(magic: int, codec: Codec, records: Sequence[Record]) -> bytearray:
    """The records as a consumer of that magic gets them from a log of magic 2."""
    kept = records if magic else [record._replace(timestamp=NOW, timestamp_type=0) for record in records]
    batches = b"".join(
        batch_of([record._replace(headers=(("h", b"x"),)) for record in chunk], codec) for chunk in _chunks(kept)
    )
    converted = down_convert(batches, magic)
    assert converted.records == converted.lost_headers == COUNT
    return converted.data


@pytest.fixture(scope="module")
def written_sets(module_server_dir: Path) -> Written:
    """Message sets: built by us, as our broker stores a producer's, and down-converted batches."""
    written = Written(module_server_dir / "sets")
    for magic, kind in KINDS:
        records = _records(kind)
        for name in CODECS:
            codec, title = codec_by_name(name), f"{magic}-{name}-{NAMES[kind]}"
            built = b"".join(build_message_set(chunk, magic, codec) for chunk in _chunks(records))
            written.add(title, built, records)
            written.add(f"{title}-produced", _produced_sets(magic, codec, records), records)
            written.add(f"{title}-converted", _converted_batches(magic, codec, records), records)
    return written


@pytest.mark.parametrize("version", [*(pytest.param(old, marks=OTHER) for old in ("0.10.2.2", "3.9.1")), NEWEST])
def test_kafka_dumps_the_message_sets_that_we_write(written_sets: Written, version: Version) -> None:
    assert dumped_records(dump_log(version, *written_sets.paths)) == _as_dumped(version, written_sets.dumped)
    batches = dumped_batches(dump_log(version, *written_sets.paths, deep=False))
    wanted: list[tuple[int, str]] = []
    for name in written_sets.logs:
        codec = name.split("-")[1]
        # a compressed chunk is one message
        wanted += [(int(name[0]), codec)] * (COUNT if codec == "none" else COUNT // CHUNK)
    assert [(batch.magic, batch.codec) for batch in batches] == wanted


@pytest.fixture(scope="module")
def written_batches(module_server_dir: Path) -> Written:
    """Batches of magic 2: built by us, and converted from message sets."""
    written = Written(module_server_dir / "batches")
    for name in ALL_CODECS:
        for kind, level in ((0, None), (1, None), *((0, level) for level in LEVELS.get(name, ()))):
            records = _records(kind, headers=True)
            batches = [batch_of(chunk, codec_by_name(name), level) for chunk in _chunks(records)]
            written.add(f"2-{name}-{NAMES[kind]}-{level}", b"".join(batches), records)
    for magic, kind in KINDS:
        records = [record._replace(timestamp_type=max(kind, 0)) for record in _records(kind)]
        for name in CODECS:
            sets = b"".join(build_message_set(chunk, magic, codec_by_name(name)) for chunk in _chunks(_records(kind)))
            written.add(f"2-all-{magic}-{name}-{kind}", up_convert(sets), records)
    return written


@pytest.mark.parametrize("version", [pytest.param("3.9.1", marks=OTHER), NEWEST])
def test_kafka_dumps_the_batches_that_we_write(written_batches: Written, version: Version) -> None:
    output = dump_log(version, *written_batches.paths)
    assert dumped_records(output) == written_batches.dumped
    records = [record for _, records in written_batches.logs.values() for record in records]
    names = [[name for name, _ in record.headers] for record in records]
    found = re.findall(r"^\| offset: .* headerKeys: \[(.*?)\]", output, re.MULTILINE)
    assert [keys.split(",") if keys else [] for keys in found] == names
    batches = dumped_batches(dump_log(version, *written_batches.paths, deep=False))
    assert {batch.magic for batch in batches} == {2}
    ours = [name.split("-")[1] for name in written_batches.logs if not name.startswith("2-all-")]
    wanted = [codec for codec in ours for _ in range(COUNT // CHUNK)]
    assert [batch.codec for batch in batches[: len(wanted)]] == wanted
    assert {batch.codec for batch in batches[len(wanted) :]} == set(CODECS)


def _read_by_kafka_python(data: bytes) -> list[Record]:
    records = []
    rest = MemoryRecords(data)
    while rest.has_next():
        batch = rest.next_batch()
        assert batch.validate_crc()
        for record in batch:
            assert record.validate_crc()
            kind = -1 if record.timestamp_type is None else record.timestamp_type
            timestamp = -1 if record.timestamp is None else record.timestamp
            headers = tuple((name, value) for name, value in record.headers)
            records.append(Record(record.offset, timestamp, kind, record.key, record.value, headers))
    return records


def test_kafka_python_reads_what_we_write(written_sets: Written, written_batches: Written) -> None:
    for name, (path, records) in (written_sets.logs | written_batches.logs).items():
        assert _read_by_kafka_python(path.read_bytes()) == records, name


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_conversion_keeps_holes_between_offsets(codec: str) -> None:
    """Compacted logs have holes."""
    given = codec_by_name(codec)
    kept = [
        record._replace(offset=1000 + offset)
        for offset, record in enumerate(_records(0))
        if offset % 5 not in (0, 2, 4)
    ]
    batches = b"".join(batch_of(chunk, given) for chunk in _chunks(kept))
    assert _read_by_kafka_python(batches) == kept
    if codec == "zstd":
        return
    for magic in (0, 1):
        converted = down_convert(batches, magic).data
        wanted = kept if magic else [record._replace(timestamp=-1, timestamp_type=-1) for record in kept]
        assert _read_by_kafka_python(bytes(converted)) == wanted
        back = [record._replace(offset=number, timestamp_type=0) for number, record in enumerate(wanted)]
        assert _read_by_kafka_python(bytes(up_convert(converted))) == back
