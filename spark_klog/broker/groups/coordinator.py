"""Group coordinator: groups and offsets of the partitions of __consumer_offsets that this broker leads.

Each group lives in one partition; the broker that leads it coordinates the group.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_klog.base.clock import system_ms
from spark_klog.broker.event_loop import MAX_ID_LENGTH, BackgroundTasks
from spark_klog.broker.groups.expiry import DeletedTopics, expire
from spark_klog.broker.groups.groups import Groups
from spark_klog.broker.groups.offset_manager import OffsetManager, write_group
from spark_klog.broker.groups.records import StoredGroup
from spark_klog.broker.logs.stored_rows import read_log
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.errors import DirectoryError, ErrorCode, KlogError
from spark_klog.log.partition_log import PartitionLog

if TYPE_CHECKING:
    from spark_klog.broker.broker import Broker

_log = logging.getLogger(__name__)


class GroupCoordinator:
    """All groups whose partitions this broker leads. For one event loop; `tasks` removes offsets of deleted topics."""

    def __init__(self, broker: Broker, tasks: BackgroundTasks) -> None:
        self._broker = broker
        self._tasks = tasks
        config = broker.config
        self.groups = Groups(self._store, config.group_initial_delay_ms, config.group_max_size)
        self.offsets = OffsetManager(self.groups.load)
        #: Whether groups and offsets are still being read from the log.
        self.is_loading = True
        #: Partitions of __consumer_offsets that can't be read; serving their groups would start them from nothing.
        self._unread: set[int] = set()
        self._deleted_topics = DeletedTopics(self.offsets, self.local_log, broker.flushes)

    async def find(self, group: str) -> tuple[int, int]:
        """(broker id, partition of __consumer_offsets) that keep the group; creates the topic at first use.

        Raises `DirectoryError` if the topic can't be created.
        """
        return await self._broker.coordinator_of(group, OFFSETS_TOPIC)

    async def log_of(self, group: str, *, for_reading: bool = False) -> PartitionLog | ErrorCode:
        """The log that keeps the group, or the error if this broker does not lead it or has not read it.

        An id that is too long gets INVALID_GROUP_ID, unless the log has it already: Kafka may have written it.
        """
        broker = self._broker
        if not await broker.is_current(for_reading=for_reading):
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            _, partition = await self.find(group)
        except DirectoryError as error:
            _log.error("group %s has no coordinator: %s", group, error)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not broker.registry.leads(OFFSETS_TOPIC, partition):
            return ErrorCode.NOT_COORDINATOR
        log = broker.logs.get(OFFSETS_TOPIC, partition)
        if log is None or partition in self._unread:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if self.is_loading:
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        if len(group) > MAX_ID_LENGTH and self.groups.get(group) is None and not self.offsets.has_any(group):
            return ErrorCode.INVALID_GROUP_ID
        await broker.flushes.make_early_room(log)
        return log

    async def code(self, group: str, *, for_reading: bool = False) -> ErrorCode:
        """NONE if this broker coordinates the group, else the error."""
        if not group:
            return ErrorCode.INVALID_GROUP_ID
        log = await self.log_of(group, for_reading=for_reading)
        return log if isinstance(log, ErrorCode) else ErrorCode.NONE

    def local_log(self, group: str) -> PartitionLog | None:
        """The log that keeps the group, if this broker has it and has read it."""
        log = self._broker.internal_log(OFFSETS_TOPIC, group)
        return None if log is None or log.partition in self._unread else log

    def _store(self, group: str, stored: StoredGroup | None) -> ErrorCode:
        log = self.local_log(group)
        if log is None:
            return ErrorCode.NOT_COORDINATOR
        if not self._broker.serves(log):
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        code = write_group(log, group, stored)
        self._broker.flushes.care_for(log)  # the caller may be a timer, which can't wait for a flush
        return code

    async def flushed(self, group: str) -> ErrorCode:
        """Wait for the flush that flush.messages requires before a member is answered; NONE, or the member's error."""
        log = self.local_log(group)
        if log is not None:
            try:
                await self._broker.flushes.flush_many(log)
            except OSError as error:
                _log.error("group %s can't be written to %s: %s", group, log.directory, error)
                return ErrorCode.COORDINATOR_NOT_AVAILABLE
            if not await self._broker.confirms(log):
                return ErrorCode.COORDINATOR_NOT_AVAILABLE
        return ErrorCode.NONE

    async def load(self) -> None:
        """Read groups and offsets from the log; until then requests get COORDINATOR_LOAD_IN_PROGRESS."""
        logs = [log for (topic, _), log in self._broker.logs.logs.items() if topic == OFFSETS_TOPIC]
        for log in logs:
            try:
                await read_log(self.offsets.load, log)
            except Exception as error:
                if not self._broker.logs.serves(log):
                    break
                known = isinstance(error, (KlogError, OSError))
                text = "groups and offsets of %s can't be read, and are not served: %s"
                _log.error(text, log.directory, error, exc_info=not known)
                self._unread.add(log.partition)
        self.is_loading = False
        if not all(map(self._broker.logs.serves, logs)):  # the topic was deleted meanwhile
            self._forget_all()
        self.groups.start()
        await self._deleted_topics.forget()

    def forget_topic(self, name: str) -> None:
        """Remove the offsets that groups have committed of a deleted topic until now."""
        self._deleted_topics.add(name)
        if not self.is_loading:
            self._tasks.start(self._deleted_topics.forget())

    def forget_logs_of(self, name: str) -> None:
        """Forget all groups if `name` is __consumer_offsets, whose logs were deleted or set aside."""
        if name == OFFSETS_TOPIC and not self.is_loading:  # `load` checks for itself when it ends
            self._forget_all()

    def _forget_all(self) -> None:
        self._unread.clear()
        self.groups.forget_all()
        self.offsets.forget_all()

    async def expire(self) -> None:
        """Remove expired offsets, and groups with neither members nor offsets."""
        if not self.is_loading:
            now_ms = system_ms()
            before_ms = now_ms - self._broker.config.offsets_retention_minutes * 60_000
            await self._broker.flushes.take(expire(self.groups, self.offsets, self.local_log, now_ms, before_ms))
