"""Commits between any two steps of a removal of offsets: offsets committed meanwhile stay, all others go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_klog.broker.groups import expiry, offset_manager
from spark_klog.broker.groups.expiry import Steps, expire, forget_group, forget_topics
from spark_klog.broker.groups.groups import Groups
from spark_klog.broker.groups.offset_manager import OffsetManager
from spark_klog.broker.transactions.records import marker_batch
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from tests.support.clients.commits import commit_offsets

_BEFORE, _REMOVED_AT, _MEANWHILE = 1000, 1500, 2000
_AT_ONCE = 3
#: Three steps: two whole ones, and one of two offsets.
_PARTITIONS = range(2 * _AT_ONCE + 2)
_STEPS = 3
_OLD, _NEW = (1, -1, ""), (2, -1, "")

Removal = Callable[[OffsetManager, PartitionLog, str], Steps]


def _expiring(offsets: OffsetManager, log: PartitionLog, _: str) -> Steps:
    groups = Groups(lambda group, stored: ErrorCode.NONE, 0, 10)
    return expire([groups], offsets, lambda group: log, _REMOVED_AT, _REMOVED_AT)


def _of_a_deleted_topic(offsets: OffsetManager, log: PartitionLog, _: str) -> Steps:
    return forget_topics({"t": offsets.since_now(topic="t")}, offsets, lambda group: log)


def _of_a_deleted_group(offsets: OffsetManager, log: PartitionLog, group: str) -> Steps:
    return forget_group(group, offsets.since_now(group=group), offsets, lambda group: log)


@pytest.mark.parametrize("removal", [_expiring, _of_a_deleted_topic, _of_a_deleted_group])
@pytest.mark.parametrize("way", ["plain", "transaction", "transaction that ends last"])
def test_commits_at_every_step_and_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removal: Removal, way: str
) -> None:
    """This holds in memory, and for what a restart loads from the log."""
    clock = {"ms": _BEFORE}
    monkeypatch.setattr(offset_manager, "system_ms", lambda: clock["ms"])
    monkeypatch.setattr(expiry, "_AT_ONCE", _AT_ONCE)
    log = PartitionLog(tmp_path / "__consumer_offsets-0", LogConfig())
    left: dict[str, tuple[int, OffsetManager]] = {}
    for taken in range(_STEPS + 2):
        for partition in _PARTITIONS:
            group = f"{taken} steps, then partition {partition}"
            producer = ProducerIdAndEpoch(len(left), 0)
            offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
            clock["ms"] = _BEFORE
            commit_offsets(offsets, log, group, {("t", each): _OLD for each in _PARTITIONS})

            def end(offsets: OffsetManager = offsets, producer: ProducerIdAndEpoch = producer) -> None:
                log.append(memoryview(marker_batch(producer, commits=True, coordinator_epoch=0, now_ms=_MEANWHILE)))
                offsets.complete(0, producer.producer_id, committed=True)

            steps = removal(offsets, log, group)
            for _ in range(taken):
                next(steps, None)
            clock["ms"] = _MEANWHILE
            if way == "plain":
                commit_offsets(offsets, log, group, {("t", partition): _NEW})
            else:
                commit_offsets(
                    offsets, log, group, {("t", partition): _NEW}, producer=(producer.producer_id, producer.epoch)
                )
                if way == "transaction":
                    end()
            assert len(list(steps)) == max(0, _STEPS - taken)
            if way == "transaction that ends last":
                end()
            left[group] = partition, offsets
    loaded = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    loaded.load(log)
    for group, (partition, offsets) in left.items():
        for each in (offsets, loaded):
            committed = [(*place, offset[:3]) for place, offset in each.all(group).items()]
            assert committed == [("t", partition, _NEW)], group
    log.close()
