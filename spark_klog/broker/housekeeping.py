"""Periodic work: timed flushes, retention, checkpoints, retries of failed log changes, expiry of committed offsets.

An error in one log is logged with its name and does not affect other logs. Requests are served meanwhile: files are
synced and removed in threads, one log at a time, and other work is done in short slices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from spark_klog.broker.broker import Broker
from spark_klog.broker.event_loop.background import Pace
from spark_klog.errors import DecodeError, LogCorrupted, LogRetired
from spark_klog.log.partition_log import SEGMENTS_AT_ONCE, PartitionLog

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 1.0
_RETRY_SECONDS = 1.0


async def keep_house(broker: Broker) -> None:
    """Run until cancelled. Failures are logged, and the next round retries."""
    config = broker.config
    shortest = min(config.log.flush_ms, config.housekeeping_ms, config.checkpoint_ms) / 1000
    pause = max(0.05, min(_LONGEST_PAUSE, shortest))
    duties: list[tuple[str, float, Callable[[Broker], Awaitable[None]]]] = [
        ("flush", 0, _flush),
        ("retention", config.housekeeping_ms / 1000, _delete_expired),
        ("reading of the directories", _RETRY_SECONDS, lambda broker: broker.follower.retry()),
        ("creation of logs", config.housekeeping_ms / 1000, Broker.care_for_topic_logs),
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
