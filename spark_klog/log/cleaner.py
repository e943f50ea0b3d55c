"""Compacting a log: compaction.py's two passes over its segments, and the files around them.

    *.log.cleaned   is being written: not part of the log
    *.log.swap      whole and flushed: takes the place of its group of segments, after a crash too (recovery.py)

The passes only read sealed segments, so that they may run beside appends and reads; `swap` is for the thread that
changes the log. A damaged batch ends a round: `LogCorrupted` names it, and what was cleaned before stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from spark_klog.errors import LogCorrupted
from spark_klog.log.compaction import Cleaner, CleaningRound, LastRecord, build_map
from spark_klog.log.compaction_plan import (
    Cleanable,
    SegmentInfo,
    cleanable,
    group_segments,
    retains_legacy_tombstones,
)
from spark_klog.log.file_system import FileInfo, write_all
from spark_klog.log.offset_map import OffsetMap
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.recovery import CLEANED, SWAP
from spark_klog.log.scan import headers
from spark_klog.log.segment import Segment
from spark_klog.log.transaction_index import encode_transaction_index
from spark_klog.records.batch import Header

_log = logging.getLogger(__name__)
_WRITE_BYTES = 1024 * 1024


def plan(log: PartitionLog, checkpoint: int | None, now_ms: int) -> Cleanable:
    """What of the log can be cleaned, and whether it is due; `checkpoint` is where the last round came to."""
    return cleanable(
        [_info(segment) for segment in log.segments],
        log.config,
        checkpoint=checkpoint,
        log_start_offset=log.start_offset,
        log_end_offset=log.end_offset,
        last_stable_offset=log.last_stable_offset,
        now=now_ms,
    )


def compact(
    log: PartitionLog,
    found: Cleanable,
    offsets: OffsetMap,
    now_ms: int,
    in_owner: Callable[[Callable[[], bool]], bool] = lambda change: change(),
    check: Callable[[], None] = lambda: None,
) -> int:
    """One round over what `plan` found; the offset up to which the log is clean then.

    `in_owner` runs a change of the log where appends run, too; `check` is called for each batch, and may raise to end
    the round. `LogCorrupted`, OSError: the groups before stay cleaned.
    """
    segments = [segment for segment in log.segments if segment.base_offset < found.first_uncleanable_offset]
    aborted = [item for segment in segments for item in segment.transaction_index.read()]
    offsets.clear()
    dirty = [
        segment
        for segment, following in zip(segments, [*segments[1:], None], strict=True)
        if following is None or following.base_offset > found.first_dirty_offset
    ]
    end = build_map(
        chain.from_iterable(_batches(segment, check) for segment in dirty),
        offsets,
        found.first_dirty_offset,
        found.first_uncleanable_offset,
        aborted,
    )
    producers = {
        producer_id: LastRecord(item.batches[-1].last_offset if item.batches else None, item.epoch)
        for producer_id, item in list(log.producers.producers.items())
    }
    cleaning = CleaningRound(end, found.first_uncleanable_offset, now_ms, log.config.delete_retention_ms, producers)
    cleaner = Cleaner(offsets, cleaning, aborted)
    by_base = {segment.base_offset: segment for segment in segments}
    infos = [_info(segment) for segment in segments if segment.base_offset < end]
    for group in group_segments(infos, log.config, found.first_uncleanable_offset):
        old = tuple(by_base[info.base_offset] for info in group)
        kept = [
            retains_legacy_tombstones(infos, info, found.first_dirty_offset, log.config.delete_retention_ms)
            for info in group
        ]
        size = _write_cleaned(log, cleaner, old, kept, check)
        if not in_owner(partial(swap, log, old, size)):
            return found.first_dirty_offset
    _log.info("%s compacted up to offset %d: %s", log.directory.name, end, cleaner.stats)
    return end


def _info(segment: Segment) -> SegmentInfo:
    timestamp = segment.max_timestamp
    return SegmentInfo(
        segment.base_offset,
        segment.size,
        segment.first_timestamp(),
        timestamp if timestamp >= 0 else segment.made_ms,
        segment.made_ms,
        segment.offset_index.size,
        segment.time_index.size,
    )


def _batches(segment: Segment, check: Callable[[], None]) -> Iterator[tuple[Header, memoryview]]:
    """All batches of a sealed segment; `LogCorrupted` where it does not end with a whole one."""
    end = 0
    for position, header in headers(segment.file, segment.path, 0, segment.size):
        check()
        yield header, memoryview(segment.file.read_at(position, header.size))
        end = position + header.size
    if end != segment.size:
        raise LogCorrupted(f"{segment.path}: no whole batch at position {end}, {segment.size - end} bytes are left")


def _write_cleaned(
    log: PartitionLog,
    cleaner: Cleaner,
    old: Sequence[Segment],
    legacy_kept: Sequence[bool],
    check: Callable[[], None],
) -> int:
    """Write the segment that takes the place of `old`, to a name that is not the log's; its size."""
    path = old[0].path.with_name(old[0].path.name + CLEANED)
    log.files.remove(path)
    file = log.files.open(path)
    size, waiting = 0, bytearray()
    for segment, kept in zip(old, legacy_kept, strict=True):
        for _, batch in cleaner.clean(_batches(segment, check), kept):
            waiting += batch
            if len(waiting) >= _WRITE_BYTES:
                write_all(file, size, waiting)
                size += len(waiting)
                waiting.clear()
    write_all(file, size, waiting)
    file.sync()
    file.close()
    aborted = cleaner.take_aborted()
    if aborted:
        index = old[0].transaction_index.path
        log.files.replace(index.with_name(index.name + CLEANED), encode_transaction_index(aborted))
    return size + len(waiting)


def swap(log: PartitionLog, old: tuple[Segment, ...], size: int) -> bool:
    """Put the cleaned segment in the place of `old`; False where the log has them no more. OSError."""
    files, base = log.files, old[0]
    if not set(old) <= set(log.segments):
        return False
    there = files.names(log.directory)
    names = [name for name in (base.transaction_index.path.name, base.path.name) if name + CLEANED in there]
    for name in names:  # the log last: from then on it is in force
        files.rename(log.directory / (name + CLEANED), log.directory / (name + SWAP))
    files.sync_folder(log.directory)
    info = FileInfo(size, old[-1].made_ms)
    has_transactions = base.transaction_index.path.name in names
    new = Segment(files, log.directory, base.base_offset, base.interval, info, has_transactions=has_transactions)
    log.delete_files(old)
    for name in names:
        files.rename(log.directory / (name + SWAP), log.directory / name)
    files.sync_folder(log.directory)
    log.replace_segments(old, new)
    return True
