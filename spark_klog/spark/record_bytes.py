"""How large the records of a query's partitions are, for its progress: an estimate by sampling."""

from __future__ import annotations

import logging
import time
from typing import Any

from spark_klog.client.cluster import Cluster
from spark_klog.client.sampling import record_sizes
from spark_klog.errors import KlogError
from spark_klog.spark.offsets import Offsets, TopicPartition

_log = logging.getLogger(__name__)
#: A partition is sampled again after so many seconds: it takes a fetch.
_KEPT_SECONDS = 60.0


class RecordBytes:
    """Bytes of a record in the log, as it is compressed, on the average; by topic and partition."""

    def __init__(self) -> None:
        self._known: dict[TopicPartition, tuple[float, float]] = {}

    def learn(self, cluster: Cluster, waiting: Offsets) -> None:
        """Sample the partitions that have records from these offsets on, where it is long ago. Never an error."""
        now = time.monotonic()
        due = {
            key: offset for key, offset in waiting.items() if now - self._known.get(key, (-1e9, 0))[0] > _KEPT_SECONDS
        }
        if not due:
            return
        try:
            sizes = record_sizes(cluster, due)
        except (KlogError, OSError) as error:
            _log.info("record sizes are not known: %s", error)
            return
        self._known |= {key: (now, size) for key, size in sizes.items()}

    def to_json(self) -> list[dict[str, Any]]:
        """[{"topic": ..., "partition": ..., "bytes": ...}]"""
        return [
            {"topic": topic, "partition": partition, "bytes": round(size, 1)}
            for (topic, partition), (_, size) in sorted(self._known.items())
        ]
