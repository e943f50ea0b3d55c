"""How large columns may become by elements of lists and maps that leave their fields out.

`{}` in a list of JSON objects has two bytes, an empty message in a list of Protobuf has two, an item of Avro that was
written before its schema got fields has few, but in columns each takes some bytes for each field that its type has: a
few KB of a compressed batch could take gigabytes. So the elements of a record may take 4 MiB, and 64 bytes for each
byte of the record; a record beyond that is bad. Thousands of events of a few bytes, each of another one of many types,
are within it. A load decodes as many records at once as take 256 MiB so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

#: As in `_protobuf.pyx` and `_avro.pyx`.
BASE_ROOM: Final = 4 * 1024 * 1024
ROOM_OF_A_BYTE: Final = 64
TOO_MANY_ABSENT: Final = (
    "lists with so many elements that leave fields out that their columns take more than 4 MiB, and "
    f"{ROOM_OF_A_BYTE} bytes for each byte of the record"
)
#: What such elements of the rows that are decoded at once may take.
_PART_ROOM: Final = 256 * 1024 * 1024
#: Bytes of a value of variable size that is absent or empty, and what the shortest element, `{},`, has in JSON.
VARIABLE_BYTES: Final = 5
_SHORTEST: Final = 3


def empty_bytes(kind: pa.DataType) -> int:
    """Bytes in columns of a value of a type whose fields are all absent."""
    if pa.types.is_struct(kind):
        return 1 + sum(empty_bytes(field.type) for field in kind)
    try:
        return 1 + int(kind.bit_width) // 8
    except ValueError:
        return VARIABLE_BYTES


def largest_element(kind: pa.DataType) -> int:
    """Bytes of the largest element of a type's lists and maps without its fields; 0 if it has none."""
    return max(map(empty_bytes, _elements(kind)), default=0)


def _elements(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The types of the elements of lists and maps within a type."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _elements(field.type)
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        below = kind.item_type if pa.types.is_map(kind) else kind.value_type
        yield below
        yield from _elements(below)


def decodable_parts(sizes: NDArray[np.int64], element_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows that may be decoded at once, by the bytes of each and those of the largest element in columns."""
    ends = np.cumsum(np.minimum(BASE_ROOM + ROOM_OF_A_BYTE * sizes, sizes * element_bytes))
    ranges, begin = [], 0
    while begin < len(sizes):
        before = ends[begin - 1] if begin else 0
        end = max(int(np.searchsorted(ends, before + _PART_ROOM, "right")), begin + 1)
        ranges.append((begin, end))
        begin = end
    return ranges


class JsonRoom:
    """The bound for JSON records whose lists and maps have elements of at most so many bytes without their fields."""

    def __init__(self, element_bytes: int) -> None:
        self._bytes = element_bytes

    def crowded(self, rows: pa.Array) -> dict[int, str]:
        """Why rows of a binary column are bad, by their number."""
        if self._bytes <= ROOM_OF_A_BYTE * _SHORTEST:
            return {}
        counts = pc.multiply(pc.count_substring_regex(rows, r"\{|null").cast(pa.int64()), self._bytes)
        rooms = pc.add(pc.multiply(pc.binary_length(rows).cast(pa.int64()), ROOM_OF_A_BYTE), BASE_ROOM)
        bad = {}
        for row in pc.indices_nonzero(pc.greater(counts, rooms)).to_pylist():
            try:
                count = _count(json.loads(rows[row].as_py(), parse_int=float))  # `int` refuses those of 4,300 digits
            except (ValueError, RecursionError) as error:
                bad[row] = f"no JSON: {error}"
            else:
                if count * self._bytes > rooms[row].as_py():
                    bad[row] = TOO_MANY_ABSENT
        return bad


def _count(value: Any) -> int:
    """Objects and nulls within a value, but not within texts."""
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else value is None
