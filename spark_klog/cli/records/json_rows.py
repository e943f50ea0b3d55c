"""JSON → values for Arrow columns of a type that is known: the other way round of `json_texts`.

Each value is checked, so that an error names the field. Fields of a record may be left out where the schema has a
default: what a value has of its column's type is its shape, a type of its own.
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa

from spark_klog.errors import ConfigError

_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\s*(Z|[+-]\d\d:?\d\d)?")
_TIME_OF_DAY = re.compile(r"(\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?")
_MEMBER = re.compile(r"member\d+")
#: Fraction digits of a time in Python.
_DIGITS = 6


def shape_of(value: Any, kind: pa.DataType, path: str = "") -> pa.DataType:
    """The type without the fields of records that the value does not have; `ConfigError` for one that it has too many.

    Items of a list and values of a map share one shape. Of a union's members none may be left out.
    """
    if value is None:
        return kind
    if pa.types.is_struct(kind):
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object")
        fields = {field.name: field for field in kind}
        if unknown := [name for name in value if name not in fields]:
            raise ConfigError(f"{_at(path)}the schema has no field {', '.join(unknown)}")
        is_union = all(_MEMBER.fullmatch(name) for name in fields)
        return pa.struct(
            [
                field.with_type(shape_of(value.get(name), field.type, _below(path, name)))
                for name, field in fields.items()
                if name in value or is_union
            ]
        )
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise _wrong(path, value, "a list")
        return pa.list_(kind.value_field.with_type(_shape_of_all(value, kind.value_type, f"{path}[]")))
    if pa.types.is_map(kind):
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object")
        items = _shape_of_all(list(value.values()), kind.item_type, f"{path}{{}}")
        return pa.map_(kind.key_field, kind.item_field.with_type(items))
    return kind


def _shape_of_all(values: list[Any], kind: pa.DataType, path: str) -> pa.DataType:
    """The shape of several values; a field that only some of them have is null in the others."""
    if not (pa.types.is_nested(kind) and values):
        return kind
    shapes = {shape_of(value, kind, path) for value in values if value is not None}
    return shapes.pop() if len(shapes) == 1 else kind


def row_of(value: Any, kind: pa.DataType, path: str = "", *, nullable: bool = True) -> Any:
    """What `pyarrow.array` takes for a JSON value whose numbers with a point are `Decimal`.

    `ConfigError` names the field that does not fit the type, and what it has to be.
    """
    types = pa.types
    if value is None:
        if not nullable:
            raise ConfigError(f"{_at(path)}must not be null, and not be left out")
        return None
    if types.is_struct(kind):
        return {
            field.name: row_of(value.get(field.name), field.type, _below(path, field.name), nullable=field.nullable)
            for field in kind
        }
    if types.is_list(kind):
        nullable = kind.value_field.nullable
        return [row_of(one, kind.value_type, f"{path}[{index}]", nullable=nullable) for index, one in enumerate(value)]
    if types.is_map(kind):
        nullable = kind.item_field.nullable
        return [
            (_key(name, kind.key_type, path), row_of(one, kind.item_type, f"{path}{{{name}}}", nullable=nullable))
            for name, one in value.items()
        ]
    if types.is_boolean(kind):
        if isinstance(value, bool):
            return value
        raise _wrong(path, value, "true or false")
    if types.is_integer(kind):
        return _integer(value, kind, path)
    if types.is_floating(kind):
        return _float(value, path)
    if types.is_decimal(kind):
        return _decimal(value, kind, path)
    if types.is_string(kind):
        if isinstance(value, str):
            return value
        raise _wrong(path, value, "text")
    if types.is_binary(kind) or types.is_fixed_size_binary(kind):
        return _bytes(value, path)
    if types.is_date32(kind):
        return _date(value, path)
    if types.is_timestamp(kind):
        return _timestamp(value, kind, path)
    if types.is_time(kind):
        return _time(value, path)
    raise ConfigError(f"{_at(path)}JSON has no form for {kind}")


def _at(path: str) -> str:
    return f"field {path}: " if path else ""


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _wrong(path: str, value: Any, wanted: str) -> ConfigError:
    text = str(value) if isinstance(value, Decimal) else repr(value)
    return ConfigError(f"{_at(path)}{text if len(text) <= 60 else text[:60] + '...'} must be {wanted}")


def _key(name: str, kind: pa.DataType, path: str) -> Any:
    """A map's key, which is text in JSON."""
    if pa.types.is_integer(kind) and re.fullmatch(r"-?\d{1,20}", name):
        return row_of(int(name), kind, path)
    if pa.types.is_boolean(kind) and name in ("true", "false"):
        return name == "true"
    return row_of(name, kind, path)


def _integer(value: Any, kind: pa.DataType, path: str) -> int:
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    bits, is_signed = kind.bit_width, pa.types.is_signed_integer(kind)
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)
    if type(value) is not int or not least <= value <= most:
        raise _wrong(path, value, f"a whole number from {least} to {most}")
    return value


def _float(value: Any, path: str) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _wrong(path, value, 'a number, "NaN", "Infinity" or "-Infinity"')
    try:
        return float(value)
    except OverflowError:
        raise _wrong(path, value, "a number that a double holds") from None


def _decimal(value: Any, kind: pa.DataType, path: str) -> Decimal:
    wanted = f"a number of at most {kind.precision} digits, {kind.scale} of them after the point"
    try:
        number = Decimal(value) if isinstance(value, str | int | Decimal) and not isinstance(value, bool) else None
    except ArithmeticError:
        number = None
    if number is None or not number.is_finite():
        raise _wrong(path, value, wanted)
    units = number.scaleb(kind.scale)
    if units != units.to_integral_value() or abs(units) >= 10**kind.precision:
        raise _wrong(path, value, wanted)
    return number


def _bytes(value: Any, path: str) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise _wrong(path, value, 'text, or {"base64": "..."}') from None
    if isinstance(value, dict) and list(value) == ["base64"]:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise _wrong(path, value["base64"], "base64") from None
    raise _wrong(path, value, 'text, or {"base64": "..."}')


def _date(value: Any, path: str) -> date:
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(path, value, 'a date such as "2026-11-21"') from None


def _timestamp(value: Any, kind: pa.TimestampType, path: str) -> datetime:
    """With a time zone UTC is meant if the text names none; without one it must name none."""
    wanted = 'a time such as "2026-11-21T10:00:00.123456' + ('"' if kind.tz is None else 'Z"')
    parts = _TIME.fullmatch(value) if isinstance(value, str) else None
    if parts is None or (kind.tz is None and parts[4]):
        raise _wrong(path, value, wanted)
    fraction = (parts[3] or "0").ljust(_DIGITS, "0")
    if fraction[_DIGITS:].strip("0"):
        raise _wrong(path, value, f"{wanted}, in microseconds at most")
    try:
        moment = datetime.fromisoformat(f"{parts[1]}T{parts[2]}.{fraction[:_DIGITS]}")
    except ValueError:
        raise _wrong(path, value, wanted) from None
    if kind.tz is None:
        return moment
    zone = parts[4] or "Z"
    offset = timedelta()
    if zone != "Z":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:])) * (-1 if zone[0] == "-" else 1)
    try:
        return (moment - offset).replace(tzinfo=timezone.utc)
    except OverflowError:
        raise _wrong(path, value, wanted) from None


def _time(value: Any, path: str) -> time:
    parts = _TIME_OF_DAY.fullmatch(value) if isinstance(value, str) else None
    try:
        if parts is not None:
            return time.fromisoformat(f"{parts[1]}.{(parts[2] or '0').ljust(_DIGITS, '0')}")
    except ValueError:
        pass
    raise _wrong(path, value, 'a time such as "10:00:00.123456"')
