"""Threads that decompress record batches for requests: one each for small batches, large ones, and those of the log.

Small batches of producers wait neither for large ones nor for old consumers, whose batches the log has accepted with up
to decompressed.max.bytes. One thread each bounds the memory, and the processor time that the event loop has to share. A
cancelled request, whose client has gone, leaves its thread only when its batch is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spark_klog.wire.codecs import DecompressedTooLarge

_T = TypeVar("_T")
#: Bytes, compressed or not, that are compressed in some 10 ms; in half a second by zstd's slowest level.
_SMALL = 256 * 1024


class Decompression:
    """For one event loop. A thread begins with its first batch."""

    def __init__(self) -> None:
        self._small, self._large, self._of_log = (
            ThreadPoolExecutor(1, f"klog-{batches}") for batches in ("small-batches", "large-batches", "log-batches")
        )

    async def produced(self, work: Callable[[memoryview, int], _T], records: memoryview, limit: int) -> _T:
        """Call `work` with produced batches and the bytes that they may decompress to; `DecompressedTooLarge`.

        Nobody knows how large they become, so those with few bytes begin as small ones.
        """
        loop, small = asyncio.get_running_loop(), min(limit, _SMALL)
        if len(records) <= small:
            try:
                return await loop.run_in_executor(self._small, work, records, small)
            except DecompressedTooLarge:
                if small == limit:
                    raise
        return await loop.run_in_executor(self._large, work, records, limit)

    async def of_log(self, work: Callable[[], _T]) -> _T:
        """Call `work`, which decompresses batches of a log."""
        return await asyncio.get_running_loop().run_in_executor(self._of_log, work)

    def close(self) -> None:
        """Let the threads end, after what they do now."""
        for threads in (self._small, self._large, self._of_log):
            threads.shutdown(wait=False, cancel_futures=True)
