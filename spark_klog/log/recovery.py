"""Open a partition's folder: clean up after a crash, and report damage that no crash causes.

    *.log.cleaned   an unfinished compaction: removed
    *.log.swap      a finished compaction: replaces the segments that it was made from
    *.deleted       deleted segments: removed

Crash story: the log was flushed up to the recovery point. After an unclean stop, the segments beyond it are checked
batch by batch, and the log is truncated at the first bad batch, or if a segment reaches beyond the base offset of
the next one: it was never flushed. A crash does not damage batches before the recovery point, nor any batch after a
clean stop. Such damage is never truncated: `LogCorrupted` names the file and the position.

A clean start checks only the end of the log, an unclean one nothing before the recovery point. Reads report other
damage, by checksums or `LogCorrupted`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import FileInfo, FileSystem
from spark_klog.log.producer_state import SNAPSHOT, ProducerState, load_snapshot
from spark_klog.log.segments.index import IndexMemory
from spark_klog.log.segments.scan import headers
from spark_klog.log.segments.segment import (
    CLEANED,
    DELETED,
    INDEX,
    LOG,
    SWAP,
    TIME_INDEX,
    TRANSACTION_INDEX,
    Segment,
    segment_name,
)
from spark_klog.records.formats.batch_v2 import BatchHeader

_log = logging.getLogger(__name__)


def open_segments(
    files: FileSystem,
    folder: Path,
    config: LogConfig,
    *,
    clean: bool,
    recovery_point: int,
    start_offset: int,
    now_ms: int,
    memory: IndexMemory,
) -> tuple[tuple[Segment, ...], int, ProducerState]:
    """Open the log in a folder; after an unclean stop check unflushed records. `LogCorrupted`, OSError.

    Returns its segments (at least one, the last open for appends), its end, its producers.
    """
    names = _finish_renames(files, folder)
    _remove_lone_indexes(files, folder, names)
    bases = sorted(int(name[: -len(LOG)]) for name in names if name.endswith(LOG) and name[: -len(LOG)].isdecimal())
    segments = [_segment(files, folder, config, base, names, memory) for base in bases]
    empty = Segment(files, folder, start_offset, config.index_interval_bytes, FileInfo(0, now_ms), memory)
    end_offset = start_offset if not segments else segments[-1].load_end() if clean else None
    if end_offset is None:
        end_offset = _recover(segments, recovery_point, clean=clean)
    if not segments and end_offset < recovery_point:
        raise LogCorrupted(
            f"{folder} has no {LOG} files, but records up to offset {recovery_point} had been flushed. Restore them "
            f"from a copy, or go on without them, at offset {recovery_point}, with `klog log repair {folder}`"
        )
    segments = segments or [empty]
    if end_offset < recovery_point:
        raise LogCorrupted(
            f"{segments[-1].path} ends at offset {end_offset}, but had been flushed up to offset {recovery_point}: "
            f"records are missing. {_how_to_go_on(segments[-1])}"
        )
    if end_offset < start_offset:
        # All records had been deleted; new ones must not get offsets before the log's start.
        _log.warning("%s: no records left before offset %d, where the log starts", folder, start_offset)
        for segment in segments:
            segment.rename(DELETED)
        segments, end_offset = [empty], start_offset
    if empty in segments:
        empty.is_made = False
        if start_offset:  # only the file's name tells the next start where the log begins
            empty.open_for_appends()
    producers = _producers(files, folder, names, segments, end_offset, clean=clean)
    return tuple(segments), end_offset, producers


def _segment(
    files: FileSystem, folder: Path, config: LogConfig, base: int, names: set[str], memory: IndexMemory
) -> Segment:
    name = segment_name(base)
    has_transactions = name + TRANSACTION_INDEX in names
    info = files.info(folder / (name + LOG))
    segment = Segment(files, folder, base, config.index_interval_bytes, info, memory, has_transactions=has_transactions)
    if not (name + INDEX in names and name + TIME_INDEX in names):
        if segment.size:
            _log.warning("%s lacks an index, building both", segment.path)
        segment.rebuild_indexes()
    return segment


def _remove_lone_indexes(files: FileSystem, folder: Path, names: set[str]) -> None:
    for name in names:
        stem, dot, suffix = name.rpartition(".")
        if dot + suffix in (INDEX, TIME_INDEX, TRANSACTION_INDEX) and stem + LOG not in names:
            _log.warning("%s has no log: removed", folder / name)
            files.remove(folder / name)


def _finish_renames(files: FileSystem, folder: Path) -> set[str]:
    """Finish or undo the renames that a crash interrupted; returns the names afterwards."""
    names = files.names(folder)
    swaps = sorted(name for name in names if name.endswith(LOG + SWAP))
    for name in swaps:
        _swap_in(files, folder, int(name[: -len(LOG + SWAP)]))
    if swaps:
        files.sync_folder(folder)
        names = files.names(folder)
    left = {name for name in names if name.endswith((CLEANED, SWAP, DELETED))}
    for name in left:
        files.remove(folder / name)
    return names - left


def _swap_in(files: FileSystem, folder: Path, base: int) -> None:
    """Replace the segments within its offsets by a compacted segment (BASE.log.swap)."""
    stem = segment_name(base)
    swap = folder / (stem + LOG + SWAP)
    file = files.open(swap)
    last = base
    for _, header in headers(file, swap, 0, files.info(swap).size):
        last = header.last_offset
    file.close()
    for name in files.names(folder):
        path = folder / name
        if (
            path.stem.isdecimal()
            and base <= int(path.stem) <= last
            and path.suffix in (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX)
        ):
            files.rename(path, path.with_name(name + DELETED))
    for suffix in (TRANSACTION_INDEX, LOG):  # the log last: until then the next start repeats the swap
        if stem + suffix + SWAP in files.names(folder):
            files.rename(folder / (stem + suffix + SWAP), folder / (stem + suffix))


def _recover(segments: list[Segment], recovery_point: int, *, clean: bool) -> int:
    """Check the segments beyond the recovery point, and truncate after a crash. Returns the end of the log.

    After a clean stop it checks only the last segment, and truncates nothing.
    """
    last = len(segments) - 1
    index = last if clean else next((i for i in range(last, -1, -1) if segments[i].base_offset <= recovery_point), 0)
    if index and _end_of(segments[index - 1]) > segments[index].base_offset:
        index -= 1
    end_offset = segments[index].base_offset
    while index < len(segments):
        segment = segments[index]
        end_offset, damage = segment.recover()
        index += 1
        overlap = None if damage else overlap_of(segment, end_offset, segments[index:])
        if damage is None and overlap is None:
            segment.flush()
            continue
        flushed = "completely at a clean stop" if clean else f"up to offset {recovery_point}"
        if overlap is not None and (clean or segments[index].base_offset < recovery_point):
            raise LogCorrupted(
                f"{overlap}, but the log had been flushed {flushed}: a crash alone can't cause this. "
                f"{_how_to_go_on(segment)}"
            )
        if damage is not None and (clean or end_offset < recovery_point):
            raise LogCorrupted(
                f"{segment.path} is damaged at position {damage.position}, offset {end_offset} ({damage}), but had "
                f"been flushed {flushed}: a crash alone can't cause this. {_how_to_go_on(segment)}"
            )
        lost = sum(later.size for later in segments[index:])
        end = segment.size if damage is None else damage.position
        _log.warning(
            "%s: truncated there; removed %d unflushed bytes and %d later segments",
            overlap or f"{segment.path}: bad batch at position {end} ({damage})",
            segment.size - end + lost,
            len(segments) - index,
        )
        for later in segments[index:]:
            later.rename(DELETED)
        del segments[index:]
        segment.cut(end)
    return end_offset


def _end_of(segment: Segment) -> int:
    """The offset after the last record, by headers alone, as far as they can be read."""
    end = segment.load_end()
    if end is None:
        end = segment.base_offset
        with suppress(LogCorrupted):
            for _, header in segment.headers(0):
                end = header.next_offset
    return end


def overlap_of(segment: Segment, end_offset: int, later: Sequence[Segment]) -> str | None:
    """The problem if a segment with that end has offsets of the next one, else None."""
    if not later or end_offset <= later[0].base_offset:
        return None
    return f"{segment.path} reaches to offset {end_offset}, but {later[0].path} begins at offset {later[0].base_offset}"


def _how_to_go_on(segment: Segment) -> str:
    return f"Restore it from a copy, or drop what follows with `klog log repair {segment.path.parent}`"


def _producers(
    files: FileSystem, folder: Path, there: set[str], segments: list[Segment], end_offset: int, *, clean: bool
) -> ProducerState:
    """Restore the producers from the newest valid snapshot and the log after it; removes snapshots within segments."""
    state, bases = None, {segment.base_offset for segment in segments}
    names = sorted((name for name in there if name.endswith(SNAPSHOT)), reverse=True)
    for path in (folder / name for name in names):
        offset = int(path.stem) if path.stem.isdecimal() else -1
        try:
            if state is None and offset <= end_offset:
                state = load_snapshot(files, path)
            elif offset not in bases:
                files.remove(path)
        except DecodeError as error:
            _log.warning("%s: trying an older one", error)
            files.remove(path)
    state = state or ProducerState()
    if clean and not names:
        # As in Kafka: a log from before snapshots existed has no relevant producers.
        state.end_offset = end_offset
    replay(state, segments, end_offset)
    return state


def replay(state: ProducerState, segments: list[Segment], end_offset: int) -> None:
    """Apply the log up to its end to the state, and complete the segments' transaction indexes."""
    start = state.end_offset
    following = [segment.base_offset for segment in segments[1:]] + [end_offset]
    for segment, end in zip(segments, following, strict=True):
        # The last segment's index may have entries of truncated batches, even if there is nothing to replay.
        if end <= start and segment is not segments[-1]:
            continue
        if segment.transaction_index.repair(start):
            _log.warning("%s is damaged: rebuilt from the log", segment.transaction_index.path)
            try:
                _derive_aborted(segments, segment, start)
            except LogCorrupted as error:
                _log.error("%s lacks entries, aborted records may be read: %s", segment.transaction_index.path, error)
        at = segment.position_of(start) if start > segment.base_offset else (0, None)
        for header, batch in _producer_batches(segment, at[0] if at else segment.size):
            if header.base_offset >= start and (aborted := state.add(header, batch)) is not None:
                segment.transaction_index.append(aborted)
    state.end_offset = end_offset


def _producer_batches(segment: Segment, position: int) -> Iterator[tuple[BatchHeader, memoryview]]:
    """(header, bytes) of the batches of producers from a position on; bytes only of control batches."""
    for at, header in segment.headers(position):
        if isinstance(header, BatchHeader) and header.producer_id >= 0:
            yield header, memoryview(segment.file.read_at(at, header.size) if header.is_control else b"")


def _derive_aborted(segments: list[Segment], damaged: Segment, end: int) -> None:
    """Rebuild the entries of a damaged transaction index before offset `end`: transactions may begin in any segment."""
    state = ProducerState()
    for segment in segments:
        for header, batch in _producer_batches(segment, 0):
            if header.last_offset >= end:
                return
            aborted = state.add(header, batch)
            if aborted is not None and segment is damaged:
                segment.transaction_index.append(aborted)
