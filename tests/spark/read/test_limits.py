"""Limits of micro-batches and tasks: properties of the pure functions."""

from __future__ import annotations

import math
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given, strategies as st

from spark_klog.client.places import Offsets
from spark_klog.spark.options import SplitLimits
from spark_klog.spark.read.ranges import OffsetRange, limit_bytes, limit_rows, pack, split

A, B, C = ("a", 0), ("a", 1), ("b", 0)
Partitions = dict[tuple[str, int], tuple[int, int]]

#: partition: (start, unread records)
some_partitions = st.dictionaries(
    st.tuples(st.sampled_from("ab"), st.integers(0, 5)),
    st.tuples(st.integers(0, 1000), st.integers(0, 5000)),
    min_size=1,
)
record_sizes = st.floats(0.1, 1e6)


def start_and_latest(partitions: Partitions) -> tuple[Offsets, Offsets]:
    start = {key: begin for key, (begin, _) in partitions.items()}
    return start, {key: begin + count for key, (begin, count) in partitions.items()}


def check_progress(start: Offsets, latest: Offsets, end: Offsets) -> None:
    """No end lies before the start or after the log's end, and every partition with unread records advances."""
    assert end.keys() == latest.keys()
    assert all(start[key] <= end[key] <= latest[key] for key in start)
    assert all(end[key] > start[key] for key in start if latest[key] > start[key])


@given(some_partitions, st.integers(1, 20_000))
def test_limit_rows(partitions: Partitions, rows: int) -> None:
    start, latest = start_and_latest(partitions)
    end = limit_rows(start, latest, rows)
    check_progress(start, latest, end)
    taken = {key: end[key] - start[key] for key in start}
    total = sum(latest.values()) - sum(start.values())
    busy = [key for key in start if latest[key] > start[key]]
    # The sum is `rows` except for rounding: shares below one record are rounded up, others down.
    if total <= rows:
        assert end == latest
    else:
        assert rows - len(busy) <= sum(taken.values()) <= rows + len(busy)
        for key in busy:
            share = rows * (latest[key] - start[key]) / total
            assert math.floor(share) <= taken[key] <= math.ceil(share)


@given(some_partitions, st.integers(1, 5000), st.integers(0, 5000))
def test_limit_rows_is_monotone(partitions: Partitions, rows: int, more: int) -> None:
    start, latest = start_and_latest(partitions)
    smaller, larger = limit_rows(start, latest, rows), limit_rows(start, latest, rows + more)
    assert all(smaller[key] <= larger[key] for key in latest)


@given(some_partitions, st.integers(1, 500))
def test_limit_rows_gets_to_the_end(partitions: Partitions, rows: int) -> None:
    at = {key: begin for key, (begin, _) in partitions.items()}
    latest = {key: begin + min(count, 300) for key, (begin, count) in partitions.items()}
    for _ in range(300 * len(at) + 1):
        if at == latest:
            return
        at = limit_rows(at, latest, rows)
    assert at == latest


def test_limit_rows_goes_back_where_the_log_has() -> None:
    assert limit_rows({A: 9, B: 0}, {A: 5, B: 100}, 10) == {A: 5, B: 10}
    assert limit_rows({B: 0}, {A: 5, B: 100}, 10) == {A: 5, B: 10}


@pytest.mark.parametrize(
    ("sizes", "size", "end"),
    [
        ({A: 10.0, B: 10.0}, 1000, {A: 25, B: 75}),
        ({A: 10.0, B: 10.0}, 4000, {A: 100, B: 300}),
        ({A: 10.0, B: 10.0}, 3999, {A: 99, B: 299}),
        # a quarter of each partition's unread records, however large they are
        ({A: 30.0, B: 10.0}, 1500, {A: 25, B: 75}),
        # at least one record each
        ({A: 1e9, B: 1e9}, 1, {A: 1, B: 1}),
        # records of unknown size do not count
        ({A: 10.0}, 500, {A: 50, B: 150}),
        ({}, 1, {A: 100, B: 300}),
    ],
)
def test_limit_bytes(sizes: dict[tuple[str, int], float], size: int, end: Offsets) -> None:
    assert limit_bytes({A: 0, B: 0}, {A: 100, B: 300}, size, sizes) == end


@given(st.data(), some_partitions, st.integers(1, 10_000_000))
def test_limit_bytes_is_near_the_limit(data: st.DataObject, partitions: Partitions, size: int) -> None:
    sizes = {key: data.draw(record_sizes) for key in sorted(partitions)}
    start, latest = start_and_latest(partitions)
    end = limit_bytes(start, latest, size, sizes)
    check_progress(start, latest, end)
    busy = [key for key in start if latest[key] > start[key]]
    total = sum((latest[key] - start[key]) * sizes[key] for key in busy)
    if total <= size:
        assert end == latest
        return
    taken = sum((end[key] - start[key]) * sizes[key] for key in busy)
    one_each = sum(sizes[key] for key in busy)
    assert size - 2 * one_each <= taken * (1 + 1e-9)
    assert taken <= (size + one_each) * (1 + 1e-9)


@given(st.data(), some_partitions, st.integers(1, 100_000))
def test_limit_bytes_gets_to_the_end(data: st.DataObject, partitions: Partitions, size: int) -> None:
    sizes = {key: data.draw(record_sizes) for key in sorted(partitions)}
    at = {key: begin for key, (begin, _) in partitions.items()}
    latest = {key: begin + min(count, 50) for key, (begin, count) in partitions.items()}
    for _ in range(50 * len(at) + 1):
        if at == latest:
            return
        at = limit_bytes(at, latest, size, sizes)
    assert at == latest


@given(some_partitions, st.integers(1, 20_000), st.integers(1, 10_000_000))
def test_both_limits_one_after_the_other(partitions: Partitions, rows: int, size: int) -> None:
    """The stream applies the byte limit to the end that the record limit gives."""
    start, latest = start_and_latest(partitions)
    by_rows = limit_rows(start, latest, rows)
    end = limit_bytes(start, by_rows, size, dict.fromkeys(start, 100.0))
    check_progress(start, latest, end)
    assert all(end[key] <= by_rows[key] for key in end)


def split_one(count: int, limits: SplitLimits, size: float | None = None) -> list[tuple[int, int]]:
    sizes = {} if size is None else {A: size}
    return [(item.start, item.end) for item in split([OffsetRange(*A, 100, 100 + count)], limits, sizes)]


@pytest.mark.parametrize(
    ("count", "limits", "size", "pieces"),
    [
        (10, SplitLimits(), None, [(100, 110)]),
        (10, SplitLimits(min_partitions=1), None, [(100, 110)]),
        (10, SplitLimits(min_partitions=2), None, [(100, 105), (105, 110)]),
        (10, SplitLimits(min_partitions=3), None, [(100, 103), (103, 106), (106, 110)]),
        (2, SplitLimits(min_partitions=9), None, [(100, 101), (101, 102)]),
        (10, SplitLimits(max_records=10), None, [(100, 110)]),
        (10, SplitLimits(max_records=9), None, [(100, 105), (105, 110)]),
        (10, SplitLimits(max_records=4), None, [(100, 103), (103, 106), (106, 110)]),
        (3, SplitLimits(max_records=1), None, [(100, 101), (101, 102), (102, 103)]),
        (10, SplitLimits(max_bytes=500), 100.0, [(100, 105), (105, 110)]),
        (10, SplitLimits(max_bytes=499), 100.0, [(100, 103), (103, 106), (106, 110)]),
        # three records of 3 bytes do not fit into 8 bytes
        (6, SplitLimits(max_bytes=8), 3.0, [(100, 102), (102, 104), (104, 106)]),
        (4, SplitLimits(max_bytes=4), 3.0, [(100, 101), (101, 102), (102, 103), (103, 104)]),
        # a record is not split
        (2, SplitLimits(max_bytes=1), 1e6, [(100, 101), (101, 102)]),
        # records of unknown size do not count
        (10, SplitLimits(max_bytes=1), None, [(100, 110)]),
        # the strictest limit wins
        (10, SplitLimits(2, 4, 200), 100.0, [(100 + at, 102 + at) for at in range(0, 10, 2)]),
        (10, SplitLimits(2, 4, 10_000), 100.0, [(100, 103), (103, 106), (106, 110)]),
        (10, SplitLimits(5, 4, 10_000), 100.0, [(100 + at, 102 + at) for at in range(0, 10, 2)]),
    ],
)
def test_split(count: int, limits: SplitLimits, size: float | None, pieces: list[tuple[int, int]]) -> None:
    assert split_one(count, limits, size) == pieces


def test_split_takes_from_the_largest() -> None:
    wanted = [OffsetRange(*A, 0, 10), OffsetRange(*B, 0, 1), OffsetRange(*C, 5, 95)]
    assert [item[:2] for item in split(wanted, SplitLimits(min_partitions=3), {})] == [A, B, C]
    found = split(wanted, SplitLimits(min_partitions=7), {})
    assert [item[:2] for item in found] == [A, B, C, C, C, C, C]
    assert {item.end - item.start for item in found if item[:2] == C} == {18}


def test_a_backlog_beside_many_small_ranges_is_split() -> None:
    """The small ones share tasks: as many as minPartitions of them are no reason to leave the backlog in one."""
    wanted = [*many(200, 10), OffsetRange(*A, 0, 1_000_000)]
    limits = SplitLimits(min_partitions=50)
    sizes = [sum(item.end - item.start for item in ranges) for ranges in pack(split(wanted, limits, {}), limits)]
    assert sum(sizes) == 1_002_000
    assert max(sizes) <= 1_002_000 / 50
    assert len(sizes) <= 52
    assert split(many(200, 900), limits, {}) == many(200, 900)


def test_split_of_nothing() -> None:
    assert split([], SplitLimits(8, 8, 8), {}) == []


some_ranges = st.dictionaries(
    st.sampled_from([A, B, C, ("b", 1)]), st.tuples(st.integers(0, 1 << 62), st.integers(1, 3000))
).map(lambda found: [OffsetRange(*key, start, start + count) for key, (start, count) in sorted(found.items())])


@given(
    st.data(),
    some_ranges,
    st.none() | st.integers(1, 200),
    st.none() | st.integers(1, 4000),
    st.none() | st.integers(1, 10_000_000),
)
def test_pieces(
    data: st.DataObject,
    wanted: list[OffsetRange],
    min_partitions: int | None,
    max_records: int | None,
    max_bytes: int | None,
) -> None:
    sizes = {item[:2]: data.draw(record_sizes) for item in wanted if data.draw(st.booleans())}
    limits = SplitLimits(min_partitions, max_records, max_bytes)
    pieces = split(wanted, limits, sizes)
    by_partition = {key: list(group) for key, group in groupby(pieces, lambda item: item[:2])}
    assert list(by_partition) == [item[:2] for item in wanted], "in order, a partition's side by side"
    for item in wanted:
        mine = by_partition[item[:2]]
        # the pieces cover the range exactly
        assert (mine[0].start, mine[-1].end) == (item.start, item.end)
        assert all(before.end == after.start for before, after in pairwise(mine))
        # they are even, and none is empty
        counts = [piece.end - piece.start for piece in mine]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
        # they are within the limits
        if max_records:
            assert max(counts) <= max_records
        if max_bytes and item[:2] in sizes:
            assert max(counts) == 1 or max(counts) * sizes[item[:2]] <= max_bytes * (1 + 1e-9)
    # at least min_partitions tasks, if there are as many records
    total = sum(item.end - item.start for item in wanted)
    assert len(pieces) >= min(min_partitions or 0, total)


@given(some_ranges, st.integers(1, 200))
def test_least_number_of_pieces(wanted: list[OffsetRange], min_partitions: int) -> None:
    """Without other limits there are no more pieces than requested, and their sizes are about equal."""
    assume(wanted)
    pieces = split(wanted, SplitLimits(min_partitions=min_partitions), {})
    total = sum(item.end - item.start for item in wanted)
    assert len(pieces) == max(len(wanted), min(min_partitions, total))
    parts = {item[:2]: len([piece for piece in pieces if piece[:2] == item[:2]]) for item in wanted}
    counts = {item[:2]: item.end - item.start for item in wanted}
    largest = max(counts[key] / parts[key] for key in parts)
    # no partition is split further than the largest piece requires
    assert all(counts[key] / (parts[key] - 1) >= largest for key in parts if parts[key] > 1)


def many(count: int, records: int) -> list[OffsetRange]:
    return [OffsetRange("many", partition, 5, 5 + records) for partition in range(count)]


@pytest.mark.parametrize(
    ("wanted", "limits", "tasks"),
    [
        (many(32, 1), SplitLimits(), 32),
        (many(200, 25), SplitLimits(), 34),
        (many(200, 25), SplitLimits(min_partitions=100), 100),
        (many(200, 25), SplitLimits(min_partitions=200), 200),
        (many(200, 25), SplitLimits(max_records=25), 200),
        (many(200, 25), SplitLimits(max_records=50), 100),
        (many(200, 25), SplitLimits(max_bytes=10_000_000), 200),  # with maxBytesPerPartition ranges are not packed
        (many(200, 9_000), SplitLimits(), 200),
        (many(1_000, 1_000), SplitLimits(), 100),
        ([*many(100, 10), OffsetRange(*A, 0, 1_000_000)], SplitLimits(), 1 + 34),
    ],
)
def test_many_small_ranges_share_tasks(wanted: list[OffsetRange], limits: SplitLimits, tasks: int) -> None:
    packed = pack(wanted, limits)
    assert [item for ranges in packed for item in ranges] == wanted
    assert len(packed) == tasks


def test_tasks_have_ranges_of_few_leaders_in_turns() -> None:
    """Pieces of a partition stay in order; tasks that run at the same time ask different leaders."""
    wanted = [OffsetRange("many", number, at, at + 5) for number in range(200) for at in (5, 10)]
    packed = pack(wanted, SplitLimits(min_partitions=40), lambda _, number: number % 4)
    leaders = [{item.partition % 4 for item in ranges} for ranges in packed]
    assert leaders == [{number % 4} for number in range(40)]
    in_order = [item for ranges in packed for item in ranges if item.partition == 7]
    assert in_order == [OffsetRange("many", 7, 5, 10), OffsetRange("many", 7, 10, 15)]


@given(
    st.lists(st.integers(1, 100) | st.integers(1, 100_000), max_size=300),
    st.builds(SplitLimits, st.none() | st.integers(1, 400), st.none() | st.integers(1, 20_000)),
    st.integers(1, 50),
)
def test_packing_keeps_every_range_and_the_limits(counts: list[int], limits: SplitLimits, brokers: int) -> None:
    wanted = [OffsetRange("p", partition, 0, count) for partition, count in enumerate(counts)]
    packed = pack(wanted, limits)
    assert [item for ranges in packed for item in ranges] == wanted
    packed = pack(wanted, limits, lambda _, partition: partition % brokers if partition % 11 else None)
    assert sorted(item for ranges in packed for item in ranges) == wanted
    assert len(packed) >= min(len(wanted), limits.min_partitions or 0)
    for ranges in packed:
        assert ranges
        records = sum(item.end for item in ranges)
        assert len(ranges) == 1 or records <= min(10_000, limits.max_records or 10_000)
