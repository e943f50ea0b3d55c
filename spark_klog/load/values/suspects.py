"""Find values that can't be of a schema by Python's own parser of JSON, much faster than by Arrow's errors.

It is the stricter one in nothing: what it finds is bad for Arrow, too. Some of what is bad is not found here.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pyarrow as pa

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_NUMBER = re.compile(r"[-+.0-9]")
#: Longer integers are of no type; Python is slow to read them.
_MOST_DIGITS = 400
_NAMES: dict[type, str] = {str: "a string", dict: "an object", list: "an array", bool: "a boolean"}


def _integer(text: str) -> float:
    return int(text) if len(text) <= _MOST_DIGITS else math.inf


def why_bad(row: bytes, kind: pa.DataType) -> str:
    """Explain why a value is not JSON of a type; "" if that is not certain."""
    try:
        value = json.loads(str(row, "utf-8"), strict=False, parse_int=_integer)
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        if b"Inf" in row or b"NaN" in row:  # Arrow reads Inf and -NaN, too
            return ""
        return f"no JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return ""
    return _why(value, kind, "")


def _why(value: Any, kind: pa.DataType, path: str) -> str:
    if value is None:
        return ""
    wanted = _wanted(value, kind)
    if wanted:
        where = f"field {path[1:]}" if path else "the value"
        return f"{where} must be {wanted}, not {_NAMES.get(type(value), 'a number')}"
    if pa.types.is_struct(kind):
        for field in kind:
            if found := _why(value.get(field.name), field.type, f"{path}.{field.name}"):
                return found
    elif pa.types.is_list(kind):
        for item in value:
            if found := _why(item, kind.value_type, path):
                return found
    return ""


def _wanted(value: Any, kind: pa.DataType) -> str:
    """Name what a type requires in place of a value; "" if the value may be of the type."""
    is_text = isinstance(value, str)
    if pa.types.is_struct(kind):
        return "" if isinstance(value, dict) else "an object"
    if pa.types.is_list(kind):
        return "" if isinstance(value, list) else "an array"
    if pa.types.is_boolean(kind):
        return "" if isinstance(value, bool) else "a boolean"
    if pa.types.is_integer(kind):
        is_one = isinstance(value, int) and not isinstance(value, bool)
        bits = kind.bit_width - 1
        return "" if is_one and -(1 << bits) <= value < 1 << bits else f"an integer of {bits + 1} bits"
    if pa.types.is_floating(kind):
        return "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if pa.types.is_string(kind):
        return "" if is_text else "a string"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return f"a {'date' if pa.types.is_date(kind) else 'timestamp'}" if is_text and not _DATE.match(value) else ""
    return "a decimal" if is_text and not _NUMBER.match(value) else ""
