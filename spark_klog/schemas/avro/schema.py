"""Parsed Avro schemas (Avro specification 1.12, "Schema Declaration").

A schema is a graph of `AvroSchema` nodes with full names, in which a type may contain itself. A registry writes and
compares all of them; `parse_schema` refuses those that columns can't hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isinf
from typing import Any, Final, TypeGuard

from spark_klog.errors import SchemaError

PRIMITIVES: Final = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
#: Readers' types that a writer's type is promoted to.
PROMOTIONS: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
#: Nodes that may lie in each other in a text, and in columns: what a program's stack has room for.
_MOST_NESTED: Final = 200
MAX_DEPTH: Final = 64
#: Types of a schema, each time that it is named: what a program and its columns are made of.
MAX_TYPES: Final = 1 << 15
#: Letters of a text that an error repeats.
_MOST_LETTERS: Final = 500
#: Attributes of a schema that are not its own properties, by what has them.
_RESERVED: Final = frozenset(
    ("doc", "fields", "items", "name", "namespace", "size", "symbols", "values", "type", "aliases")
)
_RESERVED_OF_ENUM: Final = _RESERVED | {"default"}
_RESERVED_OF_FIELD: Final = frozenset(("default", "doc", "name", "order", "type", "aliases"))
_ORDERS: Final = frozenset(("ascending", "descending", "ignore"))
#: Bytes of a fixed that is a duration: months, days and milliseconds, unsigned and little endian.
DURATION_SIZE: Final = 12
UUID_SIZE: Final = 16
#: Digits that Arrow's widest decimal has.
MAX_PRECISION: Final = 76

#: Logical types by the type that they annotate; decimal, uuid and duration have further conditions.
_LOGICAL: Final = {
    "int": frozenset(("date", "time-millis")),
    "long": frozenset(
        (
            "time-micros",
            "timestamp-millis",
            "timestamp-micros",
            "timestamp-nanos",
            "local-timestamp-millis",
            "local-timestamp-micros",
            "local-timestamp-nanos",
        )
    ),
    "string": frozenset(("uuid",)),
    "bytes": frozenset(("decimal",)),
    "fixed": frozenset(("decimal", "uuid", "duration")),
}


class _NoDefault:
    def __repr__(self) -> str:
        return "NO_DEFAULT"

    def __reduce__(self) -> str:
        return "NO_DEFAULT"  # the one of this module, in the process that loads it, too


NO_DEFAULT: Final = _NoDefault()


@dataclass(frozen=True, eq=False)
class AvroField:
    """A field of a record; `default` is the JSON value, or `NO_DEFAULT`."""

    name: str
    schema: AvroSchema
    default: Any = NO_DEFAULT
    aliases: tuple[str, ...] = ()
    doc: str | None = None
    order: str = "ascending"
    props: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class AvroSchema:
    """A node of a schema; nobody changes it once it is parsed. Which attributes are set depends on `kind`."""

    #: A primitive type's name, or "fixed", "enum", "record", "array", "map", "union".
    kind: str
    #: A logical type that the specification knows and whose conditions hold, else None: readers ignore any other.
    logical: str | None = None
    #: Full name, and full names of aliases: fixed, enum, record.
    name: str = ""
    aliases: tuple[str, ...] = ()
    doc: str | None = None
    #: Attributes that the specification does not define for the type.
    props: dict[str, Any] = field(default_factory=dict)
    #: Bytes of a fixed.
    size: int = 0
    #: Of a decimal.
    precision: int = 0
    scale: int = 0
    #: Of an enum.
    symbols: tuple[str, ...] = ()
    default_symbol: str | None = None
    #: Of a record.
    fields: tuple[AvroField, ...] = ()
    #: Whether a record is a protocol's error.
    is_error: bool = False
    #: Items of an array, values of a map.
    items: AvroSchema | None = None
    #: Of a union.
    branches: tuple[AvroSchema, ...] = ()

    @property
    def is_plain_bytes(self) -> bool:
        return self.kind == "bytes" and self.logical is None

    @property
    def short_name(self) -> str:
        """The name without its namespace."""
        return self.name.rpartition(".")[2]

    @property
    def namespace(self) -> str:
        return self.name.rpartition(".")[0]

    @cached_property
    def alias_set(self) -> frozenset[str]:
        return frozenset(self.aliases)

    def __str__(self) -> str:
        """What errors call the type: `record a.b.C`, `long (timestamp-millis)`, `array<int>`, `union<null, string>`."""
        if self.kind == "union":
            return f"union<{', '.join(map(str, self.branches))}>"
        if self.kind in ("array", "map"):
            return f"{self.kind}<{self.items}>"
        text = f"{self.kind} {self.name}" if self.name else self.kind
        if self.logical == "decimal":
            return f"{text} (decimal({self.precision}, {self.scale}))"
        return f"{text} ({self.logical})" if self.logical else text


def parse_schema(schema: str | bytes | Mapping[str, Any] | list[Any], references: Iterable[str] = ()) -> AvroSchema:
    """Parse a schema of rows: JSON text, or what `json.loads` makes of it.

    `references` are the texts of schemas whose named types it uses, each after those that it needs itself, as a schema
    registry lists them. `SchemaError` names what is wrong, and where: also if a type contains itself, as such a type
    has no columns.
    """
    parser = AvroParser()
    for text in references:
        parser.parse(text)
    parsed = parser.parse(schema)
    if _Types().count(parsed, "", 0)[0] > MAX_TYPES:
        raise SchemaError(f"the schema has more than {MAX_TYPES} types, each counted as often as it is named")
    return parsed


class _Types:
    """Counts the types of a schema as if each were written where it is named; `SchemaError` of what has no column."""

    def __init__(self) -> None:
        #: By node, with the levels below it; None while it is being counted.
        self._counts: dict[int, tuple[int, int] | None] = {}

    def count(self, schema: AvroSchema, path: str, depth: int) -> tuple[int, int]:
        """The types of a schema at a depth, and the levels below it."""
        if id(schema) in self._counts:
            known = self._counts[id(schema)]
            if known is None:
                raise SchemaError(
                    f"{_at(path)}: record {schema.name} contains itself; recursive schemas have no Arrow or Spark type"
                )
            if depth + known[1] > MAX_DEPTH:
                raise _too_deep(path)
            return known
        if depth > MAX_DEPTH:
            raise _too_deep(path)
        if schema.kind == "union" and not schema.branches:
            raise SchemaError(f"{_at(path)}: a union without branches has no values")
        self._counts[id(schema)] = None
        below = [(entry.schema, _below(path, entry.name)) for entry in schema.fields]
        below += [(branch, path) for branch in schema.branches]
        if schema.items is not None:
            below.append((schema.items, path + ("[]" if schema.kind == "array" else "{}")))
        counts = [self.count(node, where, depth + 1) for node, where in below]
        counted = 1 + sum(count for count, _ in counts), max((1 + levels for _, levels in counts), default=0)
        self._counts[id(schema)] = counted
        return counted


def _too_deep(path: str) -> SchemaError:
    return SchemaError(f"{_at(path)}: the schema is nested more than {MAX_DEPTH} levels deep")


def _loaded(text: str | bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except ValueError as error:
        bare = text.decode(errors="replace") if isinstance(text, bytes) else text
        if bare.strip() in PRIMITIVES:
            return bare.strip()
        raise SchemaError(f"an Avro schema must be JSON: {error}") from None
    except RecursionError:
        raise SchemaError("the Avro schema is nested too deeply") from None


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:50]} is too large")
    return value


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


class AvroParser:
    """Parses one schema after the other; named types of earlier ones are known to later ones."""

    def __init__(self) -> None:
        #: By full name, in the order of their declarations.
        self.named: dict[str, AvroSchema] = {}

    def parse(self, schema: str | bytes | Mapping[str, Any] | list[Any]) -> AvroSchema:
        """Parse JSON text, or what `json.loads` makes of it. `SchemaError` names what is wrong, and where."""
        return self._node(_loaded(schema) if isinstance(schema, str | bytes) else schema, "", "", 0)

    def _node(self, node: Any, namespace: str, path: str, depth: int) -> AvroSchema:
        if depth > _MOST_NESTED:
            raise SchemaError(f"{_at(path)}: the schema is nested more than {_MOST_NESTED} levels deep")
        if isinstance(node, str):
            return self._of_name(node, namespace, path)
        if isinstance(node, list):
            return self._union(node, namespace, path, depth)
        if not isinstance(node, Mapping):
            raise SchemaError(f"{_at(path)}: {_text(node)} is not an Avro type")
        kind = node.get("type")
        if isinstance(kind, Mapping | list):  # {"type": {"type": ...}}
            return self._node(kind, namespace, path, depth + 1)
        if not isinstance(kind, str):
            raise SchemaError(f"{_at(path)}: {_text(node)} has no type")
        if kind in PRIMITIVES:
            return _with_logical(AvroSchema(kind, props=_props(node, _RESERVED)))
        if kind in ("array", "map"):
            key, name = ("items", "[]") if kind == "array" else ("values", "{}")
            if key not in node:
                raise SchemaError(f"{_at(path)}: {kind} without {key!r}")
            items = self._node(node[key], namespace, path + name, depth + 1)
            return AvroSchema(kind, items=items, props=_props(node, _RESERVED))
        if kind in ("record", "error", "enum", "fixed"):
            return self._declared(kind, node, namespace, path, depth)
        return self._of_name(kind, namespace, path)

    def _of_name(self, name: str, namespace: str, path: str) -> AvroSchema:
        if name in PRIMITIVES:
            return AvroSchema(name)
        for full in (_full_name(name, namespace), name.removeprefix(".")):
            if full in self.named:
                return self.named[full]
        raise SchemaError(f"{_at(path)}: {_text(name)} is neither an Avro type nor a name defined before it")

    def _declared(self, kind: str, node: Mapping[str, Any], namespace: str, path: str, depth: int) -> AvroSchema:
        name, space = node.get("name"), node.get("namespace")
        if not isinstance(name, str) or not name.rpartition(".")[2]:
            raise SchemaError(f"{_at(path)}: {kind} {_stated(node, 'name')}")
        name = _full_name(name, space if isinstance(space, str) else namespace).removeprefix(".")
        if name in PRIMITIVES:
            raise SchemaError(f"{_at(path)}: {kind} with the name {_text(name)}, which is an Avro type's")
        if name in self.named:
            raise SchemaError(f"{_at(path)}: {name} is defined twice")
        schema = AvroSchema("record" if kind == "error" else kind, name=name, is_error=kind == "error")
        aliases = _texts(node.get("aliases", []), path, f"the aliases of {kind} {name}")
        schema.aliases = tuple(_full_name(alias, schema.namespace) for alias in aliases)
        schema.doc = _doc(node)
        schema.props = _props(node, _RESERVED_OF_ENUM if kind == "enum" else _RESERVED)
        self.named[name] = schema
        if kind == "fixed":
            size = node.get("size")
            if not _is_number(size) or not 0 <= size < 1 << 31:
                raise SchemaError(f"{_at(path)}: fixed {name} {_stated(node, 'size')}")
            schema.size = size
            return _with_logical(schema)
        if kind == "enum":
            _read_symbols(schema, node, path)
        else:
            self._read_fields(schema, node, path, depth)
        return schema

    def _read_fields(self, schema: AvroSchema, node: Mapping[str, Any], path: str, depth: int) -> None:
        if not isinstance(node.get("fields"), list):
            raise SchemaError(f"{_at(path)}: record {schema.name} without a list 'fields'")
        fields: dict[str, AvroField] = {}
        for entry in node["fields"]:
            name = entry.get("name") if isinstance(entry, Mapping) else None
            if not isinstance(name, str) or not name or "type" not in entry:
                raise SchemaError(f"{_at(path)}: record {schema.name} has a field without name or type: {_text(entry)}")
            if name in fields:
                raise SchemaError(f"{_at(path)}: record {schema.name} has two fields {_text(name)}")
            below = _below(path, name)
            kind = self._node(entry["type"], schema.namespace, below, depth + 1)
            order = entry.get("order", "ascending")
            if not isinstance(order, str) or order.lower() not in _ORDERS:
                raise SchemaError(f"{_at(below)}: the order {_text(order)}; ascending, descending and ignore are known")
            fields[name] = AvroField(
                name,
                kind,
                entry.get("default", NO_DEFAULT),
                _texts(entry.get("aliases", []), below, "the aliases"),
                _doc(entry),
                order.lower(),
                _props(entry, _RESERVED_OF_FIELD),
            )
        schema.fields = tuple(fields.values())

    def _union(self, nodes: list[Any], namespace: str, path: str, depth: int) -> AvroSchema:
        branches = tuple(self._node(node, namespace, path, depth + 1) for node in nodes)
        seen = set()
        for branch in branches:
            if branch.kind == "union":
                raise SchemaError(f"{_at(path)}: a union directly in a union")
            if (branch.name or branch.kind) in seen:
                raise SchemaError(f"{_at(path)}: {branch} is twice in a union")
            seen.add(branch.name or branch.kind)
        return AvroSchema("union", branches=branches)


def _at(path: str) -> str:
    return f"field {path}" if path else "the schema"


def _below(path: str, name: str) -> str:
    """The path of a field, as far as an error repeats it: names in names may be as long as the text."""
    return (f"{path}.{name}" if path else name)[:_MOST_LETTERS]


def _text(value: Any) -> str:
    return json.dumps(value, default=str)[:_MOST_LETTERS]


def _stated(node: Mapping[str, Any], key: str) -> str:
    return f"with the {key} {_text(node[key])}" if key in node else f"without a {key}"


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _doc(node: Mapping[str, Any]) -> str | None:
    doc = node.get("doc")
    return doc if isinstance(doc, str) else None


def _props(node: Mapping[str, Any], reserved: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in reserved}


def _texts(values: Any, path: str, what: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise SchemaError(f"{_at(path)}: {what} must be a list of strings, not {_text(values)}")
    return tuple(values)


def _read_symbols(schema: AvroSchema, node: Mapping[str, Any], path: str) -> None:
    schema.symbols = _texts(node.get("symbols"), path, f"the symbols of enum {schema.name}")
    if len(set(schema.symbols)) != len(schema.symbols):
        raise SchemaError(f"{_at(path)}: enum {schema.name} has a symbol twice")
    schema.default_symbol = node.get("default")
    if schema.default_symbol is not None and schema.default_symbol not in schema.symbols:
        default = _text(schema.default_symbol)
        raise SchemaError(f"{_at(path)}: the default {default} of enum {schema.name} is not one of its symbols")


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_logical(schema: AvroSchema) -> AvroSchema:
    """The schema with the logical type of its properties, if that is valid for it."""
    logical = schema.props.get("logicalType")
    if not isinstance(logical, str) or logical not in _LOGICAL.get(schema.kind, ()):
        return schema
    if logical == "decimal":
        precision, scale = schema.props.get("precision"), schema.props.get("scale", 0)
        if not (_is_number(precision) and _is_number(scale) and 0 <= scale <= precision and precision > 0):
            return schema
        if schema.kind == "fixed" and precision > _fixed_precision(schema.size):
            return schema
        schema.precision, schema.scale = precision, scale
    elif schema.kind == "fixed" and schema.size != (UUID_SIZE if logical == "uuid" else DURATION_SIZE):
        return schema
    schema.logical = logical
    return schema


def _fixed_precision(size: int) -> int:
    """Digits of every decimal that fits into a fixed of `size` bytes."""
    return len(str((1 << (8 * min(size, 64) - 1)) - 1)) - 1 if size else 0
