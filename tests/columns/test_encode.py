"""Placement: its columns by partition, encoded as batches that kafka-python reads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from kafka.partitioner.default import murmur2

from spark_klog.columns.encode import Placement, by_topic
from spark_klog.columns.rows import RecordRows
from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError
from spark_klog.records import kernels
from spark_klog.records.contract import RecordColumns
from spark_klog.records.formats.batch_v2 import build_batch

from .support import read_batches

HEADERS = FULL.field("headers").type
Content = tuple["bytes | None", "bytes | None", list[Any]]


def content(columns: RecordColumns) -> list[Content]:
    """(key, value, headers) of the records, as kafka-python reads them."""
    kernel = kernels.load()
    found: list[Content] = []
    row = 0
    while row < columns.count:
        body, following, base, maximum = kernel.encode(columns, row, 100)
        batch = build_batch(body, following - row, base_timestamp=base, max_timestamp=maximum)
        found += [(record.key, record.value, list(record.headers)) for record in read_batches(batch)]
        row = following
    return found


def record_rows(batch: pa.RecordBatch, topic: str | None) -> RecordRows:
    return RecordRows(batch, topic, (1 << 20, "max.request.size"), is_any_time=True)


def split(
    batch: pa.RecordBatch,
    topic: str | None = "t",
    partitions: Callable[[str], int] = lambda topic: 4,
    chosen: Callable[[str], int] = lambda topic: 3,
    batch_bytes: int = 1 << 20,
) -> dict[tuple[str, int], list[Content]]:
    result: dict[tuple[str, int], list[Content]] = {}
    rows = record_rows(batch, topic)
    rows.check_partitions({name: partitions(name) for name in rows.topics})
    for _, part in rows:
        for name, of_topic in by_topic(part, topic):
            placement = Placement(of_topic, partitions(name), batch_bytes)
            for partition, columns in placement.records([chosen(name) for _ in range(placement.turns)]):
                assert columns.count
                result.setdefault((name, partition), []).extend(content(columns))
    return result


def by_kafka_python(key: bytes, count: int) -> int:
    partition: int = (murmur2(key) & 0x7FFFFFFF) % count
    return partition


def table(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


KEYS = [b"key-%d" % number for number in range(40)]
VALUES = [b"value-%d" % number for number in range(40)]


def expected_by_key(keys: list[Any], values: list[Any], count: int = 4) -> dict[tuple[str, int], list[Content]]:
    result: dict[tuple[str, int], list[Content]] = {}
    for key, value in zip(keys, values, strict=True):
        partition = count - 1 if key is None else by_kafka_python(key, count)
        result.setdefault(("t", partition), []).append((key, value, []))
    return result


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()], ids=str)
def test_keys_choose_the_partition_as_kafka_pythons_partitioner_does(kind: pa.DataType) -> None:
    text = [key.decode() for key in KEYS] if pa.types.is_string(kind) or pa.types.is_large_string(kind) else KEYS
    found = split(table(key=pa.array(text, kind), value=pa.array(VALUES, pa.binary())))
    assert found == expected_by_key(KEYS, VALUES)


def test_records_without_a_key_go_where_the_caller_says() -> None:
    keys = [None if number % 3 else key for number, key in enumerate(KEYS)]
    found = split(table(key=pa.array(keys, pa.binary()), value=pa.array(VALUES)))
    assert found == expected_by_key(keys, VALUES)


def test_no_key_column() -> None:
    found = split(table(value=pa.array(VALUES)), chosen=lambda topic: 2)
    assert found == {("t", 2): [(None, value, []) for value in VALUES]}


def test_an_empty_key_is_a_key() -> None:
    found = split(table(key=pa.array([b""]), value=pa.array([b"v"])))
    assert found == {("t", by_kafka_python(b"", 4)): [(b"", b"v", [])]}


def test_null_values_and_strings() -> None:
    found = split(table(value=pa.array(["ü", None, ""])))
    assert found == {("t", 3): [(None, "ü".encode(), []), (None, None, []), (None, b"", [])]}


@pytest.mark.parametrize("batch_bytes", [50, 1 << 20], ids=["cut", "whole"])
def test_null_values_in_a_slice(batch_bytes: int) -> None:
    values = [value if number % 3 == 0 else None for number, value in enumerate(VALUES)]
    found = split(table(value=pa.array(values)).slice(1), batch_bytes=batch_bytes)
    assert found == {("t", 3): [(None, value, []) for value in values[1:]]}


def test_a_partition_column_comes_before_the_key() -> None:
    partitions = [0, 3, None, 2]
    found = split(
        table(key=pa.array([*KEYS[:3], None]), value=pa.array(VALUES[:4]), partition=pa.array(partitions, pa.int32()))
    )
    wanted: dict[tuple[str, int], list[Content]] = {}
    for row, partition in enumerate([0, 3, by_kafka_python(KEYS[2], 4), 2]):
        wanted.setdefault(("t", partition), []).append((KEYS[row] if row < 3 else None, VALUES[row], []))
    assert found == wanted


@pytest.mark.parametrize("wrong", [4, -1, 1 << 30])
def test_a_wrong_partition_is_named_with_those_there_are(wrong: int) -> None:
    batch = table(value=pa.array([b"v", b"w"]), partition=pa.array([0, wrong], pa.int32()))
    with pytest.raises(ConfigError, match=f"row 1: partition {wrong} of topic t: it has partitions 0 to 3"):
        split(batch)


def test_topics_of_a_column() -> None:
    topics = ["a", "b", "a", "c", "b"]
    counts = {"a": 1, "b": 2, "c": 8}
    found = split(
        table(topic=pa.array(topics), key=pa.array(KEYS[:5]), value=pa.array(VALUES[:5])), None, counts.__getitem__
    )
    wanted: dict[tuple[str, int], list[Content]] = {}
    for topic, key, value in zip(topics, KEYS, VALUES, strict=False):
        wanted.setdefault((topic, by_kafka_python(key, counts[topic])), []).append((key, value, []))
    assert found == wanted


def test_the_option_replaces_the_topic_column() -> None:
    found = split(table(topic=pa.array(["a", None]), value=pa.array([b"1", b"2"])))
    assert found == {("t", 3): [(None, b"1", []), (None, b"2", [])]}


def test_a_null_topic_is_refused() -> None:
    with pytest.raises(ConfigError, match="row 1 has a null topic"):
        split(table(topic=pa.array(["a", None]), value=pa.array([b"1", b"2"])), None)


def test_headers() -> None:
    rows: list[Any] = [
        [{"key": "a", "value": b"1"}, {"key": "b", "value": None}],
        None,
        [],
        [{"key": "ü", "value": b""}],
    ]
    found = split(table(value=pa.array([b"v"] * 4), headers=pa.array(rows, HEADERS)))
    wanted = [[(entry["key"], entry["value"]) for entry in row or []] for row in rows]
    assert found == {("t", 3): [(None, b"v", headers) for headers in wanted]}


def test_a_null_list_that_has_entries_behind_it_is_no_headers() -> None:
    entries = pa.array([("a", b"1"), (None, b"2"), ("b", b"3")], HEADERS.value_type)
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), entries, mask=pa.array([True, False]))
    found = split(table(value=pa.array([b"v"] * 2), headers=lists))
    assert found == {("t", 3): [(None, b"v", []), (None, b"v", [("b", b"3")])]}


def test_headers_whose_list_has_another_item_name() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    found = split(table(value=pa.array([b"v"]), headers=pa.array([[{"key": "a", "value": b"1"}]], kind)))
    assert found == {("t", 3): [(None, b"v", [("a", b"1")])]}


def test_no_rows_give_nothing() -> None:
    whole = table(
        topic=pa.array(["t"]), key=pa.array([b"k"]), value=pa.array([b"v"]), headers=pa.array([None], HEADERS)
    )
    assert split(whole.slice(0, 0)) == {}
    assert split(whole.slice(0, 0), None) == {}


@pytest.mark.parametrize(("unit", "in_ms"), [("us", 1_000), ("ns", 1_000_000)])
def test_times_are_rounded_down(unit: str, in_ms: int) -> None:
    """As by Spark's unix_millis, also before 1970: a time below -1 ms must not become -1, which means no timestamp."""
    times = [ms * in_ms + rest for ms in (-2, -1, 0, 1) for rest in (0, 1, in_ms - 1)]
    for kind in (pa.timestamp(unit), pa.timestamp(unit, "UTC")):
        rows = table(value=pa.array([b"v"] * (len(times) + 1)), timestamp=pa.array([*times, None], kind))
        [(first, found)] = record_rows(rows, "t")
        assert (first, found.column("timestamp").to_pylist()) == (0, [*(time // in_ms for time in times), None])


def test_records_bear_the_time_of_the_split() -> None:
    before = time.time_ns() // 1_000_000
    [(_, columns)] = Placement(table(value=pa.array(VALUES)), 1, 1 << 20).records([0])
    after = time.time_ns() // 1_000_000
    assert columns.timestamp is not None
    stamps = memoryview(columns.timestamp).cast("B").cast("q")
    assert len(stamps) == len(VALUES)
    assert all(before <= stamp <= after for stamp in stamps)


header_lists = st.none() | st.lists(
    st.fixed_dictionaries({"key": st.text(max_size=4), "value": st.none() | st.binary(max_size=4)}), max_size=3
)
optional_bytes = st.none() | st.binary(max_size=6)
any_row = st.tuples(
    st.sampled_from(["a", "b"]), optional_bytes, optional_bytes, st.none() | st.integers(0, 2), header_lists
)


@settings(max_examples=80, deadline=None)
@given(st.lists(any_row, max_size=20), st.integers(0, 6), st.integers(0, 20), st.sampled_from([1, 60, 1 << 20]))
def test_slices_of_any_rows(rows: list[Any], start: int, length: int, batch_bytes: int) -> None:
    topics, keys, values, partitions, headers = ([row[column] for row in rows] for column in range(5))
    batch = table(
        topic=pa.array(topics, pa.string()),
        key=pa.array(keys, pa.binary()),
        value=pa.array(values, pa.binary()),
        partition=pa.array(partitions, pa.int32()),
        headers=pa.array(headers, HEADERS),
    ).slice(start, length)
    wanted: dict[tuple[str, int], list[Content]] = {}
    for topic, key, value, partition, entries in rows[start : start + length]:
        if partition is None:
            partition = 1 if key is None else by_kafka_python(key, 3)
        items = [(entry["key"], entry["value"]) for entry in entries or []]
        wanted.setdefault((topic, partition), []).append((key, value, items))
    assert split(batch, None, lambda topic: 3, lambda topic: 1, batch_bytes) == wanted


@pytest.mark.parametrize("is_keyed", [False, True], ids=["no key", "some keys"])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=200), st.integers(0, 5), st.integers(1, 4000))
def test_rows_without_a_key_take_turns_batch_by_batch(
    is_keyed: bool, sizes: list[int], start: int, batch_bytes: int
) -> None:
    """Turns follow the order of rows, none is larger than a batch, and they have similar numbers of bytes."""
    values = [b"%04d" % number + bytes(size) for number, size in enumerate(sizes)][start:]
    rows = table(value=pa.array([b""] * start + values, pa.binary())).slice(start)
    if is_keyed:
        keys = [b"k" if number % 5 == 0 else None for number in range(len(values))]
        rows = table(value=rows.column("value"), key=pa.array(keys, pa.binary()))
        values = [value for number, value in enumerate(values) if number % 5]
    turn = itertools.count()
    found = split(rows, "t", lambda topic: 1, lambda topic: 1 + next(turn), batch_bytes)
    found.pop(("t", 0), None)
    turns = [[value or b"" for _, value, _ in content] for _, content in sorted(found.items())]
    assert [value for values in turns for value in values] == values
    largest = max((len(value) for value in values), default=0) + 40
    lengths = [sum(len(value) + 10 for value in values) for values in turns]
    assert all(length <= batch_bytes + largest for length in lengths)
    assert max(lengths, default=0) - min(lengths, default=0) <= 2 * largest + 6 * max(map(len, turns), default=0)
