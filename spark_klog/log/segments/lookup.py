"""Look up offsets in the segments of a log."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from spark_klog.log.segments.segment import Segment
from spark_klog.log.segments.segment_files import FileRange
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.formats.batch import MAX_HEADER_SIZE, read_header


def read(segments: Sequence[Segment], offset: int, max_bytes: int, stop: int | None) -> FileRange | None:
    """A range of one segment's file that starts with the batch that contains `offset`; at least one batch.

    None if there is no batch, or none before `stop`.
    """
    for index in range(_index_at(segments, offset), len(segments)):
        if stop is not None and segments[index].base_offset >= stop:
            return None
        ends_within = stop is not None and (index == len(segments) - 1 or stop < segments[index + 1].base_offset)
        found = segments[index].read(offset, max_bytes, stop if ends_within else None)
        if found is not None:
            return found
    return None


def records_in(segments: Sequence[Segment], found: FileRange) -> int:
    """The number of records in the complete batches of a range from `read`; gaps from compaction count as records."""
    first = read_header(found.file.read_at(found.position, min(found.size, MAX_HEADER_SIZE)))
    segment = segments[_index_at(segments, first.base_offset)]
    # 0 if retention or compaction has just removed the segment.
    return segment.records_in(found, first.base_offset) if segment.file is found.file else 0


def offset_after(segments: Sequence[Segment], end_offset: int, offset: int, found: FileRange) -> int:
    """An offset after all records of a range that `read` returned for `offset`; by the index, so maybe some batches on.

    `end_offset` is that of the log.
    """
    index = _index_at(segments, offset)
    while index < len(segments) - 1 and segments[index].file is not found.file:
        index += 1
    following = segments[index + 1].base_offset if index < len(segments) - 1 else end_offset
    return segments[index].offset_after(found) or following


def aborted_transactions(segments: Sequence[Segment], first: int, end: int) -> list[AbortedTransaction]:
    """The aborted transactions with records in [first, end), for read_committed consumers.

    `DecodeError` for a damaged index, OSError.
    """
    aborted: list[AbortedTransaction] = []
    for segment in segments[_index_at(segments, first) :]:
        overlapping, is_complete = segment.transaction_index.overlapping(first, end)
        aborted += overlapping
        if is_complete:
            break
    return aborted


def _index_at(segments: Sequence[Segment], offset: int) -> int:
    """The index of the segment that contains the offset; 0 for earlier offsets."""
    return max(0, bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1)
