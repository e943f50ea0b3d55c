"""The proposal "Kafka Enriched Message Metadata" at the end of Kafka's protocol guide, and how v2 batches fulfil it.

It proposes metadata around messages, so that brokers, mirrors and compaction need not decompress sets. Batches with
garbage, which a codec would refuse, prove that nothing is decompressed. Batches are Kafka's own (tests/data) or made by
kafka-python, which also reads the results.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import calc_crc32c

from spark_klog.errors import DecodeError
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.records.building.assignment import assign_offsets
from spark_klog.records.building.conversion import down_convert
from spark_klog.records.formats.batch import iter_batches, read_header
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.reader import visible_batches
from tests.support.brokers.batches import read_records
from tests.support.brokers.logs import searched

TIME, APPEND_TIME = 1_700_000_000_000, 1_800_000_000_000
DATA = Path(__file__).parent.parent / "data"
#: (version, topic) of Kafka's logs with relative offsets and compression.
COMPRESSED = [
    *(("kafka-0.10.2.2", f"v1-{codec}") for codec in ("gzip", "snappy", "lz4")),
    *(("kafka-3.9.1", f"v2-{codec}") for codec in ("gzip", "snappy", "lz4", "zstd")),
]
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
ENCODE: dict[int, Callable[[bytes], bytes]] = {
    NONE: bytes,
    GZIP: gzip_encode,
    SNAPPY: snappy_encode,
    LZ4: lz4_encode,
    ZSTD: zstd_encode,
}
Headers = tuple[tuple[str, "bytes | None"], ...]
#: (offset delta, key, value, headers)
Row = tuple[int, "bytes | None", "bytes | None", Headers]
ROWS: list[Row] = [
    (0, b"key", b"value", ()),
    (1, None, b"without key", (("trace", b"\x01\x02"), ("trace", None))),
    (2, b"", b"empty key", (("", b""),)),
    (3, b"key", None, ()),
]


def _batch(rows: Sequence[Row] = ROWS, codec: int = NONE, last_delta: int | None = None) -> bytearray:
    """A batch by kafka-python; compression and last offset delta by hand."""
    builder = DefaultRecordBatchBuilder(2, NONE, False, -1, -1, -1, 1 << 30)
    for delta, key, value, headers in rows:
        builder.append(delta, TIME + delta, key, value, list(headers))
    batch = bytearray(builder.build())
    batch[61:] = ENCODE[codec](bytes(batch[61:]))
    batch[22] |= codec
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    if last_delta is not None:
        struct.pack_into(">i", batch, 23, last_delta)
    struct.pack_into(">I", batch, 17, calc_crc32c(bytes(batch[21:])))
    return batch


def _closed_batch(codec: int, count: int) -> bytearray:
    """A batch that has `count` records by its header, and can't be decompressed."""
    batch = _batch([(delta, None, b"", ()) for delta in range(count)], codec)
    batch[61:] = b"\xff" * 500
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">I", batch, 17, calc_crc32c(bytes(batch[21:])))
    with pytest.raises(DecodeError):
        list(read_records(batch))
    return batch


def _kafka_rows(data: bytes | bytearray | memoryview) -> list[tuple[int, int, int, bytes | None, bytes | None]]:
    """(offset, timestamp, its type, key, value) as kafka-python reads them; it validates the checksums."""
    rows = []
    for batch in MemoryRecords(bytes(data)):
        assert batch.validate_crc()
        rows += [(r.offset, r.timestamp, r.timestamp_type, r.key, r.value) for r in batch]
    return rows


def _golden(version: str, topic: str) -> bytes:
    return (DATA / version / "logs" / f"{topic}-0" / f"{0:020}.log").read_bytes()


def _log_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.log")))


# ----- 1


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_broker_assigns_offsets_without_decompressing(codec: int) -> None:
    """KAFKA-527: records have deltas to the base offset, which is neither compressed nor covered by the checksum."""
    closed = _closed_batch(codec, 40)
    before = bytes(closed)
    assigned = assign_offsets(memoryview(closed), 123_456, leader_epoch=9)
    assert closed[:16] == struct.pack(">qii", 123_456, len(before) - 12, 9)
    assert closed[16:] == before[16:]
    assert assigned.next_offset == 123_496
    batch = _batch(codec=codec)
    assign_offsets(memoryview(batch), 1000)
    assert [row[0] for row in _kafka_rows(batch)] == [1000, 1001, 1002, 1003]


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
def test_magic_1_has_relative_offsets_in_wrappers_too(codec: int) -> None:
    """KAFKA-527 in Kafka 0.10 (KIP-31): the wrapper has the offset of its last message, those inside count from 0."""
    builder = LegacyRecordBatchBuilder(1, codec, 1 << 30)
    for delta, key, value, _ in ROWS:
        builder.append(delta, TIME + delta, key, value)
    wrapper = bytearray(builder.build())
    before = bytes(wrapper)
    assign_offsets(memoryview(wrapper), 1000)
    assert wrapper[:8] == (1003).to_bytes(8, "big")
    assert wrapper[8:] == before[8:]
    assert [row[0] for row in _kafka_rows(wrapper)] == [1000, 1001, 1002, 1003]


# ----- 2


@pytest.mark.parametrize(("version", "topic"), COMPRESSED, ids=[topic for _, topic in COMPRESSED])
def test_a_mirror_keeps_what_is_compressed(version: str, topic: str, tmp_path: Path) -> None:
    """KAFKA-1001: batches of one log are appended to another with other offsets; payload and checksum stay."""
    source = _golden(version, topic)
    expected = _kafka_rows(source)
    log = PartitionLog(tmp_path / "mirror-0", LogConfig())
    log.append(memoryview(_batch()))
    for _, batch in list(iter_batches(source)):
        log.append(memoryview(bytearray(batch)))
    log.close()
    copy = _log_bytes(tmp_path / "mirror-0")[len(_batch()) :]
    assert _kafka_rows(copy) == [(offset + len(ROWS), *rest) for offset, *rest in expected]
    assert len(copy) == len(source)
    for (_, ours), (_, theirs) in zip(iter_batches(copy), iter_batches(source), strict=True):
        kept = 16 if ours[16] == 2 else 8  # after the offset and, in magic 2, length and leader epoch
        assert ours[kept:] == theirs[kept:]
        assert ours[8:12] == theirs[8:12]


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_mirror_needs_not_decompress(codec: int, tmp_path: Path) -> None:
    """KAFKA-1001: the mirror's broker need not either, so no flag is needed to ignore relative offsets."""
    closed = _closed_batch(codec, 7)
    log = PartitionLog(tmp_path / "mirror-0", LogConfig())
    for _ in range(3):
        log.append(memoryview(bytearray(closed)))
    log.close()
    batches = [bytes(batch) for _, batch in iter_batches(_log_bytes(tmp_path / "mirror-0"))]
    assert [struct.unpack_from(">q", batch)[0] for batch in batches] == [0, 7, 14]
    assert {batch[16:] for batch in batches} == {bytes(closed[16:])}


# ----- 3


@pytest.mark.parametrize("codec", [NONE, GZIP, ZSTD])
def test_keys_are_each_records_own_and_may_be_null(codec: int) -> None:
    """No flag for sets with keys is needed: a mirror keeps a batch in one partition, whatever its keys are."""
    batch = _batch(codec=codec)
    assert [record.key for record in read_records(batch)] == [b"key", None, b"", b"key"]
    assign_offsets(memoryview(batch), 500)
    assert [(record.offset, record.key, record.value) for record in read_records(batch)] == [
        (500 + delta, key, value) for delta, key, value, _ in ROWS
    ]


# ----- 4


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_compaction_leaves_holes(codec: int) -> None:
    """Deltas need not be consecutive; the last offset delta tells where the batch ended when it was written."""
    batch = _batch([(3, *ROWS[1][1:]), (7, *ROWS[2][1:])], codec, last_delta=9)
    struct.pack_into(">q", batch, 0, 100)
    assert [record.offset for record in read_records(batch)] == [103, 107]
    assert [row[0] for row in _kafka_rows(batch)] == [103, 107]
    header = read_header(batch)
    assert (header.base_offset, header.last_offset, header.next_offset) == (100, 109, 110)


def test_a_batch_with_holes_is_not_produced_again_as_it_is() -> None:
    """Brokers, including Kafka's, accept dense batches only: a mirror of a compacted log must rebuild batches."""
    holes = _batch([(0, None, b"a", ()), (5, None, b"b", ())], GZIP)
    with pytest.raises(DecodeError, match="batch of 2 records has last offset delta 5"):
        assign_offsets(memoryview(holes), 0)


# ----- 5


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_the_time_of_receipt_is_every_messages_own(codec: int) -> None:
    """Log append time is a field and a bit of the batch: it applies to every record, and none is rewritten."""
    batch = _batch(codec=codec)
    payload = bytes(batch[61:])
    assign_offsets(memoryview(batch), 0, append_time=APPEND_TIME)
    assert batch[61:] == payload
    assert [row[1:3] for row in _kafka_rows(batch)] == [(APPEND_TIME, 1)] * 4
    assert [(record.timestamp, record.timestamp_type) for record in read_records(batch)] == [(APPEND_TIME, 1)] * 4


def test_the_time_of_receipt_outlasts_restarts_and_files(tmp_path: Path) -> None:
    """KAFKA-881, KAFKA-979, KAFKA-1379, KAFKA-1403: times are in the log; the time index is built from them."""
    log = PartitionLog(tmp_path / "t-0", LogConfig(index_interval_bytes=1))
    for number in range(5):
        batch = _batch(codec=GZIP)
        assign_offsets(memoryview(batch), 0, append_time=APPEND_TIME + 1000 * number)
        log.append(memoryview(batch))
    log.close()
    for path in (tmp_path / "t-0").iterdir():
        os.utime(path, (0, 0))
        if path.suffix in (".index", ".timeindex"):
            path.unlink()
    log = PartitionLog(tmp_path / "t-0", LogConfig(index_interval_bytes=1))
    assert searched(log, 0) == (APPEND_TIME, 0)
    assert searched(log, APPEND_TIME + 1001) == (APPEND_TIME + 2000, 8)
    assert searched(log, APPEND_TIME + 4001) is None
    log.close()


# ----- 6


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_the_number_of_messages_is_known_without_decompressing(codec: int, count: int) -> None:
    """The header has the record count and the last offset delta."""
    header = read_header(_closed_batch(codec, count))
    assert isinstance(header, BatchHeader)
    assert (header.count, header.last_offset_delta + 1) == (count, count)


# ----- 7


@pytest.mark.parametrize("codec", [NONE, GZIP, ZSTD])
def test_tags_are_headers_which_nobody_needs_to_know(codec: int) -> None:
    """Headers have any names and values, in any number; a record may have none."""
    tags: list[Headers] = [
        (),
        (("timestamp", struct.pack(">q", TIME)), ("num_messages", struct.pack(">i", 4))),
        (("of the future", b"\xff" * 300), ("of the future", None), ("", b""), ("zwölf", b"\x00")),
    ]
    batch = _batch([(delta, b"k", b"v", headers) for delta, headers in enumerate(tags)], codec)
    assert [record.headers for record in read_records(batch)] == tags
    assert [record[:5] for record in read_records(batch)] == [
        (delta, TIME + delta, 0, b"k", b"v") for delta in range(3)
    ]
    if codec != ZSTD:
        older = down_convert(batch, 1)  # for clients that do not know headers
        assert [row[0] for row in _kafka_rows(older.data)] == [0, 1, 2]
        assert older.lost_headers == 6


def test_tags_for_the_broker_are_fields_with_defaults() -> None:
    """Producer id, epoch and sequence are -1 if unset; a bit tells whether there is a delete horizon."""
    header = read_header(_batch())
    assert isinstance(header, BatchHeader)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert header.delete_horizon is None
    batch = _batch()
    batch[22] |= 0x40
    header = read_header(batch)
    assert isinstance(header, BatchHeader)
    assert header.delete_horizon == TIME


# ----- 8


def test_control_messages_are_a_bit() -> None:
    """In Kafka 3.9.1's log, commit and abort markers have an attribute bit, and are hidden from consumers."""
    folder = DATA / "kafka-3.9.1" / "logs" / "v2-transactions-0"
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.log")))
    kinds = []
    for header, batch in iter_batches(data):
        (theirs,) = MemoryRecords(bytes(batch))
        assert header.is_control == theirs.is_control_batch == bool(batch[22] & 0x20)
        assert header.is_transactional == theirs.is_transactional
        if header.is_control:
            kinds += [("abort", "commit")[struct.unpack(">hh", record.key)[1]] for record in theirs]
    assert set(kinds) == {"abort", "commit"}
    visible = [header for header, _ in visible_batches(data)]
    assert len(visible) == len(list(iter_batches(data))) - len(kinds)
    assert not any(header.is_control for header in visible)
