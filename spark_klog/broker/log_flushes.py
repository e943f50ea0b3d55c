"""Flushes in threads, so that others are served while a log waits for the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from spark_klog.broker.background import BackgroundTasks, Pace
from spark_klog.log.partition_log import PartitionLog, system_ms

_log = logging.getLogger(__name__)


class LogFlushes:
    """For one event loop, where the logs are appended to."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        #: Flushes that a roll needs.
        self._before_rolls: dict[PartitionLog, asyncio.Task[None]] = {}
        #: Flushes that flush.messages asks for.
        self._after_appends: dict[PartitionLog, asyncio.Task[None]] = {}

    async def flush(self, log: PartitionLog, *, with_snapshot: bool = False) -> None:
        """Flush a log, also if the caller is cancelled; OSError, and then the log takes no more."""
        await self._tasks.finish(self._flush(log, with_snapshot=with_snapshot))

    async def _flush(self, log: PartitionLog, *, with_snapshot: bool) -> None:
        flush = log.begin_flush(with_snapshot=with_snapshot)
        try:
            await asyncio.to_thread(flush.run)
        except OSError as error:
            log.end_flush(flush, error)
            log.check_open()  # else the files were away because it was deleted
            raise
        log.end_flush(flush)

    async def make_room(self, log: PartitionLog, size: int, timestamp: int) -> None:
        """Before an append of so many bytes, up to that time (ms): flush the log if that begins a new segment; OSError.

        Those who come meanwhile wait for the same flush.
        """
        while log.waits_to_roll(size, timestamp):
            under_way = self._before_rolls.get(log)
            if under_way is None:
                under_way = self._tasks.start(self._flush_before_roll(log))
                self._before_rolls[log] = under_way
            await asyncio.shield(under_way)

    async def _flush_before_roll(self, log: PartitionLog) -> None:
        try:
            await self._flush(log, with_snapshot=True)
        finally:
            # before the task is done: who found it done would wait for it without giving up the event loop
            del self._before_rolls[log]

    async def make_early_room(self, log: PartitionLog, size: int | None = None) -> None:
        """Before records of the broker's own: begin a new segment if this one has no room for them. Without a `size`
        there is room for the largest batch then. What fails is left to the append.
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
        """After an append: flush the log if flush.messages asks for it; OSError. Appends side by side share a flush."""
        end = log.end_offset
        while log.has_many_unflushed and log.recovery_point < end:
            under_way = self._after_appends.get(log)
            if under_way is None:
                under_way = self._tasks.start(self._flush_appended(log))
                self._after_appends[log] = under_way
            await asyncio.shield(under_way)

    async def _flush_appended(self, log: PartitionLog) -> None:
        try:
            await self._flush(log, with_snapshot=False)
        except OSError as error:
            if log.is_open and log.failure is None:  # it could not be begun, but the batches are appended
                log.fail(error, "flush failed")
            raise
        finally:
            del self._after_appends[log]  # before the task is done, as above

    def care_for(self, log: PartitionLog) -> None:
        """After an append that nobody waits with: do in the background what the next one would have to wait for."""
        if log.has_many_unflushed or log.waits_to_roll(_early_bytes(log), system_ms()):
            self._tasks.start(self._care_for(log))

    async def _care_for(self, log: PartitionLog) -> None:
        await self._flush_many_quietly(log)
        await self.make_early_room(log)

    async def take(self, steps: Iterable[PartitionLog | None]) -> None:
        """Take all the steps of work in the event loop. Each yields the log that the next one appends a batch to: room
        is made there, and what flush.messages asks for is flushed. A log that fails takes no more, and says so.
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
