"""Estimate the bytes per record of a stream's partitions by sampling, for its progress record."""

from __future__ import annotations

import logging
import time
from typing import Any

from spark_klog.client.cluster import Cluster
from spark_klog.client.sampling import record_sizes
from spark_klog.errors import KlogError
from spark_klog.spark.offsets import Offsets, TopicPartition

_log = logging.getLogger(__name__)
#: A sample costs a fetch, so each partition is sampled only once in this time.
_KEPT_SECONDS = 60.0


class RecordBytes:
    """Average bytes of a record in the log (compressed), by partition."""

    def __init__(self) -> None:
        self._known: dict[TopicPartition, tuple[float, float]] = {}

    def sample(self, cluster: Cluster, starts: Offsets) -> None:
        """Sample the partitions whose last sample is old; each has records from its offset on. Logs errors."""
        now = time.monotonic()
        due = {
            key: offset for key, offset in starts.items() if now - self._known.get(key, (-1e9, 0))[0] > _KEPT_SECONDS
        }
        if not due:
            return
        try:
            sizes = record_sizes(cluster, due)
        except (KlogError, OSError) as error:
            _log.info("can't sample record sizes: %s", error)
            return
        self._known |= {key: (now, size) for key, size in sizes.items()}

    def to_json(self) -> list[dict[str, Any]]:
        """[{"topic": ..., "partition": ..., "bytes": ...}]"""
        return [
            {"topic": topic, "partition": partition, "bytes": round(size, 1)}
            for (topic, partition), (_, size) in sorted(self._known.items())
        ]
