"""Write logs of Kafka 0.7 as its design chapter describes them; shares no code with the package."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import cramjam

GZIP, SNAPPY = 1, 2


def message(payload: bytes, magic: int = 1, attributes: int = 0) -> bytes:
    """A message: INT32 length, magic, attributes (magic 1), CRC-32 of the payload, payload."""
    head = struct.pack(">bb", 1, attributes) if magic else b"\x00"
    content = head + struct.pack(">I", zlib.crc32(payload)) + payload
    return struct.pack(">i", len(content)) + content


def compressed(payloads: Sequence[bytes], codec: int) -> bytes:
    """A compressed message set; snappy as the Java library wrote it then: one block in xerial's frame."""
    inner = b"".join(message(payload) for payload in payloads)
    if codec == GZIP:
        return message(gzip.compress(inner), attributes=GZIP)
    block = bytes(cramjam.snappy.compress_raw(inner))
    return message(b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, len(block)) + block, attributes=SNAPPY)


def write_log(folder: Path, files: Sequence[Sequence[bytes]], start: int = 0) -> list[int]:
    """Write consecutive log files from offset `start` on; return the messages' offsets and the end offset."""
    folder.mkdir(parents=True, exist_ok=True)
    offsets = [start]
    for messages in files:
        (folder / f"{offsets[-1]:020}.kafka").write_bytes(b"".join(messages))
        for one in messages:
            offsets.append(offsets[-1] + len(one))
    return offsets
