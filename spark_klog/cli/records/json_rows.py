"""JSON → values for Arrow columns of a type that is known: the other way round of `json_texts`.

Each value is checked, so that an error names the field. Fields of a record may be left out where the schema has a
default: what a value has of its column's type is its shape, a type of its own.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa

from spark_klog.columns.json_texts import DURATION_DIGITS
from spark_klog.errors import ConfigError

#: Larger numbers round to infinity in 32 bits.
_MOST_FLOAT32 = float.fromhex("0x1.fffffefffffffp127")
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\s*(Z|[+-]\d\d:?\d\d)?")
_SECONDS = re.compile(r"(-?\d{1,19}(?:\.\d{1,9})?(?:E-\d)?)s")
_TIME_OF_DAY = re.compile(r"(\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?")
_MEMBER = re.compile(r"member\d+")
#: Shapes whose readers are kept.
_MOST_SHAPES = 1_000
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
            raise _wrong_at(path, value, "an object")
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
            raise _wrong_at(path, value, "a list")
        return pa.list_(kind.value_field.with_type(_shape_of_all(value, kind.value_type, f"{path}[]")))
    if pa.types.is_map(kind):
        if not isinstance(value, dict):
            raise _wrong_at(path, value, "an object")
        items = _shape_of_all(list(value.values()), kind.item_type, f"{path}{{}}")
        return pa.map_(kind.key_field, kind.item_field.with_type(items))
    return kind


def _shape_of_all(values: list[Any], kind: pa.DataType, path: str) -> pa.DataType:
    """The shape of several values; a field that only some of them have is null in the others."""
    if not (pa.types.is_nested(kind) and values):
        return kind
    shapes = {shape_of(value, kind, path) for value in values if value is not None}
    return shapes.pop() if len(shapes) == 1 else kind


Reader = Callable[[Any], Any]
"""Makes of a JSON value, in which numbers with a point are `Decimal`, what `pyarrow.array` takes; else `_Misfit`."""


class _Misfit(Exception):
    """A value that does not fit; who reads what is around it puts the names of fields before."""

    def __init__(self, text: str) -> None:
        self.text, self.path = text, ""


class RowReader:
    """Makes rows of JSON values, for a column of a type."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._key_of = _key_of(kind) or (lambda value: None)
        #: Shapes and their readers, by what values have.
        self._shapes: dict[Any, tuple[pa.DataType, Reader]] = {}

    def read(self, value: Any) -> tuple[Any, pa.DataType]:
        """What `pyarrow.array` takes for a value, and its shape. `ConfigError` names the field that does not fit."""
        key = self._key_of(value)
        known = self._shapes.get(key)
        if known is None:
            shape = shape_of(value, self._kind)
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            known = self._shapes[key] = shape, _reader_of(shape)
        shape, read = known
        try:
            return read(value), shape
        except _Misfit as error:
            raise ConfigError(f"{_at(error.path)}{error.text}") from None


def _key_of(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What tells the shapes of values apart; None if they have one only."""
    if pa.types.is_struct(kind):
        nested = [(field.name, key_of) for field in kind if (key_of := _key_of(field.type)) is not None]

        def key_of_object(value: Any) -> Any:
            if not isinstance(value, dict):
                return value is None
            names = tuple(value)
            return (names, *(key_of(value.get(name)) for name, key_of in nested)) if nested else names

        return key_of_object
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        key_of_item = _key_of(kind.value_type if pa.types.is_list(kind) else kind.item_type)
        wanted = list if pa.types.is_list(kind) else dict

        def key_of_items(value: Any) -> Any:
            if not isinstance(value, wanted):
                return value is None
            items = value.values() if isinstance(value, dict) else value
            return True if key_of_item is None else frozenset(map(key_of_item, items))

        return key_of_items
    return None


def _reader_of(kind: pa.DataType, nullable: bool = True, advice: str = "") -> Reader:
    """A reader of a shape's values; `advice` is what else to say of a null."""
    read = _reader_of_values(kind)

    def read_or_null(value: Any) -> Any:
        if value is not None:
            return read(value)
        if nullable:
            return None
        raise _Misfit(f"must not be null{advice}")

    return read_or_null


def _reader_of_values(kind: pa.DataType) -> Reader:
    types = pa.types
    if types.is_struct(kind):
        return _object_reader(kind)
    if types.is_list(kind):
        return _list_reader(_reader_of(kind.value_type, kind.value_field.nullable))
    if types.is_map(kind):
        return _map_reader(_key_reader(kind.key_type), _reader_of(kind.item_type, kind.item_field.nullable))
    for holds, make in _LEAVES:
        if holds(kind):
            return make(kind)
    raise ConfigError(f"JSON has no form for {kind}")


def _object_reader(kind: pa.StructType) -> Reader:
    # without a default the schema refuses a shape that lacks the field
    advice = "; if the schema has a default, leave it out, of all records of a list"
    readers = [(field.name, _reader_of(field.type, field.nullable, advice)) for field in kind]

    def read(value: Any) -> Any:
        row = {}
        for name, of_field in readers:
            try:
                row[name] = of_field(value.get(name))
            except _Misfit as error:
                raise _within(name, error) from None
        return row

    return read


def _list_reader(of_item: Reader) -> Reader:
    def read(value: Any) -> Any:
        rows: list[Any] = []
        try:
            for one in value:
                rows.append(of_item(one))
        except _Misfit as error:
            raise _within(f"[{len(rows)}]", error) from None
        return rows

    return read


def _map_reader(of_name: Reader, of_item: Reader) -> Reader:
    def read(value: Any) -> Any:
        entries = []
        for name, one in value.items():
            try:
                entries.append((of_name(name), of_item(one)))
            except _Misfit as error:
                raise _within(f"{{{name}}}", error) from None
        return entries

    return read


def _within(name: str, error: _Misfit) -> _Misfit:
    dot = "." if error.path and error.path[0] not in "[{" else ""
    error.path = f"{name}{dot}{error.path}"
    return error


def _at(path: str) -> str:
    return f"field {path}: " if path else ""


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _wrong_at(path: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{_at(path)}{_wrong(value, wanted).text}")


def _wrong(value: Any, wanted: str) -> _Misfit:
    text = str(value) if isinstance(value, Decimal) else repr(value)
    return _Misfit(f"{text if len(text) <= 60 else text[:60] + '...'} must be {wanted}")


def _key_reader(kind: pa.DataType) -> Reader:
    """Of a map's key, which is text in JSON."""
    read = _reader_of_values(kind)

    def read_key(name: Any) -> Any:
        if pa.types.is_integer(kind) and re.fullmatch(r"-?\d{1,20}", name):
            return read(int(name))
        if pa.types.is_boolean(kind) and name in ("true", "false"):
            return name == "true"
        return read(name)

    return read_key


def _null(kind: pa.DataType) -> Reader:
    def read(value: Any) -> Any:
        raise _wrong(value, "null")

    return read


def _boolean(kind: pa.DataType) -> Reader:
    def read(value: Any) -> Any:
        if isinstance(value, bool):
            return value
        raise _wrong(value, "true or false")

    return read


def _text(kind: pa.DataType) -> Reader:
    def read(value: Any) -> Any:
        if isinstance(value, str):
            return value
        raise _wrong(value, "text")

    return read


def _integer(kind: pa.DataType) -> Reader:
    bits, is_signed = kind.bit_width, pa.types.is_signed_integer(kind)
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)

    def read(value: Any) -> Any:
        if isinstance(value, Decimal) and value == value.to_integral_value():
            value = int(value)
        if type(value) is int and least <= value <= most:
            return value
        raise _wrong(value, f"a whole number from {least} to {most}")

    return read


def _float(kind: pa.DataType) -> Reader:
    most = _MOST_FLOAT32 if pa.types.is_float32(kind) else sys.float_info.max

    def read(value: Any) -> Any:
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise _wrong(value, 'a number, "NaN", "Infinity" or "-Infinity"')
        try:
            number = float(value)
        except OverflowError:  # of a whole number
            number = math.inf
        if abs(number) > most:
            raise _wrong(value, f"a number that {kind} holds")
        return number

    return read


def _decimal(kind: pa.DataType) -> Reader:
    wanted = f"a number of at most {kind.precision} digits, {kind.scale} of them after the point"

    def read(value: Any) -> Any:
        try:
            number = Decimal(value) if isinstance(value, str | int | Decimal) and not isinstance(value, bool) else None
        except ArithmeticError:
            number = None
        if number is None or not number.is_finite():
            raise _wrong(value, wanted)
        _, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)  # it is finite
        spare = max(0, -kind.scale - exponent)  # digits too many after the point
        if any(digits[len(digits) - spare :]) or (number.adjusted() >= kind.precision - kind.scale and any(digits)):
            raise _wrong(value, wanted)
        return number

    return read


def _bytes(kind: pa.DataType) -> Reader:
    wanted = 'text, or {"base64": "..."}'

    def read(value: Any) -> Any:
        if isinstance(value, str):
            try:
                return value.encode()
            except UnicodeEncodeError:  # half of a surrogate pair
                raise _wrong(value, wanted) from None
        if not isinstance(value, dict) or list(value) != ["base64"]:
            raise _wrong(value, wanted)
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise _wrong(value["base64"], "base64") from None

    return read


def _date(kind: pa.DataType) -> Reader:
    def read(value: Any) -> Any:
        try:
            return date.fromisoformat(value)
        except (TypeError, ValueError):
            raise _wrong(value, 'a date such as "2026-11-21"') from None

    return read


def _timestamp(kind: pa.TimestampType) -> Reader:
    """With a time zone UTC is meant if the text names none; without one it must name none."""
    is_local = kind.tz is None
    wanted = 'a time such as "2026-11-21T10:00:00.123456' + ('"' if is_local else 'Z"')

    def read(value: Any) -> Any:
        parts = _TIME.fullmatch(value) if isinstance(value, str) else None
        if parts is None or (is_local and parts[4]):
            raise _wrong(value, wanted)
        fraction = (parts[3] or "0").ljust(_DIGITS, "0")
        if fraction[_DIGITS:].strip("0"):
            raise _wrong(value, f"{wanted}, in microseconds at most")
        try:
            moment = datetime.fromisoformat(f"{parts[1]}T{parts[2]}.{fraction[:_DIGITS]}")
            if is_local:
                return moment
            zone = parts[4] or "Z"
            offset = timedelta()
            if zone != "Z":
                offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:])) * (-1 if zone[0] == "-" else 1)
            return (moment - offset).replace(tzinfo=timezone.utc)
        except (ValueError, OverflowError):
            raise _wrong(value, wanted) from None

    return read


def _duration(kind: pa.DurationType) -> Reader:
    def read(value: Any) -> Any:
        parts = _SECONDS.fullmatch(value) if isinstance(value, str) else None
        units = Decimal(parts[1]).scaleb(DURATION_DIGITS[kind.unit]) if parts else None
        if units is None or units != units.to_integral_value() or abs(units) >= 1 << 63:
            raise _wrong(value, f'a duration such as "1.5s", in {kind.unit} at most')
        return int(units)

    return read


def _time(kind: pa.DataType) -> Reader:
    def read(value: Any) -> Any:
        parts = _TIME_OF_DAY.fullmatch(value) if isinstance(value, str) else None
        try:
            if parts is not None:
                return time.fromisoformat(f"{parts[1]}.{(parts[2] or '0').ljust(_DIGITS, '0')}")
        except ValueError:
            pass
        raise _wrong(value, 'a time such as "10:00:00.123456"')

    return read


_LEAVES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], Reader]], ...] = (
    (pa.types.is_null, _null),
    (pa.types.is_boolean, _boolean),
    (pa.types.is_integer, _integer),
    (pa.types.is_floating, _float),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_string, _text),
    (pa.types.is_binary, _bytes),
    (pa.types.is_fixed_size_binary, _bytes),
    (pa.types.is_date32, _date),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_time, _time),
    (pa.types.is_duration, _duration),
)
