"""Flushes in threads, so that requests are served while a log waits for the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from spark_klog.base.clock import system_ms
from spark_klog.broker.event_loop import BackgroundTasks, Pace
from spark_klog.log.partition_log import PartitionLog

_log = logging.getLogger(__name__)


class LogFlushes:
    """The flushes of one event loop, which also does the appends."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        #: Flushes under way: before a new segment (True), and those that flush.messages requires (False).
        self._under_way: dict[tuple[PartitionLog, bool], asyncio.Task[None]] = {}

    async def flush(self, log: PartitionLog, *, with_snapshot: bool = False) -> None:
        """Flush a log, even if the caller is cancelled. After an OSError the log accepts no more appends."""
        await self._tasks.finish(self._flush(log, with_snapshot=with_snapshot))

    async def _flush(self, log: PartitionLog, *, with_snapshot: bool) -> None:
        flush = log.begin_flush(with_snapshot=with_snapshot)
        try:
            await asyncio.to_thread(flush.run)
        except OSError as error:
            log.end_flush(flush, error)
            log.check_open()  # raises LogRetired if the files are gone because the log was deleted
            raise
        log.end_flush(flush)

    async def make_room(self, log: PartitionLog, size: int, timestamp: int) -> None:
        """Before an append of `size` bytes with that largest timestamp (ms): flush the log if it will roll.

        Raises OSError.
        """
        while log.waits_to_roll(size, timestamp):
            await self.flush_before_roll(log)

    async def flush_before_roll(self, log: PartitionLog) -> None:
        """Flush a log so that it can roll without a wait; concurrent callers share the flush. Raises OSError."""
        await self._share_flush(log, before_roll=True)

    async def _share_flush(self, log: PartitionLog, *, before_roll: bool) -> None:
        under_way = self._under_way.get((log, before_roll))
        if under_way is None:
            under_way = self._tasks.start(self._flush_shared(log, before_roll))
            self._under_way[log, before_roll] = under_way
        await self._tasks.outcome(under_way)

    async def _flush_shared(self, log: PartitionLog, before_roll: bool) -> None:
        try:
            await self._flush(log, with_snapshot=before_roll)
        finally:
            # before the task is done: a caller that found a finished task here would loop without yielding
            del self._under_way[log, before_roll]

    async def make_early_room(self, log: PartitionLog, size: int | None = None) -> None:
        """Before an append of the broker's own records: roll the segment if it has no room for `size` bytes.

        Without `size`, make room for the largest batch. Errors are left to the append.
        """
        if size is None:
            size = _early_bytes(log)
        try:
            await self.make_room(log, size, system_ms())
            if log.is_full(size, system_ms()):
                log.roll()
        except OSError as error:
            _log.debug("%s: no new segment: %s", log.directory, error)

    async def flush_many(self, log: PartitionLog) -> None:
        """After an append: flush as flush.messages requires; concurrent callers share a flush. Raises OSError."""
        end = log.end_offset
        while log.has_many_unflushed and log.recovery_point < end:
            await self._share_flush(log, before_roll=False)

    def care_for(self, log: PartitionLog) -> None:
        """After an append that nobody awaits: do in the background what the next append would have to wait for."""
        if log.has_many_unflushed or log.waits_to_roll(_early_bytes(log), system_ms()):
            self._tasks.start(self._care_for(log))

    async def _care_for(self, log: PartitionLog) -> None:
        await self._flush_many_quietly(log)
        await self.make_early_room(log)

    async def take(self, steps: Iterable[PartitionLog | None]) -> None:
        """Run steps in the event loop. Each yields the log that the next step appends to, or None.

        Room is made in that log before, and it is flushed after as flush.messages requires. A log that fails accepts
        no more appends.
        """
        pace = Pace()
        log: PartitionLog | None = None
        for following in steps:
            await self._flush_many_quietly(log)
            await pace.rest()
            log = following
            if log is not None:
                await self.make_early_room(log)
        await self._flush_many_quietly(log)

    async def _flush_many_quietly(self, log: PartitionLog | None) -> None:
        if log is not None and log.failure is None:
            try:
                await self.flush_many(log)
            except OSError as error:
                _log.debug("%s: not flushed: %s", log.directory, error)


def _early_bytes(log: PartitionLog) -> int:
    return min(log.config.max_message_bytes, log.config.segment_bytes // 2)
