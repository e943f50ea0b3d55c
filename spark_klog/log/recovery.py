"""Opening a partition's folder: what a crash has left is put right, what is no crash's work is named.

    *.log.cleaned   a compaction that was not finished: removed
    *.log.swap      one that was: takes the place of the segments that it was made of
    *.deleted       deleted, but not removed yet: removed

Crash story: up to the recovery point the log was flushed. Segments that go beyond it are checked batch by batch after
an unclean stop; at the first bad batch the log is cut, and what follows is gone: it was never flushed. A bad batch
before the recovery point is no crash's work, and after a clean stop none is. It is never cut: `LogCorrupted` says which
file and where.

A clean start looks at the end of the log only, an unclean one at nothing before the recovery point: damage elsewhere is
named when it is read, by the checksum that readers compare or by `LogCorrupted`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import FileInfo, FileSystem
from spark_klog.log.index_memory import IndexMemory
from spark_klog.log.producer_state import SNAPSHOT, ProducerState, load_snapshot
from spark_klog.log.scan import headers
from spark_klog.log.segment import INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX, Segment, segment_name
from spark_klog.records.batch_v2 import BatchHeader

_log = logging.getLogger(__name__)
CLEANED, SWAP, DELETED = ".cleaned", ".swap", ".deleted"


class Opened(NamedTuple):
    """A log as it is found: its segments (at least one, which is open for appends), its end, its producers."""

    segments: tuple[Segment, ...]
    end_offset: int
    producers: ProducerState


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
) -> Opened:
    """Open what is in the folder; after an unclean stop check what was not flushed. `LogCorrupted`, OSError."""
    names = _finish_renames(files, folder)
    _remove_lone_indexes(files, folder, names)
    bases = sorted(int(name[: -len(LOG)]) for name in names if name.endswith(LOG) and name[: -len(LOG)].isdecimal())
    segments = [_segment(files, folder, config, base, names, memory) for base in bases]
    empty = Segment(files, folder, start_offset, config.index_interval_bytes, FileInfo(0, now_ms), memory)
    end_offset = start_offset if not segments else segments[-1].load_end() if clean else None
    if end_offset is None:
        end_offset = _recover(segments, recovery_point, clean=clean)
    segments = segments or [empty]
    if end_offset < recovery_point:
        raise LogCorrupted(
            f"{segments[-1].path} ends at offset {end_offset}, but had been flushed up to offset {recovery_point}: "
            f"records are missing. {_how_to_go_on(segments[-1])}"
        )
    if end_offset < start_offset:
        # All of it had been deleted; what is appended now must not get offsets that lie before the log's start.
        _log.warning("%s: all is gone before offset %d, where the log begins", folder, start_offset)
        for segment in segments:
            segment.rename(DELETED)
        segments, end_offset = [empty], start_offset
    segments[-1].open_for_appends()
    producers = _producers(files, folder, segments, end_offset, clean=clean)
    return Opened(tuple(segments), end_offset, producers)


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
    """What there is afterwards."""
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
    """Put a compacted segment (BASE.log.swap) in the place of those that it was made of: those within its offsets."""
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
    for suffix in (TRANSACTION_INDEX, LOG):  # the log last: until it is in its place this is done again
        if stem + suffix + SWAP in files.names(folder):
            files.rename(folder / (stem + suffix + SWAP), folder / (stem + suffix))


def _recover(segments: list[Segment], recovery_point: int, *, clean: bool) -> int:
    """Check the segments that go beyond the recovery point; the end of the log. What a crash has left is cut off.

    After a clean stop only the last segment is checked, and nothing is cut.
    """
    last = len(segments) - 1
    place = last if clean else next((i for i in range(last, -1, -1) if segments[i].base_offset <= recovery_point), 0)
    end_offset = segments[place].base_offset
    while place < len(segments):
        segment = segments[place]
        end_offset, damage = segment.recover()
        place += 1
        if damage is None:
            segment.flush()
            continue
        if clean or end_offset < recovery_point:
            flushed = "as a whole at a clean stop" if clean else f"up to offset {recovery_point}"
            raise LogCorrupted(
                f"{segment.path} is damaged at position {damage.position}, offset {end_offset} ({damage}), but had "
                f"been flushed {flushed}: a crash does not do this. {_how_to_go_on(segment)}"
            )
        lost = sum(later.size for later in segments[place:])
        _log.warning(
            "%s: bad batch at position %d (%s): cut there; %d bytes were never flushed, %d segments after it go",
            *(segment.path, damage.position, damage, segment.size - damage.position + lost, len(segments) - place),
        )
        for later in segments[place:]:
            later.rename(DELETED)
        del segments[place:]
        segment.cut(damage.position)
    return end_offset


def _how_to_go_on(segment: Segment) -> str:
    return f"Restore it from a copy, or give up what follows by `klog log repair {segment.path.parent}`"


def _producers(
    files: FileSystem, folder: Path, segments: list[Segment], end_offset: int, *, clean: bool
) -> ProducerState:
    """Of the newest sound snapshot, and the log from there on. Snapshots within segments were for one start."""
    state, bases = None, {segment.base_offset for segment in segments}
    names = sorted((name for name in files.names(folder) if name.endswith(SNAPSHOT)), reverse=True)
    for path in (folder / name for name in names):
        offset = int(path.stem) if path.stem.isdecimal() else -1
        try:
            if state is None and offset <= end_offset:
                state = load_snapshot(files, path)
            elif offset not in bases:
                files.remove(path)
        except DecodeError as error:
            _log.warning("%s: looking for an older one", error)
            files.remove(path)
    state = state or ProducerState()
    if clean and not names:
        # as Kafka: a log of before there were snapshots has no producers that matter
        state.end_offset = end_offset
    replay(state, segments, end_offset)
    return state


def replay(state: ProducerState, segments: list[Segment], end_offset: int) -> None:
    """Bring the state up to the end of the log; the aborted transactions met are in the segments' indexes then."""
    start = state.end_offset
    following = [segment.base_offset for segment in segments[1:]] + [end_offset]
    for segment, end in zip(segments, following, strict=True):
        # the last one may have entries of what a crash took away, though nothing in it is left to replay
        if end <= start and segment is not segments[-1]:
            continue
        segment.transaction_index.repair(start)
        found = segment.position_of(start) if start > segment.base_offset else (0, None)
        for position, header in headers(segment.file, segment.path, found[0] if found else segment.size, segment.size):
            if not isinstance(header, BatchHeader) or header.producer_id < 0 or header.base_offset < start:
                continue
            batch = memoryview(segment.file.read_at(position, header.size) if header.is_control else b"")
            aborted = state.add(header, batch)
            if aborted is not None:
                segment.transaction_index.append(aborted)
    state.end_offset = end_offset
