"""Flushes in threads, so that others are served while a log waits for the disk."""

from __future__ import annotations

import asyncio
import logging

from spark_klog.broker.background import BackgroundTasks
from spark_klog.log.partition_log import PartitionLog, system_ms

_log = logging.getLogger(__name__)
#: Left empty in a segment of an internal topic.
_EARLY_BYTES = 64 * 1024


class LogFlushes:
    """For one event loop, where the logs are appended to."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        #: Flushes that a roll needs.
        self._before_rolls: dict[PartitionLog, asyncio.Task[None]] = {}

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

    async def make_early_room(self, log: PartitionLog) -> None:
        """Before records of the broker's own, whose size is not known yet: begin a new segment if this one is nearly
        full. What fails is left to the append.
        """
        try:
            size = min(_EARLY_BYTES, log.config.segment_bytes // 10)
            await self.make_room(log, size, system_ms())
            if log.is_full(size, system_ms()):
                log.roll()
        except OSError as error:
            _log.debug("%s: no new segment: %s", log.directory, error)

    async def flush_many(self, log: PartitionLog) -> None:
        """After an append: flush the log if flush.messages asks for it; OSError."""
        if log.has_many_unflushed:
            try:
                await self.flush(log)
            except OSError as error:
                if log.is_open and log.failure is None:  # it could not be begun, but the batches are appended
                    log.fail(error, "flush failed")
                raise
