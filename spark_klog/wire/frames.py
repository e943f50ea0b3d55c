"""A frame: INT32 size N, then N bytes (protocol guide, "Common Request and Response Structure")."""

from __future__ import annotations

from struct import Struct

from spark_klog.errors import FrameTooLarge
from spark_klog.wire.primitives import Buffer

SIZE = Struct(">i")

#: The largest request that a broker accepts (Kafka: socket.request.max.bytes), and the largest response for a client.
MAX_FRAME = 100 * 1024 * 1024


def frame_size(prefix: Buffer, limit: int = MAX_FRAME) -> int:
    """The size in a 4-byte prefix; `FrameTooLarge` if it is negative or above `limit`."""
    size: int = SIZE.unpack(prefix)[0]
    if not 0 <= size <= limit:
        raise FrameTooLarge(size, limit)
    return size
