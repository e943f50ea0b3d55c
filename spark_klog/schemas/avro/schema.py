"""Parsed Avro schemas (Avro specification 1.12, "Schema Declaration").

A schema is a tree of `AvroSchema` nodes with full names. Recursive schemas are refused: they have no Arrow type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spark_klog.errors import SchemaError

PRIMITIVES: Final = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
#: Nodes that may lie in each other: what a program's stack has room for.
MAX_DEPTH: Final = 64
#: Types of a schema, each time that it is named: what a program and its columns are made of.
MAX_TYPES: Final = 1 << 15
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


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record; `default` is the JSON value, or `NO_DEFAULT`."""

    name: str
    schema: AvroSchema
    default: Any = NO_DEFAULT
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A node of a schema. Which attributes are set depends on `kind`."""

    #: A primitive type's name, or "fixed", "enum", "record", "array", "map", "union".
    kind: str
    #: A logical type that the specification knows and whose conditions hold, else None: readers ignore any other.
    logical: str | None = None
    #: Full name, and full names of aliases: fixed, enum, record.
    name: str = ""
    aliases: tuple[str, ...] = ()
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
    """Parse a schema: JSON text, or what `json.loads` makes of it.

    `references` are the texts of schemas whose named types it uses, each after those that it needs itself, as a schema
    registry lists them. `SchemaError` names what is wrong, and where.
    """
    parser = _Parser()
    for text in references:
        parser.parse(_loaded(text), "", "", 0)
    parsed = parser.parse(_loaded(schema) if isinstance(schema, str | bytes) else schema, "", "", 0)
    if _types_in(parsed, {}) > MAX_TYPES:
        raise SchemaError(f"the schema has more than {MAX_TYPES} types, each counted as often as it is named")
    return parsed


def _types_in(schema: AvroSchema, counts: dict[int, int]) -> int:
    """The types of a schema, counted as if each were written where it is named."""
    count = counts.get(id(schema))
    if count is None:
        below = [entry.schema for entry in schema.fields] + list(schema.branches)
        if schema.items is not None:
            below.append(schema.items)
        count = counts[id(schema)] = 1 + sum(_types_in(one, counts) for one in below)
    return count


def _loaded(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        bare = text.decode(errors="replace") if isinstance(text, bytes) else text
        if bare.strip() in PRIMITIVES:
            return bare.strip()
        raise SchemaError(f"an Avro schema must be JSON: {error}") from None
    except RecursionError:
        raise SchemaError("the Avro schema is nested too deeply") from None


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


@dataclass
class _Parser:
    """Parses one schema after the other; named types of earlier ones are known to later ones."""

    named: dict[str, AvroSchema | None] = field(default_factory=dict)

    def parse(self, node: Any, namespace: str, path: str, depth: int) -> AvroSchema:
        if depth > MAX_DEPTH:
            raise SchemaError(f"{_at(path)}: the schema is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, str):
            return self._of_name(node, namespace, path)
        if isinstance(node, list):
            return self._union(node, namespace, path, depth)
        if not isinstance(node, Mapping):
            raise SchemaError(f"{_at(path)}: {node!r} is not an Avro type")
        kind = node.get("type")
        if isinstance(kind, Mapping | list):  # {"type": {"type": ...}}
            return self.parse(kind, namespace, path, depth + 1)
        if kind in PRIMITIVES:
            return _logical(AvroSchema(kind), node)
        if kind in ("array", "map"):
            key, name = ("items", "[]") if kind == "array" else ("values", "{}")
            if key not in node:
                raise SchemaError(f"{_at(path)}: {kind} without {key!r}")
            return AvroSchema(kind, items=self.parse(node[key], namespace, path + name, depth + 1))
        if kind in ("record", "error"):
            return self._record(node, namespace, path, depth)
        if kind in ("enum", "fixed"):
            name, namespace = self._declared(node, namespace, path)
            schema = _enum(node, name, path) if kind == "enum" else _fixed(node, name, path)
            return self._known(schema, _aliases(node, namespace))
        if isinstance(kind, str):
            return self._of_name(kind, namespace, path)
        raise SchemaError(f"{_at(path)}: {kind!r} is not an Avro type")

    def _of_name(self, name: str, namespace: str, path: str) -> AvroSchema:
        if name in PRIMITIVES:
            return AvroSchema(name)
        for full in (_full_name(name, namespace), name):
            if full in self.named:
                schema = self.named[full]
                if schema is None:
                    raise SchemaError(
                        f"{_at(path)}: record {full} contains itself; recursive schemas have no Arrow or Spark type"
                    )
                return schema
        raise SchemaError(f"{_at(path)}: {name!r} is neither an Avro type nor a name defined before it")

    def _declared(self, node: Mapping[str, Any], namespace: str, path: str) -> tuple[str, str]:
        """The full name that a declaration has, and the namespace of what is in it."""
        name = node.get("name")
        if not isinstance(name, str) or not name:
            raise SchemaError(f"{_at(path)}: {node.get('type')} with the name {name!r}")
        full = _full_name(name, node.get("namespace", namespace) or "")
        if full in PRIMITIVES:
            raise SchemaError(f"{_at(path)}: {node.get('type')} with the name {full!r}, which is an Avro type's")
        if full in self.named:
            raise SchemaError(f"{_at(path)}: {full} is defined twice")
        return full, full.rpartition(".")[0]

    def _known(self, schema: AvroSchema, aliases: tuple[str, ...]) -> AvroSchema:
        declared = self.named[schema.name] = replace(schema, aliases=aliases)
        return declared

    def _record(self, node: Mapping[str, Any], namespace: str, path: str, depth: int) -> AvroSchema:
        name, namespace = self._declared(node, namespace, path)
        if not isinstance(node.get("fields"), list):
            raise SchemaError(f"{_at(path)}: record {name} without a list 'fields'")
        self.named[name] = None
        fields: dict[str, AvroField] = {}
        for entry in node["fields"]:
            called = entry.get("name") if isinstance(entry, Mapping) else None
            if not isinstance(called, str) or not called or "type" not in entry:
                raise SchemaError(f"{_at(path)}: record {name} has a field without name or type: {entry!r}")
            if called in fields:
                raise SchemaError(f"{_at(path)}: record {name} has two fields {called!r}")
            below = f"{path}.{called}" if path else called
            schema = self.parse(entry["type"], namespace, below, depth + 1)
            aliases = tuple(alias for alias in entry.get("aliases") or () if isinstance(alias, str))
            fields[called] = AvroField(called, schema, entry.get("default", NO_DEFAULT), aliases)
        return self._known(AvroSchema("record", name=name, fields=tuple(fields.values())), _aliases(node, namespace))

    def _union(self, nodes: list[Any], namespace: str, path: str, depth: int) -> AvroSchema:
        branches = tuple(self.parse(node, namespace, path, depth + 1) for node in nodes)
        if not branches:
            raise SchemaError(f"{_at(path)}: a union without branches")
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


def _aliases(node: Mapping[str, Any], namespace: str) -> tuple[str, ...]:
    return tuple(_full_name(alias, namespace) for alias in node.get("aliases") or () if isinstance(alias, str))


def _enum(node: Mapping[str, Any], name: str, path: str) -> AvroSchema:
    symbols = node.get("symbols")
    if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
        raise SchemaError(f"{_at(path)}: enum {name} without a list 'symbols' of strings")
    if len(set(symbols)) != len(symbols):
        raise SchemaError(f"{_at(path)}: enum {name} has a symbol twice")
    default = node.get("default")
    if default is not None and default not in symbols:
        raise SchemaError(f"{_at(path)}: the default {default!r} of enum {name} is not one of its symbols")
    return AvroSchema("enum", name=name, symbols=tuple(symbols), default_symbol=default)


def _fixed(node: Mapping[str, Any], name: str, path: str) -> AvroSchema:
    size: Any = node.get("size")
    if not _is_number(size) or not 0 <= size < 1 << 31:
        raise SchemaError(f"{_at(path)}: fixed {name} has the size {size!r}")
    return _logical(AvroSchema("fixed", name=name, size=size), node)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _logical(schema: AvroSchema, node: Mapping[str, Any]) -> AvroSchema:
    """The schema with its logical type, if that is valid for it."""
    logical = node.get("logicalType")
    if not isinstance(logical, str) or logical not in _LOGICAL.get(schema.kind, ()):
        return schema
    if logical == "decimal":
        precision: Any = node.get("precision")
        scale: Any = node.get("scale", 0)
        if not (_is_number(precision) and _is_number(scale) and 0 <= scale <= precision and precision > 0):
            return schema
        if schema.kind == "fixed" and precision > _fixed_precision(schema.size):
            return schema
        return replace(schema, logical=logical, precision=precision, scale=scale)
    if schema.kind == "fixed" and schema.size != (UUID_SIZE if logical == "uuid" else DURATION_SIZE):
        return schema
    return replace(schema, logical=logical)


def _fixed_precision(size: int) -> int:
    """Digits of every decimal that fits into a fixed of `size` bytes."""
    return len(str((1 << (8 * min(size, 64) - 1)) - 1)) - 1 if size else 0
