"""Group coordinator: groups and offsets of the partitions of __consumer_offsets that this broker leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_klog.base.clock import system_ms
from spark_klog.broker.coordinator import Coordinator
from spark_klog.broker.event_loop import MAX_ID_LENGTH, BackgroundTasks
from spark_klog.broker.groups.expiry import expire, forget_topics
from spark_klog.broker.groups.group import Group
from spark_klog.broker.groups.groups import Groups
from spark_klog.broker.groups.offset_manager import OffsetManager, Since
from spark_klog.broker.groups.records import encode_group, encode_group_key
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import PartitionLog

if TYPE_CHECKING:
    from spark_klog.broker.broker import Broker


class GroupCoordinator(Coordinator):
    """All groups whose partitions this broker leads. For one event loop; `tasks` removes offsets of deleted topics."""

    def __init__(self, broker: Broker, tasks: BackgroundTasks) -> None:
        super().__init__(broker, OFFSETS_TOPIC, "group")
        self._tasks = tasks
        self.groups = Groups(self._store, broker.config.group_initial_delay_ms, broker.config.group_max_size)
        self.offsets = OffsetManager(self.groups.load)
        #: Deleted topics whose offsets are still to be removed.
        self._deleted: dict[str, Since] = {}
        self._removes_deleted = False

    async def log_of(self, key: str, *, for_reading: bool = False) -> PartitionLog | ErrorCode:
        """As in `Coordinator`. An id that is too long gets INVALID_GROUP_ID, unless it is known: Kafka may have it."""
        log = await super().log_of(key, for_reading=for_reading)
        is_error = isinstance(log, ErrorCode)
        if not is_error and len(key) > MAX_ID_LENGTH and self.groups.get(key) is None and not self.offsets.has_any(key):
            return ErrorCode.INVALID_GROUP_ID
        return log

    async def code(self, group: str, *, for_reading: bool = False) -> ErrorCode:
        """NONE if this broker coordinates the group, else the error."""
        if not group:
            return ErrorCode.INVALID_GROUP_ID
        log = await self.log_of(group, for_reading=for_reading)
        return log if isinstance(log, ErrorCode) else ErrorCode.NONE

    def _store(self, group_id: str, group: Group | None) -> ErrorCode:
        log = self.local_log(group_id)
        if log is None:
            return ErrorCode.NOT_COORDINATOR
        code = self._append(
            log,
            group_id,
            lambda: (encode_group_key(group_id), None if group is None else encode_group(group, system_ms())),
        )
        if not code:
            self._broker.flushes.care_for(log)  # the caller may be a timer, which can't wait for a flush
        return code

    async def flushed(self, group: str) -> ErrorCode:
        """Wait for the flush that flush.messages requires before a member is answered; NONE, or the member's error."""
        log = self.local_log(group)
        return ErrorCode.NONE if log is None or await self._is_flushed(log) else ErrorCode.COORDINATOR_NOT_AVAILABLE

    async def load(self) -> None:
        """Read groups and offsets from the log; until then requests get COORDINATOR_LOAD_IN_PROGRESS."""
        is_read = await self._read_logs(self.offsets.load) is not None
        self.is_loading = False
        if not is_read:
            self._forget_all()
        self.groups.start()
        await self._remove_deleted()

    def forget_topic(self, name: str) -> None:
        """Remove the offsets that groups have committed of a deleted topic until now."""
        if name in self._deleted:
            self.offsets.forget_since(self._deleted[name])
        self._deleted[name] = self.offsets.since_now(topic=name)
        if not self.is_loading:
            self._tasks.start(self._remove_deleted())

    async def _remove_deleted(self) -> None:
        """Remove the offsets of deleted topics. Only one run at a time: it also handles topics added meanwhile."""
        if self._removes_deleted:
            return
        self._removes_deleted = True
        try:
            while self._deleted:
                topics, self._deleted = self._deleted, {}
                try:
                    await self._broker.flushes.take(forget_topics(topics, self.offsets, self.local_log))
                finally:
                    for since in topics.values():
                        self.offsets.forget_since(since)
        finally:
            self._removes_deleted = False

    def forget_logs_of(self, name: str) -> None:
        """Forget all groups if `name` is __consumer_offsets, whose logs were deleted or set aside."""
        if name == OFFSETS_TOPIC and not self.is_loading:  # `load` checks for itself when it ends
            self._unread.clear()
            self._forget_all()

    def _forget_all(self) -> None:
        self.groups.forget_all()
        self.offsets.forget_all()

    async def expire(self) -> None:
        """Remove expired offsets, and groups with neither members nor offsets."""
        if not self.is_loading:
            now_ms = system_ms()
            before_ms = now_ms - self._broker.config.offsets_retention_minutes * 60_000
            await self._broker.flushes.take(expire(self.groups, self.offsets, self.local_log, now_ms, before_ms))
