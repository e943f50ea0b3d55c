"""A data directory (Kafka: log.dirs): all partition logs of a broker.

.lock                     held by fcntl, as Kafka's own lock: one broker at a time
meta.properties           version, broker.id, cluster.id
.kafka_cleanshutdown      there after a clean stop only: the logs need no recovery
TOPIC-PARTITION/          see partition_log.py
TOPIC-PARTITION.*-delete  being deleted; removed at the next start
TOPIC-PARTITION.*-stray   of an earlier topic of that name; kept, not served
"""

from __future__ import annotations

import base64
import fcntl
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import UUID, uuid4

from spark_klog.errors import LogCorrupted, LogDirLocked
from spark_klog.log.partition_log import LogConfig, PartitionLog, check_topic_name, partition_of_folder

_log = logging.getLogger(__name__)


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
        path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            self.cluster_id = self._check_meta()
            self.logs: dict[tuple[str, int], PartitionLog] = {}
            self._load()
        except BaseException:
            os.close(self._lock)
            raise

    def _take_lock(self) -> int:
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise LogDirLocked(
                f"data directory {self.path} is held by another broker; stop that one, or choose another --data-dir"
            ) from None
        return lock

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
        return self.path / ".kafka_cleanshutdown"

    def _load(self) -> None:
        clean = self._clean_marker.exists()
        self._clean_marker.unlink(missing_ok=True)
        for folder in sorted(self.path.iterdir()):
            if folder.name.endswith("-delete"):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            key = partition_of_folder(folder.name) if folder.is_dir() else None
            if key is not None:
                self.logs[key] = PartitionLog(folder, self.config, clean=clean)
        _log.info("%s: %d partitions, %s stop before", self.path, len(self.logs), "clean" if clean else "no clean")

    def get(self, topic: str, partition: int) -> PartitionLog | None:
        return self.logs.get((topic, partition))

    def create(
        self,
        topic: str,
        partition: int,
        topic_id: UUID | None = None,
        overrides: Mapping[str, int] | None = None,
    ) -> PartitionLog:
        """The partition's log, made where it is missing; `overrides` are `LogConfig` values of the topic's own.

        `ConfigError` for an illegal topic name.
        """
        check_topic_name(topic)
        key = topic, partition
        if key not in self.logs:
            folder = self.path / f"{topic}-{partition}"
            self.logs[key] = PartitionLog(folder, self.config, topic_id, clean=True, overrides=overrides)
        return self.logs[key]

    def delete(self, topic: str, partition: int) -> None:
        """Remove the partition's log, if it is there."""
        log = self.logs.pop((topic, partition), None)
        if log is not None:
            log.delete()

    def set_aside(self, topic: str, partition: int) -> None:
        """Keep the log of an earlier topic of this name out of the way, as Kafka does: renamed, no longer served."""
        log = self.logs.pop((topic, partition))
        _log.warning("%s is of an earlier topic: kept as %s", log.directory.name, log.retire("stray"))

    def close(self) -> None:
        """Close all logs, mark the stop as clean, give the lock back."""
        for log in self.logs.values():
            log.close()
        self._clean_marker.write_text('{"version":0,"brokerEpoch":-1}')
        os.close(self._lock)
