"""Decide which segments retention deletes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from spark_klog.log.config import LogConfig
from spark_klog.log.segments.segment import Segment


class SegmentFacts(NamedTuple):
    """A segment: its end offset, size in bytes, and largest timestamp (ms) or else the time of its last write."""

    end: int
    size: int
    newest_ms: int


def facts_of(segments: Sequence[Segment], end_offset: int) -> Iterator[SegmentFacts]:
    """Yield the facts of a log's segments, lazily: retention rarely needs more than the first."""
    ends = [segment.base_offset for segment in segments[1:]] + [end_offset]
    for segment, end in zip(segments, ends, strict=True):
        newest = segment.max_timestamp
        yield SegmentFacts(end, segment.size, newest if newest >= 0 else segment.made_ms)


def expired(segments: Iterable[SegmentFacts], config: LogConfig, size: int, start_offset: int, now_ms: int) -> int:
    """How many of the oldest segments to delete; `size` is the sum of all segments, including the active one.

    A segment is deleted if it ends at or before `start_offset`; with cleanup.policy=delete also if its newest record is
    older than retention.ms, or if the log without it still has retention.bytes. The count stops at the first to keep.
    """
    count = 0
    for segment in segments:
        too_old = config.deletes and 0 <= config.retention_ms < now_ms - segment.newest_ms
        too_much = config.deletes and 0 <= config.retention_bytes <= size - segment.size
        if not (segment.end <= start_offset or too_old or too_much):
            break
        count += 1
        size -= segment.size
    return count
