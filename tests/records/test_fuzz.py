"""Any bytes and changed batches give records or `DecodeError`, never another exception."""

from __future__ import annotations

import struct
import tracemalloc

import crcmod.predefined
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.records.contract import COLUMNS
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.reading.reader import AbortedTransactions, append_batch, visible_batches
from spark_klog.wire.codecs import CODECS
from tests.support.available_kernels import KERNELS
from tests.support.brokers.batches import read_records
from tests.support.checker.record_model import Row, encode_rows, to_lists, varint

_CRC32C = crcmod.predefined.mkCrcFun("crc-32c")
TIME = 1_700_000_000_000
ROWS = [
    Row(0, TIME, b"key", b"value" * 5),
    Row(1, TIME + 5, None, b"", (("h", b"v"), ("n", None))),
    Row(2, TIME - 7, b"", None),
    Row(3, TIME, struct.pack(">hh", 0, 0), b"\x00" * 6),
]
BODY = encode_rows(ROWS, 0, TIME)
LIMIT = 1 << 16
_NAMES = [codec.name for codec in CODECS.values()]
_FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _batch(codec_id: int, body: bytes = BODY, attributes: int = 0, count: int = 4) -> bytes:
    return build_batch(
        body,
        count,
        base_timestamp=TIME,
        max_timestamp=TIME,
        codec=CODECS[codec_id],
        attributes=attributes,
        producer_id=1,
    )


BATCHES = {codec.id: _batch(codec.id) for codec in CODECS.values()}


def _read(data: bytes) -> int:
    """Read in every way; returns the number of records, or 0 after `DecodeError`. All kernels must agree."""
    results: list[object] = []
    for kernel in KERNELS:
        builder = kernel.builder(frozenset(COLUMNS))
        try:
            for header, batch in visible_batches(data):
                append_batch(builder, header, batch, 0, 2**63 - 1, LIMIT)
            outcome = "read"
        except DecodeError:
            outcome = "refused"
        results.append((outcome, builder.rows, to_lists(builder.finish())))
    assert results[1:] == results[:-1]
    for aborted in (None, AbortedTransactions([(1, 0)])):
        try:
            for record in read_records(data, aborted):
                assert record.offset >= 0
        except DecodeError:
            pass
    outcome, rows, _ = results[0]  # type: ignore[misc]
    return int(rows) if outcome == "read" else 0


def _with_crc(batch: bytearray) -> bytes:
    """The batch with a valid length and checksum, so that reading gets as far as the change."""
    if len(batch) >= 61:
        struct.pack_into(">i", batch, 8, len(batch) - 12)
        struct.pack_into(">I", batch, 17, _CRC32C(bytes(batch[21:])))
    return bytes(batch)


@pytest.mark.parametrize("codec_id", BATCHES, ids=_NAMES)
def test_unchanged_batches_are_read(codec_id: int) -> None:
    assert _read(BATCHES[codec_id]) == 4
    assert _read(BATCHES[codec_id] * 2 + BATCHES[0][:50]) == 8


@_FUZZ
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    _read(data)


_HEADER = struct.Struct(">qiibIhiqqqhii")
_INT = st.sampled_from([-1, 0, 1, 4, 60, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1)
_LONG = st.sampled_from([-1, 0, 1, 2**63 - 1, 2**63 - 5, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)


@_FUZZ
@given(_LONG, st.integers(0, 0x7F), _INT, _LONG, _LONG, _INT, st.binary(max_size=80) | st.just(BODY))
def test_any_header_with_the_right_checksum(
    base_offset: int, attributes: int, last_delta: int, base_time: int, max_time: int, count: int, body: bytes
) -> None:
    batch = bytearray(
        _HEADER.pack(base_offset, 0, 0, 2, 0, attributes, last_delta, base_time, max_time, 1, 0, 0, count)
    )
    _read(_with_crc(batch + body))


_CHANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 255)), min_size=1, max_size=4)


@_FUZZ
@given(st.sampled_from(sorted(BATCHES)), _CHANGES, st.booleans())
def test_changed_batches(codec_id: int, changes: list[tuple[int, int]], mend: bool) -> None:
    batch = bytearray(BATCHES[codec_id])
    for position, mask in changes:
        batch[position % len(batch)] ^= mask
    rows = _read(_with_crc(batch) if mend else bytes(batch))
    if not mend and all(position % len(batch) >= 17 for position, _ in changes) and batch != BATCHES[codec_id]:
        assert rows == 0


@_FUZZ
@given(st.sampled_from(sorted(BATCHES)), _CHANGES, st.booleans())
def test_changed_bodies_behind_a_codec(codec_id: int, changes: list[tuple[int, int]], control: bool) -> None:
    body = bytearray(BODY)
    for position, mask in changes:
        body[position % len(body)] ^= mask
    _read(_batch(codec_id, bytes(body), attributes=0x30 if control else 0x10))


@_FUZZ
@given(st.sampled_from(sorted(BATCHES)), st.integers(0, 300), st.integers(0, 300), st.binary(max_size=10))
def test_cut_and_pasted_batches(codec_id: int, start: int, stop: int, middle: bytes) -> None:
    batch = BATCHES[codec_id]
    _read(_with_crc(bytearray(batch[:start] + middle + batch[stop:])))
    _read(batch[:start] + middle + batch[stop:])


_VARINTS = st.lists(st.sampled_from([-2, -1, 0, 1, 5, 63, 2**31 - 1, 2**31, -(2**63), 2**63 - 1]), max_size=12)


@_FUZZ
@given(st.lists(st.tuples(_VARINTS, st.binary(max_size=12)), max_size=4), st.integers(0, 5))
def test_records_of_any_fields(records: list[tuple[list[int], bytes]], count: int) -> None:
    body = b""
    for numbers, rest in records:
        content = b"\x00" + b"".join(map(varint, numbers)) + rest
        body += varint(len(content)) + content
    _read(_batch(0, body, count=count))


def test_huge_counts_allocate_nothing() -> None:
    key_of_2_gb = varint(20) + b"\x00\x00\x00" + varint(2**31 - 1) + bytes(15)
    headers_of_2_billion = varint(20) + b"\x00\x00\x00\x01\x01" + varint(2**31 - 1) + bytes(9)
    tracemalloc.start()
    try:
        for body in (b"", BODY, key_of_2_gb, headers_of_2_billion):
            for count in (1, 2**31 - 1):
                assert _read(_batch(0, body, count=count)) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("codec_id", [1, 2, 3, 4])
def test_bomb_in_a_batch_is_refused(codec_id: int) -> None:
    value = bytes(LIMIT + 1)
    body = encode_rows([Row(0, TIME, None, value)], 0, TIME)
    batch = _batch(codec_id, body, count=1)
    assert len(batch) < LIMIT // 8
    assert _read(batch) == 0
    assert [record.value for record in read_records(batch)] == [value]
