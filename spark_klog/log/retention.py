"""Which segments retention deletes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from spark_klog.log.config import LogConfig
from spark_klog.log.segment import Segment


class SegmentFacts(NamedTuple):
    """A segment with offsets below `end`; its largest timestamp (ms), or when it was written where it has none."""

    end: int
    size: int
    newest_ms: int


def facts_of(segments: Sequence[Segment], end_offset: int) -> Iterator[SegmentFacts]:
    """What retention asks of the segments of a log, each when it comes to it."""
    ends = [segment.base_offset for segment in segments[1:]] + [end_offset]
    for segment, end in zip(segments, ends, strict=True):
        newest = segment.max_timestamp
        yield SegmentFacts(end, segment.size, newest if newest >= 0 else segment.made_ms)


def expired(segments: Iterable[SegmentFacts], config: LogConfig, size: int, start_offset: int, now_ms: int) -> int:
    """How many of the oldest segments may be deleted; `size` is that of all, the active one is among them.

    A segment goes where all of it lies before `start_offset`; with cleanup.policy=delete also where its newest record
    is older than retention.ms, or the log would hold retention.bytes without it. It ends at the first that may not.
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
