"""Checkpoint files of a data directory: an offset for each partition, in Kafka's format.

    0                       version
    2                       how many lines follow
    clicks 0 1234           topic, partition, offset
    clicks 1 99

recovery-point-offset-checkpoint  up to there the log has been flushed: it needs no check after an unclean stop
log-start-offset-checkpoint       records before it were deleted by DeleteRecords, though the segment is still there
cleaner-offset-checkpoint         where the dirty part begins of a log that is compacted
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spark_klog.errors import LogCorrupted
from spark_klog.log.file_system import FileSystem

RECOVERY_POINT = "recovery-point-offset-checkpoint"
LOG_START = "log-start-offset-checkpoint"
CLEANER = "cleaner-offset-checkpoint"

Offsets = dict[tuple[str, int], int]


def write_checkpoint(files: FileSystem, path: Path, offsets: Mapping[tuple[str, int], int]) -> None:
    """Replace the file as a whole; OSError."""
    lines = [f"{topic} {partition} {offset}\n" for (topic, partition), offset in sorted(offsets.items())]
    files.replace(path, f"0\n{len(lines)}\n{''.join(lines)}".encode())


def read_checkpoint(files: FileSystem, path: Path) -> Offsets | None:
    """The offsets, None where there is no such file; `LogCorrupted` where it is not as above."""
    try:
        text = files.read(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    if not text:
        return {}  # as Kafka 4.1 leaves that of its cleaner
    offsets: Offsets = {}
    try:
        version, count, *lines = text.split("\n")
        for line in lines[: int(count)]:
            topic, partition, offset = line.split(" ")
            offsets[topic, int(partition)] = int(offset)
        if version.strip() != "0" or len(offsets) != int(count) or min(offsets.values(), default=0) < 0:
            raise ValueError
    except ValueError:
        raise LogCorrupted(
            f"{path} is no checkpoint of version 0: {text[:200]!r}; remove it, and the logs are checked as a whole"
        ) from None
    return offsets
