"""What is removed in time: offsets that nobody needs (KIP-211), those of deleted topics, groups of nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from spark_klog.broker.coordinator.group import State
from spark_klog.broker.coordinator.groups import Groups
from spark_klog.broker.coordinator.subscription import subscribed_topics
from spark_klog.broker.offset_manager import OffsetManager
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog

_log = logging.getLogger(__name__)
LogOf = Callable[[str], PartitionLog | None]
#: Nothing was committed before it.
_NEVER = -1


def expire(groups: Groups, offsets: OffsetManager, log_of: LogOf, now_ms: int, before_ms: int) -> None:
    """Remove what was committed before that time: of groups that have had no members since then, and of groups that
    consume other topics by now. An offset with an expiry time of its own goes by that. Then remove groups that have
    neither members nor offsets.
    """
    for group_id in offsets.groups:
        group = groups.get(group_id)
        if group is None or group.state is State.EMPTY:
            needed: set[str] | None = set()
            is_over = groups.empty_since(group_id, now_ms) < before_ms
        else:
            needed = subscribed_topics(group) if group.state is State.STABLE else None
            is_over = True
        if needed is not None:
            gone = offsets.expired(group_id, now_ms, before_ms if is_over else _NEVER)
            _remove(offsets, log_of, group_id, [key for key in gone if key[0] not in needed])
    for group in groups:
        if group.is_idle and not offsets.keys(group.group_id):
            groups.delete(group.group_id)


def forget_topics(topics: Collection[str], offsets: OffsetManager, log_of: LogOf) -> None:
    """Remove what groups have committed for topics that are gone."""
    for group_id in offsets.groups if topics else ():
        _remove(offsets, log_of, group_id, [key for key in offsets.keys(group_id) if key[0] in topics])


def _remove(offsets: OffsetManager, log_of: LogOf, group_id: str, keys: Iterable[tuple[str, int]]) -> None:
    log = log_of(group_id)
    if log is None:
        return
    try:
        offsets.remove(log, group_id, keys)
    except (BatchTooLarge, OSError) as error:
        _log.error("offsets of group %s that are not needed any more can't be removed: %s", group_id, error)
