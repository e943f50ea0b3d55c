"""All consumer groups (KIP-848) of a broker: runs `consumer_group.py` with a clock, a log and the broker's topics."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.broker.event_loop import Turns
from spark_klog.broker.groups.consumer_group import ConsumerGroup, Heartbeat, Matching, refused_heartbeat
from spark_klog.broker.groups.consumer_records import (
    ConsumerGroupKey,
    Row,
    encode_changes,
    encode_removal,
    load_record,
)
from spark_klog.broker.groups.group import Join, refused_join
from spark_klog.broker.groups.membership import Membership
from spark_klog.broker.groups.migration import read_subscription
from spark_klog.broker.groups.topic_pattern import TopicPattern
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.metadata.registry import Topic
from spark_klog.broker.settings.group_settings import GroupTimes
from spark_klog.errors import DecodeError, ErrorCode
from spark_klog.protocol.tables.groups import CONSUMER_GROUP_METADATA_KEY, JOIN_EPOCH

#: The most regular expressions that are kept compiled.
_MOST_PATTERNS = 1000


class _Matches:
    """The topics that match a regular expression; only new names are matched."""

    def __init__(self, regex: str) -> None:
        self._pattern = TopicPattern(regex)
        self._known: dict[str, bool] = {}
        self._seen: Mapping[str, Topic] | None = None
        self.names: frozenset[str] = frozenset()

    async def look(self, topics: Mapping[str, Topic], turns: Turns) -> None:
        """Match the names of these topics, without internal ones."""
        if topics is self._seen:
            return
        known = {}
        for name in topics:
            if name not in INTERNAL_TOPICS:
                matches = self._known.get(name)
                if matches is None:
                    await turns.take()
                    matches = self._pattern.matches(name)
                known[name] = matches
        self._known, self._seen = known, topics
        self.names = frozenset(name for name, matches in known.items() if matches)


class ConsumerGroups:
    """All groups of the consumer protocol. For one event loop.

    `store` writes rows to the group's partition of __consumer_offsets. `make_classic` gets a group with members of the
    classic protocol alone, and says whether it is one of that protocol now. `times_of` has a group's times.
    """

    def __init__(
        self,
        store: Callable[[str, Callable[[], list[Row]]], ErrorCode],
        make_classic: Callable[[ConsumerGroup], bool],
        times_of: Callable[[str], GroupTimes],
        max_size: int,
    ) -> None:
        self._store, self._make_classic = store, make_classic
        self._times_of, self._max_size = times_of, max_size
        self._groups: dict[str, ConsumerGroup] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        #: When each group was last written (ms): for an empty group, when it lost its last member.
        self._emptied: dict[str, int] = {}
        self._matches: OrderedDict[str, _Matches] = OrderedDict()
        self._is_stopped = False

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(list(self._groups.values()))

    def get(self, group_id: str) -> ConsumerGroup | None:
        return self._groups.get(group_id)

    def load(self, key: ConsumerGroupKey, value: bytes | None) -> None:
        """Load a record from the log; `DecodeError`."""
        if key.kind is CONSUMER_GROUP_METADATA_KEY and value is None:
            self._groups.pop(key.group, None)
        elif value is not None or key.group in self._groups:
            load_record(self._group(key.group).membership, key, value)

    def start(self) -> None:
        """Start the session timeouts, after all groups have been loaded."""
        now = time.monotonic()
        for group in self._groups.values():
            self._emptied[group.group_id] = system_ms()
            group.restart(now)
            self._set_timer(group)

    def stop(self) -> None:
        """Accept no more heartbeats."""
        self._is_stopped = True
        self._cancel_timers()

    def forget_all(self) -> None:
        """Forget all groups, because their log is gone."""
        groups, self._groups = self._groups, {}
        self._cancel_timers()
        self._emptied.clear()
        for group in groups.values():
            group.kill()

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _group(self, group_id: str) -> ConsumerGroup:
        group = self._groups.get(group_id)
        if group is None:
            group = ConsumerGroup(group_id, self._write, self._times_of(group_id), self._max_size)
            self._groups[group_id] = group
        return group

    def _write(self, group: ConsumerGroup, before: Membership, after: Membership) -> ErrorCode:
        rows = encode_changes(group.group_id, before, after)
        if not rows:
            return ErrorCode.NONE
        code = self._store(group.group_id, lambda: rows)
        if not code:
            self._emptied[group.group_id] = system_ms()
        return code

    async def _resolve(self, regex: str, topics: Mapping[str, Topic], turns: Turns) -> None:
        """Match a regular expression against the topics' names; `ConfigError` if it is none."""
        matches = self._matches.get(regex)
        if matches is None:
            matches = _Matches(regex)
            while len(self._matches) >= _MOST_PATTERNS:
                self._matches.popitem(last=False)
            self._matches[regex] = matches
        self._matches.move_to_end(regex)
        await matches.look(topics, turns)

    def _matching(self, regex: str, allows: Callable[[str], bool]) -> frozenset[str]:
        """The allowed topics that match, of those of the last `_resolve`."""
        matches = self._matches.get(regex)
        return frozenset() if matches is None else frozenset(filter(allows, matches.names))

    async def resolved(
        self, group_id: str, regex: str | None, topics: Mapping[str, Topic], turns: Turns
    ) -> Mapping[str, Topic]:
        """Resolve the regular expressions of the group and of a member; return the topics for `heartbeat`.

        `ConfigError` if the member's regular expression is none.
        """
        resolved: set[str] = set()
        while unresolved := self._regexes(group_id, regex) - resolved:
            for each in unresolved:
                await self._resolve(each, topics, turns)
            resolved |= unresolved
        return topics

    def heartbeat(
        self, group_id: str, beat: Heartbeat, topics: Mapping[str, Topic], allows: Callable[[str], bool]
    ) -> dict[str, Any]:
        """Answer ConsumerGroupHeartbeat; `allows` says whether the client may see a topic."""
        if self._is_stopped:
            return refused_heartbeat(ErrorCode.COORDINATOR_NOT_AVAILABLE, beat.member_id, "the broker stops")
        if group_id not in self._groups and beat.epoch != JOIN_EPOCH:
            return refused_heartbeat(ErrorCode.UNKNOWN_MEMBER_ID, beat.member_id, f"there is no group {group_id}")
        group = self._group(group_id)
        group.times = self._times_of(group_id)
        matching: Matching = partial(self._matching, allows=allows)
        answer = group.heartbeat(beat, topics, matching, time.monotonic())
        if group.is_empty and not group.membership.epoch:  # the first member was refused
            self._groups.pop(group_id, None)
        else:
            self._settle(group)
        return answer

    def join_classic(
        self, group_id: str, join: Join, topics: Mapping[str, Topic], allows: Callable[[str], bool]
    ) -> dict[str, Any]:
        """Answer JoinGroup of a member of the classic protocol."""
        if self._is_stopped:
            return refused_join(ErrorCode.COORDINATOR_NOT_AVAILABLE, join.member_id)
        group = self._groups.get(group_id)
        if group is None:  # it has changed its protocol meanwhile
            return refused_join(ErrorCode.REBALANCE_IN_PROGRESS, join.member_id)
        try:
            if join.protocol_type != group.protocol_type or not join.protocols:
                return refused_join(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, join.member_id)
            names, owned = read_subscription(join.protocols[0][1], topics)
        except DecodeError:
            return refused_join(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, join.member_id)
        matching: Matching = partial(self._matching, allows=allows)
        answer = group.join_classic(join, owned, names, topics, matching, time.monotonic())
        self._settle(group)
        return answer

    def sync_classic(
        self,
        group: ConsumerGroup,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
    ) -> dict[str, Any]:
        """Answer SyncGroup of a member of the classic protocol."""
        answer = group.sync_classic(member_id, instance_id, generation, protocol, time.monotonic())
        self._settle(group)
        return answer

    def heartbeat_classic(
        self, group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int
    ) -> ErrorCode:
        """Answer Heartbeat of a member of the classic protocol."""
        code = group.heartbeat_classic(member_id, instance_id, generation, time.monotonic())
        self._settle(group)
        return code

    def leave_classic(self, group: ConsumerGroup, member_id: str, instance_id: str | None) -> ErrorCode:
        """Answer LeaveGroup of a member."""
        code = group.leave_classic(member_id, instance_id, time.monotonic())
        self._settle(group)
        return code

    def adopt(self, group_id: str, membership: Membership) -> None:
        """Take over a group of the classic protocol, whose new records have been written."""
        group = self._group(group_id)
        group.membership = membership
        group.restart(time.monotonic())
        self._set_timer(group)

    def _regexes(self, group_id: str, regex: str | None) -> set[str]:
        group = self._groups.get(group_id)
        return ({regex} if regex else set()) | (set() if group is None else group.regexes)

    def empty_since(self, group_id: str, now_ms: int) -> int:
        """When the group lost its last member (ms): `now_ms` if it has members, 0 if it never had any."""
        group = self._groups.get(group_id)
        return now_ms if group is not None and not group.is_empty else self._emptied.get(group_id, 0)

    def delete(self, group_id: str) -> ErrorCode:
        """Remove an empty group; NON_EMPTY_GROUP if it has members, GROUP_ID_NOT_FOUND if nobody has joined it."""
        group = self._groups.get(group_id)
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if not group.is_empty:
            return ErrorCode.NON_EMPTY_GROUP
        code = self._store(group_id, lambda: encode_removal(group_id, group.membership))
        if not code:
            self.forget(group_id)
        return code

    def forget(self, group_id: str) -> None:
        """Forget a group whose records have been removed."""
        self._groups.pop(group_id).kill()
        self._emptied.pop(group_id, None)
        timer = self._timers.pop(group_id, None)
        if timer is not None:
            timer.cancel()

    def _settle(self, group: ConsumerGroup) -> None:
        """Set the group's timer after a change; one without members of the consumer protocol leaves this class."""
        if not group.is_dead and not (group.classic_protocol is not None and self._make_classic(group)):
            self._set_timer(group)

    def _set_timer(self, group: ConsumerGroup) -> None:
        timer = self._timers.pop(group.group_id, None)
        if timer is not None:
            timer.cancel()
        if group.wake_at < inf and not self._is_stopped:
            delay = max(0.0, group.wake_at - time.monotonic())
            self._timers[group.group_id] = asyncio.get_running_loop().call_later(delay, self._tick, group)

    def _tick(self, group: ConsumerGroup) -> None:
        group.tick(time.monotonic())
        self._settle(group)
