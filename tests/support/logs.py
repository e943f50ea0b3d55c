"""Create logs in a data directory as the broker does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_log import PartitionLog


def add_log(logs: LogDirectory, topic: str, partition: int, overrides: Mapping[str, Any] | None = None) -> PartitionLog:
    """Create a partition's log and serve it."""
    log = logs.logs[topic, partition] = logs.make(topic, partition, overrides=overrides)
    return log
