"""The entries of a segment's index files, one by one, damaged ones named; for `klog log dump` and `klog log verify`.

.index      8 bytes an entry: INT32 relative offset, INT32 position in the .log file
.timeindex  12 bytes: INT64 timestamp (ms), INT32 relative offset
.txnindex   34 bytes: INT16 version 0, INT64 producer id, first offset, last offset, last stable offset

Relative offsets count from the segment's base offset, the file's name. The first two grow from entry to entry. Kafka
preallocates them, so that zeros may follow the entries while the segment is the newest.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from spark_klog.log.dump import Damage
from spark_klog.log.segment import INDEX, TIME_INDEX, TRANSACTION_INDEX

#: By suffix: an entry's bytes, and its fields as Kafka's DumpLogSegments calls them.
_FORMATS = {
    INDEX: (Struct(">ii"), ("offset", "position")),
    TIME_INDEX: (Struct(">qi"), ("timestamp", "offset")),
    TRANSACTION_INDEX: (
        Struct(">hqqqq"),
        ("version", "producerId", "firstOffset", "lastOffset", "lastStableOffset"),
    ),
}
INDEX_SUFFIXES = tuple(_FORMATS)
_ZEROS = bytes(64 * 1024)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry at `position` in its file; `fields` by Kafka's names, offsets are absolute, timestamps in ms."""

    position: int
    size: int
    fields: dict[str, int]


@dataclass(frozen=True, slots=True)
class Padding:
    """Zeros after the last entry, which Kafka has preallocated."""

    position: int
    size: int


def dump_index(path: Path) -> Iterator[IndexEntry | Damage | Padding]:
    """What an index file holds, in order; OSError. Its suffix says which index it is.

    That entries grow and agree with the log is not checked here. A rest that is no whole entry is damage.
    """
    entry, names = _FORMATS[path.suffix]
    with path.open("rb") as file:
        file.seek(0, 2)
        if not file.tell():
            return
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
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
        yield Damage(whole, len(data) - whole, f"{len(data)} bytes are no multiple of {entry.size}, an entry's")


def _is_zero(data: memoryview) -> bool:
    parts = (data[start : start + len(_ZEROS)] for start in range(0, len(data), len(_ZEROS)))
    return all(part == _ZEROS[: len(part)] for part in parts)
