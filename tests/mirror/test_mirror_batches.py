"""Batches for another log: which are copied, rebuilt or left out; kafka-python reads them back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatch

from spark_klog.client.fetch.entries import Fetched
from spark_klog.errors import CorruptBatchError
from spark_klog.mirror.batches import OutBatch, Span, out_batches
from spark_klog.records.building.assignment import own_batch
from spark_klog.records.building.conversion import batch_of
from spark_klog.records.contract import CREATE_TIME, LOG_APPEND_TIME, Headers, Record
from spark_klog.records.formats.batch_v2 import (
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    build_batch,
    read_batch_header,
    set_produced,
)
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.reading.offset_order import NOTHING
from spark_klog.records.reading.reader import ABORT, EndTransactionMarker, encode_marker
from spark_klog.wire.codecs import NONE, codec_by_name

_TIME = 1_700_000_000_000
_HEADERS: Headers = (("h", b"x"), ("null", None))


def _chunk(data: bytes, offset: int = 0, aborted: Sequence[tuple[int, int]] = ()) -> Fetched:
    return Fetched("clicks", 3, offset, 1 << 40, memoryview(data), list(aborted), NOTHING)


def _out(data: bytes, offset: int = 0, aborted: Sequence[tuple[int, int]] = ()) -> list[OutBatch]:
    return list(out_batches(_chunk(data, offset, aborted), 1 << 20))


def _records(*offsets: int) -> list[Record]:
    return [
        Record(offset, _TIME + 10 * offset, CREATE_TIME, None if offset % 3 == 0 else b"k", b"v%d" % offset, _HEADERS)
        for offset in offsets
    ]


def _read(data: bytes | bytearray) -> list[tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]:
    """(offset, timestamp, key, value, headers) as kafka-python reads them, after it has checked the CRC."""
    found, records = [], MemoryRecords(bytes(data))
    while (batch := records.next_batch()) is not None:
        assert batch.validate_crc()
        found += [(one.offset, one.timestamp, one.key, one.value, list(one.headers)) for one in batch]
    return found


def _expected(
    records: list[Record],
) -> list[tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]:
    """The same records with offsets 0, 1, 2 and so on, in the form of `_read`."""
    return [(n, one.timestamp, one.key, one.value, list(one.headers)) for n, one in enumerate(records)]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_are_copied_as_they_are(codec: str) -> None:
    records = _records(700, 701, 702)
    body = bytearray()
    for delta, one in enumerate(records):
        append_record(body, one.timestamp - records[0].timestamp, delta, one.key, one.value, one.headers)
    batch = build_batch(
        body,
        3,
        base_timestamp=records[0].timestamp,
        max_timestamp=records[-1].timestamp,
        codec=codec_by_name(codec),
        base_offset=700,
        attributes=TRANSACTIONAL_BIT | DELETE_HORIZON_BIT,
        producer_id=11,
        producer_epoch=2,
        base_sequence=40,
        leader_epoch=5,
    )
    [out] = _out(batch, 700)
    assert (out.count, out.following, out.spans, out.is_copied) == (3, 703, [Span(700, 3, 0)], True)
    assert out.data == batch
    set_produced(memoryview(out.data), 99, 7, 1000, is_transactional=False)
    assert out.data[HEADER_SIZE:] == batch[HEADER_SIZE:]
    before, after = read_batch_header(batch), read_batch_header(out.data)
    theirs = DefaultRecordBatch(bytes(out.data))
    assert theirs.validate_crc()
    assert (theirs.base_offset, theirs.leader_epoch, theirs.is_transactional) == (0, -1, False)
    assert (theirs.producer_id, theirs.producer_epoch, theirs.base_sequence) == (99, 7, 1000)
    assert (after.codec_id, after.delete_horizon) == (before.codec_id, None)
    for field in ("length", "last_offset_delta", "base_timestamp", "max_timestamp", "count"):
        assert getattr(before, field) == getattr(after, field)
    if codec in ("none", "gzip"):  # the other codecs need libraries that kafka-python may lack
        assert _read(out.data) == _expected(records)
    set_produced(memoryview(out.data), -1, -1, -1, is_transactional=True)
    assert DefaultRecordBatch(bytes(out.data)).is_transactional


def test_gaps_of_compaction_are_closed() -> None:
    records = _records(5, 6, 9, 10, 20)
    [out] = _out(batch_of(records, codec_by_name("gzip")), 5)
    assert not out.is_copied
    assert (out.spans, out.following) == ([Span(5, 2, 0), Span(9, 2, 2), Span(20, 1, 4)], 21)
    assert read_batch_header(out.data).codec_id == 1
    assert _read(out.data) == _expected(records)


def test_a_fetch_that_begins_within_a_batch() -> None:
    [out] = _out(batch_of(_records(5, 6, 7), NONE), 6)
    assert (out.spans, _read(out.data)) == ([Span(6, 2, 0)], _expected(_records(6, 7)))


def test_append_time_becomes_create_time() -> None:
    records = [one._replace(timestamp=_TIME, timestamp_type=LOG_APPEND_TIME) for one in _records(0, 1)]
    batch = batch_of(records, NONE)
    assert read_batch_header(batch).attributes & LOG_APPEND_TIME_BIT
    [out] = _out(batch)
    assert not read_batch_header(out.data).attributes & LOG_APPEND_TIME_BIT
    assert _read(out.data) == _expected(records)


@pytest.mark.parametrize("magic", [0, 1])
def test_messages_are_converted(magic: int) -> None:
    records = [one._replace(headers=()) for one in _records(3, 4, 5, 6, 7)]
    data = build_message_set(records[:2], magic, NONE)
    data += build_message_set(records[2:4], magic, codec_by_name("gzip"))
    data += build_message_set(records[4:], magic, NONE)
    found = _out(bytes(data), 3)
    assert [(out.count, out.following, read_batch_header(out.data).codec_id) for out in found] == [
        (2, 5, 0),
        (2, 7, 1),
        (1, 8, 0),
    ]
    read = [one[1:] for out in found for one in _read(out.data)]
    expected = [one[1:] for one in _expected(records)]
    assert read == (expected if magic else [(-1, *one[1:]) for one in expected])


def test_control_batches_aborted_ones_and_empty_ones_are_left_out() -> None:
    def of(offset: int, producer: int, attributes: int) -> bytearray:
        batch = own_batch([(b"k", b"v%d" % offset)], _TIME, attributes=attributes, producer=(producer, 0))
        batch[:8] = offset.to_bytes(8, "big")
        return batch

    marker = own_batch([encode_marker(EndTransactionMarker(ABORT, 0))], _TIME, attributes=0x30, producer=(1, 0))
    marker[:8] = (2).to_bytes(8, "big")
    empty = build_batch(b"", 0, base_timestamp=_TIME, max_timestamp=_TIME, base_offset=4, last_offset_delta=3)
    data = bytes(
        of(0, 1, TRANSACTIONAL_BIT) + of(1, 2, TRANSACTIONAL_BIT) + marker + of(3, 1, TRANSACTIONAL_BIT) + empty
    )
    found = _out(data, 0, [(1, 0)])
    assert [out.spans for out in found] == [[Span(1, 1, 0)], [Span(3, 1, 0)]]


def test_corrupt_bytes_are_not_given_a_new_checksum() -> None:
    good = batch_of(_records(0), NONE)
    bad = bytearray(batch_of(_records(1), NONE))
    bad[-3] ^= 1
    found = out_batches(_chunk(good + bytes(bad)), 1 << 20)
    assert next(found).following == 1
    with pytest.raises(CorruptBatchError, match="clicks-3"):
        next(found)
