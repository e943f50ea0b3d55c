"""Expiry of committed offsets (KIP-211), of offsets of deleted topics, and of empty groups.

There may be millions: each function is a generator, and its caller may do other things between two steps. It yields
the log that the next step appends to, or None: `LogFlushes.take` makes room there first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from spark_klog.broker.coordinator.group import State
from spark_klog.broker.coordinator.groups import Groups
from spark_klog.broker.coordinator.subscription import subscribed_topics
from spark_klog.broker.log_flushes import LogFlushes
from spark_klog.broker.offset_manager import OffsetManager
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog, system_ms

_log = logging.getLogger(__name__)
LogOf = Callable[[str], PartitionLog | None]
#: Nothing was committed before it.
_NEVER = -1
#: Offsets looked at, and removed, in one step: a millisecond.
_AT_ONCE = 100
#: What a step appends to next.
Steps = Iterator[PartitionLog | None]


def expire(groups: Groups, offsets: OffsetManager, log_of: LogOf, now_ms: int, before_ms: int) -> Steps:
    """Remove what was committed before that time: of groups that have had no members since then, and of groups that
    consume other topics by now. An offset with an expiry time of its own goes by that. Then remove groups that have
    neither members nor offsets.
    """
    for group_id in offsets.groups:
        for keys in _in_parts(offsets.known(group_id)):
            yield log_of(group_id)
            needed, since_ms = _kept(groups, group_id, now_ms, before_ms)
            if needed is not None:
                gone = offsets.expired(group_id, keys, now_ms, since_ms)
                _remove(offsets, log_of, group_id, [key for key in gone if key[0] not in needed])
    for group in groups:
        yield log_of(group.group_id) if group.is_idle else None
        is_there = groups.get(group.group_id) is group
        if is_there and group.is_idle and not offsets.has_any(group.group_id):
            groups.delete(group.group_id)


def _kept(groups: Groups, group_id: str, now_ms: int, before_ms: int) -> tuple[set[str] | None, int]:
    """(topics that the group consumes, None if that is not known; the time (ms) before which its commits expire)."""
    group = groups.get(group_id)
    if group is None or group.state is State.EMPTY:
        return set(), before_ms if groups.empty_since(group_id, now_ms) < before_ms else _NEVER
    return subscribed_topics(group) if group.state is State.STABLE else None, before_ms


def forget_topics(topics: Mapping[str, int], offsets: OffsetManager, log_of: LogOf) -> Steps:
    """Remove what groups have committed for topics that are gone, since when (ms): what they committed after that
    is for a new topic of the same name.
    """
    for group_id in offsets.groups if topics else ():
        for part in _in_parts(offsets.known(group_id)):
            keys = [key for key in part if key[0] in topics]
            yield log_of(group_id) if keys else None
            gone = [key for key in keys if offsets.is_of_before(group_id, key, topics[key[0]])]
            _remove(offsets, log_of, group_id, gone)


def forget_group(group_id: str, since_ms: int, offsets: OffsetManager, log_of: LogOf) -> Steps:
    """Remove what a group that was deleted at that time had committed, not what it commits since; OSError."""
    for keys in _in_parts(offsets.known(group_id)):
        yield log_of(group_id)
        gone = [key for key in keys if offsets.is_of_before(group_id, key, since_ms)]
        if gone and (log := log_of(group_id)) is not None:
            offsets.remove(log, group_id, gone)


class DeletedTopics:
    """Topics whose offsets are still to be removed."""

    def __init__(self, offsets: OffsetManager, log_of: LogOf, flushes: LogFlushes) -> None:
        self._offsets, self._log_of, self._flushes = offsets, log_of, flushes
        self._since_ms: dict[str, int] = {}
        self._is_running = False

    def add(self, name: str) -> None:
        """The topic is gone, as of now."""
        self._since_ms[name] = system_ms()

    async def forget(self) -> None:
        """Remove the offsets. One run at a time: it takes what comes meanwhile."""
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._since_ms:
                topics, self._since_ms = self._since_ms, {}
                await self._flushes.take(forget_topics(topics, self._offsets, self._log_of))
        finally:
            self._is_running = False


def _in_parts(keys: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    left = iter(keys)
    while part := list(islice(left, _AT_ONCE)):
        yield part


def _remove(offsets: OffsetManager, log_of: LogOf, group_id: str, keys: list[tuple[str, int]]) -> None:
    log = log_of(group_id)
    if log is None or log.failure is not None or not keys:
        return
    try:
        offsets.remove(log, group_id, keys)
    except (BatchTooLarge, OSError) as error:
        _log.error("offsets of group %s that are not needed any more can't be removed: %s", group_id, error)
