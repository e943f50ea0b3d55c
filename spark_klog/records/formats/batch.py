"""Batches of any magic, one after the other, as in a log file or a fetch response.

    offset  INT64    the first record's; in magic 0 and 1 the last one's
    length  INT32    bytes after this field
    ...     4 bytes  checksum (magic 0, 1) or leader epoch (2)
    magic   INT8     what follows: see message_set.py (0, 1) and batch_v2.py (2)

A message of magic 0 or 1, a wrapper too, counts as a batch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from spark_klog.errors import DecodeError
from spark_klog.records.formats.batch_v2 import (
    HEADER_SIZE,
    LOG_OVERHEAD,
    BatchHeader,
    check_batch_crc,
    read_batch_header,
)
from spark_klog.records.formats.message_set import MIN_LENGTH, MessageHeader, check_message_crc, read_message_header
from spark_klog.wire.primitives import Buffer

Header = BatchHeader | MessageHeader

#: Offset and length, which batches of all magics begin with.
PREFIX = Struct(">qi")
MAGIC_POSITION = 16
_MIN_LENGTH = (*MIN_LENGTH, HEADER_SIZE - LOG_OVERHEAD)
#: A header of any magic fits into these bytes.
MAX_HEADER_SIZE = HEADER_SIZE
#: Bytes of the smallest batch there can be.
MIN_BATCH_SIZE = LOG_OVERHEAD + min(_MIN_LENGTH)


def magic_of(data: Buffer, position: int = 0) -> int | None:
    """The magic byte (unchecked) of the batch at `position`; None if the data end before it."""
    view = memoryview(data)
    return view[position + MAGIC_POSITION] if len(view) > position + MAGIC_POSITION else None


def first_batch_size(data: Buffer, position: int = 0) -> int | None:
    """Size of the batch at `position`, whole or not; None if its length field is cut off.

    `DecodeError` if its magic is unknown, or its length is too small for a batch.
    """
    if len(data) - position < LOG_OVERHEAD:
        return None
    length: int = PREFIX.unpack_from(data, position)[1]
    magic = magic_of(data, position)
    if magic is not None and magic >= len(_MIN_LENGTH):
        raise DecodeError(f"no batch at position {position}: unknown magic {magic}, length {length}")
    if length < _MIN_LENGTH[magic or 0]:
        raise DecodeError(f"no batch at position {position}: length {length}")
    return length + LOG_OVERHEAD


def whole_batch_size(data: Buffer, position: int = 0) -> int | None:
    """Size of the batch at `position`, None if it is cut off. `DecodeError` as in `first_batch_size`."""
    size = first_batch_size(data, position)
    return size if size is not None and size <= len(data) - position else None


def read_header(data: Buffer, position: int = 0) -> Header:
    """The header at `position`; `DecodeError` if it is cut off, impossible or of an unknown magic."""
    if magic_of(data, position) == 2:
        return read_batch_header(data, position)
    return read_message_header(data, position)


def iter_batches(data: Buffer) -> Iterator[tuple[Header, memoryview]]:
    """Every whole batch: (header, its bytes as a view). A partial one at the end is left out."""
    view = memoryview(data)
    position = 0
    while True:
        size = whole_batch_size(view, position)
        if size is None:
            return
        yield read_header(view, position), view[position : position + size]
        position += size


def whole_batches(data: Buffer) -> list[tuple[Header, memoryview]]:
    """As `iter_batches`, but `DecodeError` if there are no batches, or bytes follow the last one."""
    batches = list(iter_batches(data))
    if not batches or sum(header.size for header, _ in batches) != len(data):
        raise DecodeError(f"{len(data)} bytes are not whole record batches")
    return batches


def next_offset_after(data: Buffer, offset: int) -> int:
    """The offset after the last whole batch, or `offset` if there is none. `DecodeError` as in `first_batch_size`."""
    position = 0
    last: int | None = None
    while (size := whole_batch_size(data, position)) is not None:
        last = position
        position += size
    return offset if last is None else max(offset, read_header(data, last).next_offset)


def check_crc(header: Header, batch: memoryview) -> None:
    """Raise `CorruptBatchError` unless the stored checksum is that of the bytes."""
    if isinstance(header, BatchHeader):
        check_batch_crc(header, batch)
    else:
        check_message_crc(header, batch)
