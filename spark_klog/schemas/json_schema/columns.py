"""The plan of a column of JSON: what its values are, whether they may be null, and how they are written.

Ways to a plan: a JSON Schema (schema.py), and an Arrow type (from_arrow.py), which a load has of a DDL text and
`klog produce` of a schema of another format.
docs/explanation/json-schema.md has the table of types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import pyarrow as pa

from spark_klog.errors import SchemaError

#: What values of a schema are; "any": of several kinds, or of any.
Kind = Literal["any", "null", "boolean", "integer", "number", "string", "array", "object"]
#: How values stand in a column: `json` is their text, as strings.
Form = Literal[
    "json",
    "null",
    "boolean",
    "integer",
    "number",
    "decimal",
    "string",
    "binary",
    "date",
    "timestamp",
    "local-timestamp",
    "days",
    "milliseconds",
    "time",
    "duration",
    "list",
    "struct",
    "map",
]
#: Lists, structs and maps that may lie in each other.
MAX_DEPTH: Final = 64
#: Columns that a schema may have: references of references can make them many.
MAX_COLUMNS: Final = 10_000
TIMESTAMP: Final = pa.timestamp("us", "UTC")
LOCAL_TIMESTAMP: Final = pa.timestamp("us")


class _Marked(pa.ExtensionType):  # type: ignore[misc]
    """A type that plans and tables know by its name. Columns of batches and files are of its storage."""

    def __init__(self, storage: pa.DataType, name: str) -> None:
        super().__init__(storage, name)

    def __arrow_ext_serialize__(self) -> bytes:
        return str(self.extension_name).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> _Marked:
        return cls(storage_type, serialized.decode())

    def __hash__(self) -> int:
        return hash(self.extension_name)

    def __str__(self) -> str:
        return str(self.extension_name)


#: The text of any JSON value, and a VARIANT.
JSON_TEXT: Final = _Marked(pa.string(), "json")
VARIANT: Final = _Marked(
    pa.struct([pa.field(name, pa.binary(), nullable=False) for name in ("metadata", "value")]), "variant"
)


def stored_type(kind: pa.DataType) -> pa.DataType:
    """The type as columns have it, with strings for `JSON_TEXT`."""
    if kind in (JSON_TEXT, VARIANT):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(stored_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(stored_type(kind.value_type)))
    return kind


#: Of a second, by Arrow's unit.
UNIT_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_TYPES: Final[dict[Form, pa.DataType]] = {
    "json": pa.string(),
    "null": pa.null(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
    "local-timestamp": LOCAL_TIMESTAMP,
    "days": pa.date32(),
    "milliseconds": TIMESTAMP,
}


@dataclass(frozen=True)
class Dialect:
    """What JSON values mean where the ways to a plan differ; the defaults are those of a JSON Schema."""

    #: Whether a decimal in a string is its digits; else it is what Kafka Connect writes, base64 of the unscaled number.
    digits_in_strings: bool = False
    #: Whether a date may end in Z, as Debezium writes it with `time.precision.mode=isostring`.
    utc_dates: bool = False
    #: Whether "NaN", "Infinity" and "-Infinity" are numbers, and {"base64": ...} is bytes, as they are shown.
    as_shown: bool = False
    #: Whether a text stands for the bytes that it has in UTF-8; else it is their base64.
    utf8_bytes: bool = False
    #: What a user is told in addition who gives a null that may not be.
    null_advice: str = ""


JSON_SCHEMA: Final = Dialect()
DDL: Final = Dialect(digits_in_strings=True, utc_dates=True)
#: What `texts.py` writes, of rows that are to be written by a schema; fields with defaults are left out.
ROWS: Final = Dialect(
    digits_in_strings=True,
    as_shown=True,
    utf8_bytes=True,
    null_advice="; if the schema has a default, leave it out, of all records of a list",
)
#: The same by a JSON Schema, whose bytes are base64.
JSON_SCHEMA_ROWS: Final = replace(ROWS, utf8_bytes=False)


class _NoDefault:
    def __repr__(self) -> str:
        return "NO_DEFAULT"

    def __reduce__(self) -> str:
        return "NO_DEFAULT"  # the one of this module, in the process that loads it, too


NO_DEFAULT: Final = _NoDefault()


@dataclass(frozen=True)
class Property:
    """A property of an object. `default` is the JSON value, or `NO_DEFAULT`."""

    name: str
    column: Column
    is_required: bool = False
    default: Any = NO_DEFAULT

    @property
    def fills(self) -> bool:
        """Whether the default stands for a value that is missing: not where null is a value."""
        return self.default is not NO_DEFAULT and self.default is not None and not self.column.nullable

    @property
    def nullable(self) -> bool:
        """Whether the Arrow field may be null."""
        return not self.fills and (self.column.nullable or not self.is_required)


@dataclass(frozen=True)
class Column:
    """What a schema says of a value, as far as its column is concerned. Attributes depend on `kind`."""

    kind: Kind
    nullable: bool = False
    #: The form, if it is not the one of the kind's name, or of an object without properties.
    refined: Form | None = None
    #: Bits of an integer or a number.
    bits: int = 64
    #: Of a decimal.
    precision: int = 0
    scale: int = 0
    #: Strings that an enum or a const lists.
    symbols: tuple[str, ...] | None = None
    #: Of an array.
    items: Column | None = None
    #: Of an object: named properties, and what others are, if the schema says so.
    properties: tuple[Property, ...] = ()
    values: Column | None = None
    #: Of the names in a map, None: text.
    keys: Column | None = None
    #: Whether an object has no other properties.
    is_closed: bool = False
    dialect: Dialect = JSON_SCHEMA
    #: The Arrow type that the plan was made of, None: that of the form.
    arrow: pa.DataType | None = None

    @cached_property
    def form(self) -> Form:
        if self.kind == "any":
            return "json"
        if self.kind == "array":
            return "list"
        if self.kind == "object":
            if self.properties or self.refined is not None:
                return self.refined or "struct"
            return "json" if self.values is None or self.values == ANY else "map"
        return self.refined or self.kind

    @cached_property
    def type(self) -> pa.DataType:
        """The Arrow type. Fields are nullable unless the property is required, and its schema has no null."""
        form = self.form
        if self.arrow is not None:
            return self.arrow
        if form == "integer":
            return {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[self.bits]
        if form == "number":
            return pa.float32() if self.bits == 32 else pa.float64()
        if form == "decimal":
            return pa.decimal128(self.precision, self.scale)
        if form == "list":
            assert self.items is not None
            return pa.list_(pa.field("element", self.items.type, self.items.nullable))
        if form == "map":
            assert self.values is not None
            return pa.map_(pa.string(), pa.field("value", self.values.type, self.values.nullable))
        if form == "struct":
            return pa.struct([pa.field(one.name, one.column.type, one.nullable) for one in self.properties])
        return _TYPES[form]

    def __str__(self) -> str:
        """What errors call the values: `an array`, `a string`."""
        if self.form == "number" and self.dialect.as_shown:
            return 'a number, "NaN", "Infinity" or "-Infinity"'
        if self.form == "binary" and self.dialect.utf8_bytes:
            return 'text, or {"base64": "..."}'
        if self.form in _CALLED:
            return _CALLED[self.form]
        if self.form == "integer":
            return f"an integer of {self.bits} bits" + (" without a sign" if self.is_unsigned else "")
        if self.form == "decimal":
            return f"a decimal({self.precision}, {self.scale})"
        return {"object": "an object", "array": "an array", "any": "JSON"}.get(self.kind, f"a {self.kind}")

    @property
    def is_unsigned(self) -> bool:
        return self.arrow is not None and bool(pa.types.is_unsigned_integer(self.arrow))

    def tree(self) -> Iterator[Column]:
        """The column and all below it."""
        yield self
        for below in self.children:
            yield from below.tree()

    @property
    def children(self) -> list[Column]:
        if self.form == "struct":
            return [one.column for one in self.properties]
        below = {"list": self.items, "map": self.values}.get(self.form)
        return [] if below is None else [below]


_CALLED: Final[dict[Form, str]] = {
    "null": "null",
    "binary": "a string in base64",
    "date": "a date such as 2024-12-31",
    "timestamp": "a time such as 2024-12-31T23:59:59Z",
    "local-timestamp": "a time such as 2024-12-31T23:59:59",
    "days": "a number of days",
    "milliseconds": "a number of milliseconds",
    "time": "a time such as 23:59:59.123456",
    "duration": "a duration such as 1.5s",
}
#: Of a schema that says nothing.
ANY: Final = Column("any", nullable=True)
NULL: Final = Column("null", nullable=True)


@dataclass
class Size:
    """Counts a schema's columns and levels while it is read; `SchemaError` for one that is too large."""

    columns: int = 0

    def add(self, depth: int) -> None:
        self.columns += 1
        if self.columns > MAX_COLUMNS:
            raise SchemaError(f"the schema has more than {MAX_COLUMNS:,} parts, counted once for each $ref to them")
        if depth > 4 * MAX_DEPTH:
            raise SchemaError("the schema is nested too deeply")


def check_depth(column: Column, depth: int = 0, path: str = "") -> None:
    """`SchemaError` if a column has too many levels."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"field {path}: the schema is nested more than {MAX_DEPTH} levels deep")
    if column.form == "struct":
        for one in column.properties:
            check_depth(one.column, depth + 1, f"{path}.{one.name}" if path else one.name)
    for below in column.children if column.form != "struct" else ():
        check_depth(below, depth + 1, f"{path}[]")
