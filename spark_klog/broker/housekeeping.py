"""Periodic work: timed flushes, retention, checkpoints, retries of failed log changes, expiry of committed offsets.

An error in one log is logged with its name and does not affect other logs. Requests are served meanwhile: files are
synced and removed in threads, one log at a time, and other work is done in short slices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from spark_klog.base.clock import system_ms
from spark_klog.broker.broker import Broker
from spark_klog.broker.event_loop import Pace, ThreadPace
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.errors import DecodeError, LogCorrupted, LogRetired
from spark_klog.log.compaction.cleaner import compact
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.compaction.plan import Cleanable
from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_log import SEGMENTS_AT_ONCE, PartitionLog

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_LONGEST_PAUSE = 1.0
_RETRY_SECONDS = 1.0


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
        dirtiest = await _dirtiest(logs, now_ms)
        if dirtiest is None:
            if offsets is not None:
                unused, offsets = offsets, None
                await asyncio.to_thread(unused.close)
            await asyncio.sleep(config.cleaner_backoff_ms / 1000)
            continue
        log, cleanable = dirtiest
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
            cleanable = logs.cleanable(log, now_ms) if log.is_open else None
        except Exception as error:
            _leave(logs, log, "checked for compaction", error)
            continue
        if cleanable is not None and (dirtiest is None or cleanable.dirty_ratio > dirtiest[1].dirty_ratio):
            dirtiest = log, cleanable
        await pace.rest()
    return dirtiest


async def keep_house(broker: Broker) -> None:
    """Run until cancelled. Failures are logged, and the next round retries."""
    config = broker.config
    shortest = min(config.log.flush_ms, config.housekeeping_ms, config.checkpoint_ms) / 1000
    pause = max(0.05, min(_LONGEST_PAUSE, shortest))
    duties: list[tuple[str, float, Callable[[Broker], Awaitable[None]]]] = [
        ("flush", 0, _flush),
        ("retention", config.housekeeping_ms / 1000, _delete_expired),
        ("reading of the directories", _RETRY_SECONDS, lambda broker: broker.follower.retry()),
        ("creation of logs", config.housekeeping_ms / 1000, lambda broker: broker.follower.retry_logs()),
        ("expiry of offsets", config.offsets_check_ms / 1000, lambda broker: broker.coordinator.expire()),
        ("writing of checkpoints", config.checkpoint_ms / 1000, _write_checkpoints),
    ]
    done_at = dict.fromkeys((name for name, _, _ in duties), time.monotonic())
    while True:
        await asyncio.sleep(pause)
        for name, interval, duty in duties:
            now = time.monotonic()
            if now - done_at[name] >= interval:
                done_at[name] = now
                try:
                    await duty(broker)
                except Exception:
                    _log.exception("%s failed and will be retried", name)


async def _each(broker: Broker, care: Callable[[PartitionLog], Awaitable[None]]) -> None:
    pace = Pace()
    for log in list(broker.logs.logs.values()):
        try:
            await care(log)
        except LogRetired as error:
            _log.debug("%s: %s", log.directory, error)  # the topic was deleted during this round
        except (OSError, LogCorrupted, DecodeError) as error:
            if log.is_open:  # else the log was deleted meanwhile
                _log.error("%s: %s", log.directory, error)
        except Exception:
            _log.exception("%s: housekeeping failed", log.directory)
        await pace.rest()


async def _flush(broker: Broker) -> None:
    """Flush the logs that are due by flush.ms."""

    async def care(log: PartitionLog) -> None:
        if log.is_flush_due:
            await broker.flushes.flush(log)

    await _each(broker, care)


async def _delete_expired(broker: Broker) -> None:
    """Delete expired segments, files that were deleted before, and producers that have expired."""

    async def care(log: PartitionLog) -> None:
        if log.waits_to_expire:
            await broker.flushes.flush(log, with_snapshot=True)
        while log.delete_expired(SEGMENTS_AT_ONCE) == SEGMENTS_AT_ONCE:
            await asyncio.sleep(0)
        if log.deleted_files.are_due:
            await asyncio.to_thread(log.deleted_files.remove_due)
        log.forget_producers()

    await _each(broker, care)


async def _write_checkpoints(broker: Broker) -> None:
    """Write checkpoints: up to where each log is flushed, and where it starts."""
    logs = broker.logs
    try:
        await asyncio.to_thread(logs.write_checkpoints)
    except OSError as error:
        _log.error("checkpoints of %s can't be written: %s", logs.path, error)
