"""Batches rebuilt with some of their records; tests/log/test_compaction.py tests those that compaction builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kafka.record.default_records import DefaultRecordBatch

from spark_klog.errors import DecodeError
from spark_klog.log.compaction.passes import empty_batch, retain_records
from spark_klog.records.formats.batch_v2 import HEADER_SIZE, BatchHeader, read_batch_header
from tests.support.brokers.compaction_logs import batch_of_rows
from tests.support.checker.record_model import Row, encode_rows

NOW = 1_700_000_000_000
ROWS = [Row(5, NOW, b"a", b"1"), Row(6, NOW - 7, b"b", None, (("h", None),)), Row(9, NOW + 7, None, b"")]


def _header(**fields: Any) -> BatchHeader:
    batch = batch_of_rows(ROWS, last_offset=11, producer=(9, 2, 1), **fields)
    return read_batch_header(batch)


@pytest.mark.parametrize("horizon", [None, NOW + 10**9, 0])
@pytest.mark.parametrize("kept", [[True] * 3, [False, True, True], [False, False, True], [True, False, False]])
def test_the_records_are_those_of_the_model(kept: list[bool], horizon: int | None) -> None:
    header = _header()
    rows = [row for row, is_kept in zip(ROWS, kept, strict=True) if is_kept]
    batch = retain_records(header, encode_rows(ROWS, 5, NOW), bytes(kept), horizon)
    after = read_batch_header(batch)
    assert DefaultRecordBatch(batch).validate_crc()
    base = rows[0].timestamp if horizon is None else horizon
    assert batch[HEADER_SIZE:] == encode_rows(rows, 5, base)
    assert (after.base_timestamp, after.max_timestamp) == (base, max(row.timestamp for row in rows))
    assert (after.delete_horizon, after.count) == (horizon, len(rows))
    assert (after.base_offset, after.last_offset, after.base_sequence) == (5, 11, 1)


def test_with_log_append_time_all_have_it() -> None:
    header = _header(attributes=0x08, max_timestamp=NOW + 99)
    after = read_batch_header(retain_records(header, encode_rows(ROWS, 5, NOW), b"\1\0\1", None))
    assert (after.base_timestamp, after.max_timestamp, after.timestamp_type) == (NOW + 99, NOW + 99, 1)


@pytest.mark.parametrize("timestamp", [-(1 << 63), (1 << 63) - 1])
def test_timestamps_wrap_as_those_of_java(timestamp: int) -> None:
    """A difference of more than 63 bits, which a wrong clock may cause."""
    header = read_batch_header(batch_of_rows([Row(0, NOW)]))
    wrapped = (timestamp - NOW + (1 << 63)) % (1 << 64) - (1 << 63)
    body = encode_rows([Row(0, NOW + wrapped)], 0, NOW)
    batch = retain_records(header, body, b"\1", 0)
    assert batch[HEADER_SIZE:] == encode_rows([Row(0, timestamp)], 0, 0)


def test_header_names_that_are_not_utf8_are_kept() -> None:
    """Readers get replacement characters for such names, which must not be written."""
    body = encode_rows([Row(5, NOW), Row(6, NOW, b"k", b"2", (("__", b"x"),))], 5, NOW).replace(b"__", b"\xff\xfe")
    assert b"\xff\xfe" in retain_records(_header(), body, b"\0\1", None)


def test_an_empty_batch() -> None:
    batch = empty_batch(_header(codec="gzip", attributes=0x50))
    after = read_batch_header(batch)
    assert DefaultRecordBatch(batch).validate_crc()
    assert (len(batch), after.count, after.attributes) == (HEADER_SIZE, 0, 0x10)
    assert (after.base_timestamp, after.max_timestamp) == (-1, NOW + 7)
    assert (after.base_offset, after.last_offset, after.producer_id, after.base_sequence) == (5, 11, 9, 1)


@pytest.mark.parametrize(
    "change", [lambda body: body + b"\0", lambda body: body[:-1], lambda body: b"", lambda body: b"\1"]
)
def test_a_damaged_body(change: Callable[[bytes], bytes]) -> None:
    body = change(encode_rows(ROWS, 5, NOW))
    with pytest.raises(DecodeError):
        retain_records(_header(), body, b"\1\0\1", None)
