"""The kernel contract: records ↔ buffers in Arrow's layout. The reference and the native kernel implement it.

Buffers are little endian: a binary column of n values is INT32 offsets (n + 1), the bytes one after the other, and a
validity bitmap (bit i of byte i // 8, least significant first; 1 = not null; None = no nulls).
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from spark_klog.wire.primitives import Buffer

#: The columns that a builder can decode from records.
COLUMNS = ("key", "value", "offset", "timestamp", "timestampType", "headers")

Headers = tuple[tuple[str, bytes | None], ...]

#: Timestamp types; records of magic 0 have NO_TIMESTAMP_TYPE.
NO_TIMESTAMP_TYPE, CREATE_TIME, LOG_APPEND_TIME = -1, 0, 1
#: The timestamp of a record without one.
NO_TIMESTAMP = -1


class Record(NamedTuple):
    """One record; the timestamp is in ms, its type one of the constants above."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def json_value(data: bytes | None) -> object:
    """Bytes as they stand in JSON: text if they are UTF-8, else {"base64": ...}; None for null."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode()}


@dataclass(slots=True)
class BinaryColumn:
    """A binary column; see the module."""

    offsets: Buffer
    data: Buffer
    validity: Buffer | None
    null_count: int

    def values(self, start: int = 0, stop: int | None = None) -> list[bytes | None]:
        """The values of the rows [start, stop) as Python objects."""
        offsets = memoryview(self.offsets).cast("B").cast("i")
        rows = len(offsets) - 1
        stop = rows if stop is None else min(stop, rows)
        if self.null_count == rows:
            return [None] * (stop - start)
        ends = offsets[start : stop + 1].tolist()
        data = bytes(memoryview(self.data).cast("B")[ends[0] : ends[-1]])
        if base := ends[0]:
            ends = [end - base for end in ends]
        values: list[bytes | None] = [data[begin:end] for begin, end in pairwise(ends)]
        if self.null_count:
            assert self.validity is not None
            valid = memoryview(self.validity).cast("B")
            values = [value if valid[row >> 3] >> (row & 7) & 1 else None for row, value in enumerate(values, start)]
        return values

    def value(self, row: int) -> bytes | None:
        """One value."""
        if self.null_count:
            assert self.validity is not None
            if not memoryview(self.validity).cast("B")[row >> 3] >> (row & 7) & 1:
                return None
        start, end = memoryview(self.offsets).cast("B").cast("i")[row : row + 2]
        return bytes(memoryview(self.data).cast("B")[start:end])


@dataclass(slots=True)
class HeadersColumn:
    """A column of header lists: list offsets INT32 (n + 1), validity of the lists, then all names and values."""

    offsets: Buffer
    validity: Buffer | None
    null_count: int
    keys: BinaryColumn
    values: BinaryColumn
    total: int

    def rows(self, start: int, stop: int) -> list[Headers]:
        """The headers of the records [start, stop) as Python objects."""
        if not self.total:
            return [()] * (stop - start)
        ends = memoryview(self.offsets).cast("B").cast("i")[start : stop + 1].tolist()
        first, last = ends[0], ends[-1]
        names = [(name or b"").decode() for name in self.keys.values(first, last)]
        headers = list(zip(names, self.values.values(first, last), strict=True))
        return [tuple(headers[begin - first : end - first]) for begin, end in pairwise(ends)]

    def row(self, row: int) -> Headers:
        """The headers of one record."""
        start, end = memoryview(self.offsets).cast("B").cast("i")[row : row + 2]
        return tuple(((self.keys.value(at) or b"").decode(), self.values.value(at)) for at in range(start, end))


@dataclass(slots=True)
class RecordColumns:
    """`count` records as columns, None if not requested. Offsets and timestamps (ms) are INT64, types INT32."""

    count: int
    key: BinaryColumn | None = None
    value: BinaryColumn | None = None
    offset: Buffer | None = None
    timestamp: Buffer | None = None
    timestamp_type: Buffer | None = None
    headers: HeadersColumn | None = None


class IndexState(NamedTuple):
    """State of a segment's indexes between appends; times in ms, -1 for none.

    Bytes since the last index entry; the largest timestamp so far and its offset; the last entry of the time index.
    """

    since_index: int = 0
    max_timestamp: int = -1
    timestamp_offset: int = -1
    indexed_timestamp: int = -1


#: The segment to append to: its base offset, the position of `data[0]` in its file, bytes between index entries.
IndexTarget = tuple[int, int, int]


class BatchRun(NamedTuple):
    """A run of valid batches: its end in the data, the offset after it, the size of its largest batch in bytes.

    `offset_entries` and `time_entries` are to be appended to the indexes (formats: log/segments/index.py); `producers`
    are the positions of the batches that have a producer id.
    """

    end: int
    next_offset: int
    largest: int
    state: IndexState
    offset_entries: bytes
    time_entries: bytes
    producers: list[int]


class OrderedBatches(NamedTuple):
    """Batches in order: the number of their offsets, the offset after the one before the last (-1: there is one only).

    Of the last one: position, size, offsets [first, following), leader epoch, and whether its checksum is correct.
    """

    offsets: int
    before: int
    position: int
    size: int
    first: int
    following: int
    leader_epoch: int
    is_intact: bool


class KeyOffsets(Protocol):
    """The last offset of each key, in a table of `slots` slots of 24 bytes, all zero at first.

        digest       16 bytes   of the key: SipHash-2-4 with 128 bits, by the secret (16 bytes)
        offset + 1   INT64      0: the slot is free

    With the digest as two UINT64, a key's slot is the first one modulo `slots`; while others have it, the one that is
    the second one modulo (`slots` - 1), plus 1, further on. `size` slots are in use, at most `capacity`.
    """

    table: Any
    slots: int
    secret: bytes
    size: int
    capacity: int

    def put(self, key: Buffer, offset: int) -> bool:
        """Set a key's offset; False, without effect, if the table is full and does not have the key."""

    def get(self, key: Buffer) -> int:
        """The key's offset, -1 if it has none."""


class CleaningLimits(NamedTuple):
    """What `clean_batches` needs to know: the offset at which the table ends; times in ms.

    Tombstones go whose delete horizon is `now` or earlier; others get `horizon`. `stays`: sorted INT64, the last
    offsets of batches of which the header stays.
    """

    end: int
    now: int
    horizon: int
    stays: bytes


class CleanedRun(NamedTuple):
    """A run of batches: its end in the data, what is left of it, batches read and written, records without a key."""

    end: int
    data: Buffer
    read: int
    written: int
    without_key: int


class MessageRun(NamedTuple):
    """Messages of records of a body: their bytes, the position in the body after the records, the number of these.

    Of the `records` that became messages: the number of headers, the last one's offset, the largest timestamp (ms).
    """

    data: Buffer
    position: int
    read: int
    records: int
    headers: int
    last_offset: int
    max_timestamp: int


class ColumnBuilder(Protocol):
    """Collects records of many batches, column by column."""

    @property
    def rows(self) -> int:
        """Records collected since the last `finish`."""

    @property
    def size(self) -> int:
        """Bytes of keys and values collected since the last `finish`."""

    def append(
        self,
        body: Buffer,
        count: int,
        base_offset: int,
        base_timestamp: int,
        append_time: int | None,
        first: int,
        end: int,
    ) -> None:
        """Add the records of a decompressed body of magic 2 whose offsets lie in [first, end).

        `append_time` (ms), if not None, is every record's timestamp. `DecodeError` if the body is not exactly `count`
        records; the builder is unchanged then.
        """

    def append_batches(
        self, data: Buffer, position: int, first: int, end: int, rows: int, size: int
    ) -> tuple[int, int]:
        """Add the run of plain batches that begins at `position`; return (end of the run, the offset after it).

        A fast path for valid, whole batches of magic 2 without codec, transactional or control flag. The run ends
        before any other batch, before one that begins at offset `end` or later, and when the builder holds `rows`
        records or `size` bytes. It may be empty (in the reference kernel it always is); the offset is `first` then.
        """

    def append_messages(
        self,
        messages: Buffer,
        magic: int,
        last_offset: int | None,
        append_time: int | None,
        first: int,
        end: int,
    ) -> None:
        """Add the messages of an uncompressed message set of magic 0 or 1 whose offsets lie in [first, end).

        `last_offset` is the last message's offset if offsets are relative (inside a wrapper of magic 1), None if they
        are absolute. `append_time` (ms), if not None, is every record's timestamp. Otherwise each message has its own
        timestamp, with its own type outside a wrapper and create time inside one (consumers take the wrapper's type).
        `CorruptBatchError` for a wrong CRC, `DecodeError` if the bytes are not whole, uncompressed messages of that
        magic; the builder is unchanged then.
        """

    def finish(self) -> RecordColumns:
        """Return the collected records and empty the builder."""


class Kernel(Protocol):
    """The contract of a kernel."""

    name: str

    def builder(self, columns: frozenset[str]) -> ColumnBuilder:
        """A builder of the named columns, a subset of `COLUMNS`."""

    def encode(self, columns: RecordColumns, start: int, target: int) -> tuple[Buffer, int, int, int]:
        """Encode records from row `start` on until the body has `target` bytes, at least one.

        Offset deltas count from 0; `columns.offset` is not read. Returns (body, next row, base timestamp, max
        timestamp).
        """

    def message_run(self, data: Buffer, position: int, end: int) -> int:
        """End of the run of whole, uncompressed messages of one magic (0 or 1) that begins at `position`.

        The run also ends before a message with an offset of `end` or more. It may be empty. `DecodeError` if the
        length of a message is too small.
        """

    def scan_batches(
        self,
        data: Buffer,
        position: int,
        state: IndexState,
        target: IndexTarget,
        next_offset: int,
        leader_epoch: int | None,
    ) -> BatchRun:
        """The run of whole batches of magic 2 with a correct checksum that begins at `position`; it may be empty.

        It ends before a batch that begins before `next_offset` or before its predecessor's end, or whose offsets do
        not fit the indexes (INT32, relative to the base offset). With a `leader_epoch` the batches get that epoch and
        dense offsets from `next_offset` on, in place; the run then also ends before a batch whose record count does
        not match its offsets.
        """

    def plain_produced(self, data: Buffer, limit: int) -> int | None:
        """A fast path for data that are one plain batch of magic 2, in which `check_produced` finds nothing wrong.

        Returns its largest timestamp (ms). None for anything else, as for a batch with a codec, a transactional flag,
        or more records than fit into `limit` bytes; in the reference kernel always. Does not check the checksum.
        """

    def ordered_batches(self, data: Buffer, log_end: int) -> OrderedBatches | None:
        """A fast path for data whose whole batches are of magic 2, each after the end of the one before it.

        None for no batches or any others, for impossible headers, and if a batch ends after `log_end` (INT64); in the
        reference kernel always. Checks the last batch's checksum only. A partial batch at the end is ignored.
        """

    def partitions(self, keys: BinaryColumn, count: int, partitions: int) -> Buffer:
        """INT32 per key: Kafka's default partition (murmur2, positive, modulo); -1 for a null key."""

    def put_keys(self, offsets: KeyOffsets, columns: RecordColumns) -> int | None:
        """Set the offset of each key; returns the offset of the first key that does not fit.

        Reads `columns.key` and `columns.offset`. Rows before that one are set, those after it are not.
        """

    def kept_rows(
        self, offsets: KeyOffsets, columns: RecordColumns, end: int, retains_tombstones: bool
    ) -> tuple[bytes, bool, int]:
        """(a byte per row: 1 if compaction keeps it; whether a kept row is a tombstone; rows without a key).

        Rows from offset `end` on are kept. Of others those with a key of which the table has no later offset;
        tombstones only if they are retained. Reads `columns.key`, `columns.value` (nulls only) and `columns.offset`.
        """

    def retained(
        self, body: Buffer, flags: bytes, base_timestamp: int, append_time: int | None, base: int | None
    ) -> tuple[Buffer, int, int]:
        """A decompressed body of magic 2 with those records whose flag is 1, at least one.

        Returns (body, base timestamp, max timestamp). Timestamps count from `base`, or that of the first kept record.
        The rest of a record is copied as it is. `DecodeError` if the body does not have a record for each flag.
        """

    def clean_batches(self, offsets: KeyOffsets, data: Buffer, limits: CleaningLimits) -> CleanedRun:
        """What compaction leaves of the run of plain batches that `data` begins with.

        A fast path for valid, whole batches of magic 2 without codec, transactional or control flag. The run ends
        before any other batch, and before one that loses all its records and stays without them; it may be empty (in
        the reference kernel it always is).
        """

    def message_set(
        self,
        body: Buffer,
        position: int,
        count: int,
        most: int,
        base_offset: int,
        base_timestamp: int,
        append_time: int | None,
        first: int,
        magic: int,
        is_inner: bool,
    ) -> MessageRun:
        """The next `most` of the `count` records of a body of magic 2 from `position` on, as messages of magic 0 or 1.

        Those with offsets before `first` are left out, headers are dropped; `append_time` as in `ColumnBuilder.append`.
        Messages that go into a wrapper (`is_inner`) have no timestamp type, and in magic 1 offsets that count from the
        first one's. `DecodeError` if the records are damaged, or the last of them does not end the body.
        """
