"""Schemas of values, in Spark's DDL: `user_id bigint, at timestamp, tags array<string>, place struct<lat: double>`."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa

from spark_klog.errors import ConfigError

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
    "date": pa.date32(),
}
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|([A-Za-z0-9_]+)|([<>(),:]))")
_DEEPEST = 32
_MOST_DIGITS = 38


def read_schema(text: str) -> pa.DataType:
    """Parse a schema, or the file that has it, to a struct type; `ConfigError` for one that can't be parsed."""
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a schema may be longer than a file's name
        is_file = False
    if is_file:
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--schema {text} can't be read: {error}") from None
    elif text.strip() and not any(mark in text.strip() for mark in " \t\n:`"):
        raise ConfigError(f"--schema {text} is neither a file nor DDL: write 'user_id bigint, at timestamp'")
    return parse_schema(text)


def parse_schema(text: str) -> pa.DataType:
    """Parse a schema to a struct type; `ConfigError`."""
    parser = _Parser(text)
    fields = parser.fields("", 0)
    parser.expect_end()
    return pa.struct(fields)


def schema_text(kind: pa.DataType) -> str:
    """A schema as text that `parse_schema` takes; equal for equal schemas."""
    return ", ".join(f"{_quoted(field.name)} {_type_text(field.type)}" for field in kind)


def _quoted(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_]+", name) else "`" + name.replace("`", "``") + "`"


def _type_text(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{_quoted(field.name)}: {_type_text(field.type)}' for field in kind)}>"
    if pa.types.is_list(kind):
        return f"array<{_type_text(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next(name for name, known in _TYPES.items() if known == kind)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def _fail(self, what: str) -> ConfigError:
        return ConfigError(
            f"schema {self._text.strip()[:200]!r}: {what} at character {self._at + 1}; write Spark's DDL, as "
            "'user_id bigint, at timestamp, tags array<string>'"
        )

    def _peek(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        return found[0].strip() if found else ""

    def _next(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self._fail("a name or a type is missing")
        self._at = found.end()
        return found[0].strip()

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._fail(f"{token!r} is missing")
        self._next()

    def expect_end(self) -> None:
        if self._text[self._at :].strip():
            raise self._fail("unexpected text")

    def fields(self, end: str, depth: int) -> list[pa.Field]:
        """Fields up to the token `end`, which is left."""
        found: dict[str, pa.Field] = {}
        while True:
            name = self._next()
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            elif not re.fullmatch(r"\w+", name):
                raise self._fail(f"{name!r} is not a name")
            if name in found:
                raise self._fail(f"field {name} is there twice")
            if self._peek() == ":":
                self._next()
            found[name] = pa.field(name, self._type(depth + 1))
            if self._peek() != ",":
                break
            self._next()
        if self._peek() != end:
            raise self._fail("unexpected text")
        return list(found.values())

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
        if name in ("decimal", "numeric"):
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
