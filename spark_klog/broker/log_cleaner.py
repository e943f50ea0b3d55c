"""The broker's log cleaner: compacts the dirtiest log, one at a time, beside the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from spark_klog.broker.config import BrokerConfig
from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.cleaner import compact
from spark_klog.log.directory import LogDirectory
from spark_klog.log.offset_map import OffsetMap
from spark_klog.log.partition_log import system_ms

_log = logging.getLogger(__name__)


class _Stopping(Exception):
    """The broker stops: the round is given up."""


async def clean_logs(logs: LogDirectory, config: BrokerConfig) -> None:
    """Runs until it is cancelled. A log that can't be cleaned is told of, and left alone until the next start."""
    loop = asyncio.get_running_loop()
    offsets: OffsetMap | None = None

    stopping = False

    def check() -> None:
        if stopping:
            raise _Stopping

    async def changed(change: Callable[[], bool]) -> bool:
        return change()

    def in_loop(change: Callable[[], bool]) -> bool:
        return asyncio.run_coroutine_threadsafe(changed(change), loop).result()

    while True:
        now_ms = system_ms()
        found = logs.dirtiest(now_ms)
        if found is None:
            offsets = None  # its table is large
            await asyncio.sleep(config.cleaner_backoff_ms / 1000)
            continue
        log, cleanable = found
        if offsets is None:
            offsets = OffsetMap(config.cleaner_memory_bytes)
        try:
            end = await asyncio.to_thread(compact, log, cleanable, offsets, now_ms, in_loop, check)
            logs.note_clean(log, end)
        except asyncio.CancelledError:
            stopping = True  # the thread ends with its next batch
            raise
        except (LogCorrupted, DecodeError, OSError) as error:
            _log.error("%s can't be compacted, it is left so until the next start: %s", log.directory, error)
            logs.leave_uncleaned(log)
        await asyncio.sleep(0)
