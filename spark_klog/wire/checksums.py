"""CRC-32C (Castagnoli; record batch v2) and CRC-32 (ISO 3309; message sets).

CRC-32C comes from the hardware instruction where the `crc32c` package has a wheel, else from crcmod.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from zlib import crc32 as crc32

__all__ = ["crc32", "crc32c"]

Bytes = bytes | bytearray | memoryview


def _crcmod_crc32c() -> Callable[[Bytes], int]:
    import crcmod.predefined

    function: Callable[[Bytes], int] = crcmod.predefined.mkCrcFun("crc-32c")
    return lambda data: function(bytes(data) if isinstance(data, memoryview) else data)


@cache
def _crc32c() -> Callable[[Bytes], int]:
    """Made at the first use: both packages take long to import, and the native kernel has one of its own."""
    try:
        from crc32c import crc32c as hardware
    except ImportError:
        return _crcmod_crc32c()
    function: Callable[[Bytes], int] = hardware
    return function


def crc32c(data: Bytes) -> int:
    """The unsigned 32-bit CRC-32C of a contiguous buffer."""
    return _crc32c()(data)
