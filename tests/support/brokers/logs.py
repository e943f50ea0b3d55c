"""Create, look up and append to logs as the broker does, without its pauses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_log import Appended, PartitionLog


def add_log(
    logs: LogDirectory,
    topic: str,
    partition: int,
    overrides: Mapping[str, Any] | None = None,
    topic_id: UUID | None = None,
) -> PartitionLog:
    """Create a partition's log and serve it."""
    log = logs.logs[topic, partition] = logs.make(topic, partition, topic_id, overrides)
    return log


def searched(log: PartitionLog, timestamp: int | None) -> tuple[int, int] | None:
    """The result of `PartitionLog.search`."""
    steps, answer = log.search(timestamp), None
    while True:
        try:
            work = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = None if work is None else work()


def append_of_client(log: PartitionLog, data: bytes) -> Appended:
    """Append what a client produces, and flush if flush.messages says so."""
    appended = log.append_unflushed(memoryview(bytearray(data)), of_client=True, rolls=True)
    assert appended is not None
    if log.has_many_unflushed:
        log.flush()
    return appended
