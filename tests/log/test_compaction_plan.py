"""Plans of compaction: which part of a log is cleaned, when, and in which groups of segments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from spark_klog.log.compaction.plan import SegmentInfo, cleanable, group_segments, retains_legacy_tombstones
from spark_klog.log.config import LogConfig

NOW = 1_700_000_000_000
HOUR = 3_600_000
#: Segments of 100 offsets; the active one begins at 400. First records are 50 to 10 hours old, last ones 45 to 5.
SEGMENTS = [
    SegmentInfo(100 * n, size, NOW - hours * HOUR, NOW - (hours - 5) * HOUR, NOW - (hours - 5) * HOUR)
    for n, (size, hours) in enumerate([(1000, 50), (200, 40), (300, 30), (500, 20), (7000, 10)])
]
LAG = 30 * HOUR


# Columns: checkpoint, last stable offset, min.compaction.lag.ms; first dirty and first uncleanable offset, clean and
# cleanable bytes.
@pytest.mark.parametrize(
    ("checkpoint", "stable", "lag", "expected"),
    [
        (None, 450, 0, (0, 400, 0, 2000)),
        (0, 450, 0, (0, 400, 0, 2000)),
        (200, 450, 0, (200, 400, 1200, 800)),
        (400, 450, 0, (400, 400, 2000, 0)),
        (430, 450, 0, (430, 400, 9000, 0)),
        (450, 450, 0, (450, 400, 9000, 0)),
        # nothing from the segment with the last stable offset on
        (0, 400, 0, (0, 400, 0, 2000)),
        (0, 399, 0, (0, 300, 0, 1500)),
        (0, 300, 0, (0, 300, 0, 1500)),
        (200, 120, 0, (200, 200, 1200, 0)),
        # a full map ended the last round within a segment, which then counts as clean and as cleanable
        (250, 450, 0, (250, 400, 1500, 800)),
        (250, 260, 0, (250, 200, 1500, 0)),
        # nothing from the first segment with a record younger than the lag on
        (0, 450, LAG, (0, 200, 0, 1200)),
        (0, 450, LAG - 5 * HOUR, (0, 300, 0, 1500)),
        (0, 450, LAG - 5 * HOUR + 1, (0, 200, 0, 1200)),
        (300, 450, LAG, (300, 300, 1500, 0)),
        # a checkpoint beyond the log's end: all is dirty
        (451, 450, 0, (0, 400, 0, 2000)),
    ],
)
def test_the_parts_of_a_log(checkpoint: int | None, stable: int, lag: int, expected: tuple[int, int, int, int]) -> None:
    found = cleanable(
        SEGMENTS,
        LogConfig(min_compaction_lag_ms=lag),
        checkpoint=checkpoint,
        log_start_offset=0,
        log_end_offset=450,
        last_stable_offset=stable,
        now=NOW,
    )
    assert (
        found.first_dirty_offset,
        found.first_uncleanable_offset,
        found.clean_bytes,
        found.cleanable_bytes,
    ) == expected
    total = found.clean_bytes + found.cleanable_bytes
    assert found.dirty_ratio == pytest.approx(found.cleanable_bytes / total)


@pytest.mark.parametrize(
    ("checkpoint", "ratio", "max_lag", "expected"),
    [
        (200, 0.39, 1 << 62, True),
        (200, 0.4, 1 << 62, False),
        (200, 0.0, 1 << 62, True),
        (400, 0.0, 1 << 62, False),
        (None, 0.99, 1 << 62, True),
        # the oldest dirty record is 30 hours old
        (200, 0.9, 30 * HOUR, False),
        (200, 0.9, 30 * HOUR - 7, True),
        (300, 0.9, 20 * HOUR, False),
        (400, 0.9, 0, False),
    ],
)
def test_when_it_is_due(checkpoint: int | None, ratio: float, max_lag: int, expected: bool) -> None:
    found = cleanable(
        SEGMENTS,
        LogConfig(min_cleanable_dirty_ratio=ratio, max_compaction_lag_ms=max_lag),
        checkpoint=checkpoint,
        log_start_offset=0,
        log_end_offset=450,
        last_stable_offset=450,
        now=NOW,
    )
    assert found.is_due == expected


@pytest.mark.parametrize("checkpoint", [None, 50])
def test_segments_before_the_first_one_were_deleted(checkpoint: int | None) -> None:
    found = cleanable(
        SEGMENTS[2:],
        LogConfig(),
        checkpoint=checkpoint,
        log_start_offset=200,
        log_end_offset=450,
        last_stable_offset=450,
        now=NOW,
    )
    assert (found.first_dirty_offset, found.clean_bytes, found.cleanable_bytes) == (200, 0, 800)


def test_an_empty_log_is_never_due() -> None:
    empty = SegmentInfo(0, 0, -1, NOW, NOW)
    found = cleanable(
        [empty],
        LogConfig(min_cleanable_dirty_ratio=0.0, max_compaction_lag_ms=0),
        checkpoint=None,
        log_start_offset=0,
        log_end_offset=0,
        last_stable_offset=0,
        now=NOW,
    )
    assert (found.is_due, found.dirty_ratio, found.first_uncleanable_offset) == (False, 0.0, 0)


@pytest.mark.parametrize(
    ("number", "first_dirty", "retention", "expected"),
    [
        (0, 200, 10 * HOUR, True),  # modified 45 hours ago; the last clean segment 35 hours ago
        (0, 200, 10 * HOUR - 1, False),
        (1, 200, 0, False),
        (2, 200, 0, True),
        (0, 0, 0, True),
    ],
)
def test_tombstones_of_old_magics(number: int, first_dirty: int, retention: int, expected: bool) -> None:
    segments = [replace(segment, last_modified=segment.last_modified + 1) for segment in SEGMENTS[:1]] + SEGMENTS[1:]
    assert retains_legacy_tombstones(segments, segments[number], first_dirty, retention) is expected


# Ranges of a segment's number of offsets, its size, and the sizes of its indexes.
PARTS = ((1, 2**30), (1, 600), (0, 50), (0, 50))
CONFIG = LogConfig(segment_bytes=1000, segment_index_bytes=80)


def _segment(base_offset: int, size: int, index_size: int = 0, time_index_size: int = 0) -> SegmentInfo:
    return SegmentInfo(base_offset, size, NOW, NOW, NOW, index_size, time_index_size)


@pytest.mark.parametrize(
    ("segments", "end", "expected"),
    [
        ([], 0, []),
        ([_segment(0, 2000)], 10, [[0]]),
        ([_segment(0, 500), _segment(10, 500), _segment(20, 1)], 30, [[0, 10], [20]]),
        ([_segment(0, 500), _segment(10, 501), _segment(20, 499)], 30, [[0], [10, 20]]),
        ([_segment(0, 1, 40, 0), _segment(10, 1, 40, 0), _segment(20, 1, 1, 0)], 30, [[0, 10], [20]]),
        ([_segment(0, 1, 0, 40), _segment(10, 1, 0, 41)], 30, [[0], [10]]),
        # a segment's last offset is the next base offset less 1; the last segment's is the end less 1
        ([_segment(0, 1), _segment(10, 1)], 2**31, [[0, 10]]),
        ([_segment(0, 1), _segment(10, 1)], 2**31 + 1, [[0], [10]]),
        ([_segment(0, 1), _segment(10, 1), _segment(2**31 + 1, 1)], 2**31 + 9, [[0], [10, 2**31 + 1]]),
        ([_segment(0, 1), _segment(10, 0)], 2**40, [[0, 10]]),
    ],
)
def test_groups(segments: list[SegmentInfo], end: int, expected: list[list[int]]) -> None:
    groups = group_segments(segments, CONFIG, end)
    assert [[segment.base_offset for segment in group] for group in groups] == expected


@given(st.lists(st.tuples(*(st.integers(low, high) for low, high in PARTS)), min_size=1))
def test_groups_hold_all_and_no_more_than_a_segment_may(parts: list[tuple[int, int, int, int]]) -> None:
    base, segments = 0, []
    for offsets, *sizes in parts:
        segments.append(_segment(base, *sizes))
        base += offsets
    groups = group_segments(segments, CONFIG, base)
    assert [segment for group in groups for segment in group] == segments
    ends = [group[0].base_offset for group in groups[1:]] + [base]
    for group, end in zip(groups, ends, strict=True):
        assert sum(segment.size for segment in group) <= 1000
        assert sum(segment.index_size for segment in group) <= 80
        assert sum(segment.time_index_size for segment in group) <= 80
        assert end - 1 - group[0].base_offset < 2**31
    # and no group could have taken the first segment of the next one
    for group, following, end in zip(groups, groups[1:], ends[1:], strict=False):
        more = [*group, following[0]]
        last = following[1].base_offset if len(following) > 1 else end
        assert (
            sum(segment.size for segment in more) > 1000
            or sum(segment.index_size for segment in more) > 80
            or sum(segment.time_index_size for segment in more) > 80
            or last - 1 - group[0].base_offset >= 2**31
        )
