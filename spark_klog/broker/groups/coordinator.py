"""Group coordinator: groups and offsets of the partitions of __consumer_offsets that this broker leads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.broker.coordinator import Coordinator
from spark_klog.broker.event_loop import MAX_ID_LENGTH, BackgroundTasks
from spark_klog.broker.groups.consumer_group import ConsumerGroup, Heartbeat, refused_heartbeat
from spark_klog.broker.groups.consumer_groups import ConsumerGroups
from spark_klog.broker.groups.consumer_records import Row, encode_removal
from spark_klog.broker.groups.expiry import expire, forget_topics
from spark_klog.broker.groups.group import Group, Join, State, refused_join, subscribed_topics
from spark_klog.broker.groups.groups import Groups
from spark_klog.broker.groups.membership import Partitions
from spark_klog.broker.groups.migration import classic_message, membership_of, protocols_of
from spark_klog.broker.groups.offset_manager import OffsetManager, Since
from spark_klog.broker.groups.records import encode_group, encode_group_key, encode_stored_group
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.metadata.registry import Topic
from spark_klog.broker.partitions import ServedPartitions
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.broker.settings.group_settings import group_times
from spark_klog.broker.topic_changes import TopicChanges
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.tables.groups import JOIN_EPOCH

_log = logging.getLogger(__name__)


class GroupCoordinator(Coordinator):
    """All groups whose partitions this broker leads. For one event loop; `tasks` removes offsets of deleted topics."""

    def __init__(
        self, config: BrokerConfig, partitions: ServedPartitions, changes: TopicChanges, tasks: BackgroundTasks
    ) -> None:
        super().__init__(config, partitions, changes, OFFSETS_TOPIC, "group")
        self._tasks = tasks
        self.groups = Groups(self._store, config.group_initial_delay_ms, config.group_max_size)
        self.consumer_groups = ConsumerGroups(
            self._store_consumer_rows,
            self._make_classic,
            lambda group: group_times(config, self._registry.group_settings.get(group, {})),
            config.consumer_max_size,
        )
        self.offsets = OffsetManager(self.groups.load, self.consumer_groups.load)
        #: Deleted topics whose offsets are still to be removed.
        self._deleted: dict[str, Since] = {}
        self._removal = asyncio.Lock()

    async def log_of(self, key: str, *, for_reading: bool = False) -> PartitionLog | ErrorCode:
        """As in `Coordinator`. An id that is too long gets INVALID_GROUP_ID, unless it is known: Kafka may have it."""
        log = await super().log_of(key, for_reading=for_reading)
        if not isinstance(log, ErrorCode) and len(key) > MAX_ID_LENGTH and not self._knows(key):
            return ErrorCode.INVALID_GROUP_ID
        return log

    def _knows(self, group: str) -> bool:
        is_group = self.groups.get(group) is not None or self.consumer_groups.get(group) is not None
        return is_group or self.offsets.has_any(group)

    async def code(self, group: str, *, for_reading: bool = False) -> ErrorCode:
        """NONE if this broker coordinates the group, else the error."""
        if not group:
            return ErrorCode.INVALID_GROUP_ID
        log = await self.log_of(group, for_reading=for_reading)
        return log if isinstance(log, ErrorCode) else ErrorCode.NONE

    def stop(self) -> None:
        """Answer all waiting requests, so that clients look for the coordinator again, and accept no more."""
        self.groups.stop()
        self.consumer_groups.stop()

    def may_commit(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        epoch: int,
        partitions: Callable[[], Partitions],
        *,
        in_transaction: bool = False,
    ) -> ErrorCode:
        """Return NONE if OffsetCommit (`in_transaction`: TxnOffsetCommit) of partitions is allowed, else the error.

        `epoch` is the member's epoch, or the generation of a group of the classic protocol.
        """
        group = self.consumer_groups.get(group_id)
        if group is None:
            return self.groups.may_commit(group_id, member_id, instance_id, epoch, in_transaction=in_transaction)
        return group.may_commit(member_id, epoch, partitions)

    def may_fetch(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Return NONE if OffsetFetch is allowed: of anybody, but of a member only in its epoch."""
        group = self.consumer_groups.get(group_id)
        is_member = bool(member_id) or epoch >= 0
        return group.may_fetch(member_id or "", epoch) if group is not None and is_member else ErrorCode.NONE

    async def join(
        self, group_id: str, join: Join, topics_now: Callable[[], Mapping[str, Topic]], allows: Callable[[str], bool]
    ) -> dict[str, Any]:
        """Answer JoinGroup; an empty consumer group becomes one of the classic protocol."""
        groups = self.consumer_groups
        seen = await groups.resolved(group_id, None, topics_now, self._partitions.turns)
        group = groups.get(group_id)
        if group is not None and not group.is_empty:
            return groups.join_classic(group_id, join, seen, allows)
        if group is not None:
            if join.member_id:
                return refused_join(ErrorCode.UNKNOWN_MEMBER_ID, join.member_id)
            emptied_ms = groups.empty_since(group_id, system_ms())
            code = groups.delete(group_id)
            if code:
                return refused_join(code, join.member_id)
            self.groups.note_emptied(group_id, emptied_ms)  # its offsets expire as before until members have joined
        return await self.groups.join(group_id, join)

    async def sync(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: dict[str, bytes],
    ) -> dict[str, Any]:
        """Answer SyncGroup; a consumer group has no use for a leader's assignments."""
        group = self.consumer_groups.get(group_id)
        if group is not None:
            names = self._registry.names
            answer = group.sync_classic(member_id, instance_id, generation, protocol, names, time.monotonic())
            self.consumer_groups.settle(group)
            return answer
        return await self.groups.sync(group_id, member_id, instance_id, generation, protocol, assignments)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Answer Heartbeat."""
        group = self.consumer_groups.get(group_id)
        if group is not None:
            code = group.heartbeat_classic(member_id, instance_id, generation, time.monotonic())
            self.consumer_groups.settle(group)
            return code
        return self.groups.heartbeat(group_id, member_id, instance_id, generation)

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> ErrorCode:
        """Answer LeaveGroup of one member."""
        group = self.consumer_groups.get(group_id)
        if group is not None:
            code = group.leave_classic(member_id, instance_id, time.monotonic())
            self.consumer_groups.settle(group)
            return code
        return self.groups.leave(group_id, member_id, instance_id)

    def consumer_heartbeat(
        self, group_id: str, beat: Heartbeat, topics: Mapping[str, Topic], allows: Callable[[str], bool]
    ) -> dict[str, Any]:
        """Answer ConsumerGroupHeartbeat; `topics` are those that `ConsumerGroups.resolved` has returned.

        With its first member of the consumer protocol, a group of the classic one becomes a consumer group, with its
        members if they are consumers: GROUP_ID_NOT_FOUND if they are not; COORDINATOR_LOAD_IN_PROGRESS, with which
        clients try again, while they rebalance.
        """
        group, converted = self.groups.get(group_id), None
        if group is not None and beat.epoch == JOIN_EPOCH and group.state is not State.EMPTY:
            if group.state is not State.STABLE:
                reason = f"group {group_id} rebalances: try again"
                return refused_heartbeat(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, beat.member_id, reason)
            converted = membership_of(group, topics)
            if converted is None:
                reason = f"group {group_id} has other members than consumers: choose another group"
                return refused_heartbeat(ErrorCode.GROUP_ID_NOT_FOUND, beat.member_id, reason)
        return self.consumer_groups.heartbeat(group_id, beat, topics, allows, converted)

    def _store_consumer_rows(self, group_id: str, encode: Callable[[], list[Row]]) -> ErrorCode:
        """Write rows of a consumer group; a group of the classic protocol ends with its first ones, in one batch."""
        group = self.groups.get(group_id)
        ends = [] if group is None else [(encode_group_key(group_id), None)]
        code = self._store_rows(group_id, lambda: [*ends, *encode()])
        if not code and group is not None:
            _log.info("group %s is one of the consumer protocol now, with its classic members", group_id)
            self.groups.forget(group_id)
        return code

    def _make_classic(self, group: ConsumerGroup) -> bool:
        """Let a consumer group with classic members alone become one of the classic protocol; whether it is now."""
        group_id, stored = group.group_id, classic_message(group, self._registry.names, system_ms())
        # after a restart members are to join again, too: nobody is in the generation that is read then
        later = stored | {"generation": stored["generation"] + 1}
        code = self._store_rows(
            group_id,
            lambda: [
                *encode_removal(group_id, group.membership),
                (encode_group_key(group_id), encode_stored_group(later)),
            ],
        )
        if not code:
            _log.info("group %s is one of the classic protocol again", group_id)
            self.consumer_groups.forget(group_id)
            self.groups.load(group_id, stored)
            reason = "its last member of the consumer protocol has gone"
            self.groups.begin_again(group_id, protocols_of(group.membership), later["generation"], reason)
        return not code

    def delete(self, group_id: str) -> ErrorCode:
        """Remove a group without members; NON_EMPTY_GROUP, or GROUP_ID_NOT_FOUND if nobody has joined it."""
        is_consumer_group = self.consumer_groups.get(group_id) is not None
        return (self.consumer_groups if is_consumer_group else self.groups).delete(group_id)

    def subscribed_topics(self, group_id: str) -> set[str] | None:
        """The topics that the group's members consume; None if unknown."""
        consumer_group, group = self.consumer_groups.get(group_id), self.groups.get(group_id)
        if consumer_group is not None and not consumer_group.is_empty:
            return consumer_group.subscribed_topics()
        return set() if group is None else subscribed_topics(group)

    def _store(self, group_id: str, group: Group | None) -> ErrorCode:
        return self._store_rows(
            group_id,
            lambda: [(encode_group_key(group_id), None if group is None else encode_group(group, system_ms()))],
        )

    def _store_rows(self, group_id: str, encode: Callable[[], list[Row]]) -> ErrorCode:
        log = self.local_log(group_id)
        if log is None:
            return ErrorCode.NOT_COORDINATOR
        code = self._append(log, group_id, encode)
        if not code:
            self._flushes.care_for(log)  # the caller may be a timer, which can't wait for a flush
        return code

    async def flushed(self, group: str) -> ErrorCode:
        """Wait for the flush that flush.messages requires before a member is answered; NONE, or the member's error."""
        log = self.local_log(group)
        return ErrorCode.NONE if log is None or await self._is_flushed(log) else ErrorCode.COORDINATOR_NOT_AVAILABLE

    async def load(self) -> None:
        """Read groups and offsets from the log; until then requests get COORDINATOR_LOAD_IN_PROGRESS."""
        # of deletions after which a kill may have come before their offsets were removed; a later topic is a new one
        gone = self._logs.journal.deleted_before - self._registry.topics.keys() - self._registry.unread
        is_read = await self._read_logs(self.offsets.load) is not None
        if not is_read:
            self._forget_all()
        for name in gone:
            self.forget_topic(name)
        self.is_loading = False
        self.groups.start()
        self.consumer_groups.start()
        await self.remove_deleted()

    def forget_topic(self, name: str) -> None:
        """Remove the offsets that groups have committed of a deleted topic until now."""
        if name in self._deleted:
            self.offsets.forget_since(self._deleted[name])
        self._deleted[name] = self.offsets.since_now(topic=name)
        if not self.is_loading:
            self._tasks.start(self.remove_deleted())

    async def remove_deleted(self) -> None:
        """Remove the offsets of topics that were deleted until now; before `load` nothing: it does that itself."""
        async with self._removal:
            while self._deleted and not self.is_loading:
                topics, self._deleted = self._deleted, {}
                try:
                    await self._flushes.take(forget_topics(topics, self.offsets, self.local_log))
                finally:
                    for since in topics.values():
                        self.offsets.forget_since(since)

    def forget_logs_of(self, name: str) -> None:
        """Forget all groups if `name` is __consumer_offsets, whose logs were deleted or set aside."""
        if name == OFFSETS_TOPIC and not self.is_loading:  # `load` checks for itself when it ends
            self._unread.clear()
            self._forget_all()

    def _forget_all(self) -> None:
        self.groups.forget_all()
        self.consumer_groups.forget_all()
        self.offsets.forget_all()

    async def expire(self) -> None:
        """Remove expired offsets, and groups with neither members nor offsets."""
        if not self.is_loading:
            now_ms = system_ms()
            before_ms = now_ms - self._config.offsets_retention_minutes * 60_000
            known = self.groups, self.consumer_groups
            await self._flushes.take(expire(known, self.offsets, self.local_log, now_ms, before_ms))
