"""Read the files of a log and report damage, for `klog log dump` and `verify`: batch by batch, or entry by entry.

Formats: records/formats/; log/segments/index.py and transaction_index.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_klog.errors import DecodeError
from spark_klog.log.partition_files import SUFFIX_07
from spark_klog.log.segments.segment import INDEX, TIME_INDEX, TRANSACTION_INDEX
from spark_klog.log.segments.transaction_index import TRANSACTION_ENTRY
from spark_klog.records.contract import NO_TIMESTAMP, NO_TIMESTAMP_TYPE, Record
from spark_klog.records.formats.batch import Header, check_crc, first_batch_size, read_header
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.formats.message_07 import Message07, check_crc_07, iter_messages_07, records_07
from spark_klog.records.kernels.reference import OFFSET_ENTRY, TIME_ENTRY
from spark_klog.records.reading.reader import records_of
from spark_klog.wire.codecs import CODECS, MAX_DECOMPRESSED

#: Bytes of base offset and length: no batch begins with as many zeros.
_EMPTY_START_SIZE = 12
_CHUNK_BYTES = 1 << 20
#: By suffix: the format of an entry, and the names of its fields as in Kafka's DumpLogSegments.
_FORMATS = {
    INDEX: (OFFSET_ENTRY, ("offset", "position")),
    TIME_INDEX: (TIME_ENTRY, ("timestamp", "offset")),
    TRANSACTION_INDEX: (
        TRANSACTION_ENTRY,
        ("version", "producerId", "firstOffset", "lastOffset", "lastStableOffset"),
    ),
}
INDEX_SUFFIXES = tuple(_FORMATS)


@dataclass(frozen=True, slots=True)
class Damage:
    """`size` bytes at `position` in the file that are not a valid batch, and the reason."""

    position: int
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Padding:
    """Zeros up to the end of a file, which Kafka preallocates: indexes always, a .log file with `preallocate`."""

    position: int
    size: int


@dataclass(frozen=True, slots=True)
class Dumped:
    """A batch whose CRC is right, at `position` in the file."""

    position: int
    size: int
    header: Header | Message07
    data: memoryview

    def records(self, limit: int = MAX_DECOMPRESSED) -> list[Record]:
        """The batch's records; `DecodeError` if they are damaged or decompress to more than `limit` bytes."""
        if isinstance(self.header, Message07):
            return list(records_07(self.header, limit))
        return list(records_of(self.header, self.data, limit))

    def describe(self) -> dict[str, object]:
        """The batch's fields by Kafka's names; `DecodeError` if a compressed message can't be decoded."""
        header = self.header
        common = {"position": self.position, "size": self.size, "magic": header.magic}
        if isinstance(header, BatchHeader):
            return common | {
                "baseOffset": header.base_offset,
                "lastOffset": header.last_offset,
                "count": header.count,
                "codec": _codec(header.codec_id),
                "timestampType": header.timestamp_type,
                "baseTimestamp": header.base_timestamp,
                "maxTimestamp": header.max_timestamp,
                "producerId": header.producer_id,
                "producerEpoch": header.producer_epoch,
                "baseSequence": header.base_sequence,
                "partitionLeaderEpoch": header.leader_epoch,
                "isTransactional": header.is_transactional,
                "isControl": header.is_control,
                "deleteHorizon": header.delete_horizon,
                "crc": header.crc,
            }
        records = self.records()
        offsets = [record.offset for record in records] or [header.offset]  # a message set of Kafka 0.7 may be empty
        time_type = NO_TIMESTAMP_TYPE if isinstance(header, Message07) else header.timestamp_type
        return common | {
            "baseOffset": offsets[0],
            "lastOffset": offsets[-1],
            "count": len(records),
            "codec": _codec(header.codec_id),
            "timestampType": time_type,
            "maxTimestamp": max((record.timestamp for record in records), default=NO_TIMESTAMP),
            "crc": header.crc,
        }


def _codec(codec_id: int) -> str:
    return CODECS[codec_id].name if codec_id in CODECS else str(codec_id)


def mapped(path: Path) -> memoryview:
    with path.open("rb") as file:  # an empty one can't be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else b"")


def dump(path: Path) -> Iterator[Dumped | Damage | Padding]:
    """Yield the batches of a .log file, or the messages of a .kafka file (Kafka 0.7), in order; raises OSError.

    A batch with a wrong CRC is one `Damage`; reading continues after it. If the bytes at a position are not a whole
    batch, the rest of the file is one `Damage`, since the start of the next batch is unknown.
    """
    data = mapped(path)
    if not data:
        return
    if path.suffix != SUFFIX_07:
        yield from _dump(data)
    elif path.stem.isdecimal():
        yield from _dump_07(data, int(path.stem))
    else:
        yield Damage(0, len(data), f"a {SUFFIX_07} file is named by the offset of its first byte, not {path.stem}")


def _is_zero(data: memoryview) -> bool:
    parts = (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))
    return not any(data[:_EMPTY_START_SIZE]) and not any(bytes(part).strip(b"\0") for part in parts)


def _dump(data: memoryview) -> Iterator[Dumped | Damage | Padding]:
    position = 0
    while position < len(data):
        left = len(data) - position
        if _is_zero(data[position:]):
            yield Padding(position, left)
            return
        try:
            size = first_batch_size(data, position)
        except DecodeError as error:
            yield Damage(position, left, str(error))
            return
        if size is None or size > left:
            yield Damage(position, left, f"cut off: {left} bytes are left of {size or 'an unknown number'}")
            return
        batch = data[position : position + size]
        try:
            header = read_header(data, position)
            check_crc(header, batch)
        except DecodeError as error:
            yield Damage(position, size, str(error))
        else:
            yield Dumped(position, size, header, batch)
        position += size


def _dump_07(data: memoryview, base_offset: int) -> Iterator[Dumped | Damage]:
    position = 0
    try:
        for message in iter_messages_07(data, base_offset):
            position, size = message.offset - base_offset, message.next_offset - message.offset
            try:
                check_crc_07(message)
            except DecodeError as error:
                yield Damage(position, size, str(error))
            else:
                yield Dumped(position, size, message, data[position : position + size])
            position += size
    except DecodeError as error:
        yield Damage(position, len(data) - position, str(error))
        return
    if position < len(data):
        yield Damage(position, len(data) - position, f"cut off: {len(data) - position} bytes are left")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry at `position` in its file. `fields` are by Kafka's names, with absolute offsets and timestamps in ms."""

    position: int
    size: int
    fields: dict[str, int]


def dump_index(path: Path) -> Iterator[IndexEntry | Damage | Padding]:
    """Yield the entries of an index file in order; raises OSError. The suffix says which index it is.

    `verify.py` checks whether entries grow and agree with the log. A partial entry at the end is damage.
    """
    entry, names = _FORMATS[path.suffix]
    data = mapped(path)
    if not data:
        return
    is_relative = path.suffix != TRANSACTION_INDEX
    if is_relative and not (path.stem.isascii() and path.stem.isdecimal()):
        yield Damage(0, len(data), f"an index is named by the first offset of its segment, not {path.stem}")
        return
    base_offset = int(path.stem) if is_relative else 0
    whole = len(data) - len(data) % entry.size
    for position in range(0, whole, entry.size):
        fields = dict(zip(names, entry.unpack_from(data, position), strict=True))
        if is_relative:
            if not any(fields.values()) and _is_zero(data[position:whole]):
                yield Padding(position, whole - position)
                break
            fields["offset"] += base_offset
        elif fields["version"]:
            yield Damage(position, entry.size, f"an entry of version {fields['version']}, only 0 is known")
            continue
        yield IndexEntry(position, entry.size, fields)
    if whole < len(data):
        yield Damage(whole, len(data) - whole, f"{len(data)} bytes are not a multiple of {entry.size}")
