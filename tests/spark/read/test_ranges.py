"""Planning of ranges that are read and that are lost, by tables and by properties. Limits are in test_limits.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from spark_klog.client.places import (
    BeforeEndSpec,
    GroupSpec,
    Offsets,
    OffsetSpec,
    Spec,
    TimeSpec,
    check_covers,
    parse_offsets,
    parse_timestamps,
)
from spark_klog.errors import ConfigError, StartAfterEnd
from spark_klog.spark.read.pushdown import Pushed
from spark_klog.spark.read.ranges import (
    DELETED,
    NOT_YET,
    RECREATED,
    RETENTION,
    TRUNCATED,
    Lost,
    OffsetRange,
    beyond,
    check_ends,
    check_order,
    clip,
    nonempty_ranges,
    plan_micro_batch,
    unread,
)
from spark_klog.spark.versions import EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual

A, B, C = ("a", 0), ("a", 1), ("b", 0)
COMPARISONS: dict[Any, Callable[[int, int], bool]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


def offsets_spec(text: str) -> Spec:
    return parse_offsets("x", text, lambda: 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":{"0":1}}', "missing: a-1, b-0$"),
        ('{"a":{"0":1,"1":1},"b":{"0":1,"7":1},"c":{"0":1}}', "not read: b-7, c-0$"),
        ('{"a":{"0":1,"2":1},"b":{"0":1}}', "missing: a-1; not read: a-2$"),
    ],
)
def test_check_covers_names_what_differs(text: str, message: str) -> None:
    for spec in (offsets_spec(text), parse_timestamps("x", text, True)):
        with pytest.raises(ConfigError, match=f"option startingOffsets must name exactly .*: .*{message}"):
            check_covers("startingOffsets", spec, [A, B, C])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":"earliest"}', "missing: b-0$"),
        ('{"a":{"0":1},"b":"latest"}', "missing: a-1$"),
        ('{"a":"earliest","b":{"0":1},"c":"earliest"}', "not read: topic c$"),
        ('{"b":{"0":1,"1":1},"c":-1}', "missing: a-0, a-1; not read: b-1, topic c$"),
    ],
)
def test_check_covers_names_topics(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"option startingOffsets must name exactly .*: .*{message}"):
        check_covers("startingOffsets", offsets_spec(text), [A, B, C])


def test_the_offsets_of_whole_topics() -> None:
    spec = offsets_spec('{"a":"earliest","b":{"0":7}}')
    check_covers("startingOffsets", spec, [A, B, C])
    assert isinstance(spec, OffsetSpec)
    assert spec.values([A, B, C, ("a", 2)]) == {A: -2, B: -2, ("a", 2): -2, C: 7}
    check_order(spec, offsets_spec('{"a":{"0":0,"1":3},"b":"latest"}'), [A, B, C], "startingX", "endingY")


START_AFTER_END = [
    (OffsetSpec(each=((A, 5), (B, 3))), OffsetSpec(each=((A, 4), (B, 3))), "a-0 from 5 to 4"),
    (OffsetSpec(each=((A, 5), (B, 3))), OffsetSpec(each=((A, 0), (B, 0))), "a-0 from 5 to 0, a-1 from 3 to 0"),
    (TimeSpec(1000), TimeSpec(each=((A, 999), (B, 1000))), "a-0 from 1000 to 999"),
]


@pytest.mark.parametrize(("start", "end", "names"), START_AFTER_END)
def test_a_start_after_its_end_is_refused(start: Spec, end: Spec, names: str) -> None:
    with pytest.raises(StartAfterEnd) as caught:
        check_order(start, end, [A, B], "startingX", "endingY")
    assert str(caught.value) == f"[KLOG_START_OFFSET_AFTER_END_OFFSET] startingX lies after endingY: {names}"


def test_a_start_after_its_end_is_refused_when_both_are_known() -> None:
    check_ends({A: 5, B: 10}, {A: 5, B: 10}, "startingX", "endingY")
    with pytest.raises(StartAfterEnd) as caught:
        check_ends({A: 5, B: 9}, {A: 4, B: 10}, "startingX", "endingY")
    assert str(caught.value).endswith("startingX lies after endingY: a-0 from 5 to 4")


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (OffsetSpec(each=((A, 5), (B, 3))), OffsetSpec(each=((A, 5), (B, -1)))),
        (OffsetSpec(-2), OffsetSpec(each=((A, 0), (B, 0)))),
        (OffsetSpec(each=((A, 5), (B, 3))), OffsetSpec(-1)),
        (TimeSpec(1000), TimeSpec(1000)),
        (TimeSpec(1000), OffsetSpec(each=((A, 0), (B, 0)))),
        (BeforeEndSpec(5), BeforeEndSpec(7)),
        (GroupSpec("g"), OffsetSpec(each=((A, 0), (B, 0)))),
    ],
)
def test_what_may_be_in_order(start: Spec, end: Spec) -> None:
    check_order(start, end, [A, B], "startingX", "endingY")


@pytest.mark.parametrize(
    "spec",
    [
        OffsetSpec(-1),
        OffsetSpec(each=((A, 5), (B, -1))),
        TimeSpec(0),
        TimeSpec(each=((A, 5), (B, 0))),
        BeforeEndSpec(5),
        GroupSpec("g"),
    ],
)
def test_check_covers_accepts(spec: Spec) -> None:
    check_covers("x", spec, [B, A])


def test_ranges() -> None:
    start = {A: 0, B: 5, C: 7}
    assert nonempty_ranges(start, {C: 9, A: 3, B: 5, ("d", 0): 4}) == [
        OffsetRange("a", 0, 0, 3),
        OffsetRange("b", 0, 7, 9),
    ]
    assert nonempty_ranges(start, {A: 0, B: 4}) == []


def test_waiting() -> None:
    assert unread({A: 1, B: 5, ("d", 0): 0}, {A: 4, B: 3, C: 9}) == {A: 3, B: 0, C: 0}


@pytest.mark.parametrize(
    ("wanted", "available", "kept", "cause"),
    [
        ((2, 8), (0, 10), (2, 8), None),
        ((0, 10), (0, 10), (0, 10), None),
        ((0, 10), (3, 10), (3, 10), RETENTION),
        ((0, 12), (0, 10), (0, 10), NOT_YET),
        ((0, 12), (3, 10), (3, 10), RETENTION),
        ((10, 12), (0, 10), None, NOT_YET),
        ((20, 22), (0, 10), None, NOT_YET),
        ((0, 3), (3, 10), None, RETENTION),
        ((0, 3), (5, 5), None, RETENTION),
    ],
)
def test_clip(wanted: Any, available: Any, kept: Any, cause: str | None) -> None:
    found = clip([OffsetRange("a", 0, *wanted)], {A: available[0]}, {A: available[1]})
    lost: Any = (*A, *wanted, *available, cause)
    assert found == ([OffsetRange(*A, *kept)] if kept else [], [lost] if cause else [])


#: (start, size) of a range that is not empty, (first offset, size) of the log
logs = st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(0, 60), st.integers(0, 60))


@given(st.dictionaries(st.sampled_from([A, B, C]), logs, min_size=1))
def test_clip_keeps_what_is_there_and_names_what_is_cut(given_logs: dict[tuple[str, int], Any]) -> None:
    wanted = [OffsetRange(*key, start, start + size) for key, (start, size, _, _) in given_logs.items()]
    earliest = {key: low for key, (_, _, low, _) in given_logs.items()}
    latest = {key: low + size for key, (_, _, low, size) in given_logs.items()}
    kept, lost = clip(wanted, earliest, latest)
    for item in wanted:
        key = item[:2]
        there = set(range(earliest[key], latest[key])) & set(range(item.start, item.end))
        mine = [one for one in kept if one[:2] == key]
        assert [set(range(one.start, one.end)) for one in mine] == ([there] if there else [])
        assert len([one for one in lost if one[:2] == key]) == (len(there) < item.end - item.start)


def test_lost_says_what_was_wanted_and_what_there_is() -> None:
    assert str(Lost("a", 0, 1, 5, 3, 4, RETENTION)) == "a-0: wanted [1, 5), available [3, 4) (retention)"
    assert str(Lost("a", 0, 5, 5, 3, 4, RETENTION)) == "a-0: wanted offset 5, available [3, 4) (retention)"


@pytest.mark.parametrize(
    ("start", "end", "is_lost"), [(11, 10, True), (11, 11, True), (11, 12, False), (10, 10, False), (7, 5, False)]
)
def test_beyond_is_what_clip_does_not_see(start: int, end: int, is_lost: bool) -> None:
    wanted = [Lost("a", 0, start, start, 2, 10, NOT_YET)] if is_lost else []
    assert beyond({A: start}, {A: end}, {A: 2}, {A: 10}) == wanted


T = "a"


@pytest.mark.parametrize(
    ("start", "end", "low", "is_recreated", "wanted", "lost"),
    [
        # nothing is lost
        (2, 8, 0, False, (2, 8), None),
        (2, 2, 0, False, None, None),
        (2, 8, 2, False, (2, 8), None),
        # retention deleted a part or all
        (2, 8, 5, False, (5, 8), (2, 5, 5, 8, RETENTION)),
        (2, 8, 8, False, None, (2, 8, 8, 8, RETENTION)),
        (2, 8, 20, False, None, (2, 8, 20, 8, RETENTION)),
        # an empty range: the next micro-batch reports what retention deleted after it
        (2, 2, 5, False, None, None),
        # the log ends before offsets already read: none of its records count as new
        (8, 5, 0, False, None, (8, 8, 0, 5, TRUNCATED)),
        (8, 5, 6, False, None, (8, 8, 6, 5, TRUNCATED)),
        # a new topic of that name is read from its start, however long it is
        (8, 5, 0, True, (0, 5), (8, 8, 0, 5, RECREATED)),
        (8, 12, 0, True, (0, 12), (8, 12, 0, 12, RECREATED)),
        (8, 8, 0, True, (0, 8), (8, 8, 0, 8, RECREATED)),
        (8, 5, 3, True, (3, 5), (8, 8, 3, 5, RECREATED)),
        (8, 0, 0, True, None, (8, 8, 0, 0, RECREATED)),
        # a new partition
        (None, 8, 0, False, (0, 8), None),
        (None, 8, 3, False, (3, 8), (0, 3, 3, 8, RETENTION)),
        (None, 0, 0, False, None, None),
        (None, 8, 0, True, (0, 8), None),
        # deleted before it was read, after or before the end was known
        (2, 8, None, False, None, (2, 8, -1, -1, DELETED)),
        (8, 5, None, False, None, None),
        (2, 8, None, True, None, (2, 8, -1, -1, DELETED)),
        (2, None, None, False, None, (2, 2, -1, -1, DELETED)),
        (2, None, 0, False, None, (2, 2, -1, -1, DELETED)),
        (None, 8, None, False, None, (0, 8, -1, -1, DELETED)),
    ],
)
def test_plan_batch(
    start: int | None, end: int | None, low: int | None, is_recreated: bool, wanted: Any, lost: Any
) -> None:
    def only(value: int | None) -> Offsets:
        return {} if value is None else {A: value}

    found = plan_micro_batch(only(start), only(end), only(low), [T] if is_recreated else [])
    assert found == (
        [OffsetRange(*A, *wanted)] if wanted else [],
        [Lost(*A, *lost)] if lost else [],
    )


def test_a_start_that_the_log_has_not_reached_yet() -> None:
    assert plan_micro_batch({A: 8}, {A: 5}, {A: 2}, [], is_first=True) == ([], [Lost(*A, 8, 8, 2, 5, NOT_YET)])


KEYS = [(topic, partition) for topic in ("a", "b", "c") for partition in range(3)]
some_offsets = st.dictionaries(st.sampled_from(KEYS), st.integers(0, 40))


@given(some_offsets, some_offsets, some_offsets, st.sets(st.sampled_from(["a", "b"])))
def test_plan_batch_accounts_for_every_offset(
    start: Offsets, end: Offsets, earliest: Offsets, recreated: set[str]
) -> None:
    planned, lost = plan_micro_batch(start, end, earliest, recreated)
    assert all(item.start < item.end for item in planned)
    assert all(item.start <= item.end for item in lost)
    assert len({item[:2] for item in planned}) == len(planned)
    assert len({item[:2] for item in lost}) == len(lost), "one cause for a partition"
    assert {item[:2] for item in (*planned, *lost)} <= start.keys() | end.keys()
    read = {item[:2]: set(range(item.start, item.end)) for item in planned}
    gone = {item[:2]: set(range(item.start, item.end)) for item in lost}
    causes = {item[:2]: item.cause for item in lost}
    for key in start.keys() | end.keys():
        first = start.get(key, 0)
        wanted = set(range(first, end.get(key, first)))
        assert all(offset >= earliest[key] for offset in read.get(key, ()))
        if causes.get(key) == RECREATED:
            assert key[0] in recreated
            assert read.get(key, set()) == set(range(earliest[key], end[key]))
            assert gone[key] == wanted
        else:
            # each offset is either read or lost
            assert read.get(key, set()) | gone.get(key, set()) == wanted
            assert not read.get(key, set()) & gone.get(key, set())
        is_there = key in end and key in earliest
        if key not in end or key not in earliest:
            assert causes.get(key) == (DELETED if wanted or key not in end else None)
        if is_there and key[0] in recreated and key in start:
            assert causes[key] == RECREATED
        elif is_there and end[key] < first:
            assert causes[key] == TRUNCATED
        elif is_there:
            assert causes.get(key) == (RETENTION if wanted and first < earliest[key] else None)


@pytest.mark.parametrize("kind", COMPARISONS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bound", [-1, 0, 4, 9, 10])
def test_a_pushed_filter_keeps_what_passes(kind: Any, bound: int) -> None:
    """Spark does not look at these rows again."""
    passing = [number for number in range(10) if COMPARISONS[kind](number, bound)]
    pushed = Pushed()
    assert pushed.push([kind(("offset",), bound)]) == []
    kept = pushed.clip(OffsetRange("a", 0, 0, 10))
    assert list(range(kept.start, kept.end)) == passing
    pushed = Pushed()
    assert pushed.push([kind(("partition",), bound)]) == []
    assert [number for number in range(10) if pushed.keeps(("a", number))] == passing
