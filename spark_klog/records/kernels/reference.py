"""The reference kernel, in Python: tests compare the native one with it.

record           VARINT   length of what follows
  attributes     INT8     unused
  timestamp      VARLONG  delta to the batch's base timestamp
  offset         VARINT   delta to the batch's base offset
  key            VARINT   length, -1 is null; then the bytes
  value          VARINT   length, -1 is null; then the bytes
  headers        VARINT   count; each VARINT length and name (UTF-8), VARINT length (-1 is null) and value
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate
from struct import Struct

from spark_klog.errors import DecodeError
from spark_klog.records.contract import (
    NO_TIMESTAMP,
    BatchRun,
    BinaryColumn,
    CleanedRun,
    CleaningLimits,
    Headers,
    HeadersColumn,
    IndexState,
    IndexTarget,
    KeyOffsets,
    MessageRun,
    Record,
    RecordColumns,
)
from spark_klog.records.formats.batch import Header, check_crc, magic_of, read_header, whole_batch_size
from spark_klog.records.formats.batch_v2 import LOG_APPEND_TIME_BIT, BatchHeader, body, set_base_offset
from spark_klog.records.formats.message_set import build_message, plain_records, read_message_header
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.primitives import Buffer, append_uvarint, append_varlong, wrap_int64

name = "reference"

_INT32 = Struct("<i")
#: The entries of a segment's indexes.
OFFSET_ENTRY, TIME_ENTRY = Struct(">ii"), Struct(">qi")
_MAX_OFFSET = (1 << 63) - 1
#: Indexes store positions, and offsets relative to the segment's base, as INT32.
MAX_RELATIVE = 0x7FFFFFFF


def _varint(data: Buffer, position: int) -> tuple[int, int]:
    """(value, next position) of a VARINT or VARLONG; IndexError if it is cut off."""
    byte = data[position]
    position += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position
    result, shift = byte & 0x7F, 7
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise DecodeError(f"varint of more than 64 bits before position {position}")
    if result >> 64:
        raise DecodeError(f"varint of more than 64 bits before position {position}")
    return (result >> 1) ^ -(result & 1), position


def _bytes(data: bytes, position: int, end: int) -> tuple[bytes | None, int]:
    """(the bytes after their length, next position); None for the length -1."""
    size, position = _varint(data, position)
    if size == -1:
        return None, position
    if size < -1 or size > end - position:
        raise DecodeError(f"field of {size} bytes at position {position}, {end - position} are left in its record")
    return data[position : position + size], position + size


def _headers(data: bytes, position: int, count: int, end: int) -> tuple[Headers, int]:
    if count < 0 or count > end - position:
        raise DecodeError(f"{count} headers at position {position}, {end - position} bytes are left in the record")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        key, position = _bytes(data, position, end)
        if key is None:
            raise DecodeError(f"header without a name before position {position}")
        value, position = _bytes(data, position, end)
        headers.append((key.decode(errors="replace"), value))  # as Java does
    return tuple(headers), position


def iter_body(
    records: Buffer, count: int, base_offset: int, base_timestamp: int, append_time: int | None
) -> Iterator[Record]:
    """The records of a decompressed body; `DecodeError` unless it is exactly `count` records."""
    data = bytes(records)
    position, kind = 0, 0 if append_time is None else 1
    try:
        for _ in range(count):
            size, position = _varint(data, position)
            end = position + size
            if size < 0 or end > len(data):
                raise DecodeError(f"record of {size} bytes at position {position}, {len(data) - position} are left")
            delta, position = _varint(data, position + 1)
            offset, position = _varint(data, position)
            if not 0 <= offset < 1 << 31:
                raise DecodeError(f"offset delta {offset} before position {position}")
            key, position = _bytes(data, position, end)
            value, position = _bytes(data, position, end)
            number, position = _varint(data, position)
            headers: Headers = ()
            if number:
                headers, position = _headers(data, position, number, end)
            if position != end:
                raise DecodeError(f"record ends at position {end}, its fields at {position}")
            timestamp = wrap_int64(base_timestamp + delta) if append_time is None else append_time
            yield Record(base_offset + offset, timestamp, kind, key, value, headers)
    except IndexError:
        raise DecodeError(f"record cut off at position {len(data)}") from None
    if position != len(data):
        raise DecodeError(f"{len(data) - position} bytes left over after {count} records")


def iter_records(header: BatchHeader, batch: memoryview, limit: int = MAX_DECOMPRESSED) -> Iterator[Record]:
    """The records of one batch, whose CRC was checked."""
    records = body(header, batch, limit)
    return iter_body(records, header.count, header.base_offset, header.base_timestamp, header.append_time)


def _bitmap(valid: list[bool]) -> tuple[bytes | None, int]:
    nulls = valid.count(False)
    if not nulls:
        return None, 0
    bits = bytearray((len(valid) + 7) // 8)
    for index, is_valid in enumerate(valid):
        if is_valid:
            bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits), nulls


class ReferenceBuilder:
    """See `contract.ColumnBuilder`."""

    def __init__(self, columns: frozenset[str]) -> None:
        self._columns = columns
        self._records: list[Record] = []
        self._size = 0

    @property
    def rows(self) -> int:
        return len(self._records)

    @property
    def size(self) -> int:
        return self._size

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
        self._add(iter_body(body, count, base_offset, base_timestamp, append_time), first, end)

    def append_batches(
        self, data: Buffer, position: int, first: int, end: int, rows: int, size: int
    ) -> tuple[int, int]:
        return position, first

    def append_messages(
        self,
        messages: Buffer,
        magic: int,
        last_offset: int | None,
        append_time: int | None,
        first: int,
        end: int,
    ) -> None:
        self._add(plain_records(messages, magic, last_offset, append_time), first, end)

    def _add(self, records: Iterator[Record], first: int, end: int) -> None:
        wanted = [record for record in records if first <= record.offset < end]
        self._records += wanted
        if "key" in self._columns:
            self._size += sum(len(record.key or b"") for record in wanted)
        if "value" in self._columns:
            self._size += sum(len(record.value or b"") for record in wanted)

    def finish(self) -> RecordColumns:
        records, self._records, self._size = self._records, [], 0
        columns = RecordColumns(len(records))
        if "key" in self._columns:
            columns.key = _binary([record.key for record in records])
        if "value" in self._columns:
            columns.value = _binary([record.value for record in records])
        if "offset" in self._columns:
            columns.offset = array("q", [record.offset for record in records]).tobytes()
        if "timestamp" in self._columns:
            columns.timestamp = array("q", [record.timestamp for record in records]).tobytes()
        if "timestampType" in self._columns:
            columns.timestamp_type = array("i", [record.timestamp_type for record in records]).tobytes()
        if "headers" in self._columns:
            columns.headers = _headers_column([record.headers for record in records])
        return columns


def _binary(values: list[bytes | None]) -> BinaryColumn:
    contents = [value or b"" for value in values]
    offsets = array("i", accumulate(map(len, contents), initial=0))
    validity, nulls = _bitmap([value is not None for value in values])
    return BinaryColumn(offsets.tobytes(), b"".join(contents), validity, nulls)


def _headers_column(rows: list[Headers]) -> HeadersColumn:
    """The headers column; null for a record without headers, as in Spark's Kafka connector."""
    offsets = array("i", accumulate(map(len, rows), initial=0))
    names = _binary([name.encode() for headers in rows for name, _ in headers])
    values = _binary([value for headers in rows for _, value in headers])
    validity, nulls = _bitmap([bool(headers) for headers in rows])
    return HeadersColumn(offsets.tobytes(), validity, nulls, names, values, offsets[-1])


def builder(columns: frozenset[str]) -> ReferenceBuilder:
    """See `contract.Kernel.builder`."""
    return ReferenceBuilder(columns)


#: Below it signed varints come from a table.
_SMALL = 2048
_SMALL_NUMBERS = [
    bytes((number,)) if number < 0x80 else bytes((number & 0x7F | 0x80, number >> 7))
    for number in range(0, 2 * _SMALL, 2)
]


def append_record(
    target: bytearray,
    timestamp_delta: int,
    offset_delta: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers = (),
) -> None:
    """Append one encoded record to a body."""
    if not headers and 0 <= timestamp_delta < _SMALL > offset_delta:  # most records: half of the time
        key_size, size = 0 if key is None else len(key), 0 if value is None else len(value)
        if key_size < _SMALL > size:
            numbers = _SMALL_NUMBERS
            small = b"".join(
                (
                    b"\0",
                    numbers[timestamp_delta],
                    numbers[offset_delta],
                    b"\1" if key is None else numbers[key_size] + key,
                    b"\1" if value is None else numbers[size] + value,
                    b"\0",
                )
            )
            append_uvarint(target, len(small) << 1)
            target += small
            return
    record = bytearray(1)
    delta = wrap_int64(timestamp_delta)
    append_varlong(record, delta)
    append_uvarint(record, offset_delta << 1)
    for field in (key, value):
        _append_bytes(record, field)
    append_uvarint(record, len(headers) << 1)
    for header, content in headers:
        _append_bytes(record, header.encode())
        _append_bytes(record, content)
    append_uvarint(target, len(record) << 1)
    target += record


def _append_bytes(target: bytearray, value: bytes | None) -> None:
    if value is None:
        target.append(1)
    else:
        append_uvarint(target, len(value) << 1)
        target += value


def _value(column: BinaryColumn | None, row: int) -> bytes | None:
    if column is None:
        return None
    if column.validity is not None and not column.validity[row >> 3] >> (row & 7) & 1:
        return None
    start, stop = (_INT32.unpack_from(column.offsets, 4 * index)[0] for index in (row, row + 1))
    return bytes(column.data[start:stop])


def _row_headers(column: HeadersColumn | None, row: int) -> Headers:
    if column is None or (column.validity is not None and not column.validity[row >> 3] >> (row & 7) & 1):
        return ()
    start, stop = (_INT32.unpack_from(column.offsets, 4 * index)[0] for index in (row, row + 1))
    return tuple(
        ((_value(column.keys, index) or b"").decode(), _value(column.values, index)) for index in range(start, stop)
    )


def encode(columns: RecordColumns, start: int, target: int) -> tuple[Buffer, int, int, int]:
    """See `contract.Kernel.encode`."""
    assert columns.timestamp is not None
    timestamps = array("q")
    timestamps.frombytes(columns.timestamp)
    base = timestamps[start]
    maximum, row = base, start
    encoded = bytearray()
    while row < columns.count and len(encoded) < target:
        append_record(
            encoded,
            timestamps[row] - base,
            row - start,
            _value(columns.key, row),
            _value(columns.value, row),
            _row_headers(columns.headers, row),
        )
        maximum = max(maximum, timestamps[row])
        row += 1
    return bytes(encoded), row, base, maximum


def message_run(data: Buffer, position: int, end: int) -> int:
    """See `contract.Kernel.message_run`."""
    magic = magic_of(data, position)
    while magic in (0, 1) and magic_of(data, position) == magic and (size := whole_batch_size(data, position)):
        header = read_message_header(data, position)
        if header.codec_id or header.offset >= end:
            break
        position += size
    return position


def scan_batches(
    data: Buffer,
    position: int,
    state: IndexState,
    target: IndexTarget,
    next_offset: int,
    leader_epoch: int | None,
) -> BatchRun:
    """See `contract.Kernel.scan_batches`."""
    view = memoryview(data)
    base_offset, start, _ = target
    headers: list[tuple[int, Header]] = []
    at, following = position, next_offset
    while True:
        try:
            size = whole_batch_size(view, at)
            header = None if size is None else read_header(view, at)
            if not isinstance(header, BatchHeader):
                break
            batch = view[at : at + header.size]
            check_crc(header, batch)
        except DecodeError:
            break
        first = header.base_offset if leader_epoch is None else following
        last = first + header.last_offset_delta
        if first < following or last - base_offset > MAX_RELATIVE or start + at > MAX_RELATIVE:
            break
        if leader_epoch is not None:
            if header.count != header.last_offset_delta + 1:
                break
            set_base_offset(batch, first, leader_epoch)
            header = read_header(view, at)
        headers.append((at, header))
        at += header.size
        following = last + 1
    return run_of(headers, position, state, target, next_offset)


def run_of(
    batches: Iterable[tuple[int, Header]], position: int, state: IndexState, target: IndexTarget, next_offset: int
) -> BatchRun:
    """The run of these batches, of any magic: (position in the data, header) of each, the first at `position`."""
    since, timestamp, timestamp_offset, indexed = state
    base_offset, start, interval = target
    largest = 0
    offsets, times, producers = bytearray(), bytearray(), []
    for at, header in batches:
        if isinstance(header, BatchHeader) and header.producer_id >= 0:
            producers.append(at)
        # a base offset that is damaged may be any: no checksum covers it
        has_entry = 0 <= header.last_offset - base_offset <= MAX_RELATIVE
        if header.max_timestamp > timestamp and has_entry:
            timestamp, timestamp_offset = header.max_timestamp, header.last_offset
        if since > interval and has_entry:
            offsets += OFFSET_ENTRY.pack(header.last_offset - base_offset, start + at)
            if timestamp > indexed:
                times += TIME_ENTRY.pack(timestamp, timestamp_offset - base_offset)
                indexed = timestamp
            since = 0
        since += header.size
        largest = max(largest, header.size)
        position, next_offset = at + header.size, header.next_offset
    after = IndexState(since, timestamp, timestamp_offset, indexed)
    return BatchRun(position, next_offset, largest, after, bytes(offsets), bytes(times), producers)


def plain_produced(data: Buffer, limit: int) -> None:
    """See `contract.Kernel.plain_produced`."""


def ordered_batches(data: Buffer, log_end: int) -> None:
    """See `contract.Kernel.ordered_batches`."""


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 (org.apache.kafka.common.utils.Utils), as an unsigned number."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for position in range(0, whole, 4):
        k = int.from_bytes(data[position : position + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    tail = data[whole:]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def partitions(keys: BinaryColumn, count: int, partitions: int) -> Buffer:
    """See `contract.Kernel.partitions`."""
    result = array("i")
    for row in range(count):
        key = _value(keys, row)
        result.append(-1 if key is None else (murmur2(key) & 0x7FFFFFFF) % partitions)
    return result.tobytes()


_SIP_START = 0x736F6D6570736575, 0x646F72616E646F6D ^ 0xEE, 0x6C7967656E657261, 0x7465646279746573
_UINT64, _UINT64_PAIR = Struct("<Q"), Struct("<QQ")


def siphash(key: Buffer, secret: bytes) -> bytes:
    """SipHash-2-4 with 128 bits (Aumasson and Bernstein); `secret` has 16 bytes."""
    mask = 0xFFFFFFFFFFFFFFFF
    v0, v1, v2, v3 = (start ^ half for start, half in zip(_SIP_START, _UINT64_PAIR.unpack(secret) * 2, strict=True))
    data = bytes(key)
    rest = data[len(data) & ~7 :].ljust(7, b"\0") + bytes((len(data) & 0xFF,))
    words = [word for (word,) in _UINT64.iter_unpack(data[: len(data) & ~7] + rest)]
    result: list[int] = []
    for word, rounds in [*((word, 2) for word in words), (None, 4), (None, 4)]:
        if word is not None:
            v3 ^= word
        elif result:
            v1 ^= 0xDD
        else:
            v2 ^= 0xEE
        for _ in range(rounds):
            v0 = v0 + v1 & mask
            v2 = v2 + v3 & mask
            v1 = (v1 << 13 & mask | v1 >> 51) ^ v0
            v3 = (v3 << 16 & mask | v3 >> 48) ^ v2
            v0 = (v0 << 32 & mask | v0 >> 32) + v3 & mask
            v2 = v2 + v1 & mask
            v3 = (v3 << 21 & mask | v3 >> 43) ^ v0
            v1 = (v1 << 17 & mask | v1 >> 47) ^ v2
            v2 = v2 << 32 & mask | v2 >> 32
        if word is not None:
            v0 ^= word
        else:
            result.append(v0 ^ v1 ^ v2 ^ v3)
    return _UINT64_PAIR.pack(*result)


def _offsets_of(columns: RecordColumns) -> array[int]:
    assert columns.offset is not None
    return array("q", bytes(columns.offset))


def put_keys(offsets: KeyOffsets, columns: RecordColumns) -> int | None:
    """See `contract.Kernel.put_keys`."""
    for row, offset in enumerate(_offsets_of(columns)):
        key = _value(columns.key, row)
        if key is not None and not offsets.put(key, offset):
            return offset
    return None


def kept_rows(
    offsets: KeyOffsets, columns: RecordColumns, end: int, retains_tombstones: bool
) -> tuple[bytes, bool, int]:
    """See `contract.Kernel.kept_rows`."""
    flags, has_tombstones, without_key = bytearray(), False, 0
    for row, offset in enumerate(_offsets_of(columns)):
        key, value = _value(columns.key, row), _value(columns.value, row)
        is_kept = offset >= end
        if not is_kept and key is None:
            without_key += 1
        elif not is_kept and key is not None:
            is_kept = (value is not None or retains_tombstones) and offset >= offsets.get(key)
        has_tombstones = has_tombstones or (is_kept and value is None)
        flags.append(is_kept)
    return bytes(flags), has_tombstones, without_key


def retained(
    body: Buffer, flags: bytes, base_timestamp: int, append_time: int | None, base: int | None
) -> tuple[Buffer, int, int]:
    """See `contract.Kernel.retained`."""
    data, kept = bytes(body), bytearray()
    position, latest = 0, NO_TIMESTAMP
    try:
        for flag in flags:
            size, position = _varint(data, position)
            end = position + size
            if size < 1 or end > len(data):
                raise DecodeError(f"record of {size} bytes at position {position}, {len(data) - position} are left")
            if flag:
                delta, rest = _varint(data[position:end], 1)
                timestamp = wrap_int64(base_timestamp + delta) if append_time is None else append_time
                base = timestamp if base is None else base
                latest = max(latest, timestamp)
                content = bytearray(data[position : position + 1])
                append_varlong(content, wrap_int64(timestamp - base))
                content += data[position + rest : end]
                append_uvarint(kept, len(content) << 1)
                kept += content
            position = end
    except IndexError:
        raise DecodeError(f"record cut off at position {len(data)}") from None
    if position != len(data):
        raise DecodeError(f"{len(data) - position} bytes left over after {len(flags)} records")
    return kept, NO_TIMESTAMP if base is None else base, latest


def clean_batches(offsets: KeyOffsets, data: Buffer, limits: CleaningLimits) -> CleanedRun:
    """See `contract.Kernel.clean_batches`."""
    return CleanedRun(0, b"", 0, 0, 0)


def message_set(
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
    """See `contract.Kernel.message_set`."""
    data, end, read = memoryview(body), position, 0
    try:
        while read < min(count, most) and end <= len(data):
            size, start = _varint(data, end)
            end, read = start + max(size, 0), read + 1
    except IndexError:
        raise DecodeError(f"record cut off at position {len(data)}") from None
    records = list(iter_body(data[position:end], read, base_offset, base_timestamp, append_time))
    if read == count and end != len(data):
        raise DecodeError(f"{len(data) - end} bytes left over after {count} records")
    if any(record.offset > _MAX_OFFSET for record in records):
        raise DecodeError(f"offset {max(record.offset for record in records)} in a batch")
    records = [record for record in records if record.offset >= first]
    shift = records[0].offset if records and is_inner and magic else 0
    kind = LOG_APPEND_TIME_BIT if append_time is not None and magic and not is_inner else 0
    messages = [
        build_message(magic, record.offset - shift, record.timestamp, record.key, record.value, kind)
        for record in records
    ]
    return MessageRun(
        b"".join(messages),
        end,
        read,
        len(records),
        sum(len(record.headers) for record in records),
        records[-1].offset if records else 0,
        max((record.timestamp for record in records), default=-1 << 63),
    )
