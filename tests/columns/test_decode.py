"""PartitionDecoder against rows that kafka-python encoded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.columns import decode
from spark_klog.columns.decode import PartitionDecoder, Unreadable
from spark_klog.columns.schema import FULL, WITHOUT_HEADERS, subset
from spark_klog.errors import CorruptBatchError, DecodeError

from .support import CODECS, Row, make_batch

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
NOW = 1_700_000_000_123

ROWS = [
    Row(100, b"k0", b"v0", NOW, [("a", b"1"), ("b", None), ("a", b"")]),
    Row(101, None, b"v1", NOW - 7, []),
    Row(102, b"", None, NOW + 10_000, [("ü", b"\xff\x00")]),
    Row(103, None, None, 0, []),
    Row(104, b"k4", b"", NOW, []),
]


def meaning(row: Row) -> dict[str, Any]:
    """The DataFrame row for a record."""
    return {
        "key": row.key,
        "value": row.value,
        "topic": "t",
        "partition": 7,
        "offset": row.offset,
        "timestamp": EPOCH + timedelta(milliseconds=row.timestamp),
        "timestampType": 0,
        "headers": [{"key": key, "value": value} for key, value in row.headers] or None,
    }


def decoded(
    data: Sequence[bytes], first: int = 0, end: int = 1 << 60, schema: pa.Schema = FULL
) -> list[pa.RecordBatch]:
    decoder = PartitionDecoder("t", 7, schema)
    batches = [batch for chunk in data for batch in decoder.decode(chunk, first, end)]
    batches += decoder.finish()
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(schema, check_metadata=True)
    return batches


def rows_of(batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("codec", CODECS)
def test_all_columns(codec: str) -> None:
    assert rows_of(decoded([make_batch(ROWS, codec)])) == [meaning(row) for row in ROWS]


@pytest.mark.parametrize(
    "names",
    [
        *([name] for name in FULL.names),
        ["headers", "key"],
        ["offset", "value", "topic"],
        list(reversed(FULL.names)),
    ],
    ids=",".join,
)
def test_subsets_of_columns(names: list[str]) -> None:
    found = rows_of(decoded([make_batch(ROWS)], schema=subset(names)))
    assert found == [{name: meaning(row)[name] for name in names} for row in ROWS]
    assert all(list(row) == names for row in found)


@pytest.mark.parametrize(
    ("first", "end"), [(0, 200), (100, 105), (101, 104), (102, 103), (103, 103), (0, 100), (105, 999), (104, 999)]
)
def test_offset_ranges(first: int, end: int) -> None:
    wanted = [meaning(row) for row in ROWS if first <= row.offset < end]
    assert rows_of(decoded([make_batch(ROWS[:2]) + make_batch(ROWS[2:4]), make_batch(ROWS[4:])], first, end)) == wanted


def test_gaps_in_offsets_as_compaction_leaves_them() -> None:
    rows = [ROWS[0], ROWS[2], ROWS[4]._replace(offset=150)]
    assert rows_of(decoded([make_batch(rows)], 101, 151)) == [meaning(row) for row in rows[1:]]


def test_nothing_gives_nothing() -> None:
    assert decoded([]) == []
    assert decoded([b""]) == []


def test_a_partial_batch_at_the_end_is_left_out() -> None:
    data = make_batch(ROWS[:2]) + make_batch(ROWS[2:])[:-1]
    assert rows_of(decoded([data])) == [meaning(row) for row in ROWS[:2]]


def test_the_memory_of_the_data_may_be_used_again() -> None:
    decoder = PartitionDecoder("t", 7, FULL)
    buffer = bytearray(make_batch(ROWS))
    assert list(decoder.decode(buffer, 0, 1000)) == []
    buffer[:] = bytes(len(buffer))
    assert rows_of(list(decoder.finish())) == [meaning(row) for row in ROWS]


def test_batches_are_cut_by_rows_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(offset, None, b"x" * 100, NOW, []) for offset in range(40)]
    data = b"".join(make_batch(rows[at : at + 4]) for at in range(0, 40, 4))
    monkeypatch.setattr(decode, "ROWS", 8)
    assert [batch.num_rows for batch in decoded([data])] == [8] * 5
    monkeypatch.setattr(decode, "BYTES", 350)
    batches = decoded([data])
    assert [batch.num_rows for batch in batches] == [4] * 10
    assert rows_of(batches) == [meaning(row) for row in rows]


@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_partitions_in_turn_share_batches(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Arrow batches may end within a partition, at an empty one, at a new topic, or at one that comes again."""
    monkeypatch.setattr(decode, "ROWS", rows)
    places = [("t", 7), ("t", 2), ("empty", 0), ("u", 2), ("u", 3), ("t", 7), ("t", 7), ("none", 1)]
    decoder = PartitionDecoder("t", 7, FULL)
    batches, wanted = [], []
    for number, (topic, partition) in enumerate(places):
        decoder.move_to(topic, partition)
        if topic not in ("empty", "none"):
            chosen = ROWS[: 1 + number % len(ROWS)]
            batches += decoder.decode(b"".join(make_batch([row]) for row in chosen), 0, 1000)
            wanted += [meaning(row) | {"topic": topic, "partition": partition} for row in chosen]
    batches += decoder.finish()
    for batch in batches:
        batch.validate(full=True)
    assert rows_of(batches) == wanted
    assert len(batches) == -(-len(wanted) // rows)
    decoder.move_to("x", 5)
    broken = bytearray(make_batch(ROWS))
    broken[-1] ^= 1
    with pytest.raises(CorruptBatchError, match="x-5: batch"):
        list(decoder.decode(bytes(broken), 0, 1000))


def test_a_wrong_checksum_names_topic_partition_and_offsets() -> None:
    broken = bytearray(make_batch(ROWS))
    broken[-1] ^= 1
    with pytest.raises(CorruptBatchError, match=r"t-7: batch of offsets 100-104: CRC 0x"):
        decoded([bytes(broken)])


def test_a_wrong_checksum_beyond_the_range_is_not_looked_at() -> None:
    broken = bytearray(make_batch(ROWS[3:]))
    broken[-1] ^= 1
    data = make_batch(ROWS[:3]) + bytes(broken)
    assert rows_of(decoded([data], 100, 103)) == [meaning(row) for row in ROWS[:3]]
    with pytest.raises(CorruptBatchError, match="103-104"):
        decoded([data], 100, 104)


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_a_wrong_checksum_beyond_a_range_that_ends_in_a_gap_is_not_looked_at(codec: str) -> None:
    """Compaction has removed the last offset of the range."""
    broken = bytearray(make_batch(ROWS[3:], codec))
    broken[-1] ^= 1
    data = make_batch(ROWS[:2]) + bytes(broken)
    assert rows_of(decoded([data], 100, 103)) == [meaning(row) for row in ROWS[:2]]
    with pytest.raises(CorruptBatchError, match="103-104"):
        decoded([data], 100, 104)


def test_what_is_no_batch_names_topic_and_partition() -> None:
    with pytest.raises(DecodeError, match="t-7: "):
        decoded([b"\xff" * 100])


@pytest.mark.parametrize("timestamp", [(2**63 - 1) // 1000 + 1, 2**62, -(2**63), -((2**63 - 1) // 1000) - 1])
def test_a_timestamp_without_microseconds_is_named(timestamp: int) -> None:
    with pytest.raises(DecodeError, match=rf"^t-7: the record at offset 100 has the timestamp {timestamp} ms,"):
        decoded([make_batch([ROWS[0]._replace(timestamp=timestamp)])])
    schema = pa.schema([FULL.field("timestamp")])
    with pytest.raises(DecodeError, match=rf"^t-7: the record at offset 100 has the timestamp {timestamp} ms,"):
        decoded([make_batch([ROWS[0]._replace(timestamp=timestamp)])], schema=schema)
    schema = pa.schema([FULL.field("offset")])
    assert rows_of(decoded([make_batch([ROWS[0]._replace(timestamp=timestamp)])], schema=schema)) == [{"offset": 100}]


def test_records_before_one_without_microseconds_come_first() -> None:
    rows = [row._replace(timestamp=2**62) if row.offset == 102 else row for row in ROWS]
    decoder = PartitionDecoder("t", 7, FULL)
    assert not list(decoder.decode(make_batch(rows), 0, 1000))
    batches = decoder.finish()
    assert rows_of([next(batches)]) == [meaning(row) for row in rows if row.offset < 102]
    with pytest.raises(DecodeError, match=r"^t-7: the record at offset 102 has the timestamp"):
        next(batches)


def test_records_without_microseconds_are_left_out_alone() -> None:
    """Each names its own partition, also if an Arrow batch has several partitions."""
    rows = [row._replace(timestamp=2**62) if row.offset in (101, 102) else row for row in ROWS]
    decoder = PartitionDecoder("t", 7, FULL, yields_bad=True)
    parts = list(decoder.decode(make_batch(rows), 0, 1000))
    decoder.move_to("u", 2)
    parts += decoder.decode(make_batch(rows[1:4]), 0, 1000)  # the first of them is left out
    decoder.move_to("t", 7)
    parts += [*decoder.decode(make_batch(rows[3:]), 0, 1000), *decoder.finish()]
    bad = [part for part in parts if isinstance(part, Unreadable)]
    batches = [part for part in parts if not isinstance(part, Unreadable)]
    good = [meaning(row) for row in rows if row.timestamp < 2**62]
    assert rows_of(batches) == [*good, good[1] | {"topic": "u", "partition": 2}, *good[1:]]
    assert [(topic, partition, item.offset, bytes(item.data)) for topic, partition, item in bad] == [
        ("t", 7, 101, b"v1"),
        ("t", 7, 102, b""),
        ("u", 2, 101, b"v1"),
        ("u", 2, 102, b""),
    ]


def test_the_last_timestamp_with_microseconds() -> None:
    timestamp = (2**63 - 1) // 1000
    [batch] = decoded([make_batch([ROWS[0]._replace(timestamp=timestamp)])])
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [timestamp * 1000]


optional_bytes = st.none() | st.binary(max_size=20)
row_values = st.tuples(
    optional_bytes,
    optional_bytes,
    st.integers(0, 1 << 42),
    st.lists(st.tuples(st.text(max_size=5), optional_bytes), max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(row_values, min_size=1, max_size=6), max_size=4),
    st.integers(0, 25),
    st.integers(0, 25),
    st.data(),
)
def test_any_rows(batches: list[list[Any]], first: int, end: int, data: st.DataObject) -> None:
    rows: list[Row] = []
    encoded = []
    for batch in batches:
        made = [Row(len(rows) + index, *values) for index, values in enumerate(batch)]
        rows += made
        encoded.append(make_batch(made, data.draw(st.sampled_from(["none", "gzip"]))))
    wanted = [meaning(row) for row in rows if first <= row.offset < end]
    assert rows_of(decoded(encoded, first, end)) == wanted
    without = [{name: row[name] for name in WITHOUT_HEADERS.names} for row in wanted]
    assert rows_of(decoded([b"".join(encoded)], first, end, WITHOUT_HEADERS)) == without
