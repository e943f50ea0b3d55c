"""A data directory (Kafka: log.dirs): all partition logs of a broker.

.lock                     see file_system.py
meta.properties           version, broker.id, cluster.id; which other folders are refused: layout.py
.kafka_cleanshutdown      exists after a clean stop: the logs need no recovery
*-checkpoint              see partition_files.py
klog-topics.journal       see topic_journal.py; of a standalone broker, after its first change of a topic
TOPIC-PARTITION/          see partition_log.py
TOPIC-PARTITION.*-delete  being deleted; removed at the next start
TOPIC-PARTITION.*-stray   of an earlier topic of that name; kept, not served
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any
from uuid import UUID, uuid4

from spark_klog.base.clock import system_ms
from spark_klog.errors import DataDirectoryError, DecodeError, DirectoryError, LogCorrupted
from spark_klog.log.compaction.cleaner import plan
from spark_klog.log.compaction.plan import Cleanable
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import FileSystem, take_lock
from spark_klog.log.layout import Meta, check_data_directory, read_meta, usable, write_meta
from spark_klog.log.partition_files import (
    CLEANER,
    LOG_START,
    PARTITION_METADATA,
    RECOVERY_POINT,
    Offsets,
    is_deleted_folder,
    is_marked_deleted,
    is_unfinished,
    mark_deleted,
    partition_of_folder,
    read_checkpoint,
    read_topic_id,
    retired_folder,
    topic_id_of,
    write_checkpoint,
)
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.index import IndexMemory
from spark_klog.log.segments.segment import LOG
from spark_klog.log.topic_journal import JOURNAL, TopicJournal

_log = logging.getLogger(__name__)
CLEAN_STOP = ".kafka_cleanshutdown"
#: The metadata log of a KRaft cluster, which is not a topic.
_KRAFT_METADATA = "__cluster_metadata"
_LOCAL = FileSystem()


def new_cluster_id() -> str:
    """A new cluster id in Kafka's format: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")


class LogDirectory:
    """An open data directory.

    `LogDirLocked` if another process holds its lock; `DataDirectoryError` if it is not a data directory of this broker
    (nothing has been written then), or can't be read or written.
    """

    def __init__(
        self,
        path: Path,
        broker_id: int,
        config: LogConfig,
        *,
        files: FileSystem = _LOCAL,
        now_ms: Callable[[], int] = system_ms,
    ) -> None:
        self.path = path
        self.broker_id = broker_id
        self.config = config
        self._files = files
        self._now_ms = now_ms
        self.index_memory = IndexMemory()
        self.journal = TopicJournal(files, path)
        #: Guards the checkpoint files: other threads create logs.
        self._checkpointing = RLock()
        check_data_directory(path, broker_id)
        with usable(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(path, "choose another --data-dir")
            try:
                meta = read_meta(path)
                self.cluster_id = meta.cluster_id if meta else None
                self.logs: dict[tuple[str, int], PartitionLog] = {}
                #: Partitions that can't be served, with the reason.
                self.offline: dict[tuple[str, int], LogCorrupted] = {}
                self.clean_offsets = self._checkpoint(CLEANER)
                self._uncleanable: set[tuple[str, int]] = set()
                #: Partitions that the checkpoint files name.
                self._checkpointed: set[tuple[str, int]] = set()
                #: Rounds of compaction since the start.
                self.cleanings = 0
                self._load(has_meta=meta is not None)
            except BaseException:
                os.close(self._lock)
                raise

    def set_cluster_id(self, cluster_id: str) -> None:
        """Record the cluster of this directory; `DataDirectoryError` if it belongs to another."""
        if self.cluster_id not in (None, cluster_id):
            raise DataDirectoryError(
                f"data directory {self.path} belongs to cluster {self.cluster_id}, not {cluster_id}; connect to the "
                "ZooKeeper or the directories of that cluster, or choose another --data-dir"
            )
        with usable(self.path):
            write_meta(self.path, Meta(self.broker_id, cluster_id))
        self.cluster_id = cluster_id

    @property
    def _clean_marker(self) -> Path:
        return self.path / CLEAN_STOP

    def _load(self, *, has_meta: bool) -> None:
        names = self._files.names(self.path)
        clean = CLEAN_STOP in names
        if not clean:
            self.journal.read()
        elif JOURNAL in names:
            self.journal.clear()  # Kafka has stopped since
        if clean:
            self._files.remove(self._clean_marker)
            self._files.sync_folder(self.path)  # it must not reappear after a power failure
        recovery_points = self._checkpoint(RECOVERY_POINT)
        start_offsets = self._checkpoint(LOG_START)
        self._checkpointed = {*recovery_points, *start_offsets, *self.clean_offsets}
        for folder in (self.path / name for name in sorted(self._files.folders(self.path))):
            if is_deleted_folder(folder.name):
                self._files.remove_folder(folder)
                continue
            key = partition_of_folder(folder.name)
            if key is None or key[0] == _KRAFT_METADATA:
                continue
            if is_marked_deleted(self._files, folder):
                try:
                    self._files.remove_folder(self._rename_deleted(folder))
                except OSError as error:
                    _log.error("%s is of a deleted topic, not served, and can't be removed: %s", folder, error)
                continue
            # also after a clean stop, before which the log could not be made
            if not recovery_points.get(key) and is_unfinished(
                self._files, folder, is_ours=key[0] in self.journal.topics
            ):
                self._set_aside(folder)
                continue
            try:
                self.logs[key] = PartitionLog(
                    folder,
                    self.config,
                    clean=clean,
                    recovery_point=recovery_points.get(key, 0),
                    start_offset=start_offsets.get(key, 0),
                    files=self._files,
                    now_ms=self._now_ms,
                    memory=self.index_memory,
                )
            except LogCorrupted as error:
                _log.error("%s is not served: %s", folder.name, error)
                self.offline[key] = error
        is_new = not (has_meta or self.logs or self.offline)
        before = "clean stop before" if clean else "new" if is_new else "no clean stop before"
        _log.info("%s: %d partitions, %s", self.path, len(self.logs), before)

    def _set_aside(self, folder: Path) -> None:
        """Leave out a folder in which nothing was flushed, and that may be an earlier topic's; OSError."""
        has_records = any(name.endswith(LOG) for name in self._files.names(folder))
        renamed = retired_folder(folder, "stray" if has_records else "delete")
        self._files.rename(folder, renamed)
        if has_records:
            _log.warning("%s has no whole %s: kept as %s", folder.name, PARTITION_METADATA, renamed)
        else:
            self._files.remove_folder(renamed)

    def _checkpoint(self, name: str) -> Offsets:
        try:
            return read_checkpoint(self._files, self.path / name) or {}
        except LogCorrupted as error:
            if name == LOG_START:
                raise
            _log.warning("%s", error)  # without it every log is checked, and dirty for the cleaner
            return {}

    def write_checkpoints(self) -> None:
        """Write the recovery points and start offsets of all logs; OSError."""
        with self._checkpointing:
            logs = list(self.logs.items())
            points = {key: log.recovery_point for key, log in logs}
            # Offline partitions keep their offsets until they are repaired.
            points |= {key: offset for key, offset in self._checkpoint(RECOVERY_POINT).items() if key in self.offline}
            # Also if a segment starts there: a power failure may bring back earlier segments.
            starts = {key: log.start_offset for key, log in logs if log.start_offset > 0}
            starts |= {key: offset for key, offset in self._checkpoint(LOG_START).items() if key in self.offline}
            self._checkpointed |= starts.keys() | points.keys()  # in case only one of the files gets written
            write_checkpoint(self._files, self.path / LOG_START, starts)
            write_checkpoint(self._files, self.path / RECOVERY_POINT, points)
            self._checkpointed = {*points, *starts, *self.clean_offsets}

    def _write_clean_offsets(self) -> None:
        with self._checkpointing:
            clean = list(self.clean_offsets.items())
            there = {key: value for key, value in clean if key in self.logs or key in self.offline}
            write_checkpoint(self._files, self.path / CLEANER, there)

    def _forget_earlier(self, key: tuple[str, int]) -> None:
        """Remove a deleted log's offsets from the checkpoints before a new log gets its name; OSError."""
        with self._checkpointing:
            self.clean_offsets.pop(key, None)
            self._uncleanable.discard(key)
            if key in self._checkpointed:
                self._write_clean_offsets()
                self.write_checkpoints()

    def cleanable(self, log: PartitionLog, now_ms: int) -> Cleanable | None:
        """The part of a log to compact now; None if compaction is not due. `LogCorrupted`, OSError."""
        key = log.topic, log.partition
        if not log.config.compacts or key in self._uncleanable:
            return None
        cleanable = plan(log, self.clean_offsets.get(key), now_ms)
        return cleanable if cleanable.is_due else None

    def note_clean(self, log: PartitionLog, offset: int) -> None:
        """Record that a round of compaction has reached `offset`; OSError."""
        with self._checkpointing:  # `make` for a new log of that name waits for it, then removes the offset
            if not self.serves(log):
                return  # deleted during the round
            self.clean_offsets[log.topic, log.partition] = offset
            self._checkpointed.add((log.topic, log.partition))
            self.cleanings += 1
            self._write_clean_offsets()

    def leave_uncleaned(self, log: PartitionLog) -> None:
        """Record that compaction has failed: the log is not compacted again until the next start."""
        if self.serves(log):
            self._uncleanable.add((log.topic, log.partition))

    def serves(self, log: PartitionLog) -> bool:
        """Whether `log` is still the log of its partition."""
        return self.logs.get((log.topic, log.partition)) is log

    def get(self, topic: str, partition: int) -> PartitionLog | None:
        return self.logs.get((topic, partition))

    def make(
        self, topic: str, partition: int, topic_id: UUID | None = None, overrides: Mapping[str, Any] | None = None
    ) -> PartitionLog:
        """Open or create the log of a partition that is not in `logs`; the caller adds it. Runs in any thread.

        `LogCorrupted`, OSError.
        """
        self._forget_earlier((topic, partition))
        folder = self.path / f"{topic}-{partition}"
        if is_marked_deleted(self._files, folder):
            try:
                self._files.remove_folder(self._rename_deleted(folder))
            except OSError:
                if topic_id_of(self._files, folder) is None:  # else the caller sees that the log is not the topic's
                    raise
        elif is_unfinished(self._files, folder):  # an earlier try has failed
            self._set_aside(folder)
        return PartitionLog(
            folder,
            self.config,
            topic_id,
            clean=True,
            overrides=overrides,
            files=self._files,
            now_ms=self._now_ms,
            memory=self.index_memory,
        )

    def take(self, topic: str, partition: int) -> Callable[[], Path] | None:
        """Stop serving a deleted partition. Returns a function that renames its folder; None if there is no such log.

        The function runs in any thread, returns the new path, which may be removed, and raises OSError.
        """
        key = topic, partition
        self.clean_offsets.pop(key, None)
        self._uncleanable.discard(key)
        log = self.logs.pop(key, None)
        if log is not None:
            log.is_open = False  # makes the cleaner stop
            return partial(log.retire, "delete")
        folder = self.path / f"{topic}-{partition}"
        return partial(self._rename_deleted, folder) if self.offline.pop(key, None) else None

    def rename_unmade(self, topic: str, partition: int, topic_id: UUID) -> Path | None:
        """Rename what a failure of `make` has left of a deleted partition, and return the path, which may be removed.

        None if there is no folder, or it may be an earlier topic's. Runs in any thread. OSError.
        """
        folder, whose = self.path / f"{topic}-{partition}", None
        with suppress(DecodeError, OSError):
            whose = read_topic_id(self._files, folder)
        with suppress(FileNotFoundError):
            has_records = any(name.endswith(LOG) for name in self._files.names(folder))
            if whose == topic_id or not (whose or has_records):
                return self._rename_deleted(folder)
        return None

    def mark_deleted(self, topic: str, partition: int) -> None:
        """Mark the folder of a deleted partition that can't be renamed, so that no start serves it; OSError."""
        mark_deleted(self._files, self.path / f"{topic}-{partition}")

    def _rename_deleted(self, folder: Path) -> Path:
        renamed = retired_folder(folder, "delete")
        self._files.rename(folder, renamed)
        return renamed

    def topic_id(self, topic: str, partition: int) -> UUID | None:
        """The topic id of a partition, offline ones included; None if it has none or it can't be read."""
        log = self.logs.get((topic, partition))
        try:
            return log.topic_id if log else topic_id_of(self._files, self.path / f"{topic}-{partition}")
        except LogCorrupted:
            return None  # the reason was logged when the partition went offline

    def close(self) -> None:
        """Close all logs, mark the stop as clean, release the lock."""
        is_clean = not self.offline  # the next start checks offline partitions again
        for log in self.logs.values():
            try:
                log.close()
            except Exception as error:
                text = "%s can't be closed, it will be checked at the next start: %s"
                _log.error(text, log.directory, error, exc_info=not isinstance(error, OSError))
                is_clean = False
        try:
            self.journal.note({})  # deletions that are not in it yet
        except DirectoryError as error:
            _log.error("deleted topics may come back at the next start: %s", error)
        try:
            self.write_checkpoints()
            # the journal alone knows of a log that could not be made, and of folders that could not be removed
            is_made = all(key in self.logs for key in self.journal.partitions())
            if is_clean and is_made and self.journal.is_settled and not self.journal.left():
                self.journal.clear()
                self._files.replace(self._clean_marker, b'{"version":0,"brokerEpoch":-1}')
        except OSError as error:
            _log.error("%s: the stop is not clean, the logs will be checked at the next start: %s", self.path, error)
        finally:
            os.close(self._lock)
