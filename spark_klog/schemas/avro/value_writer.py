"""A single Python value → an Avro record, without Arrow, whose columns of one row cost ten times as much.

| schema | value, beside None where the schema has null |
| --- | --- |
| boolean; string, enum; bytes, fixed, duration | bool; str; bytes, bytearray, memoryview |
| int, long, time-millis, time-micros | int |
| float, double | float; an int that the type has exactly |
| decimal | Decimal or int, whose digits the schema has |
| date | date, or days since 1970 as an int |
| timestamp-millis, -micros, -nanos | datetime with a time zone, or an int in that unit since 1970 |
| local-timestamp-millis, -micros, -nanos | datetime without one, or an int |
| uuid | str or UUID |
| record, map; array | dict (any mapping); list (any collection) |
| union of null and one type, of int and long, of float and double | as of the type |
| any other union | a dict of the one member that is not null: member0, member1, ..., one for each branch but null |

Numbers may be NumPy's. Nothing is rounded but floats to 32 bits, and times to their unit. A field that a record leaves
out, wherever the record is, has its default, or is null.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, Final, NoReturn
from uuid import UUID

from spark_klog.errors import EncodeError, SchemaError
from spark_klog.schemas.avro.opcodes import TEXTS, Reason
from spark_klog.schemas.avro.resolution import encoded_default
from spark_klog.schemas.avro.schema import NO_DEFAULT, AvroField, AvroSchema
from spark_klog.schemas.value_types import is_integer, misfit_text
from spark_klog.wire.primitives import append_varlong

_Write = Callable[[bytearray, Any], None]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)
_INT64: Final = 1 << 63


class _Misfit(Exception):
    """A value that is not of its schema, and where it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path = ""

    def below(self, part: str) -> _Misfit:
        """The error, from within a field, or from [] or {}."""
        self.path = part if not self.path else part + (self.path if self.path[0] in "[{" else f".{self.path}")
        return self


def value_writer(schema: AvroSchema, prefix: bytes) -> Callable[[Any], bytes]:
    """What writes values of a schema after `prefix`. `EncodeError` names the field that does not fit."""
    write = _raw if prefix and schema.is_plain_bytes else _writer(schema)

    def written(value: Any) -> bytes:
        out = bytearray(prefix)
        try:
            write(out, value)
        except _Misfit as error:
            raise EncodeError(f"{error.path and f'field {error.path}: '}{error}") from None
        except (TypeError, ValueError, OverflowError) as error:  # of a value's own methods
            raise EncodeError(f"{type(error).__name__}: {error}") from error
        return bytes(out)

    return written


def _refuse(value: Any, wanted: str) -> NoReturn:
    if value is None:
        raise _Misfit(TEXTS[Reason.IS_NULL])
    raise _Misfit(misfit_text(value, wanted))


def _writer(schema: AvroSchema) -> _Write:
    logical = schema.logical or ""
    if logical == "decimal":
        return _decimal(schema)
    if logical == "date":
        return _date
    if "timestamp-" in logical:
        return _timestamp(logical)
    if logical == "uuid" and schema.kind == "string":
        return _uuid
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
    return _PRIMITIVES[schema.kind]


def _long_bytes(value: int) -> bytes:
    out = bytearray()
    append_varlong(out, value)
    return bytes(out)


def _integer(bits: int) -> _Write:
    low, high = -1 << bits - 1, (1 << bits - 1) - 1

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not int:
            if not is_integer(value):
                _refuse(value, "an int")
            value = int(value)
        if not low <= value <= high:
            raise _Misfit(f"an int of more than {bits} bits")
        append_varlong(out, value)

    return write


_INT, _LONG = _integer(32), _integer(64)


def _null(out: bytearray, value: Any) -> None:
    if value is not None:
        _refuse(value, "None")


def _boolean(out: bytearray, value: Any) -> None:
    if type(value) is not bool and type(value).__name__ not in ("bool", "bool_"):  # NumPy's, by its versions
        _refuse(value, "a bool")
    out.append(bool(value))


def _floating(code: str, bits: int) -> _Write:
    form = struct.Struct(code)

    def write(out: bytearray, value: Any) -> None:
        if type(value) is float:
            number = value
        elif isinstance(value, bool) or not isinstance(value, Real):
            _refuse(value, "a float")
        else:
            number = _converted(value)
        try:
            data = form.pack(number)
        except OverflowError:
            data = b""
        if not data or (isinstance(value, Integral) and form.unpack(data)[0] != value):
            raise _Misfit(f"{str(value)[:50]} is not among the floats of {bits} bits")
        out += data

    return write


def _converted(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return 0.0  # which is not the value


def _string(out: bytearray, value: Any) -> None:
    if type(value) is not str and not isinstance(value, str):
        _refuse(value, "a str")
    try:
        data = value.encode()
    except UnicodeEncodeError as error:
        raise _Misfit(f"is no Unicode text: {error.reason}") from None
    append_varlong(out, len(data))
    out += data


def _uuid(out: bytearray, value: Any) -> None:
    _string(out, str(value) if isinstance(value, UUID) else value)


def _as_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        _refuse(value, "bytes")
    return bytes(value)


def _raw(out: bytearray, value: Any) -> None:
    """Bytes of the schema "bytes" behind an id have no length before them."""
    out += _as_bytes(value)


def _bytes(out: bytearray, value: Any) -> None:
    data = _as_bytes(value)
    append_varlong(out, len(data))
    out += data


_PRIMITIVES: Final[dict[str, _Write]] = {
    "null": _null,
    "boolean": _boolean,
    "int": _INT,
    "long": _LONG,
    "float": _floating("<f", 32),
    "double": _floating("<d", 64),
    "string": _string,
    "bytes": _bytes,
}


def _fixed(size: int) -> _Write:
    def write(out: bytearray, value: Any) -> None:
        data = _as_bytes(value)
        if len(data) != size:
            raise _Misfit(f"{TEXTS[Reason.WRONG_SIZE]}: {len(data)} bytes, not {size}")
        out += data

    return write


def _enum(schema: AvroSchema) -> _Write:
    numbers = {symbol: _long_bytes(number) for number, symbol in enumerate(schema.symbols)}

    def write(out: bytearray, value: Any) -> None:
        if not isinstance(value, str):
            _refuse(value, "a str, a symbol of the enum")
        if value not in numbers:
            raise _Misfit(f"{TEXTS[Reason.NOT_A_SYMBOL]}: {value[:50]!r}")
        out += numbers[value]

    return write


def _date(out: bytearray, value: Any) -> None:
    if isinstance(value, date) and not isinstance(value, datetime):
        append_varlong(out, value.toordinal() - _EPOCH_DAY)
    elif isinstance(value, datetime) or not is_integer(value):
        _refuse(value, "a date")
    else:
        _INT(out, value)


def _timestamp(logical: str) -> _Write:
    is_local = logical.startswith("local-")
    wanted = f"a datetime {'without' if is_local else 'with'} a time zone"
    factor, divisor = {"millis": (1, 1000), "micros": (1, 1), "nanos": (1000, 1)}[logical.rpartition("-")[2]]

    def write(out: bytearray, value: Any) -> None:
        if not isinstance(value, datetime):
            if not is_integer(value):
                _refuse(value, wanted)
            _LONG(out, value)
            return
        if (value.utcoffset() is None) is not is_local:
            _refuse(value, wanted)
        count = ((value.replace(tzinfo=timezone.utc) if is_local else value) - _EPOCH) // _MICROSECOND
        count = count * factor // divisor
        if not -_INT64 <= count < _INT64:
            raise _Misfit(TEXTS[Reason.TIME_TOO_LARGE])
        append_varlong(out, count)

    return write


def _decimal(schema: AvroSchema) -> _Write:
    scale, precision, size = schema.scale, schema.precision, schema.size

    def write(out: bytearray, value: Any) -> None:
        if not isinstance(value, Decimal):
            if not is_integer(value):
                _refuse(value, "a Decimal")
            value = Decimal(int(value))
        if not value.is_finite():
            _refuse(value, "a finite Decimal")
        number = _unscaled(value, scale, precision)
        length = size or (number + (number < 0)).bit_length() // 8 + 1
        try:
            data = number.to_bytes(length, "big", signed=True)
        except OverflowError:
            raise _Misfit(f"a decimal that does not fit into {size} bytes") from None
        if not size:
            append_varlong(out, length)
        out += data

    return write


def _unscaled(value: Decimal, scale: int, precision: int) -> int:
    """A decimal times 10^scale. Its digits are counted first: they may be millions."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    if not any(digits):
        return 0
    excess = -scale - exponent
    if excess > 0:
        if any(digits[-excess:]):
            raise _Misfit(f"a decimal of more than {scale} digits after the point")
        digits, exponent = digits[:-excess], -scale
    if len(digits) + exponent + scale > precision:
        raise _Misfit(f"a decimal of more than {precision} digits, of which {scale} are after the point")
    number: int = int("".join(map(str, digits))) * 10 ** (scale + exponent)
    return -number if sign else number


def _array(schema: AvroSchema) -> _Write:
    assert schema.items is not None
    item = _writer(schema.items)

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not list:
            is_text = isinstance(value, str | bytes | bytearray | memoryview)
            if is_text or isinstance(value, Mapping) or not isinstance(value, Collection):
                _refuse(value, "a list")
            value = list(value)
        if value:
            append_varlong(out, len(value))
            try:
                for one in value:
                    item(out, one)
            except _Misfit as error:
                raise error.below("[]") from None
        out.append(0)

    return write


def _map(schema: AvroSchema) -> _Write:
    assert schema.items is not None
    item = _writer(schema.items)

    def write(out: bytearray, value: Any) -> None:
        if not isinstance(value, Mapping):
            _refuse(value, "a dict")
        if value:
            append_varlong(out, len(value))
            try:
                for key, one in value.items():
                    _string(out, key)
                    item(out, one)
            except _Misfit as error:
                raise error.below("{}") from None
        out.append(0)

    return write


def _union(schema: AvroSchema) -> _Write:
    branches = {number: branch for number, branch in enumerate(schema.branches) if branch.kind != "null"}
    null = next((_long_bytes(number) for number in range(len(schema.branches)) if number not in branches), None)
    kinds = {branch.kind for branch in branches.values()}
    if len(branches) > 1 and kinds in ({"int", "long"}, {"float", "double"}):
        branches = {number: branch for number, branch in branches.items() if branch.kind in ("long", "double")}
        writers = [(_long_bytes(number), _PRIMITIVES[branch.kind]) for number, branch in branches.items()]
    else:
        writers = [(_long_bytes(number), _writer(branch)) for number, branch in branches.items()]
    if len(writers) > 1:
        return _members(null, {f"member{number}": writer for number, writer in enumerate(writers)})
    some, other = writers[0] if writers else (b"", _null)

    def write(out: bytearray, value: Any) -> None:
        if value is None and null is not None:
            out += null
        else:
            out += some
            other(out, value)

    return write


def _members(null: bytes | None, writers: dict[str, tuple[bytes, _Write]]) -> _Write:
    wanted = f"a dict of one of {', '.join(writers)}"

    def write(out: bytearray, value: Any) -> None:
        if value is None and null is not None:
            out += null
            return
        if not isinstance(value, Mapping):
            _refuse(value, wanted)
        _check_names(value, writers)
        present = [name for name, one in value.items() if one is not None]
        if len(present) > 1:
            raise _Misfit(TEXTS[Reason.SEVERAL_MEMBERS])
        if present:
            number, member = writers[present[0]]
            out += number
            try:
                member(out, value[present[0]])
            except _Misfit as error:
                raise error.below(present[0]) from None
        elif null is None:
            raise _Misfit(TEXTS[Reason.IS_NULL])
        else:
            out += null

    return write


def _check_names(value: Mapping[Any, Any], names: Collection[str]) -> None:
    unknown = [name for name in value if name not in names]
    if unknown:
        told = ", ".join(map(repr, unknown))
        raise _Misfit(f"there is no field {told}: it has {', '.join(sorted(names)) or 'none'}")


def _default(field: AvroField) -> bytes | str:
    """What is written for a field that is left out, or why there is nothing."""
    if field.default is NO_DEFAULT:
        if field.schema.kind != "null" and all(branch.kind != "null" for branch in field.schema.branches):
            return "is missing, and the schema has no default for it"
        field = AvroField(field.name, field.schema, None)
    try:
        return encoded_default(field, field.name)
    except SchemaError as error:
        return str(error).removeprefix(f"field {field.name}: ")


def _record(schema: AvroSchema) -> _Write:
    steps = [(field.name, _writer(field.schema), _default(field)) for field in schema.fields]
    names = frozenset(name for name, *_ in steps)

    def write(out: bytearray, value: Any) -> None:
        if type(value) is not dict and not isinstance(value, Mapping):
            _refuse(value, "a dict")
        if not value.keys() <= names:
            _check_names(value, names)
        for name, write_field, default in steps:
            try:
                if name in value:
                    write_field(out, value[name])
                elif isinstance(default, bytes):
                    out += default
                else:
                    raise _Misfit(default)
            except _Misfit as error:
                raise error.below(name) from None

    return write
