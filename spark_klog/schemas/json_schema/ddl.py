"""A schema in Spark's DDL: `user_id bigint, at timestamp, tags array<string>, place struct<lat: double>`.

Beside Spark's types there is `json`: any JSON value as its text, which is a string in files and tables.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import pyarrow as pa

from spark_klog.errors import ConfigError
from spark_klog.schemas.json_schema.columns import JSON_TEXT, VARIANT

#: What stands for the text of a schema that is to be inferred.
INFER: Final = "infer"
#: What stands for values that are VARIANTs as a whole.
_VARIANT: Final = "variant"
NO_VARIANT: Final = "give the field the type json, whose text Spark's parse_json makes a VARIANT"
_TYPES: Final[dict[str, pa.DataType]] = {
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
    "json": JSON_TEXT,
}
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|([A-Za-z0-9_]+)|([<>(),:]))")
#: Levels of types in each other.
DEEPEST: Final = 32
_MOST_DIGITS = 38
#: What Spark's DDL may have after a field's type, and why a load has no use for it.
_LEFT_OUT = {
    "NOT": "leave NOT NULL out, as a value may lack any field",
    "COMMENT": "leave the comment out, as files do not keep it",
    "DEFAULT": "leave the default out, as a field that is missing is null",
}


@lru_cache(64)
def parse_schema(text: str) -> pa.DataType:
    """Parse a schema to a struct type, in which `json` is `JSON_TEXT` (`stored_type` has it as files have it).

    It is `VARIANT` of values that are this as a whole. `ConfigError`.
    """
    if text.strip().lower() == _VARIANT:
        return VARIANT
    parser = _Parser(text)
    fields = parser.all_fields()
    parser.expect_end()
    return pa.struct(fields)


def schema_text(kind: pa.DataType) -> str:
    """A schema as text that `parse_schema` takes; equal for equal schemas."""
    if kind == VARIANT:
        return type_text(kind)
    return ", ".join(f"{_quoted(field.name)} {type_text(field.type)}" for field in kind)


def _quoted(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_]+", name) else "`" + name.replace("`", "``") + "`"


def type_text(kind: pa.DataType) -> str:
    """A type as a schema has it."""
    if kind == VARIANT:
        return _VARIANT
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{_quoted(field.name)}: {type_text(field.type)}' for field in kind)}>"
    if pa.types.is_list(kind):
        return f"array<{type_text(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next(name for name, known in _TYPES.items() if known == kind)


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
        if depth > DEEPEST:
            raise self._fail(f"more than {DEEPEST} levels of types")
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
        if name == _VARIANT:
            raise self._fail("VARIANT is the type of whole values alone (--schema variant)", NO_VARIANT)
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
