"""Which Python values are of an Arrow type: those that `poll` returns for it, and more of the same meaning.

`pyarrow` alone takes 1.5 for an integer, a time without a zone for an instant, and numbers for times.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import pyarrow as pa

from spark_klog.errors import EncodeError

Prepare = Callable[[Any], Any]


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def misfit_text(value: Any, wanted: str) -> str:
    """What to say of a value that is not of the type it has to be."""
    shown = ""
    if isinstance(value, int | float | str | date | Decimal):
        shown = f" {repr(value) if isinstance(value, str) else value}"
    return f"it must be {wanted}, not {type(value).__name__}{shown[:50]}"


def preparing(kind: pa.DataType, path: str) -> Prepare | None:
    """What makes of a value what `pyarrow` takes, and refuses what it would truncate, and names that the type has not.

    None if nothing is to do.
    """
    where = f"field {path}: " if path else ""
    if pa.types.is_struct(kind):
        names = frozenset(field.name for field in kind)
        fields = [(field.name, preparing(field.type, below(path, field.name))) for field in kind]
        nested = [(name, prepare) for name, prepare in fields if prepare is not None]

        def record(value: Any) -> Any:
            if not isinstance(value, Mapping):
                raise EncodeError(where + misfit_text(value, "a dict"))
            if not names.issuperset(value):
                unknown = ", ".join(repr(name) for name in value if name not in names)
                raise EncodeError(f"{where}there is no field {unknown}: it has {', '.join(sorted(names)) or 'none'}")
            changed = {name: prepare(value[name]) for name, prepare in nested if value.get(name) is not None}
            return {**value, **changed}

        return record
    if pa.types.is_map(kind):
        of_items = preparing(kind.item_type, path + "{}")

        def entries(value: Any) -> Any:
            if not isinstance(value, Mapping):
                raise EncodeError(where + misfit_text(value, "a dict"))
            if of_items is None:
                return list(value.items())
            return [(key, element if element is None else of_items(element)) for key, element in value.items()]

        return entries
    if pa.types.is_list(kind):
        of_value = preparing(kind.value_type, f"{path}[]")

        def items(value: Any) -> Any:
            if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Collection):
                raise EncodeError(where + misfit_text(value, "a list"))
            return [element if element is None or of_value is None else of_value(element) for element in value]

        return items
    leaf = _leaf_of(kind)
    if leaf is None:
        return None
    fits, wanted = leaf

    def checked(value: Any) -> Any:
        if not fits(value):
            raise EncodeError(where + misfit_text(value, wanted))
        return value

    return checked


def _leaf_of(kind: pa.DataType) -> tuple[Callable[[Any], bool], str] | None:
    """Which values are of a type, and their name; None if `pyarrow` is as strict."""
    types = pa.types
    if types.is_integer(kind):
        return is_integer, "an int"
    if types.is_float32(kind):
        return _is_float32, "a float of 32 bits"
    if types.is_floating(kind):
        return _is_float, "a float"
    if types.is_string(kind):
        return lambda value: isinstance(value, str), "a str"
    if types.is_binary(kind):
        return lambda value: isinstance(value, bytes | bytearray | memoryview), "bytes"
    if types.is_date(kind):
        return lambda value: isinstance(value, date) and not isinstance(value, datetime), "a date"
    if types.is_timestamp(kind):
        is_local = kind.tz is None
        wanted = f"a datetime {'without' if is_local else 'with'} a time zone"
        return lambda value: isinstance(value, datetime) and (value.utcoffset() is None) is is_local, wanted
    if types.is_duration(kind):
        return lambda value: isinstance(value, timedelta), "a timedelta"
    return None


def _is_float(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_float32(value: Any) -> bool:
    if not _is_float(value):
        return False
    try:
        struct.pack("<f", value)
    except (OverflowError, struct.error):
        return False
    return True


def below(path: str, name: str) -> str:
    """The path of a field."""
    return f"{path}.{name}" if path else name
