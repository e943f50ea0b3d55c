"""What a partition's entry of a Fetch answer says: the table by which every reader of the client goes on."""

from __future__ import annotations

from struct import pack_into
from typing import Any

import pytest

from spark_klog.client.fetch.entries import Fetched, FetchParameters, Larger, Limits, entries_of, read_entry
from spark_klog.errors import DecodeError, ErrorCode, ProtocolError, RecordTooLarge
from tests.support.brokers.batches import make_batch

KEY = ("t", 0)
WANTED = {KEY: FetchParameters(0, 1)}
_DELTA = 23


def _batch(offset: int, records: int = 10) -> bytes:
    data = make_batch([(None, b"v" * 20)] * records, [1_700_000_000_000] * records)
    pack_into(">q", data, 0, offset)
    return bytes(data)


def _flipped(batch: bytes, delta: int | None = None) -> bytes:
    data = bytearray(batch)
    data[-5] ^= 1
    if delta is not None:
        pack_into(">i", data, _DELTA, delta)
    return bytes(data)


def _entry(records: bytes | None, high_watermark: int = 20, code: int = 0) -> dict[str, Any]:
    view = None if records is None else memoryview(records)
    aborted = [{"producer_id": 7, "first_offset": 3}]
    return {"error_code": code, "records": view, "high_watermark": high_watermark, "aborted_transactions": aborted}


A, B = _batch(0), _batch(10)
SIZE = len(A)


def _read(records: bytes | None, offset: int = 0, asked: int = SIZE, most: int = 10 * SIZE, **more: Any) -> Any:
    high_watermark, end = more.pop("high_watermark", 20), more.pop("end", 0)
    return read_entry(KEY, _entry(records, high_watermark), offset, Limits(asked, most, **more), end)


@pytest.mark.parametrize(
    ("records", "following", "size", "damaged", "is_corrupt"),
    [
        (A, 10, SIZE, 0, False),
        (A + B, 20, 2 * SIZE, 0, False),
        (A + B[:50], 10, SIZE, 0, False),
        (_flipped(A) + B, 20, 2 * SIZE, 0, False),
        (_batch(5) + B, 20, 2 * SIZE, 1, False),
        (_flipped(A), 10, SIZE, 0, True),
        (_flipped(A, 2), 3, SIZE, 0, True),
        (_flipped(A, 1000), 20, SIZE, 1, True),
        (_flipped(A) + B[:50], 10, SIZE + 50, 0, True),
    ],
    ids=[
        "one",
        "two",
        "cut",
        "corrupt first",
        "overlapping",
        "corrupt",
        "corrupt short",
        "corrupt long",
        "cut corrupt",
    ],
)
def test_batches(records: bytes, following: int, size: int, damaged: int, is_corrupt: bool) -> None:
    fetched = _read(records)
    assert isinstance(fetched, Fetched)
    assert (fetched.offset, fetched.next_offset, len(fetched.data)) == (0, following, size)
    assert (len(fetched.damaged), fetched.is_corrupt) == (damaged, is_corrupt)
    assert fetched.aborted == [(7, 3)]


@pytest.mark.parametrize("records", [None, b""])
def test_no_bytes(records: bytes | None) -> None:
    assert _read(records) is None


def test_a_high_watermark_that_lags_behind() -> None:
    assert _read(A + B, high_watermark=0).next_offset == 20
    assert _read(A + B, high_watermark=12, end=20).next_offset == 20
    assert _read(A + B, high_watermark=12).next_offset == 10, "offsets beyond the log's end are wrong"


@pytest.mark.parametrize(
    ("records", "asked", "most", "is_shared", "expected"),
    [
        (A[:50], 50, 10 * SIZE, False, SIZE),
        (A[:50], 50, 10 * SIZE, True, SIZE),
        (A[:50], 50, SIZE, False, SIZE),
        (A[:50], 50, SIZE - 1, False, None),
        (A[:50], 50, SIZE - 1, True, None),
        (A[:50], SIZE, 10 * SIZE, False, None),
        (A[:50], SIZE, 10 * SIZE, True, SIZE),
        (A[:50], 3 * SIZE, 10 * SIZE, True, 3 * SIZE),
        (A[:5], 5, 10 * SIZE, False, 12),
        (A[:5], 12, 10 * SIZE, False, None),
        (A[:5], 12, 10 * SIZE, True, 12),
    ],
)
def test_a_batch_that_is_cut_off(records: bytes, asked: int, most: int, is_shared: bool, expected: int | None) -> None:
    if expected is not None:
        assert _read(records, asked=asked, most=most, is_shared=is_shared) == Larger(expected)
        return
    with pytest.raises(RecordTooLarge, match=r"t-0 at offset 0: .*; raise that$") as raised:
        _read(records, asked=asked, most=most, is_shared=is_shared, setting="that")
    assert (raised.value.size, raised.value.fetched) == (SIZE if len(records) > 12 else 0, len(records))


@pytest.mark.parametrize(
    ("records", "offset", "words"),
    [
        (b"\xff" * 100, 0, "no batch at position 0: unknown magic 255"),
        (b"\0" * 100, 0, "no batch at position 0: length 0"),
        (A, 15, f"{SIZE} bytes fetched hold only records before it"),
        (A + B[:50], 15, f"{SIZE + 50} bytes fetched hold only records before it"),
    ],
)
def test_bytes_that_are_of_no_use(records: bytes, offset: int, words: str) -> None:
    with pytest.raises(DecodeError, match=f"^t-0 at offset {offset}: {words}"):
        _read(records, offset)


def test_an_error_code() -> None:
    with pytest.raises(ProtocolError, match="fetch of t-0 at offset 0") as raised:
        read_entry(KEY, _entry(A, -1, ErrorCode.OFFSET_OUT_OF_RANGE), 0, Limits(1, 1))
    assert raised.value.code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_an_answer_without_any_entry() -> None:
    """It is asked again, whether the broker says that it throttles or not; unless a session has no news."""
    for throttle in ({}, {"throttle_time_ms": 0}, {"throttle_time_ms": 9}):
        with pytest.raises(ProtocolError) as raised:
            entries_of({"responses": [], **throttle}, WANTED)
        assert raised.value.retriable
    assert entries_of({"responses": []}, WANTED, is_incremental=True) == {}


def test_an_answer_to_another_question() -> None:
    entry = _entry(A) | {"partition_index": 0}
    answer = {"responses": [{"topic": "t", "partitions": [entry]}]}
    assert entries_of(answer, WANTED) == {KEY: entry}
    with pytest.raises(DecodeError, match="without t-1"):
        entries_of(answer, {**WANTED, ("t", 1): FetchParameters(0, 1)})
    with pytest.raises(DecodeError, match="not asked for"):
        entries_of(answer, {("u", 0): FetchParameters(0, 1)})
