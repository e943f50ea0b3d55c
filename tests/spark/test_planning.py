"""Planning: pure functions, by tables and by their properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_klog.errors import ConfigError
from spark_klog.spark.offsets import OffsetSpec, parse_offsets
from spark_klog.spark.planning import (
    Lost,
    OffsetRange,
    beyond,
    check_covers,
    clip,
    limit_rows,
    ranges,
    wanted_times,
)

A, B, C = ("a", 0), ("a", 1), ("b", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":{"0":1}}', "it lacks a-1, b-0$"),
        (
            '{"a":{"0":1,"1":1},"b":{"0":1,"7":1},"c":{"0":1}}',
            "it names, and they are not read: b-7, c-0$",
        ),
        ('{"a":{"0":1,"2":1},"b":{"0":1}}', "it lacks a-1; it names, and they are not read: a-2$"),
    ],
)
def test_check_covers_names_what_differs(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"option startingOffsets must name exactly .*: {message}"):
        check_covers("startingOffsets", parse_offsets("startingOffsets", text), [A, B, C])


def test_check_covers_accepts() -> None:
    check_covers("x", OffsetSpec(-1), [A, B])
    check_covers("x", parse_offsets("x", '{"a":{"1":-1,"0":5}}'), [A, B])


def test_wanted_times() -> None:
    spec = parse_offsets("x", '{"a":{"0":5,"1":-1},"b":{"0":-2}}')
    assert wanted_times(spec, [A, B, C]) == ({A: 5}, {B: -1, C: -2})
    assert wanted_times(OffsetSpec(-2), [A, B]) == ({}, {A: -2, B: -2})


def test_ranges() -> None:
    start = {A: 0, B: 5, C: 7}
    assert ranges(start, {C: 9, A: 3, B: 5, ("d", 0): 4}) == [OffsetRange("a", 0, 0, 3), OffsetRange("b", 0, 7, 9)]
    assert ranges(start, {A: 0, B: 4}) == []


@pytest.mark.parametrize(
    ("wanted", "available", "kept", "lost"),
    [
        ((2, 8), (0, 10), (2, 8), False),
        ((0, 10), (0, 10), (0, 10), False),
        ((0, 10), (3, 10), (3, 10), True),
        ((0, 12), (0, 10), (0, 10), True),
        ((0, 12), (3, 10), (3, 10), True),
        ((10, 12), (0, 10), None, True),
        ((20, 22), (0, 10), None, True),
        ((0, 3), (3, 10), None, True),
        ((0, 3), (5, 5), None, True),
    ],
)
def test_clip(wanted: Any, available: Any, kept: Any, lost: bool) -> None:
    found = clip([OffsetRange("a", 0, *wanted)], {A: available[0]}, {A: available[1]})
    assert found == (
        [OffsetRange("a", 0, *kept)] if kept else [],
        [Lost("a", 0, *wanted, *available)] if lost else [],
    )


def test_lost_says_what_was_wanted_and_what_there_is() -> None:
    assert str(Lost("a", 0, 1, 5, 3, 4)) == "a-0: wanted [1, 5), available [3, 4)"


@pytest.mark.parametrize(
    ("start", "end", "is_lost"), [(11, 10, True), (11, 11, True), (11, 12, False), (10, 10, False), (7, 5, False)]
)
def test_beyond_is_what_clip_does_not_see(start: int, end: int, is_lost: bool) -> None:
    wanted = [Lost("a", 0, start, start, 2, 10)] if is_lost else []
    assert beyond({A: start}, {A: end}, {A: 2}, {A: 10}) == wanted


waiting = st.dictionaries(
    st.tuples(st.sampled_from("ab"), st.integers(0, 5)),
    st.tuples(st.integers(0, 1000), st.integers(0, 5000)),
    min_size=1,
)


@given(waiting, st.integers(1, 20_000))
def test_limit_rows(partitions: dict[tuple[str, int], tuple[int, int]], rows: int) -> None:
    start = {key: begin for key, (begin, _) in partitions.items()}
    latest = {key: begin + count for key, (begin, count) in partitions.items()}
    end = limit_rows(start, latest, rows)
    taken = {key: end[key] - start[key] for key in start}
    total = sum(latest.values()) - sum(start.values())
    busy = [key for key in start if latest[key] > start[key]]
    assert end.keys() == latest.keys()
    # Never back, never beyond the log; no partition that has records is left out.
    assert all(start[key] <= end[key] <= latest[key] for key in start)
    assert all(taken[key] >= 1 for key in busy)
    # In sum `rows` but for rounding: up below one record each, down above.
    if total <= rows:
        assert end == latest
    else:
        assert rows - len(busy) <= sum(taken.values()) <= rows + len(busy)
        for key in busy:
            share = rows * (latest[key] - start[key]) / total
            assert math.floor(share) <= taken[key] <= math.ceil(share)


@given(waiting, st.integers(1, 5000), st.integers(0, 5000))
def test_limit_rows_is_monotone(partitions: dict[tuple[str, int], tuple[int, int]], rows: int, more: int) -> None:
    start = {key: begin for key, (begin, _) in partitions.items()}
    latest = {key: begin + count for key, (begin, count) in partitions.items()}
    smaller, larger = limit_rows(start, latest, rows), limit_rows(start, latest, rows + more)
    assert all(smaller[key] <= larger[key] for key in latest)


@given(waiting, st.integers(1, 500))
def test_limit_rows_gets_to_the_end(partitions: dict[tuple[str, int], tuple[int, int]], rows: int) -> None:
    at = {key: begin for key, (begin, _) in partitions.items()}
    latest = {key: begin + min(count, 300) for key, (begin, count) in partitions.items()}
    for _ in range(300 * len(at) + 1):
        if at == latest:
            return
        at = limit_rows(at, latest, rows)
    assert at == latest


def test_limit_rows_leaves_partitions_that_are_ahead_alone() -> None:
    assert limit_rows({A: 9, B: 0}, {A: 5, B: 100}, 10) == {A: 9, B: 10}
    assert limit_rows({B: 0}, {A: 5, B: 100}, 10) == {A: 5, B: 10}
