"""What reading stored logs needs of a file system; what the bytes of a file hold, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import NamedTuple, Protocol

from spark_klog.errors import DecodeError
from spark_klog.records.batch import MAX_HEADER_SIZE, MIN_BATCH_SIZE, Header, first_batch_size, read_header
from spark_klog.records.batch_v2 import LOG_OVERHEAD
from spark_klog.wire.primitives import Buffer

#: Bytes that a walk over headers reads at once.
_WALK_BYTES = 256 * 1024
#: Bytes of an index that are read in one piece; above, its entries are searched one by one.
_SEARCHED_BYTES = 64 * 1024
_LENGTH, _LENGTH_POSITION = Struct(">i"), 8
#: Offset, length, leader epoch and magic: where all are zero, no batch was written yet (log.preallocate).
_PREFIX_SIZE = 17


class Entry(NamedTuple):
    """What a folder lists: the last part of a path, bytes of a file (0 for a folder)."""

    name: str
    size: int
    is_folder: bool


class OpenFile(Protocol):
    """A file as it was when it was opened; on most file systems it stays readable when it is deleted."""

    @property
    def size(self) -> int:
        """Bytes when it was opened."""

    def read(self, position: int, size: int) -> Buffer:
        """`size` bytes from `position` on, fewer at the end of the file; OSError."""

    def close(self) -> None:
        """Nothing is read any more."""


class LogFiles(Protocol):
    """A file system. Paths are its own, with "/" between their parts."""

    def entries(self, folder: str) -> list[Entry]:
        """What the folder holds, in any order. `FileNotFoundError` where there is no such folder, OSError."""

    def open(self, path: str) -> OpenFile:
        """`FileNotFoundError` where there is no such file, OSError."""


@contextmanager
def opened(files: LogFiles, path: str) -> Iterator[OpenFile]:
    """The file, closed afterwards; a `DecodeError` inside names it."""
    file = files.open(path)
    try:
        yield file
    except DecodeError as error:
        raise type(error)(f"{path}: {error}") from None
    finally:
        file.close()


def read_whole(files: LogFiles, path: str) -> bytes:
    """A small file's bytes; errors as of `LogFiles.open`."""
    with opened(files, path) as file:
        return bytes(file.read(0, file.size))


def headers(file: OpenFile, position: int = 0) -> Iterator[tuple[int, Header]]:
    """(position, header) of the whole batches from a position that begins one; stops at a partial one, and at zeros.

    `DecodeError` at what is no batch.
    """
    end = file.size
    window, start = memoryview(b""), position
    while True:
        if min(position + MAX_HEADER_SIZE, end) > start + len(window):
            window, start = memoryview(file.read(position, _WALK_BYTES)), position
        if not any(window[position - start :][:_PREFIX_SIZE]):
            return
        try:
            size = first_batch_size(window, position - start)
            if size is None or position + size > end:
                return
            header = read_header(window, position - start)
        except DecodeError as error:
            raise type(error)(f"no batch at position {position}: {error}") from None
        yield position, header
        position += size


def is_unwritten(file: OpenFile, position: int) -> bool:
    """Whether zeros begin where a batch should: `headers` stops there."""
    return not any(file.read(position, _PREFIX_SIZE))


def whole_end(data: memoryview) -> int:
    """Where the whole batches at the beginning end; 0 where there is none.

    It goes by lengths alone, fast; who decodes the batches looks at what they hold.
    """
    position = 0
    end, length_at = len(data) - LOG_OVERHEAD, _LENGTH.unpack_from
    while position <= end:
        length = length_at(data, position + _LENGTH_POSITION)[0]
        if length < MIN_BATCH_SIZE - LOG_OVERHEAD or length > end - position:
            break
        position += length + LOG_OVERHEAD
    return position


def index_floor(file: OpenFile, entry: Struct, field: int, value: int) -> tuple[int, ...] | None:
    """The last entry of an index (see index.py) whose `field` is not above `value`; None where there is none.

    It reads what it needs of the file. An entry of zeros ends the index. What a damaged one gives is anything.
    """

    def is_above(fields: tuple[int, ...]) -> bool:
        return fields[field] > value or not any(fields)

    low, high = 0, file.size // entry.size
    while (high - low) * entry.size > _SEARCHED_BYTES:
        middle = (low + high) // 2
        data = file.read(middle * entry.size, entry.size)
        if len(data) < entry.size or is_above(entry.unpack(data)):
            high = middle
        else:
            low = middle
    data = memoryview(file.read(low * entry.size, (high - low) * entry.size))
    found = None
    for fields in entry.iter_unpack(data[: len(data) - len(data) % entry.size]):
        if is_above(fields):
            break
        found = fields
    return found
