"""Look up times in the segments of a log, for ListOffsets. Ignores records before the log's start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from spark_klog.log.segments.segment import Segment, Steps

_LATEST, _EARLIEST = -1, -2
_Found = tuple[int, int] | None


def offset_for_timestamp(segments: Sequence[Segment], start_offset: int, timestamp: int) -> Steps[_Found]:
    """(timestamp, offset) of the first record with a timestamp (ms) of at least `timestamp`, or None."""
    for segment in _with_records(segments, start_offset):
        found = yield from segment.record_at(timestamp, start_offset)
        if found is not None:
            return found
    return None


def max_timestamp(segments: Sequence[Segment], start_offset: int) -> Steps[_Found]:
    """(timestamp, offset) of the record with the largest timestamp; None for an empty log."""
    timestamp = -1
    for segment in _with_records(segments, start_offset):
        timestamp = max(timestamp, (yield from segment.max_timestamp_from(start_offset)))
    return (yield from offset_for_timestamp(segments, start_offset, timestamp)) if timestamp >= 0 else None


def offsets_before(
    segments: Sequence[Segment], start_offset: int, end_offset: int, timestamp: int, count: int
) -> list[int]:
    """At most `count` offsets for ListOffsets version 0, the largest first.

    These are the first offsets of segments started before `timestamp` (ms), and for -1 (latest) the end of the log; for
    -2 (earliest) only the log's first offset.
    """
    if timestamp == _EARLIEST:
        found = [start_offset]
    else:
        starts = [
            max(segment.base_offset, start_offset)
            for segment in segments
            if timestamp == _LATEST or segment.made_ms <= timestamp
        ]
        ends = [end_offset] if timestamp == _LATEST and end_offset > starts[-1] else []
        found = [*ends, *reversed(starts)]
    return found[: max(0, count)]


def _with_records(segments: Sequence[Segment], start_offset: int) -> Iterator[Segment]:
    """The segments that do not lie completely before the start."""
    for segment, following in pairwise(segments):
        if following.base_offset > start_offset:
            yield segment
    yield segments[-1]
