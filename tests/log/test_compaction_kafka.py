"""Our compaction of a log against that of Kafka's cleaner, field by field."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import Cleaner, CleaningRound, LastRecord, OffsetMap, build_map
from spark_klog.log.compaction.plan import SegmentInfo, cleanable, group_segments, retains_legacy_tombstones
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.transaction_index import AbortedTransaction, parse_transaction_index
from spark_klog.log.tools.verify import verify
from spark_klog.records.formats.batch import Header, iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader, body
from spark_klog.records.formats.message_set import inner_set
from spark_klog.records.reading.reader import records_of
from tests.support.brokers.compaction_logs import any_magic, reading, survivors
from tests.support.brokers.logs import searched
from tests.support.checker.record_model import Row
from tests.support.servers.kafka import NEWEST, Kafka, Version
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = [pytest.mark.peer]

SEGMENT_BYTES = 3000
#: The config of topics; Kafka 4 has another one for sizes below a megabyte.
SEGMENT_CONFIG: dict[Version, str] = {"3.9.1": "segment.bytes", NEWEST: "internal.segment.bytes"}
DAY = 86_400_000


class Segment(NamedTuple):
    info: SegmentInfo
    data: bytes
    aborted: list[AbortedTransaction]


def _segments(folder: Path) -> list[Segment]:
    """The segments of a partition, the last one active."""
    found = []
    for path in sorted(folder.glob("*.log")):
        data, modified = path.read_bytes(), path.stat().st_mtime_ns // 1_000_000
        timestamps = [header.max_timestamp for header, _ in iter_batches(data)] or [-1]
        index, time_index, transactions = (path.with_suffix(kind) for kind in (".index", ".timeindex", ".txnindex"))
        info = SegmentInfo(
            int(path.stem),
            len(data),
            timestamps[0],
            max(timestamps) if max(timestamps) >= 0 else modified,
            modified,
            index.stat().st_size if index.exists() else 0,
            time_index.stat().st_size if time_index.exists() else 0,
        )
        aborted = transactions.read_bytes() if transactions.exists() else b""
        found.append(Segment(info, data, parse_transaction_index(aborted, transactions.name)))
    return found


def _described(data: bytes) -> list[dict[str, object]]:
    """All fields of the batches except those that depend on the compressor, and the decompressed records."""
    described = []
    for header, batch in iter_batches(data):
        fields: dict[str, object] = {name: getattr(header, name) for name in header.__slots__}
        if header.codec_id:
            del fields["crc"], fields["length"]
        described.append(fields | {"content": bytes(_content(header, batch))})
    return described


def _content(header: Header, batch: memoryview) -> bytes | bytearray | memoryview:
    if isinstance(header, BatchHeader):
        return body(header, batch) if header.count else b""
    return inner_set(header, batch) if header.codec_id else batch[12:]


def _last_records(segments: Sequence[Segment]) -> dict[int, LastRecord]:
    last: dict[int, LastRecord] = {}
    for segment in segments:
        for header, _ in iter_batches(segment.data):
            if isinstance(header, BatchHeader) and header.producer_id >= 0:
                known = last.get(header.producer_id)
                offset = (known.data_offset if known else None) if header.is_control else header.last_offset
                last[header.producer_id] = LastRecord(offset, header.producer_epoch)
    return last


def _config(retention: int) -> LogConfig:
    return LogConfig(segment_bytes=SEGMENT_BYTES, min_cleanable_dirty_ratio=0.01, delete_retention_ms=retention)


def _compacted(segments: Sequence[Segment], checkpoint: int | None, now: int, retention: int) -> list[Segment]:
    """Run one round of ours; of the returned segments only base offset, bytes and transactions are valid."""
    config = _config(retention)
    infos = [segment.info for segment in segments]
    last = max(header.next_offset for header, _ in iter_batches(segments[-1].data))
    plan = cleanable(
        infos,
        config,
        checkpoint=checkpoint,
        log_start_offset=infos[0].base_offset,
        log_end_offset=last,
        last_stable_offset=last,
        now=now,
    )
    assert plan.is_due
    assert plan.first_uncleanable_offset == infos[-1].base_offset
    aborted = [transaction for segment in segments for transaction in segment.aborted]
    start, end = plan.first_dirty_offset, plan.first_uncleanable_offset
    offsets = OffsetMap(1 << 20)
    assert build_map([reading(segment.data) for segment in segments], offsets, start, end, aborted) == end
    cleaner = Cleaner(offsets, CleaningRound(end, end, now, retention, _last_records(segments)), aborted)
    by_offset = {segment.info.base_offset: segment for segment in segments}
    left = []
    for group in group_segments(infos[:-1], config, end):
        data = bytearray()
        for info in group:
            retains = retains_legacy_tombstones(infos, info, start, retention)
            data += b"".join(cleaner.clean(reading(by_offset[info.base_offset].data), retains))
        left.append(Segment(group[0], bytes(data), cleaner.take_aborted()))
    return left


def _checkpoints(kafka: Kafka) -> dict[str, int]:
    path = kafka.log_dir / "cleaner-offset-checkpoint"
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    return {line.split()[0]: int(line.split()[2]) for line in lines}


def _wait_for_cleaning(kafka: Kafka, offsets: dict[str, int]) -> None:
    deadline = time.monotonic() + 60
    while not offsets.items() <= _checkpoints(kafka).items():
        assert time.monotonic() < deadline, (_checkpoints(kafka), offsets)
        time.sleep(0.05)


def _same(ours: Sequence[Segment], theirs: Sequence[Segment]) -> None:
    assert [segment.info.base_offset for segment in ours] == [segment.info.base_offset for segment in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert survivors(our.data) == survivors(their.data)
        assert _described(our.data) == _described(their.data)
        assert our.aborted == their.aborted


class _Writer:
    """Writes records of all kinds, in interleaved transactions."""

    def __init__(self, servers: str, topic: str, codec: str) -> None:
        self._topic, self._random = topic, random.Random(topic)
        settings = {"bootstrap.servers": servers, "linger.ms": 50, "compression.type": codec, "log_level": 0}
        self._plain = Producer(settings)
        self._others = []
        for number in range(3):
            self._others.append(Producer({**settings, "transactional.id": f"{topic}-{number}"}))
            self._others[-1].init_transactions(30)

    def write(self, batches: int) -> None:
        is_open = [False] * len(self._others)
        for _ in range(batches):
            number = self._random.randrange(len(self._others) + 1)
            if number == len(self._others):
                self._produce(self._plain, [None, b"a", b"b", b"c"])
                continue
            producer = self._others[number]
            if not is_open[number]:
                producer.begin_transaction()
            is_open[number] = True
            self._produce(producer, [b"a", b"b", b"c", b"d%d" % self._random.randrange(30)])
            if self._random.random() < 0.4:
                self._end(producer)
                is_open[number] = False
        for producer, has_transaction in zip(self._others, is_open, strict=True):
            if has_transaction:
                self._end(producer)
        # enough to fill the active segment and the end of the one before it
        for number in range(60):
            self._plain.produce(self._topic, b"x" * 100, b"end %d" % number, partition=0)
            assert self._plain.flush(30) == 0

    def _produce(self, producer: Producer, keys: Sequence[bytes | None]) -> None:
        for _ in range(self._random.randrange(1, 6)):
            key = self._random.choice(keys)
            value = self._random.choice([None, b"", b"value %d" % self._random.randrange(1000)])
            producer.produce(self._topic, value, key, partition=0, headers=[("h", b"1")])
        assert producer.flush(30) == 0

    def _end(self, producer: Producer) -> None:
        if self._random.random() < 0.5:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)


def _set_policy(kafka: Kafka, topics: Sequence[str], policy: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
    entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
    resources = [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry]) for topic in topics]
    for future in admin.incremental_alter_configs(resources).values():
        future.result(30)


def _markers(segments: Sequence[Segment]) -> int:
    """The number of transaction markers."""
    headers = [header for segment in segments for header, _ in iter_batches(segment.data)]
    return sum(header.is_control and header.count > 0 for header in headers if isinstance(header, BatchHeader))


def _expired(segments: Sequence[Segment], now: int) -> int:
    """The number of tombstones whose delete horizon has passed."""
    return sum(
        record.value is None
        for segment in segments
        for header, batch in iter_batches(segment.data)
        if isinstance(header, BatchHeader) and not header.is_control and (header.delete_horizon or now + 1) <= now
        for record in records_of(header, batch)
    )


@pytest.mark.parametrize(
    ("version", "codecs"),
    [(NEWEST, ["lz4"]), pytest.param("3.9.1", ["none", "lz4", "zstd"], marks=pytest.mark.test_all("version"))],
)
def test_transactions_and_tombstones(shared_kafkas: SharedKafkas, version: Version, codecs: list[str]) -> None:
    """Both cleaners agree over three rounds; delete.retention.ms passes between them.

    The first round removes a transaction's data, the second sets its marker's delete horizon, the third removes the
    marker. Between rounds the policy is delete, so that the cleaner does not change the log.
    """
    retention, kafka = 2000, shared_kafkas.get(version)
    topics = {f"compaction-by-{codec}": codec for codec in codecs}
    seen_horizons: dict[str, set[int | None]] = {topic: {None} for topic in topics}
    seen: Counter[str] = Counter()
    writers = {}
    for topic, codec in topics.items():
        configs = {
            "cleanup.policy": "delete",
            SEGMENT_CONFIG[version]: str(SEGMENT_BYTES),
            "index.interval.bytes": "500",
            "min.cleanable.dirty.ratio": "0.01",
            "delete.retention.ms": str(retention),
        }
        kafka.create_topic(topic, configs=configs)
        writers[topic] = _Writer(kafka.bootstrap_servers, topic, codec)
    checkpoints: dict[str, int] = {}
    last_horizon = 0
    for _ in range(3):
        while time.time() * 1000 < last_horizon:
            time.sleep(0.05)
        for writer in writers.values():
            writer.write(60)
        before = {topic: _segments(kafka.log_dir / f"{topic}-0") for topic in topics}
        ends = {topic: segments[-1].info.base_offset for topic, segments in before.items()}
        _set_policy(kafka, list(topics), "compact")
        _wait_for_cleaning(kafka, ends)
        for topic, segments in before.items():
            theirs = _segments(kafka.log_dir / f"{topic}-0")[:-1]
            assert list(verify(kafka.log_dir / f"{topic}-0")) == []
            left = [header for segment in theirs for header, _ in iter_batches(segment.data)]
            horizons = {header.delete_horizon for header in left if isinstance(header, BatchHeader)}
            (horizon,) = horizons - seen_horizons[topic]
            assert horizon is not None
            seen_horizons[topic].add(horizon)
            last_horizon = max(last_horizon, horizon)
            ours = _compacted(segments, checkpoints.get(topic), horizon - retention, retention)
            _same(ours, theirs)
            # counts for the assertion at the end
            seen["merged"] += len(segments) - 1 - len(theirs)
            seen["transactions gone"] += sum(len(one.aborted) for one in segments) - sum(
                len(one.aborted) for one in theirs
            )
            seen["transactions left"] += sum(len(one.aborted) for one in theirs)
            seen["empty"] += sum(isinstance(header, BatchHeader) and not header.count for header in left)
            seen["markers gone"] += _markers(segments[:-1]) - _markers(theirs)
            seen["tombstones gone"] += _expired(segments[:-1], horizon - retention)
        _set_policy(kafka, list(topics), "delete")
        checkpoints = ends
    names = ("merged", "transactions gone", "transactions left", "empty", "markers gone", "tombstones gone")
    assert all(seen[name] > 0 for name in names), seen


@pytest.mark.parametrize("version", [NEWEST, pytest.param("3.9.1", marks=pytest.mark.test_all("version"))])
def test_a_transaction_that_is_aborted_beyond_the_cleanable_part(
    shared_kafkas: SharedKafkas, server_dir: Path, version: Version
) -> None:
    """The last stable offset lies between the data of an aborted transaction and its marker."""
    topic, retention, kafka = "compaction-aborted-later", 2000, shared_kafkas.get(version)
    configs = {
        "cleanup.policy": "delete",
        SEGMENT_CONFIG[version]: str(SEGMENT_BYTES),
        "delete.retention.ms": str(retention),
    }
    kafka.create_topic(topic, configs=configs | {"min.cleanable.dirty.ratio": "0.01"})
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0}
    plain = Producer(settings)
    aborted, still_open = (
        Producer({**settings, "transactional.id": name}) for name in ("compaction-aborted", "compaction-open")
    )

    def write(producer: Producer, count: int, prefix: str, value: bytes | None = b"x" * 100) -> None:
        for number in range(count):
            producer.produce(topic, value, f"{prefix} {number}", partition=0)
            assert producer.flush(30) == 0

    for producer in (aborted, still_open):
        producer.init_transactions(30)
        producer.begin_transaction()
    write(plain, 30, "key")
    write(plain, 1, "key", None)
    write(aborted, 20, "key", b"aborted")
    write(plain, 30, "other")
    write(still_open, 1, "open")
    aborted.abort_transaction(30)
    write(plain, 60, "other")
    folder = kafka.log_dir / f"{topic}-0"
    copy = server_dir / "copy" / folder.name
    shutil.copytree(folder, copy)
    log = PartitionLog(copy, _config(retention))
    found = plan(log, None, searched(log, None)[0])  # type: ignore[index]
    end = found.first_uncleanable_offset
    assert 0 < end <= log.last_stable_offset < log.segments[-1].base_offset
    _set_policy(kafka, [topic], "compact")
    _wait_for_cleaning(kafka, {topic: end})
    theirs = [segment for segment in _segments(folder) if segment.info.base_offset < end]
    still_open.abort_transaction(30)
    left = [header for segment in theirs for header, _ in iter_batches(segment.data)]
    (horizon,) = {header.delete_horizon for header in left if isinstance(header, BatchHeader)} - {None}
    assert horizon is not None
    compact(log, found, OffsetMap(1 << 20), horizon - retention)
    _same([segment for segment in _segments(copy) if segment.info.base_offset < end], theirs)
    log.close()
    assert any(record.key == b"key 19" for segment in theirs for record in survivors(segment.data))


@pytest.mark.test_all("version")  # logs of old brokers are of message sets
def test_logs_of_magic_0_and_1(server_dir: Path) -> None:
    """Kafka cleans a log that we made: two clean segments, modified days apart, a dirty one, the active one."""
    now = int(time.time() * 1000)
    formats = {
        f"magic-{magic}-{codec}": (magic, codec) for magic in (0, 1) for codec in ("none", "gzip", "snappy", "lz4")
    }
    kafka = Kafka("3.9.1", server_dir / "kafka", {"log.cleaner.backoff.ms": 50})
    with kafka:
        for topic in formats:
            configs = {"cleanup.policy": "compact", "segment.bytes": "3000", "delete.retention.ms": str(DAY)}
            kafka.create_topic(topic, configs=configs | {"min.cleanable.dirty.ratio": "0.01"})
        kafka.stop()
        before = {}
        for topic, (magic, codec) in formats.items():
            folder, rng = kafka.log_dir / f"{topic}-0", random.Random(topic)
            for pattern in ("*.log", "*index", "*.snapshot", "leader-epoch-checkpoint"):
                for path in folder.glob(pattern):
                    path.unlink()
            for base, age in ((0, 10 * DAY), (40, DAY), (80, 0), (120, 0)):
                rows = []
                for offset in range(base, base + 40):
                    key = rng.choice([None, b"a", b"b", b"dirty", b"k%d" % rng.randrange(30), b"own %d" % offset])
                    rows.append(Row(offset, now - rng.randrange(9999), key, rng.choice([None, b"", b"some value"])))
                path = folder / f"{base:020}.log"
                path.write_bytes(b"".join(any_magic(rows[n : n + 5], magic, codec) for n in range(0, 40, 5)))
                os.utime(path, ns=((now - age) * 1_000_000,) * 2)
            before[topic] = _segments(folder)
        (kafka.log_dir / "cleaner-offset-checkpoint").write_text(
            "".join(["0\n", f"{len(formats)}\n", *(f"{topic} 0 80\n" for topic in formats)])
        )
        (kafka.log_dir / ".kafka_cleanshutdown").unlink()
        kafka.start()
        _wait_for_cleaning(kafka, dict.fromkeys(formats, 120))
        for topic, segments in before.items():
            theirs = _segments(kafka.log_dir / f"{topic}-0")[:-1]
            # Kafka started without indexes, and those that it built are too small to matter
            ours = _compacted(segments, 80, now, DAY)
            _same(ours, theirs)
            left = [record for segment in ours for record in survivors(segment.data)]
            tombstones = [record.offset // 40 for record in left if record.value is None]
            assert set(tombstones) == {1, 2}
