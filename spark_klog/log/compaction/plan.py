"""Decide what part of a log to compact and when: pure functions over the sizes and times of segments.

    clean segments | first dirty offset | cleanable segments | first uncleanable offset | uncleanable ones, active one

The first dirty offset is the cleaner's checkpoint. Uncleanable are the active segment, all from the last stable offset
on, and all from the first segment on with a record younger than min.compaction.lag.ms.

Sources: Kafka's documentation, "Log Compaction"; KIP-58 (min.compaction.lag.ms), KIP-354 (max.compaction.lag.ms).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from spark_klog.log.config import LogConfig
from spark_klog.records.kernels.reference import MAX_RELATIVE


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment. Sizes in bytes, times in ms.

    `first_timestamp` is the largest of its first batch, or -1; `largest_timestamp` is the segment's, or `last_modified`
    if it has none; `last_modified` is the file's.
    """

    base_offset: int
    size: int
    first_timestamp: int
    largest_timestamp: int
    last_modified: int
    index_size: int = 0
    time_index_size: int = 0


@dataclass(frozen=True, slots=True)
class Cleanable:
    """The cleanable part of a log, sizes in bytes.

    `first_uncleanable_offset` is the start of a segment.
    """

    first_dirty_offset: int
    first_uncleanable_offset: int
    clean_bytes: int
    cleanable_bytes: int
    is_due: bool

    @property
    def dirty_ratio(self) -> float:
        """The dirty fraction of the bytes; the log with the largest is cleaned first."""
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0


def cleanable(
    segments: Sequence[SegmentInfo],
    config: LogConfig,
    *,
    checkpoint: int | None,
    log_start_offset: int,
    log_end_offset: int,
    last_stable_offset: int,
    now: int,
) -> Cleanable:
    """The cleanable part of a log's segments (at least one, in order, the last one active); `now` in ms.

    `checkpoint` is the end of the last round, None before the first. It may be outside the log.
    """
    first_dirty = log_start_offset
    if checkpoint is not None and log_start_offset <= checkpoint <= log_end_offset:
        first_dirty = checkpoint
    active = segments[-1].base_offset
    dirty = _between(segments, first_dirty, active)

    bounds = [last_stable_offset, active]
    if config.min_compaction_lag_ms > 0:
        youngest = now - config.min_compaction_lag_ms
        bounds += [segment.base_offset for segment in dirty if segment.largest_timestamp > youngest][:1]
    uncleanable = _between(segments, max(first_dirty, min(bounds)), active)
    first_uncleanable = uncleanable[0].base_offset if uncleanable else active

    # As in Kafka, the segment that contains the first dirty offset counts as clean and as dirty.
    clean_bytes = sum(segment.size for segment in segments if segment.base_offset < first_dirty)
    cleanable_bytes = sum(
        segment.size for segment in _between(segments, min(first_dirty, first_uncleanable), first_uncleanable)
    )
    times = [segment.first_timestamp for segment in dirty if segment.first_timestamp > 0]
    is_late = bool(times) and now - min(times) > max(config.max_compaction_lag_ms, 0)
    ratio_is_due = cleanable_bytes > config.min_cleanable_dirty_ratio * (clean_bytes + cleanable_bytes)
    return Cleanable(
        first_dirty,
        first_uncleanable,
        clean_bytes,
        cleanable_bytes,
        ratio_is_due or (is_late and cleanable_bytes > 0),
    )


def retains_legacy_tombstones(
    segments: Sequence[SegmentInfo], segment: SegmentInfo, first_dirty_offset: int, delete_retention: int
) -> bool:
    """Whether `Cleaner.clean` keeps tombstones of magic 0 and 1 in `segment`; `delete_retention` in ms.

    They expire if the segment was last modified that long before the last clean segment.
    """
    clean = [other for other in segments if other.base_offset < first_dirty_offset]
    horizon = clean[-1].last_modified - delete_retention if clean else 0
    return segment.last_modified > horizon


def group_segments(
    segments: Sequence[SegmentInfo], config: LogConfig, first_uncleanable_offset: int
) -> list[list[SegmentInfo]]:
    """Group the segments to clean, in order: each group becomes one new segment.

    A group of several segments fits into one segment, its indexes, and their range of relative offsets.
    """
    groups: list[list[SegmentInfo]] = []
    for number, segment in enumerate(segments, start=1):
        end = segments[number].base_offset if number < len(segments) else first_uncleanable_offset
        if groups and _fits(groups[-1], segment, end - 1, config):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _fits(group: Sequence[SegmentInfo], segment: SegmentInfo, last_offset: int, config: LogConfig) -> bool:
    members = [*group, segment]
    return (
        sum(member.size for member in members) <= config.segment_bytes
        and sum(member.index_size for member in members) <= config.segment_index_bytes
        and sum(member.time_index_size for member in members) <= config.segment_index_bytes
        # an empty segment adds no offset, whatever its name
        and (segment.size == 0 or last_offset - group[0].base_offset <= MAX_RELATIVE)
    )


def _between(segments: Sequence[SegmentInfo], start: int, end: int) -> Sequence[SegmentInfo]:
    """The segments with offsets in [start, end)."""
    if start >= end:
        return ()
    first = max(0, bisect_right([segment.base_offset for segment in segments], start) - 1)
    return [segment for segment in segments[first:] if segment.base_offset < end]
