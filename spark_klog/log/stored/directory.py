"""Find the partitions of data directories (Kafka: log.dirs), to read them without a broker.

TOPIC-PARTITION/              see partition.py; of Kafka 0.7 partition_07.py
log-start-offset-checkpoint   see partition_files.py: start offsets within a segment. Logs that it does not name, in
                              lines that can be read, start with their first segment
meta.properties               exists once a broker has started here
broker-N/meta.properties      the directory of a cluster, not of a broker: rejected

Other folders (TOPIC-PARTITION.*-delete, -stray, -future) are ignored.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from spark_klog.errors import ConfigError, OffsetOutOfRange
from spark_klog.files.folder import ReadableFolder, read_whole
from spark_klog.log.layout import BROKER_FOLDER, CLUSTER_MARK, META
from spark_klog.log.partition_files import LOG_START, Offsets, partition_of_folder
from spark_klog.log.stored.partition import GONE, StoredPartition
from spark_klog.log.stored.partition_07 import StoredPartition07
from spark_klog.wire.codecs import MAX_DECOMPRESSED

#: A partition's log of any Kafka version.
StoredLog = StoredPartition | StoredPartition07


class Directory(NamedTuple):
    """A data directory: its path on a file system; `name` is for messages."""

    files: ReadableFolder
    path: str
    name: str

    def at(self, name: str) -> str:
        """The path of a file or folder in it."""
        return f"{self.path.rstrip('/')}/{name}"

    def holds_meta(self, folder: str) -> bool:
        """Whether a folder in it is a broker's data directory."""
        try:
            return META in {entry.name for entry in self.files.entries(self.at(folder))}
        except FileNotFoundError:  # deleted since the listing
            return False


class StoredDirectories:
    """The partitions of some data directories. `limit`: maximum decompressed bytes of a message set of Kafka 0.7."""

    def __init__(
        self, directories: list[Directory], *, read_committed: bool = False, limit: int = MAX_DECOMPRESSED
    ) -> None:
        self._directories = directories
        self._read_committed, self._limit = read_committed, limit
        self._checkpoints: dict[str, Offsets] = {}

    def partitions(self) -> list[tuple[str, int]]:
        """All (topic, partition), sorted.

        `ConfigError` if a directory is missing or not a data directory, or if two have the same partition; OSError.
        """
        holders: dict[tuple[str, int], str] = {}
        for directory in self._directories:
            try:
                entries = directory.files.entries(directory.path)
            except FileNotFoundError:
                raise ConfigError(f"directory {directory.name} does not exist") from None
            names = {entry.name for entry in entries}
            brokers = [entry.name for entry in entries if entry.is_folder and BROKER_FOLDER.fullmatch(entry.name)]
            if CLUSTER_MARK in names or any(directory.holds_meta(name) for name in brokers):
                raise ConfigError(
                    f"{directory.name} is the directory of a cluster: give the data directories of its brokers, "
                    + ",".join(f"{directory.name.rstrip('/')}/{name}" for name in sorted(brokers) or ["broker-0"])
                )
            here = [key for entry in entries if entry.is_folder and (key := partition_of_folder(entry.name))]
            if not here and META not in names:
                raise ConfigError(
                    f"{directory.name} is not a data directory of a broker: give the directory that contains folders "
                    "TOPIC-PARTITION"
                )
            for key in here:
                if key in holders:
                    raise ConfigError(f"{key[0]}-{key[1]} is in {holders[key]} and in {directory.name}")
                holders[key] = directory.name
        return sorted(holders)

    def open(self, topic: str, partition: int) -> StoredLog:
        """Open the log of a partition; `OffsetOutOfRange` with `GONE` available if it does not exist."""
        for directory in self._directories:
            place = directory.files, directory.at(f"{topic}-{partition}"), topic, partition
            with suppress(FileNotFoundError):
                start = self._log_starts(directory).get((topic, partition), 0)
                log = StoredPartition(*place, start, read_committed=self._read_committed)
                old = StoredPartition07(*place, self._limit) if log.is_empty else None
                return log if old is None or old.is_empty else old
        raise OffsetOutOfRange(topic, partition, (0, 0), GONE)

    def _log_starts(self, directory: Directory) -> Offsets:
        if directory.name not in self._checkpoints:
            try:
                text = read_whole(directory.files, directory.at(LOG_START)).decode(errors="replace")
            except FileNotFoundError:
                text = ""
            lines = [line.split(" ") for line in text.splitlines()[2:]]  # of a damaged file, too
            self._checkpoints[directory.name] = {
                (line[0], int(line[1])): int(line[2])
                for line in lines
                if len(line) == 3 and line[1].isdecimal() and line[2].isdecimal()
            }
        return self._checkpoints[directory.name]
