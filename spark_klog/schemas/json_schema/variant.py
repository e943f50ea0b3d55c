"""JSON values → VARIANT, in the bytes that Parquet's specification has (VariantEncoding.md) and Spark reads.

Numbers have the types that Spark's `parse_json` gives them. Values of an object stand in the order of their names.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa

from spark_klog.schemas.json_schema.columns import VARIANT
from spark_klog.schemas.json_schema.row_values import parsed, refused
from spark_klog.schemas.rows import BadRow, Decoded, cut

#: Readers of Spark 4.0 take no larger ones.
_MOST_BYTES: Final = 16 * 1024 * 1024
#: Metadata is kept for values that have the same names, unless these are long: then they are likely to be keys of a
#: map, and others in each value.
_KEPT, _KEPT_CHARACTERS = 1024, 2048
#: The first byte of a value has its kind in the two lowest bits: of objects, arrays and strings of up to 63 bytes the
#: rest says how it goes on, of others the type.
_SHORT_STRING, _OBJECT, _ARRAY, _SHORTEST_LONG = 1, 2, 3, 64
_NULL, _TRUE, _FALSE, _LONG_STRING = b"\x00", b"\x04", b"\x08", b"\x40"
_DOUBLE: Final = struct.Struct("<Bd")
#: Of integers, by their bits: the first byte, and how it and the number are packed.
_INTEGERS: Final = ((8, 3 << 2, "<Bb"), (16, 4 << 2, "<Bh"), (32, 5 << 2, "<Bi"), (64, 6 << 2, "<Bq"))
#: The digits that decimals have at most, and the bytes of their unscaled numbers.
_DECIMALS: Final = ((9, 4, 8 << 2), (18, 8, 9 << 2), (38, 16, 10 << 2))


def variants(values: pa.Array) -> Decoded:
    """Decode a binary column of JSON, of which any value is a VARIANT, into the storage of `VARIANT`."""
    rows: list[dict[str, bytes] | None] = []
    bad: list[BadRow] = []
    for number, row in enumerate(values.to_pylist()):
        made = None
        if row is not None:
            try:
                made = variant(row)
            except ValueError as error:
                bad.append(BadRow(number, cut(str(error))))
        rows.append(made)
    return Decoded(pa.array(rows, VARIANT.storage_type), bad)


def variant(text: bytes) -> dict[str, bytes]:
    """The metadata and the value of a JSON text; ValueError says why there is none."""
    ids: dict[str, int] = {}
    try:
        value = _encoded(parsed(text, _PARSER), ids)
        metadata = (_kept_metadata if sum(map(len, ids)) <= _KEPT_CHARACTERS else _metadata)(tuple(ids))
    except UnicodeEncodeError:
        raise ValueError("no JSON: half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if (size := max(len(value), len(metadata))) > _MOST_BYTES:
        raise ValueError(f"a VARIANT of {size} bytes, and readers take {_MOST_BYTES}")
    return {"metadata": metadata, "value": value}


def _encoded(value: Any, ids: dict[str, int]) -> bytes:
    """The bytes of a value; `ids` are the names of fields, and get new ones."""
    kind = type(value)
    if kind is str:
        text: bytes = value.encode()
        if len(text) < _SHORTEST_LONG:
            return bytes((len(text) << 2 | _SHORT_STRING,)) + text
        return _LONG_STRING + len(text).to_bytes(4, "little") + text
    if kind is int:
        for bits, head, form in _INTEGERS:
            if -1 << bits - 1 <= value < 1 << bits - 1:
                return struct.pack(form, head, value)
        return _number(str(value))
    if kind is bytes:  # of a number with a fraction, by the parser
        return bytes(value)
    if kind is dict:
        names = sorted(value)
        size, numbers = _packed([ids.setdefault(name, len(ids)) for name in names])
        return _container(_OBJECT, [_encoded(value[name], ids) for name in names], size, numbers)
    if kind is list:
        return _container(_ARRAY, [_encoded(element, ids) for element in value], 1, b"")
    return _NULL if value is None else _TRUE if value else _FALSE


def _container(kind: int, values: Sequence[bytes], id_size: int, ids: bytes) -> bytes:
    """An array, or an object with the `ids` of its fields, each in so many bytes."""
    offset_size, offsets = _packed([*accumulate(map(len, values), initial=0)])
    is_large = len(values) > 0xFF
    form = is_large << 4 | (id_size - 1) << 2 if kind == _OBJECT else is_large << 2
    head = bytes(((form | offset_size - 1) << 2 | kind,)) + len(values).to_bytes(4 if is_large else 1, "little")
    return b"".join((head, ids, offsets, *values))


def _packed(numbers: Sequence[int]) -> tuple[int, bytes]:
    """Numbers in as many bytes as the largest one needs, 1, 2 or 4."""
    largest = max(numbers, default=0)
    if largest <= 0xFF:
        return 1, bytes(numbers)
    size, code = (2, "H") if largest <= 0xFFFF else (4, "I")
    return size, struct.pack(f"<{len(numbers)}{code}", *numbers)


def _metadata(names: tuple[str, ...]) -> bytes:
    texts = [name.encode() for name in names]
    size, numbers = _packed([*accumulate(map(len, texts), initial=0), len(texts)])
    # the version, and how many bytes the count and the offsets have
    head = bytes((1 | (size - 1) << 6,))
    return b"".join((head, numbers[-size:], numbers[:-size], *texts))


_kept_metadata = lru_cache(_KEPT)(_metadata)


def _number(text: str) -> bytes:
    """A number with a point or an exponent, or a long one: decimals, if they have no exponent and up to 38 digits."""
    whole, _, fraction = text.partition(".")
    if len(text) <= 2 * 38 and text.lstrip("-").replace(".", "").isdecimal():
        unscaled = int(whole + fraction)
        digits = max(len(str(abs(unscaled))), len(fraction))
        for most, size, kind in _DECIMALS:
            if digits <= most:
                return bytes((kind, len(fraction))) + unscaled.to_bytes(size, "little", signed=True)
    double = float(text)
    if math.isinf(double):
        raise ValueError("a number beyond all doubles")
    return _DOUBLE.pack(7 << 2, double)


_PARSER: Final = json.JSONDecoder(parse_float=_number, parse_constant=refused)
