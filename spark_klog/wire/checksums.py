"""CRC-32C (Castagnoli; record batch v2) and CRC-32 (ISO 3309; message sets).

CRC-32C comes from the `crc32c` package (the hardware instruction) if it is installed, else from crcmod.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from zlib import crc32 as crc32

from spark_klog.wire.primitives import Buffer

__all__ = ["crc32", "crc32c"]


def _crcmod_crc32c() -> Callable[[Buffer, int], int]:
    import crcmod.predefined

    function: Callable[[Buffer, int], int] = crcmod.predefined.mkCrcFun("crc-32c")
    return lambda data, before: function(bytes(data) if isinstance(data, memoryview) else data, before)


@cache
def _crc32c() -> Callable[[Buffer, int], int]:
    """Import the function on first use: both packages are slow to import, and the native kernel needs neither."""
    try:
        from crc32c import crc32c as hardware
    except ImportError:
        return _crcmod_crc32c()
    function: Callable[[Buffer, int], int] = hardware
    return function


def crc32c(data: Buffer, before: int = 0) -> int:
    """The unsigned 32-bit CRC-32C of a contiguous buffer; `before` is that of the bytes before it."""
    return _crc32c()(data, before)
