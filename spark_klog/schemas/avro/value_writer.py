"""A single Python value → an Avro record, without Arrow, whose columns of one row cost ten times as much.

It writes what the encoder of columns writes of a value, byte for byte, but only of values of exactly the types that
`poll` returns: for anything else it says so, and the caller takes the encoder, which converts, or knows the error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final

from spark_klog.errors import SchemaError
from spark_klog.schemas.avro.resolution import encoded_default
from spark_klog.schemas.avro.schema import NO_DEFAULT, AvroField, AvroSchema
from spark_klog.wire.primitives import append_varlong

_Write = Callable[[bytearray, Any], None]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)


class _Unusual(Exception):
    """A value that the encoder of columns may take, or not."""


def value_writer(schema: AvroSchema, prefix: bytes) -> Callable[[Any], bytes | None] | None:
    """What writes values of a schema after `prefix`, and returns None for one that is not for it.

    None for a schema with a union of several types, whose values the columns have in their own way.
    """
    write = _raw if prefix and schema.is_plain_bytes else _writer(schema)
    if write is None:
        return None

    def written(value: Any) -> bytes | None:
        out = bytearray(prefix)
        try:
            write(out, value)
        except (_Unusual, UnicodeEncodeError, OverflowError):
            return None
        return bytes(out)

    return written


def _writer(schema: AvroSchema) -> _Write | None:
    if schema.logical == "decimal":
        return _decimal(schema)
    if schema.logical == "date":
        return _date
    if schema.logical is not None and "timestamp-" in schema.logical and not schema.logical.endswith("nanos"):
        return _timestamp(schema.logical)
    if schema.kind == "record":
        return _record(schema)
    if schema.kind == "union":
        return _union(schema)
    if schema.kind == "array":
        return _array(schema)
    if schema.kind == "map":
        return _map(schema)
    if schema.kind == "enum":
        return _enum(schema)
    if schema.kind == "fixed":
        return _fixed(schema.size)
    return _PRIMITIVES.get(schema.kind)


def _long_bytes(value: int) -> bytes:
    out = bytearray()
    append_varlong(out, value)
    return bytes(out)


def _integer(bits: int) -> _Write:
    low, high = -1 << bits - 1, (1 << bits - 1) - 1

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _Unusual
        append_varlong(out, value)

    return write


def _boolean(out: bytearray, value: Any) -> None:
    if type(value) is not bool:
        raise _Unusual
    out.append(value)


def _floating(code: str) -> _Write:
    pack = struct.Struct(code).pack

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not float:
            raise _Unusual
        out += pack(value)

    return write


def _string(out: bytearray, value: Any) -> None:
    if type(value) is not str:
        raise _Unusual
    data = value.encode()
    append_varlong(out, len(data))
    out += data


def _raw(out: bytearray, value: Any) -> None:
    """Bytes of the schema "bytes" behind an id have no length before them."""
    if type(value) is not bytes:
        raise _Unusual
    out += value


def _bytes(out: bytearray, value: Any) -> None:
    if type(value) is not bytes:
        raise _Unusual
    append_varlong(out, len(value))
    out += value


_PRIMITIVES: Final[dict[str, _Write]] = {
    "boolean": _boolean,
    "int": _integer(32),
    "long": _integer(64),
    "float": _floating("<f"),
    "double": _floating("<d"),
    "string": _string,
    "bytes": _bytes,
}


def _fixed(size: int) -> _Write:
    def write(out: bytearray, value: Any) -> None:
        if type(value) is not bytes or len(value) != size:
            raise _Unusual
        out += value

    return write


def _enum(schema: AvroSchema) -> _Write:
    numbers = {symbol: _long_bytes(number) for number, symbol in enumerate(schema.symbols)}

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not str or value not in numbers:
            raise _Unusual
        out += numbers[value]

    return write


def _date(out: bytearray, value: Any) -> None:
    if type(value) is not date:
        raise _Unusual
    append_varlong(out, value.toordinal() - _EPOCH_DAY)


def _timestamp(logical: str) -> _Write:
    is_local, is_coarse = logical.startswith("local-"), logical.endswith("millis")

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not datetime or (value.tzinfo is None) is not is_local:
            raise _Unusual
        count = ((value.replace(tzinfo=timezone.utc) if is_local else value) - _EPOCH) // _MICROSECOND
        if is_coarse:
            count, rest = divmod(count, 1000)
            if rest:
                raise _Unusual
        append_varlong(out, count)

    return write


def _decimal(schema: AvroSchema) -> _Write:
    scale, most, size = schema.scale, 10**schema.precision, schema.size

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not Decimal or not value.is_finite():
            raise _Unusual
        sign, digits, exponent = value.as_tuple()
        assert isinstance(exponent, int)
        if not -scale <= exponent <= schema.precision:
            raise _Unusual
        number = int("".join(map(str, digits))) * 10 ** (scale + exponent)
        if number >= most:
            raise _Unusual
        number = -number if sign else number
        length = size or (number + (number < 0)).bit_length() // 8 + 1
        data = number.to_bytes(length, "big", signed=True)
        if not size:
            append_varlong(out, length)
        out += data

    return write


def _array(schema: AvroSchema) -> _Write | None:
    assert schema.items is not None
    item = _writer(schema.items)
    if item is None:
        return None

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not list:
            raise _Unusual
        if value:
            append_varlong(out, len(value))
            for one in value:
                item(out, one)
        out.append(0)

    return write


def _map(schema: AvroSchema) -> _Write | None:
    assert schema.items is not None
    item = _writer(schema.items)
    if item is None:
        return None

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not dict:
            raise _Unusual
        if value:
            append_varlong(out, len(value))
            for key, one in value.items():
                _string(out, key)
                item(out, one)
        out.append(0)

    return write


def _union(schema: AvroSchema) -> _Write | None:
    others = [(number, branch) for number, branch in enumerate(schema.branches) if branch.kind != "null"]
    if len(others) != 1 or len(schema.branches) != 2:
        return None
    number, branch = others[0]
    other = _writer(branch)
    if other is None:
        return None
    null, some = _long_bytes(1 - number), _long_bytes(number)

    def write(out: bytearray, value: Any) -> None:
        if value is None:
            out += null
        else:
            out += some
            other(out, value)

    return write


def _default(field: AvroField) -> bytes | None:
    if field.default is NO_DEFAULT:
        return None
    try:
        return encoded_default(field, field.name)
    except SchemaError:  # of a schema that is wrong there, which who leaves the field out is told by the encoder
        return None


def _record(schema: AvroSchema) -> _Write | None:
    steps: list[tuple[str, _Write, bytes | None]] = []
    for field in schema.fields:
        write_field = _writer(field.schema)
        if write_field is None:
            return None
        steps.append((field.name, write_field, _default(field)))
    names = frozenset(name for name, *_ in steps)

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not dict or not value.keys() <= names:
            raise _Unusual
        for name, write_field, default in steps:
            if name in value:
                write_field(out, value[name])
            elif default is not None:
                out += default
            else:
                write_field(out, None)

    return write
