"""What a member of a consumer group was assigned, as its leader wrote it (KIP-62, "ConsumerProtocolAssignment"):

version      INT16
assignments  ARRAY of topic STRING, partitions ARRAY of INT32
user data    BYTES, nullable; and what later versions add
"""

from __future__ import annotations

from spark_klog.errors import DecodeError
from spark_klog.wire.primitives import Buffer, Reader


def decode_assignment(data: Buffer) -> dict[str, list[int]]:
    """Partitions by topic, none where `data` is empty; `DecodeError`."""
    found: dict[str, list[int]] = {}
    if not len(data):
        return found
    reader = Reader(data)
    reader.int16()
    for _ in range(max(0, reader.count(False))):
        topic = reader.nullable_string()
        if topic is None:
            raise DecodeError("an assignment names no topic")
        found[topic] = sorted(reader.int32() for _ in range(max(0, reader.count(False))))
    return found
