"""Read the entries of a segment's index files and report damage, for `klog log dump` and `klog log verify`.

.index      8 bytes an entry: INT32 relative offset, INT32 position in the .log file
.timeindex  12 bytes: INT64 timestamp (ms), INT32 relative offset
.txnindex   34 bytes: INT16 version 0, INT64 producer id, first offset, last offset, last stable offset

Relative offsets count from the segment's base offset, which is the file's name. Entries of .index and .timeindex grow.
Kafka preallocates these two files, so zeros may follow the entries of the newest segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from spark_klog.log.segments.segment_files import INDEX, TIME_INDEX, TRANSACTION_INDEX
from spark_klog.log.tools.dump import Damage, Padding, mapped

#: By suffix: the format of an entry, and the names of its fields as in Kafka's DumpLogSegments.
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
    """An entry at `position` in its file. `fields` are by Kafka's names, with absolute offsets and timestamps in ms."""

    position: int
    size: int
    fields: dict[str, int]


def dump_index(path: Path) -> Iterator[IndexEntry | Damage | Padding]:
    """Yield the entries of an index file in order; raises OSError. The suffix says which index it is.

    Whether entries grow and agree with the log is checked by `verify_index`. A partial entry at the end is damage.
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


def _is_zero(data: memoryview) -> bool:
    parts = (data[start : start + len(_ZEROS)] for start in range(0, len(data), len(_ZEROS)))
    return all(part == _ZEROS[: len(part)] for part in parts)
