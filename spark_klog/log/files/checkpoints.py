"""Read and write the checkpoint files of a data directory: an offset per partition, in Kafka's format.

    0                       version
    2                       the number of lines
    clicks 0 1234           topic, partition, offset
    clicks 1 99

recovery-point-offset-checkpoint  the log is flushed up to this offset, and needs no check there after an unclean stop
log-start-offset-checkpoint       DeleteRecords has deleted the records before it, although their segment exists
cleaner-offset-checkpoint         the start of the dirty part of a compacted log
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spark_klog.errors import LogCorrupted
from spark_klog.log.files.file_system import FileSystem

RECOVERY_POINT = "recovery-point-offset-checkpoint"
LOG_START = "log-start-offset-checkpoint"
CLEANER = "cleaner-offset-checkpoint"

Offsets = dict[tuple[str, int], int]


def write_checkpoint(files: FileSystem, path: Path, offsets: Mapping[tuple[str, int], int]) -> None:
    """Replace the file atomically; OSError."""
    lines = [f"{topic} {partition} {offset}\n" for (topic, partition), offset in sorted(offsets.items())]
    files.replace(path, f"0\n{len(lines)}\n{''.join(lines)}".encode())


def read_checkpoint(files: FileSystem, path: Path) -> Offsets | None:
    """Read the offsets; None if the file is missing, `LogCorrupted` if its format is wrong."""
    try:
        text = files.read(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    if not text:
        return {}  # Kafka 4.1 leaves an empty cleaner checkpoint
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
            f"{path} is not a checkpoint of version 0: {text[:200]!r}; remove it to have the logs checked completely"
        ) from None
    return offsets
