"""The coordinator of groups: which partition of __consumer_offsets keeps a group, and what was read from it.

A group lives in a partition of __consumer_offsets, which the broker that leads it coordinates.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_klog.broker.background import BackgroundTasks
from spark_klog.broker.coordinator.expiry import DeletedTopics, expire
from spark_klog.broker.coordinator.groups import Groups
from spark_klog.broker.coordinator.records import StoredGroup
from spark_klog.broker.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.offset_manager import OffsetManager, write_group
from spark_klog.broker.stored_rows import read_log
from spark_klog.errors import DirectoryError, ErrorCode, KlogError
from spark_klog.log.partition_log import PartitionLog, system_ms

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
        #: Partitions of __consumer_offsets that can't be read: their groups would begin anew.
        self._unread: set[int] = set()
        self._deleted_topics = DeletedTopics(self.offsets, self.local_log, broker.flushes)

    async def find(self, group: str) -> tuple[int, int]:
        """(broker id, partition of __consumer_offsets) that keep a group's offsets; makes that topic at first use.

        `DirectoryError` where it can't be made.
        """
        return await self._broker.place_of(group, OFFSETS_TOPIC)

    async def log_of(self, group: str) -> PartitionLog | ErrorCode:
        """Where the group's offsets are kept, if that is here and has been read."""
        broker = self._broker
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
        await broker.flushes.make_early_room(log)
        return log

    async def code(self, group: str) -> ErrorCode:
        """NONE where this broker coordinates the group."""
        if not group:
            return ErrorCode.INVALID_GROUP_ID
        log = await self.log_of(group)
        return log if isinstance(log, ErrorCode) else ErrorCode.NONE

    def local_log(self, group: str) -> PartitionLog | None:
        """The log that keeps a group, if it is here and has been read."""
        log = self._broker.internal_log(OFFSETS_TOPIC, group)
        return None if log is None or log.partition in self._unread else log

    def _store(self, group: str, stored: StoredGroup | None) -> ErrorCode:
        log = self.local_log(group)
        if log is None:
            return ErrorCode.NOT_COORDINATOR
        code = write_group(log, group, stored)
        self._broker.flushes.care_for(log)  # a timer may have caused it, which waits for nothing
        return code

    async def flushed(self, group: str) -> ErrorCode:
        """Wait for the flush that flush.messages asks for, before a member is answered; NONE, or the error it gets."""
        log = self.local_log(group)
        if log is not None:
            try:
                await self._broker.flushes.flush_many(log)
            except OSError as error:
                _log.error("group %s can't be written to %s: %s", group, log.directory, error)
                return ErrorCode.COORDINATOR_NOT_AVAILABLE
        return ErrorCode.NONE

    async def load(self) -> None:
        """Read groups and offsets from the log; until then their requests are answered with LOAD_IN_PROGRESS."""
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
        """A topic was deleted: what was committed for it goes; with __consumer_offsets all groups go."""
        self._deleted_topics.add(name)
        if not self.is_loading:
            self._tasks.start(self._deleted_topics.forget())
        self.forget_logs_of(name)

    def forget_logs_of(self, name: str) -> None:
        """The logs of a topic were deleted or set aside: with those of __consumer_offsets all groups go."""
        if name == OFFSETS_TOPIC and not self.is_loading:  # else the loader looks when it has ended
            self._forget_all()

    def _forget_all(self) -> None:
        self._unread.clear()
        self.groups.forget_all()
        self.offsets.forget_all()

    async def expire(self) -> None:
        """Remove what groups committed long ago and do not need, and groups without members and offsets."""
        if not self.is_loading:
            now_ms = system_ms()
            before_ms = now_ms - self._broker.config.offsets_retention_minutes * 60_000
            await self._broker.flushes.take(expire(self.groups, self.offsets, self.local_log, now_ms, before_ms))
