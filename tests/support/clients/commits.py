"""Commit a group's offsets as the coordinator does."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.broker.groups.offset_manager import DEFAULT_RETENTION, Commit, OffsetManager, encoded_commits
from spark_klog.log.partition_log import PartitionLog


def commit_offsets(
    offsets: OffsetManager,
    log: PartitionLog,
    group: str,
    commits: Mapping[tuple[str, int], Commit],
    *,
    retention_ms: int = DEFAULT_RETENTION,
    producer: tuple[int, int] | None = None,
) -> None:
    """Append commits to `log`, in the transaction of `producer` (id, epoch) if it is given."""
    offsets.append(log, encoded_commits(group, commits, retention_ms, producer))
