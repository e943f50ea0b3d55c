"""A data directory (Kafka: log.dirs): all partition logs of a broker.

.lock                     see lock.py
meta.properties           version, broker.id, cluster.id
.kafka_cleanshutdown      there after a clean stop only: the logs need no recovery
*-checkpoint              see checkpoints.py
TOPIC-PARTITION/          see partition_log.py
TOPIC-PARTITION.*-delete  being deleted; removed at the next start
TOPIC-PARTITION.*-stray   of an earlier topic of that name; kept, not served
"""

from __future__ import annotations

import base64
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from spark_klog.errors import LogCorrupted
from spark_klog.log.checkpoints import CLEANER, LOG_START, RECOVERY_POINT, Offsets, read_checkpoint, write_checkpoint
from spark_klog.log.cleaner import plan
from spark_klog.log.compaction_plan import Cleanable
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import LocalFileSystem
from spark_klog.log.lock import take_lock
from spark_klog.log.partition_files import topic_id_of
from spark_klog.log.partition_log import PartitionLog, check_topic_name, partition_of_folder

_log = logging.getLogger(__name__)
CLEAN_STOP = ".kafka_cleanshutdown"


def new_cluster_id() -> str:
    """22 characters, as Kafka makes them."""
    return base64.urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")


class LogDirectory:
    """An open data directory.

    `LogDirLocked` where another broker holds it, `LogCorrupted` where it belongs to another broker id.
    """

    def __init__(self, path: Path, broker_id: int, config: LogConfig) -> None:
        self.path = path
        self.broker_id = broker_id
        self.config = config
        self._files = LocalFileSystem()
        path.mkdir(parents=True, exist_ok=True)
        self._lock = take_lock(path)
        try:
            self.cluster_id = self._check_meta()
            self.logs: dict[tuple[str, int], PartitionLog] = {}
            #: Partitions that can't be served, and why.
            self.offline: dict[tuple[str, int], LogCorrupted] = {}
            self.clean_offsets = self._checkpoint(CLEANER)
            self._uncleanable: set[tuple[str, int]] = set()
            #: Rounds of compaction since the start.
            self.cleanings = 0
            self._load()
        except BaseException:
            os.close(self._lock)
            raise

    def _check_meta(self) -> str | None:
        path = self.path / "meta.properties"
        if not path.exists():
            return None
        lines = (line.partition("=") for line in path.read_text().splitlines() if not line.startswith("#"))
        meta = {key.strip(): value.strip() for key, _, value in lines}
        if meta.get("broker.id", str(self.broker_id)) != str(self.broker_id):
            raise LogCorrupted(
                f"data directory {self.path} belongs to broker {meta['broker.id']}, not {self.broker_id}; "
                f"start with --broker-id {meta['broker.id']}, or choose another --data-dir"
            )
        return meta.get("cluster.id")

    def set_cluster_id(self, cluster_id: str) -> None:
        """Note which cluster this directory belongs to; `LogCorrupted` if it is that of another."""
        if self.cluster_id not in (None, cluster_id):
            raise LogCorrupted(f"data directory {self.path} belongs to cluster {self.cluster_id}, not {cluster_id}")
        self.cluster_id = cluster_id
        text = f"#\nbroker.id={self.broker_id}\ncluster.id={cluster_id}\nversion=0\n"
        (self.path / "meta.properties").write_text(text)

    @property
    def _clean_marker(self) -> Path:
        return self.path / CLEAN_STOP

    def _load(self) -> None:
        clean = self._clean_marker.exists()
        self._clean_marker.unlink(missing_ok=True)
        recovery_points = self._checkpoint(RECOVERY_POINT)
        start_offsets = self._checkpoint(LOG_START)
        for folder in sorted(self.path.iterdir()):
            if folder.name.endswith("-delete"):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            key = partition_of_folder(folder.name) if folder.is_dir() else None
            if key is None:
                continue
            try:
                self.logs[key] = PartitionLog(
                    folder,
                    self.config,
                    clean=clean,
                    recovery_point=recovery_points.get(key, 0),
                    start_offset=start_offsets.get(key, 0),
                )
            except LogCorrupted as error:
                _log.error("%s is not served: %s", folder.name, error)
                self.offline[key] = error
        _log.info("%s: %d partitions, %s stop before", self.path, len(self.logs), "clean" if clean else "no clean")

    def _checkpoint(self, name: str) -> Offsets:
        try:
            return read_checkpoint(self._files, self.path / name) or {}
        except LogCorrupted as error:
            if name == LOG_START:
                raise
            _log.warning("%s", error)  # then all is checked, all is dirty
            return {}

    def write_checkpoints(self) -> None:
        """Note up to where the logs have been flushed, and where they begin; OSError."""
        points = {key: log.recovery_point for key, log in self.logs.items()}
        # what is not served keeps its offsets for when it has been repaired
        points |= {key: offset for key, offset in self._checkpoint(RECOVERY_POINT).items() if key in self.offline}
        starts = {
            key: log.start_offset for key, log in self.logs.items() if log.start_offset > log.segments[0].base_offset
        }
        starts |= {key: offset for key, offset in self._checkpoint(LOG_START).items() if key in self.offline}
        write_checkpoint(self._files, self.path / LOG_START, starts)
        write_checkpoint(self._files, self.path / RECOVERY_POINT, points)

    def flush_due(self) -> None:
        """Flush the logs whose flush.ms asks for it. One log's trouble is not another's, here and below."""
        self._each(PartitionLog.flush_due)

    def delete_expired(self) -> None:
        """Delete what retention no longer keeps: segments, files of those deleted before, producers long silent."""
        self._each(PartitionLog.delete_expired)
        self._each(PartitionLog.remove_deleted)
        self._each(PartitionLog.forget_producers)

    def _each(self, action: Callable[[PartitionLog], object]) -> None:
        for log in list(self.logs.values()):
            try:
                action(log)
            except (OSError, LogCorrupted) as error:
                _log.error("%s: %s", log.directory, error)

    def dirtiest(self, now_ms: int) -> tuple[PartitionLog, Cleanable] | None:
        """The log that is to be compacted next, and what of it can be, or None."""
        due = []
        for key, log in self.logs.items():
            if log.config.compacts and key not in self._uncleanable:
                found = plan(log, self.clean_offsets.get(key), now_ms)
                if found.is_due:
                    due.append((found.dirty_ratio, key, found))
        if not due:
            return None
        _, key, found = max(due, key=lambda item: item[:2])
        return self.logs[key], found

    def note_clean(self, log: PartitionLog, offset: int) -> None:
        """A round of compaction has come to `offset`; OSError."""
        self.clean_offsets[log.topic, log.partition] = offset
        self.cleanings += 1
        there = {key: value for key, value in self.clean_offsets.items() if key in self.logs or key in self.offline}
        write_checkpoint(self._files, self.path / CLEANER, there)

    def leave_uncleaned(self, log: PartitionLog) -> None:
        """A round of compaction has failed: there is no other one until the next start."""
        self._uncleanable.add((log.topic, log.partition))

    def get(self, topic: str, partition: int) -> PartitionLog | None:
        return self.logs.get((topic, partition))

    def create(
        self,
        topic: str,
        partition: int,
        topic_id: UUID | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> PartitionLog:
        """The partition's log, made where it is missing; `overrides` are `LogConfig` values of the topic's own.

        `ConfigError` for an illegal topic name; `LogCorrupted` where it is there, but offline.
        """
        check_topic_name(topic)
        key = topic, partition
        if key in self.offline:
            raise self.offline[key]
        if key not in self.logs:
            folder = self.path / f"{topic}-{partition}"
            self.logs[key] = PartitionLog(folder, self.config, topic_id, clean=True, overrides=overrides)
        return self.logs[key]

    def delete(self, topic: str, partition: int) -> None:
        """Remove the partition's log, if it is there."""
        log = self.logs.pop((topic, partition), None)
        if log is not None:
            log.delete()
        elif self.offline.pop((topic, partition), None):
            shutil.rmtree(self.path / f"{topic}-{partition}", ignore_errors=True)

    def topic_id(self, topic: str, partition: int) -> UUID:
        """Of a partition that is there, be it offline; `LogCorrupted`."""
        log = self.logs.get((topic, partition))
        return log.topic_id if log else topic_id_of(self._files, self.path / f"{topic}-{partition}", None)

    def set_aside(self, topic: str, partition: int) -> None:
        """Keep the log of an earlier topic of this name out of the way, as Kafka does: renamed, no longer served."""
        log = self.logs.pop((topic, partition))
        _log.warning("%s is of an earlier topic: kept as %s", log.directory.name, log.retire("stray"))

    def close(self) -> None:
        """Close all logs, mark the stop as clean, give the lock back."""
        is_clean = not self.offline  # they are checked again at the next start
        for log in self.logs.values():
            try:
                log.close()
            except OSError as error:
                _log.error("%s can't be closed, it will be checked at the next start: %s", log.directory, error)
                is_clean = False
        self.write_checkpoints()
        if is_clean:
            self._clean_marker.write_text('{"version":0,"brokerEpoch":-1}')
        os.close(self._lock)
