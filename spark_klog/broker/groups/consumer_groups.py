"""All consumer groups (KIP-848) of a broker: runs `consumer_group.py` with a clock, a log and the broker's topics."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
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
from spark_klog.broker.groups.known_groups import KnownGroups
from spark_klog.broker.groups.membership import Membership
from spark_klog.broker.groups.migration import read_subscription
from spark_klog.broker.groups.topic_pattern import TopicPattern, matches_in_turns
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.metadata.registry import Topic
from spark_klog.broker.settings.group_settings import GroupTimes
from spark_klog.errors import ConfigError, DecodeError, ErrorCode
from spark_klog.protocol.tables.groups import CONSUMER_GROUP_METADATA_KEY, JOIN_EPOCH

_log = logging.getLogger(__name__)
#: So many regular expressions are kept with what they match before those that no group uses are looked for.
_FEW_PATTERNS = 100


class _Matches:
    """The topics that match a regular expression; only new names are matched. A broken expression matches nothing."""

    def __init__(self, regex: str) -> None:
        self._regex = regex
        #: Why the expression is broken.
        self._reason = ""
        try:
            TopicPattern(regex)
        except ConfigError as error:
            self._reason = str(error)
        self._seen: Mapping[str, Topic] = {}
        self.names: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raise `ConfigError` if the expression is broken."""
        if self._reason:
            raise ConfigError(self._reason)

    def is_of(self, topics: Mapping[str, Topic]) -> bool:
        """Whether `names` are of these topics."""
        return topics is self._seen

    async def look(self, topics: Mapping[str, Topic], turns: Turns) -> None:
        """Match the names of these topics, without internal ones."""
        seen, known = self._seen, self.names
        names = {name for name in known if name in topics}
        new = [name for name in topics if name not in seen and name not in INTERNAL_TOPICS]
        if self._reason and not seen:
            _log.warning("a member subscribes to no topics: %s", self._reason)
        elif new and not self._reason:
            await turns.take(before_long_step=True)
            pattern = TopicPattern(self._regex)  # not kept: it takes a hundred times as long to match as to compile
            for name in new:
                if await matches_in_turns(pattern, name, turns):
                    names.add(name)
        self._seen, self.names = topics, frozenset(names)


class ConsumerGroups(KnownGroups[ConsumerGroup]):
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
        super().__init__()
        self._store, self._make_classic = store, make_classic
        self._times_of, self._max_size = times_of, max_size
        self._matches: dict[str, _Matches] = {}
        #: Regular expressions that members are about to subscribe to, with how many.
        self._resolving: Counter[str] = Counter()
        #: The number of patterns at which those that nobody uses are forgotten.
        self._most_patterns = _FEW_PATTERNS

    def load(self, key: ConsumerGroupKey, value: bytes | None, written_ms: int) -> None:
        """Load a record from the log, with the time at which it was written; `DecodeError`."""
        if key.kind is CONSUMER_GROUP_METADATA_KEY and value is None:
            self._groups.pop(key.group, None)
            self._emptied.pop(key.group, None)
        elif value is not None or key.group in self._groups:
            group = self._groups.get(key.group)
            if group is None:
                group = self._groups[key.group] = self._new(key.group)
            load_record(group.membership, key, value)
            self._emptied[key.group] = written_ms

    def _new(self, group_id: str, converted: Membership | None = None) -> ConsumerGroup:
        group = ConsumerGroup(group_id, self._write, self._times_of(group_id), self._max_size)
        if converted is not None:
            group.membership = converted
            group.restart(time.monotonic())
        return group

    def _write(self, group: ConsumerGroup, before: Membership, after: Membership) -> ErrorCode:
        rows = encode_changes(group.group_id, before, after)
        if not rows:
            return ErrorCode.NONE
        code = self._store(group.group_id, lambda: rows)
        if not code:
            self._emptied[group.group_id] = system_ms()
        return code

    async def resolved(
        self, group_id: str, regex: str | None, topics_now: Callable[[], Mapping[str, Topic]], turns: Turns
    ) -> Mapping[str, Topic]:
        """Resolve the regular expressions of the group and of a member; return the topics for `heartbeat`.

        These are the newest ones, so that two heartbeats do not undo what each other has seen. `ConfigError` if the
        member's regular expression is none; another's, from a log of Kafka's, then matches nothing.
        """
        if regex:
            self._pattern(regex).check()
        self._resolving[regex or ""] += 1
        try:
            while True:
                topics = topics_now()
                unresolved = [each for each in self._regexes(group_id, regex) if not self._pattern(each).is_of(topics)]
                if not unresolved:
                    return topics
                for each in unresolved:
                    await self._pattern(each).look(topics, turns)
        finally:
            self._resolving[regex or ""] -= 1
            self._resolving += Counter()  # without those of nobody

    def _pattern(self, regex: str) -> _Matches:
        matches = self._matches.get(regex)
        if matches is None:
            if len(self._matches) >= self._most_patterns:
                used = set(self._resolving).union(*(group.regexes for group in self._groups.values()))
                self._matches = {each: matches for each, matches in self._matches.items() if each in used}
                self._most_patterns = max(_FEW_PATTERNS, 2 * len(self._matches))
            matches = self._matches[regex] = _Matches(regex)
        return matches

    def _matching(self, allows: Callable[[str], bool]) -> Matching:
        """Look up the allowed topics that match, of those that `resolved` has returned."""
        allows = cache(allows)  # members with other expressions match the same topics

        @cache
        def matching(regex: str) -> frozenset[str]:
            return frozenset(filter(allows, self._matches[regex].names))

        return matching

    def heartbeat(
        self,
        group_id: str,
        beat: Heartbeat,
        topics: Mapping[str, Topic],
        allows: Callable[[str], bool],
        converted: Membership | None = None,
    ) -> dict[str, Any]:
        """Answer ConsumerGroupHeartbeat; `allows` says whether the client may see a topic.

        `converted` is a group of the classic protocol as one of this class: it becomes one if its new member is not
        refused.
        """
        if self._is_stopped:
            return refused_heartbeat(ErrorCode.COORDINATOR_NOT_AVAILABLE, beat.member_id, "the broker stops")
        if group_id not in self._groups and beat.epoch != JOIN_EPOCH:
            return refused_heartbeat(ErrorCode.UNKNOWN_MEMBER_ID, beat.member_id, f"there is no group {group_id}")
        group = self._groups.get(group_id) or self._new(group_id, converted)
        group.times = self._times_of(group_id)
        answer = group.heartbeat(beat, topics, self._matching(allows), time.monotonic())
        if group_id in self._groups or not answer["error_code"]:  # else the first member was refused
            self._groups[group_id] = group
            self.settle(group)
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
        answer = group.join_classic(join, owned, names, topics, self._matching(allows), time.monotonic())
        self.settle(group)
        return answer

    def _regexes(self, group_id: str, regex: str | None) -> set[str]:
        group = self._groups.get(group_id)
        return ({regex} if regex else set()) | (set() if group is None else group.regexes)

    def _remove(self, group: ConsumerGroup) -> ErrorCode:
        return self._store(group.group_id, lambda: encode_removal(group.group_id, group.membership))

    def settle(self, group: ConsumerGroup) -> None:
        """Set the group's timer after a change; one without members of the consumer protocol leaves this class."""
        if not group.is_dead and not (group.classic_protocol is not None and self._make_classic(group)):
            self._set_timer(group)

    def _tick(self, group: ConsumerGroup) -> None:
        group.tick(time.monotonic())
        self.settle(group)
