"""`klog log repair`: truncate a log at its first damaged batch, if the user asks for it.

If all .log files are gone, the log goes on, empty, where it ended: the offsets of lost records are not given again.
"""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from spark_klog.durable import sync_folder, write_synced
from spark_klog.errors import LogCorrupted
from spark_klog.log.config import LogConfig
from spark_klog.log.directory import CLEAN_STOP
from spark_klog.log.files.checkpoints import LOG_START, RECOVERY_POINT, read_checkpoint, write_checkpoint
from spark_klog.log.files.file_system import LocalFileSystem
from spark_klog.log.files.lock import locked
from spark_klog.log.files.names import partition_of_folder
from spark_klog.log.producer_state import SNAPSHOT
from spark_klog.log.recovery import overlap_of
from spark_klog.log.segments.index_memory import IndexMemory
from spark_klog.log.segments.segment import Segment
from spark_klog.log.segments.segment_files import LOG, segment_name

DAMAGED = ".damaged"


class Repaired(NamedTuple):
    """The log's new end offset, the reason, and the copies of the .log files that were truncated or deleted."""

    end_offset: int
    reason: str
    kept: list[Path]


def repair(folder: Path) -> Repaired | None:
    """Truncate a partition's log at its first damaged batch or overlapping segment; None if the log is sound.

    Files that lose data are first copied to *.log.damaged beside them. `LogDirLocked` if a broker runs on the data
    directory, `LogCorrupted` if `folder` is not a partition's folder, OSError.
    """
    key = partition_of_folder(folder.name)
    bases = sorted(int(path.stem) for path in folder.glob("*" + LOG) if path.stem.isdecimal())
    files, memory = LocalFileSystem(), IndexMemory()
    end_offset = 0 if bases or key is None else _last_known_end(files, folder, key)
    if key is None or not (bases or end_offset):
        raise LogCorrupted(
            f"{folder} is not a partition's folder, named TOPIC-PARTITION, with {LOG} files or an entry in "
            f"{folder.parent / RECOVERY_POINT}"
        )
    with locked(folder.parent):
        if not bases:
            write_synced(folder / (segment_name(end_offset) + LOG), b"")
            sync_folder(folder)
            files.remove(folder.parent / CLEAN_STOP)
            return Repaired(end_offset, f"{folder} has no {LOG} files: its records are lost", [])
        interval = LogConfig().index_interval_bytes
        segments = [
            Segment(files, folder, base, interval, files.info(folder / (segment_name(base) + LOG)), memory)
            for base in bases
        ]
        end_offset, found = bases[0], None
        for index, segment in enumerate(segments):
            end_offset, damage = segment.recover()
            later = segments[index + 1 :]
            if damage is not None:
                reason = f"{segment.path} at position {damage.position}: {damage}"
                found = Repaired(end_offset, reason, _kept([segment, *later]))
            elif (overlap := overlap_of(segment, end_offset, later)) is not None:
                found = Repaired(end_offset, overlap, _kept(later))
            if found is not None:
                for path in chain.from_iterable(gone.paths() for gone in later):
                    path.unlink(missing_ok=True)
            if damage is not None:
                segment.cut(damage.position)
            segment.seal()
            segment.flush()
            if found is not None:
                break
        points = read_checkpoint(files, folder.parent / RECOVERY_POINT) or {}
        if points.get(key, 0) > end_offset:
            write_checkpoint(files, folder.parent / RECOVERY_POINT, points | {key: end_offset})
            found = found or Repaired(end_offset, f"the log ends before its recovery point {points[key]}", [])
        files.remove(folder.parent / CLEAN_STOP)  # the next start then recovers the whole log
    return found


def _last_known_end(files: LocalFileSystem, folder: Path, key: tuple[str, int]) -> int:
    """The end of a log without files, as far as checkpoints and snapshots of producers tell."""
    checkpoints = (read_checkpoint(files, folder.parent / name) or {} for name in (RECOVERY_POINT, LOG_START))
    snapshots = (int(path.stem) for path in folder.glob("*" + SNAPSHOT) if path.stem.isdecimal())
    return max(*(points.get(key, 0) for points in checkpoints), *snapshots, 0)


def _kept(segments: list[Segment]) -> list[Path]:
    """Copy the .log files; return the copies."""
    kept = []
    for segment in segments:
        copy = segment.path.with_name(segment.path.name + DAMAGED)
        shutil.copyfile(segment.path, copy)
        kept.append(copy)
    return kept
