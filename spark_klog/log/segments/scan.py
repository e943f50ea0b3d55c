"""Walk the record batches of a .log file: only their headers, or complete with checksums in large runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from spark_klog.errors import DecodeError, KlogError, LogCorrupted
from spark_klog.log.file_system import File
from spark_klog.records import kernels
from spark_klog.records.contract import BatchRun, IndexState
from spark_klog.records.formats.batch import (
    MAX_HEADER_SIZE,
    Header,
    check_crc,
    first_batch_size,
    read_header,
    whole_batch_size,
)
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.kernels.reference import MAX_RELATIVE, run_of
from spark_klog.wire.primitives import Buffer

_SCAN_BYTES = 4 * 1024 * 1024
#: Bytes per read of headers: one read covers several small batches.
_HEADER_BYTES = 4096
#: Bytes of offset, length, leader epoch and magic: all zero in a preallocated part without batches.
UNWRITTEN_SIZE = 17


class ReadsAt(Protocol):
    """A file that can be read by position."""

    def read_at(self, position: int, size: int) -> Buffer:
        """Up to `size` bytes; fewer at the end of the file. OSError."""


class DamagedBatch(DecodeError):
    """A batch is missing, incomplete, or has a wrong checksum or offset."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position


class IndexEntries(NamedTuple):
    """The encoded entries of both indexes of a whole segment, and the state after its last batch."""

    offset_entries: bytes
    time_entries: bytes
    state: IndexState


def headers(
    file: ReadsAt,
    path: Path | str,
    position: int,
    end: int,
    damage: type[KlogError] = LogCorrupted,
    *,
    read_bytes: int = _HEADER_BYTES,
    ends_with_zeros: bool = False,
) -> Iterator[tuple[int, Header]]:
    """(position, header) of the batches from the start of one on, up to `end`; stops at a partial batch.

    Raises `damage` at bytes that are not a batch; `ends_with_zeros`: but not at preallocated zeros (log.preallocate).
    """
    if position < 0:
        raise damage(f"{path}: no batch at position {position}, which a damaged index has")
    data, start = memoryview(b""), position
    while position < end:
        at = position - start
        if len(data) - at < min(MAX_HEADER_SIZE, end - position):
            data, start, at = memoryview(file.read_at(position, min(read_bytes, end - position))), position, 0
        try:
            size = first_batch_size(data, at)
            if size is None or position + size > end:
                return
            header = read_header(data, at)
        except DecodeError as error:
            if ends_with_zeros and not any(data[at : at + UNWRITTEN_SIZE]):
                return
            raise damage(f"{path} at position {position}: {error}") from None
        yield position, header
        position += size


def scan(file: File, base_offset: int, end: int, interval: int, *, checks: bool = True) -> Iterator[BatchRun]:
    """Runs of the batches of a segment up to position `end`.

    `DamagedBatch` at the first invalid batch; without `checks` wrong checksums and offsets are ignored.
    """
    kernel = kernels.load()
    position, next_offset = 0, base_offset
    state, chunk = IndexState(), _SCAN_BYTES
    while position < end:
        data = memoryview(file.read_at(position, min(chunk, end - position)))
        target, at = (base_offset, position, interval), 0
        while at < len(data):
            run = kernel.scan_batches(data, at, state, target, next_offset, None)
            if run.end == at:
                try:
                    header = _next_header(data, at, next_offset, base_offset + MAX_RELATIVE, checks)
                except DecodeError as error:
                    raise DamagedBatch(position + at, str(error)) from None
                if header is None:
                    break
                run = run_of([(at, header)], at, state, target, next_offset)
            yield run
            at, state, next_offset = run.end, run.state, run.next_offset
        if at:
            position, chunk = position + at, _SCAN_BYTES
        elif len(data) < chunk:
            raise DamagedBatch(position, f"cut off: {end - position} bytes are left")
        else:
            chunk *= 2


def index_entries(file: File, base_offset: int, end: int, interval: int) -> IndexEntries:
    """Find the index entries of a segment that ends at position `end`, in any thread.

    `DamagedBatch` if headers can't be read, OSError.
    """
    offset_entries, time_entries, state = bytearray(), bytearray(), IndexState()
    for run in scan(file, base_offset, end, interval, checks=False):
        offset_entries += run.offset_entries
        time_entries += run.time_entries
        state = run.state
    return IndexEntries(bytes(offset_entries), bytes(time_entries), state)


def _next_header(data: memoryview, at: int, next_offset: int, limit: int, checks: bool) -> Header | None:
    """The header of a batch that no run includes; None if the batch is incomplete."""
    size = whole_batch_size(data, at)
    if size is None:
        return None
    header = read_header(data, at)
    if checks:
        check_crc(header, data[at : at + size])
        first = header.base_offset if isinstance(header, BatchHeader) else header.last_offset
        if first < next_offset or header.last_offset > limit:
            raise DecodeError(f"offset {first}, expected {next_offset}")
    return header
