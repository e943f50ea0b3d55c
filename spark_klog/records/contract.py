"""What a kernel does: records ↔ Arrow-shaped buffers. The reference and the native one fulfil it alike.

Buffers have Arrow's layout, little endian: a binary column of n values is INT32 offsets (n + 1), the bytes one after
the other, and a validity bitmap (bit i of byte i // 8, least significant first; 1 = not null; None = no nulls).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from spark_klog.wire.primitives import Buffer

#: The columns that a builder can make of a record's own bytes.
COLUMNS = ("key", "value", "offset", "timestamp", "timestampType", "headers")

Headers = tuple[tuple[str, bytes | None], ...]

#: Types of timestamps; a record of magic 0 has none.
NO_TIMESTAMP_TYPE, CREATE_TIME, LOG_APPEND_TIME = -1, 0, 1
#: The timestamp of a record that has none.
NO_TIMESTAMP = -1


class Record(NamedTuple):
    """One record: offset, timestamp in ms, its type (see the constants), key, value, headers."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(slots=True)
class BinaryColumn:
    """n values of bytes, see the module."""

    offsets: Buffer
    data: Buffer
    validity: Buffer | None
    null_count: int


@dataclass(slots=True)
class HeadersColumn:
    """n lists of headers: list offsets INT32 (n + 1), validity of the lists, then all names and values."""

    offsets: Buffer
    validity: Buffer | None
    null_count: int
    keys: BinaryColumn
    values: BinaryColumn
    total: int


@dataclass(slots=True)
class RecordColumns:
    """`count` records; a column that was not asked for is None. Offsets and timestamps (ms) INT64, types INT32."""

    count: int
    key: BinaryColumn | None = None
    value: BinaryColumn | None = None
    offset: Buffer | None = None
    timestamp: Buffer | None = None
    timestamp_type: Buffer | None = None
    headers: HeadersColumn | None = None


class IndexState(NamedTuple):
    """What the indexes of a segment must know of the batches before, times in ms, -1 for none.

    Bytes since the last entry; the largest timestamp with an offset that has it; the last one in the time index.
    """

    since_index: int = 0
    max_timestamp: int = -1
    timestamp_offset: int = -1
    indexed_timestamp: int = -1


class IndexTarget(NamedTuple):
    """The segment that batches are for: its base offset, where in its file they go, bytes between index entries."""

    base_offset: int
    position: int
    interval: int


class BatchRun(NamedTuple):
    """A run of sound batches: where it ends in the data, the offset after it, bytes of its largest batch.

    `offset_entries` and `time_entries` are those of the two indexes that are due (formats: log/index.py); `producers`
    are the positions in the data of the batches that have a producer id.
    """

    end: int
    next_offset: int
    largest: int
    state: IndexState
    offset_entries: bytes
    time_entries: bytes
    producers: list[int]


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

        `append_time` (ms) is every record's timestamp where it is not None. `DecodeError` where the body is not
        `count` records; then nothing of it has been added.
        """

    def append_batches(
        self, data: Buffer, position: int, first: int, end: int, rows: int, size: int
    ) -> tuple[int, int]:
        """Add a run of batches that begins at `position`; (where it ends, the offset after it).

        It is a shorter way for batches of magic 2 without codec, transaction and control flag, whole and sound: before
        any other it ends, as before one that begins at offset `end` or later, and when the builder holds `rows` records
        or `size` bytes. It may be empty, as it always is in the reference kernel; the offset is `first` then.
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

        `last_offset` is that of the last message where offsets are relative (inside a wrapper of magic 1), None where
        they are absolute. `append_time` (ms) is every record's timestamp where it is not None, else timestamps are each
        message's own, and so is their type outside a wrapper; within it they are create times, whatever a message says
        (consumers take the wrapper's type). `CorruptBatchError` for a wrong CRC, `DecodeError` where the bytes are not
        whole messages of that magic without a codec; then nothing of them has been added.
        """

    def finish(self) -> RecordColumns:
        """What was collected; the builder is empty afterwards."""


class Kernel(Protocol):
    """The contract of a kernel."""

    name: str

    def builder(self, columns: frozenset[str]) -> ColumnBuilder:
        """A builder of the named columns, a subset of `COLUMNS`."""

    def encode(self, columns: RecordColumns, start: int, target: int) -> tuple[bytes, int, int, int]:
        """Encode records from row `start` on until their bytes reach `target`, at least one.

        Timestamps come from `columns.timestamp`, offsets deltas count from 0, `offset` is not read.
        Returns (body, next row, base timestamp, max timestamp).
        """

    def message_run(self, data: Buffer, position: int, end: int) -> int:
        """Where the run of messages ends that begins at `position`: whole ones of one magic (0 or 1) without a codec.

        It ends, too, before a message with an offset of `end` or more; then it may be empty. `DecodeError` where
        something begins that is no batch.
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
        """The run of whole batches of magic 2 with a right checksum that begins at `position`; it may be empty.

        It ends before a batch that begins before `next_offset` or its predecessor's end, or whose offsets the indexes
        can't hold (INT32 from the base offset on). With a `leader_epoch` the run gets dense offsets from `next_offset`
        on, and that epoch, in place; it then ends before a batch whose count is not that of its offsets. The target's
        position is that of `data[0]`.
        """

    def partitions(self, keys: BinaryColumn, count: int, partitions: int) -> Buffer:
        """INT32 per key: Kafka's default partition (murmur2, positive, modulo); -1 where the key is null."""
