"""The broker's log cleaner: compacts the dirtiest log, one at a time, beside the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from spark_klog.broker.background import Pace
from spark_klog.broker.config import BrokerConfig
from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.cleaner import compact
from spark_klog.log.compaction_plan import Cleanable
from spark_klog.log.directory import LogDirectory
from spark_klog.log.offset_map import OffsetMap
from spark_klog.log.partition_log import PartitionLog, system_ms

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_LONGEST_PAUSE = 1.0


class _Stopping(Exception):
    """The broker stops: the round is given up."""


async def clean_logs(logs: LogDirectory, config: BrokerConfig, is_loading: Callable[[], bool] = lambda: False) -> None:
    """Runs until it is cancelled. A log that can't be cleaned is logged, and left alone until the next start.

    It begins when internal topics are no longer `is_loading`: they are read in threads, which a swap would disturb.
    """
    loop = asyncio.get_running_loop()
    while is_loading():
        await asyncio.sleep(min(_LONGEST_PAUSE, config.cleaner_backoff_ms / 1000))
    offsets: OffsetMap | None = None

    stopping = False

    def check() -> None:
        if stopping:
            raise _Stopping

    async def result(function: Callable[[], _Result]) -> _Result:
        return function()

    def in_loop(function: Callable[[], _Result], /) -> _Result:
        return asyncio.run_coroutine_threadsafe(result(function), loop).result()

    while True:
        now_ms = system_ms()
        found = await _dirtiest(logs, now_ms)
        if found is None:
            offsets = None  # its table is large
            await asyncio.sleep(config.cleaner_backoff_ms / 1000)
            continue
        log, cleanable = found
        if offsets is None:
            offsets = OffsetMap(config.cleaner_memory_bytes)
        try:
            end = await asyncio.to_thread(compact, log, cleanable, offsets, now_ms, in_loop, check)
            await asyncio.to_thread(logs.note_clean, log, end)
        except asyncio.CancelledError:
            stopping = True  # the thread ends with its next batch
            raise
        except (LogCorrupted, DecodeError, OSError) as error:
            if log.is_open:  # else it was deleted meanwhile, and its files with it
                _log.error("%s can't be compacted, it is left so until the next start: %s", log.directory, error)
                logs.leave_uncleaned(log)
        except Exception:
            _log.exception("%s can't be compacted, it is left so until the next start", log.directory)
            logs.leave_uncleaned(log)
        await asyncio.sleep(0)


async def _dirtiest(logs: LogDirectory, now_ms: int) -> tuple[PartitionLog, Cleanable] | None:
    """The log that is to be compacted next, and what of it can be, or None."""
    pace = Pace()
    dirtiest = None
    for log in list(logs.logs.values()):
        try:
            found = logs.cleanable(log, now_ms)
        except (LogCorrupted, DecodeError, OSError) as error:
            if log.is_open:
                _log.error("%s can't be looked at for compaction: %s", log.directory, error)
                logs.leave_uncleaned(log)
            continue
        except Exception:
            _log.exception("%s can't be looked at for compaction", log.directory)
            logs.leave_uncleaned(log)
            continue
        if found is not None and (dirtiest is None or found.dirty_ratio > dirtiest[1].dirty_ratio):
            dirtiest = log, found
        await pace.rest()
    return dirtiest
