"""What is removed in time: offsets that nobody needs (KIP-211), those of deleted topics, groups of nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from spark_klog.broker.coordinator.group import State
from spark_klog.broker.coordinator.groups import Groups
from spark_klog.broker.coordinator.subscription import subscribed_topics
from spark_klog.broker.offset_manager import OffsetManager
from spark_klog.log.partition_log import PartitionLog

_log = logging.getLogger(__name__)
LogOf = Callable[[str], PartitionLog | None]


def expire(groups: Groups, offsets: OffsetManager, log_of: LogOf, now_ms: int, before_ms: int) -> None:
    """Remove what was committed before that time: of groups that have had no members since then, and of groups that
    consume other topics by now. Then remove groups that have neither members nor offsets.
    """
    for group_id in offsets.groups:
        gone = offsets.expired(group_id, before_ms)
        if gone and groups.empty_since(group_id, now_ms) >= before_ms:
            group = groups.get(group_id)
            needed = subscribed_topics(group) if group is not None and group.state is State.STABLE else None
            gone = [] if needed is None else [key for key in gone if key[0] not in needed]
        _remove(offsets, log_of, group_id, gone)
    for group in groups:
        if group.is_idle and not offsets.has_offsets(group.group_id):
            groups.delete(group.group_id)


def forget_topics(topics: Collection[str], offsets: OffsetManager, log_of: LogOf) -> None:
    """Remove what groups have committed for topics that are gone."""
    for group_id in offsets.groups if topics else ():
        keys = [(topic, partition) for topic, partition, _ in offsets.all(group_id) if topic in topics]
        _remove(offsets, log_of, group_id, keys)


def _remove(offsets: OffsetManager, log_of: LogOf, group_id: str, keys: Iterable[tuple[str, int]]) -> None:
    log = log_of(group_id)
    if log is None:
        return
    try:
        offsets.remove(log, group_id, keys)
    except OSError as error:
        _log.error("offsets of group %s that are not needed any more can't be removed: %s", group_id, error)
