"""Expiry of committed offsets (KIP-211), of offsets of deleted topics, and of empty groups.

There may be millions of offsets, so each function is a generator: its caller can serve others between two steps. It
yields the log that the next step appends to, or None; `LogFlushes.take` makes room in it first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from spark_klog.broker.groups.consumer_group import ConsumerGroup
from spark_klog.broker.groups.consumer_groups import ConsumerGroups
from spark_klog.broker.groups.group import Group, State, subscribed_topics
from spark_klog.broker.groups.groups import Groups
from spark_klog.broker.groups.offset_manager import OffsetManager, Since
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog

_log = logging.getLogger(__name__)
LogOf = Callable[[str], PartitionLog | None]
#: Earlier than any commit (ms).
_NEVER = -1
#: Offsets checked and removed in one step, which takes about a millisecond.
_AT_ONCE = 100
#: Logs that the next steps append to.
Steps = Iterator[PartitionLog | None]


def expire(
    groups: Sequence[Groups | ConsumerGroups], offsets: OffsetManager, log_of: LogOf, now_ms: int, before_ms: int
) -> Steps:
    """Remove expired offsets, then groups, of all protocols, that have neither members nor offsets.

    An offset committed before `before_ms` expires if its group has had no members since, or no longer consumes the
    topic. An offset with its own expiry time expires then.
    """
    for group_id in offsets.groups:
        for keys in _in_parts(offsets.known(group_id)):
            yield log_of(group_id)
            needed, since_ms = _kept(groups, group_id, now_ms, before_ms)
            if needed is not None:
                gone = offsets.expired(group_id, keys, now_ms, since_ms)
                _remove(offsets, log_of, group_id, [key for key in gone if key[0] not in needed])
    for known in groups:
        for group in known:
            yield log_of(group.group_id) if group.is_idle else None
            is_there = known.get(group.group_id) is group
            if is_there and group.is_idle and not offsets.has_any(group.group_id):
                known.delete(group.group_id)


def _kept(
    groups: Sequence[Groups | ConsumerGroups], group_id: str, now_ms: int, before_ms: int
) -> tuple[set[str] | None, int]:
    """(topics the group consumes, None if unknown; the time in ms before which its commits expire)."""
    for known in groups:
        group = known.get(group_id)
        if isinstance(group, ConsumerGroup) and not group.is_empty:
            return group.subscribed_topics(), before_ms
        if isinstance(group, Group) and group.state is not State.EMPTY:
            return subscribed_topics(group) if group.state is State.STABLE else None, before_ms
    emptied_ms = max(known.empty_since(group_id, now_ms) for known in groups)
    return set(), before_ms if emptied_ms < before_ms else _NEVER


def forget_topics(topics: Mapping[str, Since], offsets: OffsetManager, log_of: LogOf) -> Steps:
    """Remove the offsets of deleted topics, except commits since the deletion: they belong to new topics."""
    for group_id in offsets.all_groups if topics else ():
        for part in _in_parts(offsets.known(group_id)):
            keys = [key for key in part if key[0] in topics]
            yield log_of(group_id) if keys else None
            gone = [key for key in keys if not topics[key[0]].has(group_id, key)]
            _remove(offsets, log_of, group_id, gone)


def forget_group(group_id: str, since: Since, offsets: OffsetManager, log_of: LogOf) -> Steps:
    """Remove the offsets that a group had when it was deleted; commits since then are kept. Raises OSError."""
    for keys in _in_parts(offsets.known(group_id)):
        yield log_of(group_id)
        gone = [key for key in keys if not since.has(group_id, key)]
        if gone and (log := log_of(group_id)) is not None:
            offsets.remove(log, group_id, gone)


def removal_error(group_id: str, error: BatchTooLarge | OSError) -> ErrorCode:
    """Log that offsets of a group can't be removed, and return the error code for the client."""
    _log.error("offsets of group %s can't be removed: %s", group_id, error)
    return ErrorCode.UNKNOWN_SERVER_ERROR if isinstance(error, BatchTooLarge) else ErrorCode.COORDINATOR_NOT_AVAILABLE


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
        removal_error(group_id, error)
