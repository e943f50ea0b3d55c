"""JSON values as a column has them, one by one, by Python's parser: what counts, and why a row is bad.

Arrow's parser (decoder.py) is faster, and has the same result for all that it reads.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from decimal import Context, Decimal
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, Final

import pyarrow as pa

from spark_klog.schemas.json_schema.columns import UNIT_DIGITS, Column, Form, Property

Convert = Callable[[Any], Any]
#: An object of JSON in values that are parsed here: its pairs, as a property may be there twice. Else it is a dict.
_Pairs = tuple[tuple[str, Any], ...]
#: Longer integers are of no type; Python is slow to read them, and may refuse to.
_LONGEST_INTEGER: Final = 400
_BEYOND_INT64: Final = 1 << 64
#: Forms of which numbers with a point or an exponent are not to be rounded.
_EXACT: Final = ("json", "decimal", "integer", "days", "milliseconds")
_LARGEST_FLOAT32: Final = 3.4028235677973366e38
_NAMES: Final[dict[type, str]] = {
    type(None): "null",
    str: "a string",
    bool: "a boolean",
    list: "an array",
    **dict.fromkeys((int, float, Decimal), "a number"),
}
_DIGITS: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DAY: Final = re.compile(r"(\d{4})-(\d\d)-(\d\d)(Z?)", re.ASCII)
_TIME: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[Tt ](\d\d)(?::(\d\d)(?::(\d\d)(?:\.(\d+))?)?)?([Zz]|[+-]\d\d(?::?\d\d)?)?)?", re.ASCII
)
_TIME_OF_DAY: Final = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d+))?", re.ASCII)
_SECONDS: Final = re.compile(r"(-?\d{1,19}(?:\.\d+)?)s", re.ASCII)
_KEY: Final = re.compile(r"-?(?:0|[1-9]\d{0,19})", re.ASCII)
_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")
_EPOCH: Final = dt.datetime(1970, 1, 1)
_EPOCH_DAY: Final = _EPOCH.toordinal()
#: Years 1 to 9999, as Python, Spark and RFC 3339 have them; milliseconds.
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
FIRST_DAY, LAST_DAY = -719_162, 2_932_896
_MICROSECOND: Final = dt.timedelta(microseconds=1)


class Misfit(ValueError):
    """A value that is not of its schema: `text` says why, `path` where, from the inside to the outside."""

    def __init__(self, text: str, value: Any = None) -> None:
        self.text, self.value = text, value
        self.path: list[str] = []

    def __str__(self) -> str:
        where = "".join(reversed(self.path)).removeprefix(".")
        return f"field {where} {self.text}" if where else f"the value {self.text}"


def _integer(text: str) -> float:
    return int(text) if len(text) <= _LONGEST_INTEGER else math.copysign(math.inf, -1 if text[0] == "-" else 1)


def _signed_integer(text: str) -> float | Decimal:
    """As `_integer`, but -0 keeps its sign: a double has it, as Arrow's parser reads it."""
    return Decimal(text) if text == "-0" else _integer(text)


def _exact(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:  # an exponent of twenty digits
        return Decimal("Infinity")


class NestedTooDeeply(ValueError):
    """JSON that Python's parser has no stack for."""

    def __init__(self) -> None:
        super().__init__("nested too deeply")


def refused(constant: str) -> Any:
    """For parsers that know NaN and Infinity; ValueError."""
    raise ValueError(f"{constant} is not JSON")


#: By whether they read fractions as Decimals, and whether all integers are ones that `int` reads. Objects are `_Pairs`.
_PARSERS: Final = {
    (decimals, is_plain): json.JSONDecoder(
        object_pairs_hook=tuple,
        parse_int=int if is_plain else _signed_integer,
        parse_float=_exact if decimals else float,
    )
    for decimals in (False, True)
    for is_plain in (False, True)
}
_MINUS_ZERO: Final = re.compile(rb"-0(?:[\s,\]}]|$)")
_PLAIN: Final = json.JSONDecoder(parse_int=_integer)
_STRICT: Final = json.JSONDecoder(parse_int=_integer, parse_constant=refused)


def load_json(row: bytes, *, is_strict: bool = False) -> Any:
    """The value of a row; ValueError says why it is no JSON. NaN and Infinity are numbers here, if not `is_strict`."""
    return parsed(row, _STRICT if is_strict else _PLAIN)


def parsed(row: bytes, parser: json.JSONDecoder) -> Any:
    """What a parser makes of a row; ValueError says why it is no JSON."""
    try:
        text = str(row, "utf-8")
        return parser.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        if not text.strip():
            raise ValueError("no JSON: it is empty") from None
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise NestedTooDeeply from None


class RowParser:
    """Parses rows of a column. `type` values are as `pa.array` takes them for the column's type."""

    def __init__(self, column: Column) -> None:
        # 1234567890123456789e0 is an integer that no float is
        self._decimals = any(one.form in _EXACT for one in column.tree())
        self._convert = _nullable(column) if column.nullable else _required(column)

    def parse(self, row: bytes) -> Any:
        """ValueError says why a row is not of the column."""
        is_plain = len(row) <= _LONGEST_INTEGER and _MINUS_ZERO.search(row) is None
        return self._converted(parsed(row, _PARSERS[self._decimals, is_plain]))

    def convert(self, value: Any) -> Any:
        """As `parse`, of a value of `json.loads` for a plan of an Arrow type; its fractions may be Decimals."""
        return self._converted(value)

    def _converted(self, value: Any) -> Any:
        try:
            return self._convert(value)
        except RecursionError:
            raise NestedTooDeeply from None


def is_value(value: Any, column: Column) -> bool:
    """Whether a JSON value, of a schema's `default`, is one of the column."""
    if value is None:
        return column.nullable
    try:
        _required(column)(_pairs(value))
    except (ValueError, RecursionError):
        return False
    return True


def default_of(one: Property) -> Any:
    """The default of a property that has a valid one, as `RowParser` returns values."""
    return _required(one.column)(_pairs(one.default))


def _pairs(value: Any) -> Any:
    """A value of `json.loads` with objects as `RowParser` has them."""
    if isinstance(value, dict):
        return tuple((name, _pairs(item)) for name, item in value.items())
    return [_pairs(item) for item in value] if isinstance(value, list) else value


def _required(column: Column) -> Convert:
    return _CONVERTERS[column.form](column)


def _nullable(column: Column) -> Convert:
    convert = _required(column)
    return lambda value: None if value is None else convert(value)


def _wrong(column: Column, value: Any) -> Misfit:
    name = "another string" if isinstance(value, str) and column.kind == "string" else _NAMES.get(type(value))
    return Misfit(f"must be {column}, not {name or 'an object'}", value)


def _json(column: Column) -> Convert:
    def convert(value: Any) -> str:
        if value is None or (column.kind == "object" and not isinstance(value, tuple)):
            raise _wrong(column, value)
        text = _written(value, encode_basestring)
        try:
            text.encode()
        except UnicodeEncodeError:
            return _written(value, encode_basestring_ascii)
        return text

    return convert


def _written(value: Any, quoted: Callable[[str], str]) -> str:
    """The value as JSON, numbers with the digits that they have; `Misfit` if a property is there twice."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        if len(dict(value)) != len(value):
            raise _twice(min(_repeated(value)))
        return f"{{{','.join(f'{quoted(name)}:{_written(item, quoted)}' for name, item in value)}}}"
    if isinstance(value, list):
        return f"[{','.join(_written(item, quoted) for item in value)}]"
    if isinstance(value, float | Decimal) and not math.isfinite(float(value)):
        raise Misfit("has a number that is too large, NaN or infinite")
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def _repeated(value: _Pairs) -> set[str]:
    """Names of properties that an object has twice."""
    return {name for name, count in Counter(name for name, _ in value).items() if count > 1}


def _twice(name: str) -> Misfit:
    misfit = Misfit("is there twice")
    misfit.path.append(f".{name}")
    return misfit


def _null(column: Column) -> Convert:
    def convert(value: Any) -> None:
        if value is not None:
            raise _wrong(column, value)

    return convert


def _boolean(column: Column) -> Convert:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _wrong(column, value)
        return value

    return convert


def _whole(column: Column) -> Convert:
    least, most = (0, 1 << column.bits) if column.is_unsigned else (-(1 << column.bits - 1), 1 << column.bits - 1)

    def convert(value: Any) -> int:
        if isinstance(value, float | Decimal) and -_BEYOND_INT64 < value < _BEYOND_INT64 and value == int(value):
            value = int(value)  # 1.0 is an integer
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < most:
            raise _wrong(column, value)
        return value

    return convert


def _number(column: Column) -> Convert:
    largest = _LARGEST_FLOAT32 if column.bits == 32 else math.inf

    def convert(value: Any) -> float:
        if isinstance(value, str) and column.dialect.as_shown and value in _NOT_FINITE:
            return float(value)
        if not isinstance(value, int | float | Decimal) or isinstance(value, bool):
            raise _wrong(column, value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not abs(number) < largest:  # NaN is not
            size = "a float" if column.bits == 32 else "a double"
            text = "is NaN, which is not JSON" if math.isnan(number) else f"is a number that {size} can't hold"
            raise Misfit(text, value)
        return number

    return convert


def _decimal(column: Column) -> Convert:
    def convert(value: Any) -> Decimal:
        if isinstance(value, str) and column.dialect.digits_in_strings:
            if not _DIGITS.fullmatch(value):
                raise _wrong(column, value)
            exact = _exact(value)
        elif isinstance(value, str):
            # as Kafka Connect's converter writes it, if it is not set to numbers
            try:
                unscaled = int.from_bytes(base64.b64decode(value, validate=True), "big", signed=True)
            except ValueError:
                raise _wrong(column, value) from None
            text = str(abs(unscaled)) if abs(unscaled) < 10**column.precision else "9" * (column.precision + 1)
            exact = Decimal((unscaled < 0, tuple(map(int, text)), -column.scale))
        elif isinstance(value, int | float | Decimal) and not isinstance(value, bool):
            exact = Decimal(str(value) if isinstance(value, float) else value)
        else:
            raise _wrong(column, value)
        if not exact.is_finite():
            raise _wrong(column, value)
        sign, digits, exponent = exact.as_tuple()
        assert isinstance(exponent, int)
        kept = len(digits)
        while kept and not digits[kept - 1]:
            kept -= 1
        if not kept:
            return Decimal(0)
        digits, exponent = digits[:kept], exponent + len(digits) - kept
        if -exponent > column.scale or kept + exponent > column.precision - column.scale:
            before, after = max(kept + exponent, 0), max(-exponent, 0)
            text = f"must be {column}, not one with {before} digits before the point and {after} after it"
            raise Misfit(text, value)
        return Decimal((sign, digits, exponent))

    return convert


def _string(column: Column) -> Convert:
    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong(column, value)
        return _whole_text(value)

    return convert


def _whole_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Misfit("has half of a surrogate pair, which no text may have", text) from None
    return text


def _binary(column: Column) -> Convert:
    dialect = column.dialect

    def convert(value: Any) -> bytes:
        if dialect.utf8_bytes and isinstance(value, str):
            return _of_size(column, _whole_text(value).encode())
        if dialect.as_shown and isinstance(value, dict | tuple) and list(dict(value)) == ["base64"]:
            value = dict(value)["base64"]
        elif not isinstance(value, str):
            raise _wrong(column, value)
        try:
            data = base64.b64decode(value, validate=True)
        except (TypeError, ValueError):
            raise Misfit("is not base64", value) from None
        return _of_size(column, data)

    return convert


def _of_size(column: Column, data: bytes) -> bytes:
    if pa.types.is_fixed_size_binary(column.type) and len(data) != column.type.byte_width:
        raise Misfit(f"has {len(data)} bytes, not {column.type.byte_width}")
    return data


def _date(column: Column) -> Convert:
    def convert(value: Any) -> int:
        match = _DAY.fullmatch(value) if isinstance(value, str) else None
        if match is None or (match[4] and not column.dialect.utc_dates):
            raise _wrong(column, value)
        try:
            return dt.date(*map(int, match.groups()[:3])).toordinal() - _EPOCH_DAY
        except ValueError as error:
            raise Misfit(f"is no date: {error}", value) from None

    return convert


def _time(column: Column) -> Convert:
    has_zone, digits = column.form == "timestamp", UNIT_DIGITS[column.type.unit]

    def convert(value: Any) -> int:
        match = _TIME.fullmatch(value) if isinstance(value, str) else None
        if match is None or (match[8] and not has_zone):
            raise _wrong(column, value)
        year, month, day, hour, minute, second = (int(match[number] or 0) for number in range(1, 7))
        try:
            time = dt.datetime(year, month, day, hour, minute, second, int((match[7] or "")[:6].ljust(6, "0")))
            if match[8] and match[8] not in "Zz":
                sign, zone = -1 if match[8][0] == "-" else 1, match[8][1:].replace(":", "").ljust(4, "0")
                if int(zone[2:]) > 59 or int(zone[:2]) > 23:
                    raise ValueError("an offset has hours up to 23, minutes up to 59")
                time -= sign * dt.timedelta(hours=int(zone[:2]), minutes=int(zone[2:]))
        except (ValueError, OverflowError) as error:
            raise Misfit(f"is no time: {error}", value) from None
        micros = (time - _EPOCH) // _MICROSECOND
        if digits <= 6:
            return int(micros // 10 ** (6 - digits))
        nanos = micros * 1000 + int((match[7] or "")[6:9].ljust(3, "0"))
        if not -(1 << 63) < nanos < 1 << 63:
            raise Misfit("is a time that nanoseconds can't hold", value)
        return nanos

    return convert


def _time_of_day(column: Column) -> Convert:
    digits = UNIT_DIGITS[column.type.unit]

    def convert(value: Any) -> int:
        match = _TIME_OF_DAY.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise _wrong(column, value)
        hour, minute, second = (int(match[number]) for number in range(1, 4))
        if hour > 23 or minute > 59 or second > 59:
            raise Misfit("is no time of a day", value)
        return int(f"{hour * 3600 + minute * 60 + second}{(match[4] or '')[:digits].ljust(digits, '0')}")

    return convert


def _duration(column: Column) -> Convert:
    digits = UNIT_DIGITS[column.type.unit]

    def convert(value: Any) -> int:
        match = _SECONDS.fullmatch(value) if isinstance(value, str) else None
        # exact, so that what is left of a unit is cut
        units = int(Decimal(match[1]).scaleb(digits, Context(prec=len(match[1])))) if match else 1 << 63
        if abs(units) >= 1 << 63:
            raise _wrong(column, value)
        return units

    return convert


def _count(column: Column) -> Convert:
    whole = _whole(column)
    first, last, factor = (FIRST_DAY, LAST_DAY, 1) if column.form == "days" else (FIRST_MS, LAST_MS, 1000)

    def convert(value: Any) -> int:
        number: int = whole(value)
        if not first <= number <= last:
            raise Misfit("is a time before the year 1 or after 9999")
        return number * factor

    return convert


def _list(column: Column) -> Convert:
    items = column.items
    assert items is not None
    convert_item = _nullable(items) if items.nullable else _required(items)

    def convert(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(column, value)
        made = []
        try:
            for item in value:
                made.append(convert_item(item))
        except Misfit as misfit:
            misfit.path.append(f"[{len(made)}]")
            raise
        return made

    return convert


def _map(column: Column) -> Convert:
    values = column.values
    assert values is not None
    convert_item = _nullable(values) if values.nullable else _required(values)
    convert_name = _whole_text if column.keys is None else _name(column.keys)

    def convert(value: Any) -> list[tuple[str, Any]]:
        value = tuple(value.items()) if isinstance(value, dict) else value
        if not isinstance(value, tuple):
            raise _wrong(column, value)
        if len(dict(value)) != len(value):
            raise _twice(min(_repeated(value)))
        made, name = [], ""
        try:
            for name, item in value:
                made.append((convert_name(name), convert_item(item)))
        except Misfit as misfit:
            misfit.path.append(f".{name}")
            raise
        return made

    return convert


def _name(column: Column) -> Convert:
    """Of a name in a map whose keys are numbers, or true and false."""
    convert = _required(column)

    def convert_name(name: str) -> Any:
        is_literal = column.form == "boolean" and name in ("true", "false")
        is_literal |= column.form == "integer" and _KEY.fullmatch(name) is not None
        return convert(json.loads(name) if is_literal else name)

    return convert_name


def _struct(column: Column) -> Convert:
    names = {one.name for one in column.properties}
    fields = [(one.name, *_of_property(one)) for one in column.properties]

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict | tuple):
            raise _wrong(column, value)
        items = dict(value)
        if isinstance(value, tuple) and len(items) != len(value):
            twice = names & _repeated(value)
            if twice:
                raise _twice(min(twice))
        made, name = {}, ""
        try:
            for name, convert_field, missing in fields:
                item = items.get(name)
                if item is not None:
                    made[name] = convert_field(item)
                elif isinstance(missing, Misfit):
                    advice = column.dialect.null_advice
                    raise Misfit(f"must not be null{advice}" if name in items else f"is required, but missing{advice}")
                else:
                    made[name] = missing
        except Misfit as misfit:
            misfit.path.append(f".{name}")
            raise
        return made

    return convert


def _of_property(one: Property) -> tuple[Convert, Any]:
    """How a property's values are converted, and what stands for null or a missing one; a `Misfit` if nothing does."""
    convert = _required(one.column)
    if one.fills:
        return convert, default_of(one)
    return convert, None if one.nullable else Misfit("")


_CONVERTERS: Final[dict[Form, Callable[[Column], Convert]]] = {
    "json": _json,
    "null": _null,
    "boolean": _boolean,
    "integer": _whole,
    "number": _number,
    "decimal": _decimal,
    "string": _string,
    "binary": _binary,
    "date": _date,
    "timestamp": _time,
    "local-timestamp": _time,
    "days": _count,
    "milliseconds": _count,
    "time": _time_of_day,
    "duration": _duration,
    "list": _list,
    "struct": _struct,
    "map": _map,
}
