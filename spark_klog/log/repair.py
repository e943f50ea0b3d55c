"""`klog log repair`: give up what follows the first damaged batch of a log, on someone's word."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from spark_klog.errors import LogCorrupted
from spark_klog.log.checkpoints import RECOVERY_POINT, read_checkpoint, write_checkpoint
from spark_klog.log.config import LogConfig
from spark_klog.log.directory import CLEAN_STOP
from spark_klog.log.file_system import LocalFileSystem
from spark_klog.log.index_memory import IndexMemory
from spark_klog.log.lock import locked
from spark_klog.log.names import partition_of_folder
from spark_klog.log.segment import LOG, Segment, segment_name

DAMAGED = ".damaged"


class Repaired(NamedTuple):
    """Where the log ends now, the reason, and the copies of the .log files that were cut or taken out."""

    end_offset: int
    reason: str
    kept: list[Path]


def repair(folder: Path) -> Repaired | None:
    """Cut a partition's log before its first bad batch; None where there is none.

    Files that lose something are kept beside it (*.log.damaged). `LogDirLocked` while a broker runs, `LogCorrupted` for
    another folder, OSError.
    """
    key = partition_of_folder(folder.name)
    bases = sorted(int(path.stem) for path in folder.glob("*" + LOG) if path.stem.isdecimal())
    if key is None or not bases:
        raise LogCorrupted(f"{folder} is no partition's folder: it should be named TOPIC-PARTITION and hold .log files")
    files, memory = LocalFileSystem(), IndexMemory()
    with locked(folder.parent):
        interval = LogConfig().index_interval_bytes
        segments = [
            Segment(files, folder, base, interval, files.info(folder / (segment_name(base) + LOG)), memory)
            for base in bases
        ]
        end_offset, found = bases[0], None
        for place, segment in enumerate(segments):
            end_offset, damage = segment.recover()
            if damage is not None:
                reason = f"{segment.path} at position {damage.position}: {damage}"
                found = Repaired(end_offset, reason, _cut(segment, damage.position, segments[place + 1 :]))
                break
            segment.seal()
            segment.flush()
        points = read_checkpoint(files, folder.parent / RECOVERY_POINT) or {}
        if points.get(key, 0) > end_offset:
            write_checkpoint(files, folder.parent / RECOVERY_POINT, points | {key: end_offset})
            found = found or Repaired(end_offset, f"the log ends before its recovery point {points[key]}", [])
        files.remove(folder.parent / CLEAN_STOP)  # so that the next start looks at all of it
    return found


def _cut(segment: Segment, position: int, later: list[Segment]) -> list[Path]:
    kept = []
    for damaged in (segment, *later):
        copy = damaged.path.with_name(damaged.path.name + DAMAGED)
        shutil.copyfile(damaged.path, copy)
        kept.append(copy)
    for damaged in later:
        for path in damaged.paths():
            path.unlink(missing_ok=True)
    segment.cut(position)
    segment.seal()
    return kept
