"""Values of records in JSON: their schema, and the time that picks a file's folder.

A schema is Spark's DDL: `user_id bigint, at timestamp, tags array<string>, place struct<lat: double>`. It is given
again with each call: a load takes one that has more fields, or room for more.
"""

from __future__ import annotations

import re
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.errors import ConfigError
from spark_klog.tables.changes import debezium_type
from spark_klog.tables.columns import holds
from spark_klog.tables.table import aliases_of

UTC = "UTC"
#: Years 1 to 9999, as Python has them.
FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_DAY_US = 86_400_000_000
_TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
}
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|([A-Za-z0-9_]+)|([<>(),:]))")
_DEEPEST = 32
_MOST_DIGITS = 38
#: What Spark's DDL may have after a field's type, and why a load has no use for it.
_LEFT_OUT = {
    "NOT": "leave NOT NULL out, as a value may lack any field",
    "COMMENT": "leave the comment out, as files do not keep it",
    "DEFAULT": "leave the default out, as a field that is missing is null",
}


def check_zone(name: str) -> None:
    """`ConfigError` if there is no such time zone."""
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ConfigError(
            f"time zone {name!r} does not exist: name one of the tz database, as Europe/Berlin or UTC"
        ) from None


def check_field(kind: pa.DataType, path: str) -> None:
    """`ConfigError` unless a schema has the field, and it is a timestamp, a date or a bigint."""
    found = kind
    for name in path.split("."):
        index = found.get_field_index(name) if pa.types.is_struct(found) else -1
        if index < 0:
            raise ConfigError(
                f"event time {path!r}: the schema has no field {name!r}: name one that it has. If the load's files or "
                "rows go by it, register a version of the schema that has it, too, or load into another table"
            )
        found = found.field(index).type
    if not (pa.types.is_timestamp(found) or pa.types.is_date(found) or pa.types.is_int64(found)):
        raise ConfigError(f"event time {path!r} must be a timestamp, a date, or ms since the epoch as a bigint")


def name_now(kind: pa.DataType, path: str) -> str:
    """The path of the field that is called so in a schema, or was before, by `aliases_of`; `path` if there is none."""
    names: list[str] = []
    for name in path.split("."):
        fields = list(kind) if pa.types.is_struct(kind) else []
        named = [one for one in fields if one.name == name] or [one for one in fields if name in aliases_of(one)]
        if not named:
            return path
        names.append(named[0].name)
        kind = named[0].type
    return ".".join(names)


def field_times(values: pa.Array, path: str, otherwise: NDArray[np.int64], zone: str) -> NDArray[np.int64]:
    """The times of a field in microseconds, as of `local_times`; of records that have none `otherwise`, which are UTC.

    A date, and a timestamp without a time zone, are local times of any zone already.
    """
    column = pc.struct_field(values, path.split("."))
    is_local = pa.types.is_date(column.type) or (pa.types.is_timestamp(column.type) and column.type.tz is None)
    column = _clipped(column, 1000) if pa.types.is_int64(column.type) else microseconds(column)
    found = pc.coalesce(column, pa.array(local_times(otherwise, zone) if is_local else otherwise))
    times = np.asarray(found.to_numpy(zero_copy_only=False), np.int64)
    return dated(times) if is_local else local_times(times, zone)


def microseconds(column: pa.Array) -> pa.Array:
    """Timestamps or dates as microseconds. A date that has none is another one before the year 1 or after 9999."""
    if pa.types.is_date32(column.type):
        return _clipped(column.cast(pa.int32()), _DAY_US)
    return column.cast(pa.timestamp("us")).cast(pa.int64())


def _clipped(numbers: pa.Array, unit: int) -> pa.Array:
    """Numbers of a unit (microseconds) as microseconds; those after the year 9999, and as far before 1970, are one."""
    most = LAST_US // unit + 1
    within = pc.max_element_wise(pc.min_element_wise(numbers, most, skip_nulls=False), -most, skip_nulls=False)
    return pc.multiply(within, unit)


def dated(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """The times (microseconds); those that have no date are the first or last one that has."""
    return np.clip(times, FIRST_US, LAST_US)


def local_times(times: NDArray[np.int64], zone: str) -> NDArray[np.int64]:
    """Convert times (microseconds) to the local times of a zone, as if those were UTC. All of them have a date."""
    if zone == UTC:
        return dated(times)
    clipped = np.clip(times, FIRST_US + _DAY_US, LAST_US - _DAY_US)
    local = pc.local_timestamp(pa.array(clipped).cast(pa.timestamp("us", tz=zone)))
    return np.asarray(local.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)


def read_schema(text: str) -> pa.DataType:
    """Parse a schema, or the file that has it, to a struct type; `ConfigError` for one that can't be parsed."""
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a schema may be longer than a file's name
        is_file = False
    try:
        return parse_schema(path.read_text("utf-8") if is_file else text)
    except ConfigError as error:
        raise ConfigError(f"--schema {f'file {text}' if is_file else 'is neither a file nor DDL'}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--schema {text} can't be read: {error}") from None


def parse_schema(text: str) -> pa.DataType:
    """Parse a schema to a struct type; `ConfigError`."""
    parser = _Parser(text)
    fields = parser.all_fields()
    parser.expect_end()
    return pa.struct(fields)


def schema_text(kind: pa.DataType) -> str:
    """A schema as text that `parse_schema` takes; equal for equal schemas."""
    return ", ".join(f"{_quoted(field.name)} {type_text(field.type)}" for field in kind)


def _quoted(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_]+", name) else "`" + name.replace("`", "``") + "`"


def type_text(kind: pa.DataType) -> str:
    """A type as a schema has it."""
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{_quoted(field.name)}: {type_text(field.type)}' for field in kind)}>"
    if pa.types.is_list(kind):
        return f"array<{type_text(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next(name for name, known in _TYPES.items() if known == kind)


def evolved_schema(before: str, asked: str, *, widens: bool) -> tuple[str, list[str]]:
    """The schema of a load that had `before` and is to have `asked`, both as `schema_text` has them, and in words what
    hinders that: fields that went, and other types.

    The fields of `before` come first, in their order. With `widens` a type may become one that holds all its values.
    """
    old, new = parse_schema(before), parse_schema(asked)
    if is_enveloped := all(_is_envelope(kind) for kind in (old, new)):
        old, new = (kind.field("after").type for kind in (old, new))
    hindrances: list[str] = []
    kind = _grown(old, new, "", widens, hindrances)
    return schema_text(debezium_type(kind) if is_enveloped else kind), hindrances


def _is_envelope(kind: pa.DataType) -> bool:
    """Whether the job has made the schema of a row's."""
    return kind.get_field_index("after") >= 0 and bool(kind == debezium_type(kind.field("after").type))


def _grown(old: pa.DataType, new: pa.DataType, path: str, widens: bool, hindrances: list[str]) -> pa.DataType:
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        asked = {field.name: field.type for field in new}
        fields = []
        for field in old:
            where = f"{path}.{field.name}" if path else field.name
            kind = asked.pop(field.name, None)
            if kind is None:
                hindrances.append(f"{where} is missing")
            else:
                fields.append(pa.field(field.name, _grown(field.type, kind, where, widens, hindrances)))
        return pa.struct([*fields, *(pa.field(name, kind) for name, kind in asked.items())])
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(_grown(old.value_type, new.value_type, f"{path}[]", widens, hindrances))
    if old != new and not (widens and holds(new, old)):
        hindrances.append(f"{path} is {type_text(new)}, and was {type_text(old)}")
    return new


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def _fail(
        self, what: str, advice: str = "write Spark's DDL, as 'user_id bigint, at timestamp, tags array<string>'"
    ) -> ConfigError:
        return ConfigError(f"schema {self._text.strip()[:200]!r}: {what} at character {self._at + 1}; {advice}")

    def _unexpected(self, otherwise: str = "unexpected text") -> ConfigError:
        word = self._peek().upper()
        return self._fail(f"unexpected {word}", _LEFT_OUT[word]) if word in _LEFT_OUT else self._fail(otherwise)

    def _peek(self) -> str:
        match = _TOKEN.match(self._text, self._at)
        return match[0].strip() if match else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise self._fail("a name or a type is missing")
        self._at = self._text.index(token, self._at) + len(token)
        return token

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._unexpected(f"{token!r} is missing")
        self._next()

    def expect_end(self) -> None:
        if self._text[self._at :].strip():
            raise self._unexpected()

    def all_fields(self) -> list[pa.Field]:
        """The fields of the schema, which may stand in a struct<...> around all of them."""
        if not re.match(r"\s*struct\s*<", self._text, re.IGNORECASE):
            return self.fields("", 0)
        return list(self._type(0))

    def fields(self, end: str, depth: int) -> list[pa.Field]:
        """Fields up to the token `end`, which is left."""
        fields: dict[str, pa.Field] = {}  # by the name in lower case
        while True:
            name = self._next()
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            elif not re.fullmatch(r"\w+", name):
                raise self._fail(f"{name!r} is not a name")
            if (other := fields.get(name.lower())) is not None:
                if other.name == name:
                    raise self._fail(f"field {name} is there twice")
                raise self._fail(
                    f"{other.name} and {name} differ by case only", "leave one of them out, as Spark can't read both"
                )
            if self._peek() == ":":
                self._next()
            fields[name.lower()] = pa.field(name, self._type(depth + 1))
            if self._peek() != ",":
                break
            self._next()
        if self._peek() != end:
            raise self._unexpected()
        return list(fields.values())

    def _type(self, depth: int) -> pa.DataType:
        if depth > _DEEPEST:
            raise self._fail(f"more than {_DEEPEST} levels of types")
        name = self._next().lower()
        if name == "array":
            self._expect("<")
            kind = pa.list_(self._type(depth + 1))
            self._expect(">")
            return kind
        if name == "struct":
            self._expect("<")
            fields = self.fields(">", depth)
            self._expect(">")
            return pa.struct(fields)
        if name in ("decimal", "dec", "numeric"):
            return self._decimal()
        if name not in _TYPES:
            raise self._fail(f"unknown type {name!r}; the types are {', '.join(_TYPES)}, decimal, array, struct")
        return _TYPES[name]

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._peek() == "(":
            self._next()
            precision = self._number()
            if self._peek() == ",":
                self._next()
                scale = self._number()
            self._expect(")")
        if not 1 <= precision <= _MOST_DIGITS or scale > precision:
            raise self._fail(f"decimal({precision},{scale}) can't be")
        return pa.decimal128(precision, scale)

    def _number(self) -> int:
        word = self._next()
        if not word.isdecimal() or len(word) > 3:
            raise self._fail(f"{word!r} is not a number of digits")
        return int(word)


def is_dated(column: pa.Array) -> bool:
    """Whether Python, and so a reader of the files, has all times of a column."""
    kind = column.type
    if pa.types.is_struct(kind):
        return all(is_dated(field) for field in column.flatten())
    if pa.types.is_map(kind):
        exact = pa.concat_arrays([column])  # the items of a slice are those of the whole
        return is_dated(exact.keys) and is_dated(exact.items)
    if pa.types.is_list(kind):
        return is_dated(column.flatten())
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return True
    times = pc.min_max(microseconds(column)).as_py()
    return times["min"] is None or FIRST_US <= times["min"] <= times["max"] <= LAST_US
