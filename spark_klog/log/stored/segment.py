"""Read a segment without a broker, on any file system: its .log file with its indexes (see index.py).

Indexes are hints: an entry is used only if a valid batch at its position contains its offset. Kafka before 0.11 wrote
the first offset of an append, later versions the last offset of a batch. Without a valid entry, the headers are walked
from the start of the segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.files.folder import OpenFile, ReadableFolder, read_whole
from spark_klog.log.segments.scan import UNWRITTEN_SIZE, headers
from spark_klog.log.segments.segment import INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX
from spark_klog.log.segments.transaction_index import AbortedTransaction, parse_transaction_index
from spark_klog.records.formats.batch import MIN_BATCH_SIZE, PREFIX, Header, check_crc, first_batch_size
from spark_klog.records.formats.batch_v2 import LOG_OVERHEAD, BatchHeader
from spark_klog.records.kernels.reference import OFFSET_ENTRY, TIME_ENTRY
from spark_klog.records.reading.offset_order import NO_END, NOTHING, End, OffsetOrder
from spark_klog.records.reading.reader import records_of

#: Bytes per read of a walk over headers.
_WALK_BYTES = 256 * 1024
#: The largest part of an index to read at once; a binary search narrows larger ones.
_SEARCHED_BYTES = 64 * 1024
#: Bytes per read.
BLOCK_BYTES = 4 * 1024 * 1024
_LEAST_BYTES = 512 * 1024
#: Batches above this size are not read to check an index entry; the headers are walked instead.
_CHECKED_BYTES = 8 * 1024 * 1024


class StoredBatches(NamedTuple):
    """Complete record batches, the offset after the last valid one, and (producer id, first offset) of aborted
    transactions.

    `data` is valid until the next call of the iterator. `damaged` maps positions in `data` to errors of batches with
    wrong offsets.
    """

    data: memoryview
    next_offset: int
    aborted: list[tuple[int, int]]
    damaged: Mapping[int, DecodeError] = NOTHING


class Tail(NamedTuple):
    """The end of a log: the offset after its last complete batch, and the error of invalid bytes after it."""

    end_offset: int
    damage: DecodeError | None


class StoredSegment:
    """The files `folder`/`stem` with suffixes; `sizes` maps suffixes to bytes. `end` is what all names end with."""

    def __init__(self, files: ReadableFolder, folder: str, stem: str, sizes: Mapping[str, int], end: str = "") -> None:
        self.base_offset = int(stem)
        self.size = sizes[LOG]
        self._files = files
        self._paths = {suffix: f"{folder}/{stem}{suffix}{end}" for suffix in sizes}
        self.path = self._paths[LOG]
        self._sizes = sizes

    # ----- indexes

    def _floor(self, suffix: str, entry: Struct, field: int, value: int) -> tuple[int, ...] | None:
        if self._sizes.get(suffix, 0) < entry.size:
            return None
        try:
            with closing(self._files.open(self._paths[suffix])) as file:
                return _index_floor(file, entry, field, value)
        except FileNotFoundError:
            return None  # if the whole segment is gone, opening its log fails

    def position_hint(self, offset: int) -> int:
        """The approximate position of `offset` by the index; 0 if it has no plausible entry."""
        entry = self._floor(INDEX, OFFSET_ENTRY, 0, offset - self.base_offset)
        return entry[1] if entry and 0 <= entry[1] < self.size else 0

    def position_estimate(self, offset: int, until: int) -> int:
        """Like `position_hint`, or else proportional; the segment's offsets end at `until`."""
        if offset >= until:
            return self.size
        share = self.size * (offset - self.base_offset) // (until - self.base_offset)
        return self.position_hint(offset) or max(0, share)

    def offset_estimate(self, position: int, until: int, near: int) -> int:
        """The approximate offset at `position`: by an index entry at most `near` bytes before it, else proportional."""
        entry = self._floor(INDEX, OFFSET_ENTRY, 1, position)
        if entry is not None and position - entry[1] <= near:
            return self.base_offset + entry[0] + 1
        return self.base_offset + (until - self.base_offset) * position // max(1, self.size)

    def aborted_transactions(self) -> list[AbortedTransaction]:
        """The entries of the transaction index; `DecodeError` if it is damaged."""
        if not self._sizes.get(TRANSACTION_INDEX):
            return []
        path = self._paths[TRANSACTION_INDEX]
        return parse_transaction_index(read_whole(self._files, path), path)

    # ----- positions

    def _headers(self, file: OpenFile, position: int) -> Iterator[tuple[int, Header]]:
        return headers(file, self.path, position, file.size, DecodeError, read_bytes=_WALK_BYTES, ends_with_zeros=True)

    def last_offset(self) -> int:
        """The last offset of the batches before any damage; the base offset if there are none."""
        last = self.base_offset
        with closing(self._files.open(self.path)) as file, suppress(DecodeError):
            for _, header in self._headers(file, 0):
                last = header.last_offset
        return last

    def _start(self, file: OpenFile, offset: int) -> int:
        """The position of a batch that starts at or before `offset`."""
        entry = self._floor(INDEX, OFFSET_ENTRY, 0, offset - self.base_offset)
        if entry and self._begins_batch(file, entry[1], self.base_offset + entry[0]):
            return entry[1]
        return 0

    def _begins_batch(self, file: OpenFile, position: int, offset: int) -> bool:
        """Whether a valid batch at `position` contains `offset`; for a wrapper, as its first or last offset."""
        try:
            if not 0 <= position < file.size:
                return False
            position, header = next(self._headers(file, position))
            if header.size > _CHECKED_BYTES:
                return False
            batch = memoryview(file.read_at(position, header.size))
            check_crc(header, batch)
            if isinstance(header, BatchHeader):
                return header.base_offset <= offset <= header.last_offset
            return offset in (header.last_offset, next(iter(records_of(header, batch))).offset)
        except (DecodeError, StopIteration):
            return False

    def _find(self, file: OpenFile, offset: int) -> tuple[int, Header] | None:
        """(position, header) of the first batch whose last offset is `offset` or later; None after the segment."""
        batches = self._headers(file, self._start(file, offset))
        return next((batch for batch in batches if batch[1].last_offset >= offset), None)

    def headers(self, start: int, end: int) -> Iterator[tuple[Header, memoryview]]:
        """(header, bytes) of the batches with offsets in [start, end); bytes only of control batches."""
        with closing(self._files.open(self.path)) as file:
            place = self._find(file, start)
            for position, header in self._headers(file, place[0]) if place else ():
                if header.base_offset >= end:
                    return
                size = header.size if header.is_control else 0
                yield header, memoryview(file.read_at(position, size))

    def header(self, offset: int) -> Header | None:
        """The header of the first batch whose last offset is `offset` or later; None after the segment."""
        with closing(self._files.open(self.path)) as file:
            place = self._find(file, offset)
            return place[1] if place else None

    def tail(self) -> Tail:
        """The end of the segment; ignores a batch that a broker is still writing."""
        with closing(self._files.open(self.path)) as file:
            end = self.base_offset
            try:
                for _, header in self._headers(file, self._start(file, (1 << 31) + self.base_offset)):
                    end = max(end, header.next_offset)
            except DecodeError as error:
                return Tail(end, error)
            return Tail(end, None)

    # ----- times

    def offset_for_time(self, timestamp: int, first: int, until: int) -> int | None:
        """The first offset in [first, until) of a record with a timestamp (ms) of at least `timestamp`, or None.

        A corrupt batch whose header claims such a timestamp counts from its start: reading it reports the damage.
        """
        with closing(self._files.open(self.path)) as file:
            for position, header in self._headers(file, self._time_start(file, timestamp)):
                if header.base_offset >= until:
                    return None
                if header.max_timestamp < timestamp or header.last_offset < first:
                    continue
                batch = memoryview(file.read_at(position, header.size))
                try:
                    check_crc(header, batch)
                    records = [record for record in records_of(header, batch) if record.timestamp >= timestamp]
                except DecodeError:
                    return max(first, header.base_offset)
                for record in records:
                    if record.offset >= first:
                        return record.offset
        return None

    def _time_start(self, file: OpenFile, timestamp: int) -> int:
        """The position of a batch such that all timestamps before it are below `timestamp`."""
        entry = self._floor(TIME_INDEX, TIME_ENTRY, 0, timestamp - 1)
        found_at = self._find(file, self.base_offset + entry[1]) if entry else None
        if entry is None or found_at is None or found_at[1].max_timestamp != entry[0]:
            return 0
        return found_at[0]

    # ----- data

    def blocks(self, start: int, end: int, following: int | None) -> Iterator[StoredBatches]:
        """The batches with offsets in [start, end), in blocks; they may extend beyond both ends.

        `following` is the base offset of the next segment, None for the log's last one. Reads one block ahead.
        `DecodeError` at bytes that are not a batch; in a segment that is not the last one, which gets no appends, also
        at a partial batch.
        """
        with closing(self._files.open(self.path)) as file:
            # If the size differs from the listing, compaction may have merged the next segment into this one.
            log_end = NO_END if following is None or file.size != self.size else following
            place = self._find(file, start)
            if place is None:
                return
            limit = self.position_hint(end) or self.size
            with ThreadPoolExecutor(1) as ahead:
                position, next_offset = place[0], start
                coming = ahead.submit(file.read_at, position, _block_size(position, limit))
                while True:
                    data = memoryview(coming.result())
                    size = _whole_end(data)
                    if not size:
                        needed = self._needed(file, position, data, following is None)
                        if not needed:
                            return
                        coming = ahead.submit(file.read_at, position, needed)
                        continue
                    order = OffsetOrder(data[:size], next_offset, log_end)
                    sound = order.end() or End(next_offset, size)
                    position += sound.position
                    next_offset = max(next_offset, sound.offset)
                    is_done = next_offset >= end or position >= file.size
                    if not is_done:
                        coming = ahead.submit(file.read_at, position, _block_size(position, limit))
                    yield StoredBatches(data[: sound.position], next_offset, [], order.damaged)
                    if is_done:
                        return

    def _needed(self, file: OpenFile, position: int, data: memoryview, is_last: bool) -> int:
        """The size of the batch at `position`, of which `data` is a part; 0 if the log ends there."""
        left = file.size - position
        try:
            size = first_batch_size(data)
        except DecodeError as error:
            if is_last and not any(file.read_at(position, UNWRITTEN_SIZE)):
                return 0
            raise DecodeError(f"{self.path} at position {position}: {error}") from None
        if size is not None and len(data) < size <= left:
            return size
        if is_last:
            return 0
        raise DecodeError(
            f"{self.path} at position {position}: the batch is incomplete, {left} bytes left of {size or 'it'}"
        )


def _block_size(position: int, limit: int) -> int:
    """Choose how many bytes to read: few beyond `limit`, the probable end of the wanted records."""
    return min(BLOCK_BYTES, max(limit - position, _LEAST_BYTES))


def _whole_end(data: memoryview) -> int:
    """The end of the complete batches at the start of `data`; 0 if there is none.

    For speed it only follows lengths; decoding checks the contents.
    """
    position = 0
    end = len(data) - LOG_OVERHEAD
    while position <= end:
        length = PREFIX.unpack_from(data, position)[1]
        if length < MIN_BATCH_SIZE - LOG_OVERHEAD or length > end - position:
            break
        position += length + LOG_OVERHEAD
    return position


def _index_floor(file: OpenFile, entry: Struct, field: int, value: int) -> tuple[int, ...] | None:
    """The last entry of an index (see index.py) whose `field` is at most `value`; None if there is none.

    Reads only parts of the file. An entry of zeros ends the index. The result from a damaged index is arbitrary.
    """

    def is_above(fields: tuple[int, ...]) -> bool:
        return fields[field] > value or not any(fields)

    low, high = 0, file.size // entry.size
    while (high - low) * entry.size > _SEARCHED_BYTES:
        middle = (low + high) // 2
        data = file.read_at(middle * entry.size, entry.size)
        if len(data) < entry.size or is_above(entry.unpack(data)):
            high = middle
        else:
            low = middle
    data = memoryview(file.read_at(low * entry.size, (high - low) * entry.size))
    floor = None
    for fields in entry.iter_unpack(data[: len(data) - len(data) % entry.size]):
        if is_above(fields):
            break
        floor = fields
    return floor
