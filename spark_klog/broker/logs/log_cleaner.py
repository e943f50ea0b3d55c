"""Log cleaner: compacts the dirtiest log, one at a time, in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from spark_klog.broker.event_loop.background import Pace, ThreadPace
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.clock import system_ms
from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.compaction.cleaner import compact
from spark_klog.log.compaction.offset_map import OffsetMap
from spark_klog.log.compaction.plan import Cleanable
from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_log import PartitionLog

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_LONGEST_PAUSE = 1.0


class _Stopping(Exception):
    """The broker stops; the round is abandoned."""


async def clean_logs(logs: LogDirectory, config: BrokerConfig, is_loading: Callable[[], bool] = lambda: False) -> None:
    """Compact logs until cancelled. A log that can't be compacted is logged and skipped until the next start.

    Cleaning begins once `is_loading` is false: threads are reading the internal topics, and replaced segments would
    disturb them.
    """
    loop = asyncio.get_running_loop()
    while is_loading():
        await asyncio.sleep(min(_LONGEST_PAUSE, config.cleaner_backoff_ms / 1000))
    offsets: OffsetMap | None = None

    stopping = False
    pace = ThreadPace(loop)

    def check() -> None:
        if stopping:
            raise _Stopping
        pace.rest()

    async def result(function: Callable[[], _Result]) -> _Result:
        return function()

    def in_loop(function: Callable[[], _Result], /) -> _Result:
        return asyncio.run_coroutine_threadsafe(result(function), loop).result()

    while True:
        now_ms = system_ms()
        found = await _dirtiest(logs, now_ms)
        if found is None:
            if offsets is not None:
                unused, offsets = offsets, None
                await asyncio.to_thread(unused.close)
            await asyncio.sleep(config.cleaner_backoff_ms / 1000)
            continue
        log, cleanable = found
        if offsets is None:
            offsets = OffsetMap(config.cleaner_memory_bytes)
        try:
            end = await asyncio.to_thread(compact, log, cleanable, offsets, now_ms, in_loop, check)
            await asyncio.to_thread(logs.note_clean, log, end)
        except asyncio.CancelledError:
            stopping = True  # the thread stops at its next batch
            raise
        except Exception as error:
            _leave(logs, log, "compacted", error)
        await asyncio.sleep(0)


def _leave(logs: LogDirectory, log: PartitionLog, what: str, error: Exception) -> None:
    """Leave a log as it is until the next start, and log why."""
    is_expected = isinstance(error, (LogCorrupted, DecodeError, OSError))
    if log.is_open or not is_expected:  # else the log was deleted meanwhile
        text = "%s can't be %s, and is left as it is until the next start: %s"
        _log.error(text, log.directory, what, error, exc_info=not is_expected)
        logs.leave_uncleaned(log)


async def _dirtiest(logs: LogDirectory, now_ms: int) -> tuple[PartitionLog, Cleanable] | None:
    """The log to compact next, with the part that can be compacted; None if no log needs it."""
    pace = Pace()
    dirtiest = None
    for log in list(logs.logs.values()):
        try:
            if log.config.compacts:
                for _ in log.check_indexes():
                    await pace.rest()
            found = logs.cleanable(log, now_ms) if log.is_open else None
        except Exception as error:
            _leave(logs, log, "checked for compaction", error)
            continue
        if found is not None and (dirtiest is None or found.dirty_ratio > dirtiest[1].dirty_ratio):
            dirtiest = log, found
        await pace.rest()
    return dirtiest
