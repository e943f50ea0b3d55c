"""Look-ups by offset over the segments of a log."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from spark_klog.log.segment import FileRange, Segment
from spark_klog.log.transaction_index import AbortedTransaction
from spark_klog.records.batch import MAX_HEADER_SIZE, read_header


def read(segments: Sequence[Segment], offset: int, max_bytes: int, stop: int | None) -> FileRange | None:
    """A range of one segment's file that begins with the batch that holds `offset`; at least one batch.

    None if there is no batch before `stop`, or none at all.
    """
    for place in range(_place(segments, offset), len(segments)):
        if stop is not None and segments[place].base_offset >= stop:
            return None
        ends_within = stop is not None and (place == len(segments) - 1 or stop < segments[place + 1].base_offset)
        found = segments[place].read(offset, max_bytes, stop if ends_within else None)
        if found is not None:
            return found
    return None


def records_in(segments: Sequence[Segment], found: FileRange) -> int:
    """How many records are in the whole batches of what `read` gave; holes of compaction count as records."""
    first = read_header(found.file.read_at(found.position, min(found.size, MAX_HEADER_SIZE)))
    segment = segments[_place(segments, first.base_offset)]
    # else retention or compaction has just taken it away
    return segment.records_in(found, first.base_offset) if segment.file is found.file else 0


def offset_after(segments: Sequence[Segment], end_offset: int, offset: int, found: FileRange) -> int:
    """An offset beyond all records in what `read` gave from `offset` on: by the index, so maybe some batches.

    `end_offset` is that of the log.
    """
    place = _place(segments, offset)
    while place < len(segments) - 1 and segments[place].file is not found.file:
        place += 1
    following = segments[place + 1].base_offset if place < len(segments) - 1 else end_offset
    return segments[place].offset_after(found) or following


def aborted_transactions(segments: Sequence[Segment], first: int, end: int) -> list[AbortedTransaction]:
    """Those with records in [first, end), for read_committed consumers.

    `DecodeError` for a damaged index, OSError.
    """
    aborted: list[AbortedTransaction] = []
    for segment in segments[_place(segments, first) :]:
        overlapping, is_complete = segment.transaction_index.overlapping(first, end)
        aborted += overlapping
        if is_complete:
            break
    return aborted


def _place(segments: Sequence[Segment], offset: int) -> int:
    """Which segment has the offset; the first one for what lies before."""
    return max(0, bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1)
