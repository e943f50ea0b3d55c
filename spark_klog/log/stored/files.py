"""The file system interface for stored logs; walk record batches and search indexes in its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import NamedTuple, Protocol

from spark_klog.errors import DecodeError
from spark_klog.records.formats.batch import MAX_HEADER_SIZE, MIN_BATCH_SIZE, Header, first_batch_size, read_header
from spark_klog.records.formats.batch_v2 import LOG_OVERHEAD
from spark_klog.wire.primitives import Buffer

#: Bytes per read of a walk over headers.
_WALK_BYTES = 256 * 1024
#: The largest part of an index to read at once; a binary search narrows larger ones.
_SEARCHED_BYTES = 64 * 1024
_LENGTH, _LENGTH_POSITION = Struct(">i"), 8
#: Bytes of offset, length, leader epoch and magic: all zero in a preallocated part without batches (log.preallocate).
_PREFIX_SIZE = 17


class Entry(NamedTuple):
    """An entry of a folder: its name, and its size in bytes (0 for a folder)."""

    name: str
    size: int
    is_folder: bool


class OpenFile(Protocol):
    """An open file; on most file systems it stays readable when it is deleted."""

    @property
    def size(self) -> int:
        """Size in bytes when the file was opened."""

    def read(self, position: int, size: int) -> Buffer:
        """`size` bytes from `position` on, fewer at the end of the file; OSError."""

    def close(self) -> None:
        """Close the file."""


class LogFiles(Protocol):
    """A file system, with "/" as separator of its paths."""

    def entries(self, folder: str) -> list[Entry]:
        """The entries of a folder, in any order. `FileNotFoundError` if it does not exist, OSError."""

    def open(self, path: str) -> OpenFile:
        """Open a file. `FileNotFoundError` if it does not exist, OSError."""


@contextmanager
def opened(files: LogFiles, path: str) -> Iterator[OpenFile]:
    """Open a file for the duration of the block; a `DecodeError` inside gets its name."""
    file = files.open(path)
    try:
        yield file
    except DecodeError as error:
        raise type(error)(f"{path}: {error}") from None
    finally:
        file.close()


def read_whole(files: LogFiles, path: str) -> bytes:
    """A small file's bytes; raises what `LogFiles.open` raises."""
    with opened(files, path) as file:
        return bytes(file.read(0, file.size))


def headers(file: OpenFile, position: int = 0) -> Iterator[tuple[int, Header]]:
    """(position, header) of the complete batches from the start of one on; stops at a partial batch and at zeros.

    `DecodeError` at bytes that are not a batch.
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
    """Whether there are zeros instead of a batch: `headers` stops there."""
    return not any(file.read(position, _PREFIX_SIZE))


def whole_end(data: memoryview) -> int:
    """The end of the complete batches at the start of `data`; 0 if there is none.

    For speed it only follows lengths; decoding checks the contents.
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
    """The last entry of an index (see index.py) whose `field` is at most `value`; None if there is none.

    Reads only parts of the file. An entry of zeros ends the index. The result from a damaged index is arbitrary.
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
