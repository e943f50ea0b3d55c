"""Avro schemas for a registry (Avro specification 1.12): parsed, in Java's text form, normalized, compared.

A parsed type is a `_Node`: recursive schemas are fine here. The canonical text is what Java's `Schema.toString` gives:
Confluent's registry stores that, so ids depend on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from itertools import islice
from math import isinf
from typing import Any, Final

from spark_klog.registry.formats.contract import (
    AVRO,
    MOST_DIFFERENCES,
    READER,
    WRITER,
    InvalidSchema,
    ParsedSchema,
    TooComplex,
    limited,
)
from spark_klog.schemas.registry.schemas import References

_PRIMITIVES: Final = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_DEPTH: Final = 200
#: Values and types that are compared for one default.
_MOST_CHECKED: Final = 200_000
#: Pairs of a reader's and a writer's types that are compared, and names of fields that are looked for in all of them.
_MOST_PAIRS: Final = 200_000
_MOST_NAMES: Final = 2_000_000
#: Letters of names in a difference.
_MOST_LETTERS: Final = 1000
#: Attributes of a schema that are not its own properties, by what has them.
_RESERVED: Final = frozenset(
    ("doc", "fields", "items", "name", "namespace", "size", "symbols", "values", "type", "aliases")
)
_RESERVED_OF_ENUM: Final = _RESERVED | {"default"}
_RESERVED_OF_FIELD: Final = frozenset(("default", "doc", "name", "order", "type", "aliases"))
_ORDERS: Final = frozenset(("ascending", "descending", "ignore"))
#: Properties of a logical type, in the order in which a normalized text has them.
_LOGICAL: Final = ("logicalType", "precision", "scale")
#: Writer's types that a reader's type also takes.
_PROMOTED: Final = {
    "long": {"int"},
    "float": {"int", "long"},
    "double": {"int", "long", "float"},
    "bytes": {"string"},
    "string": {"bytes"},
}


@dataclass(eq=False)
class _Field:
    name: str
    type: _Node
    doc: str | None
    order: str
    aliases: list[str]
    props: dict[str, Any]
    #: [] if there is none, since null is one.
    default: list[Any]


@dataclass(eq=False)
class _Node:
    """A type; which attributes are set depends on `kind`: a primitive's name, array, map, union, fixed, enum..."""

    kind: str
    name: str = ""
    namespace: str = ""
    doc: str | None = None
    aliases: list[str] = field(default_factory=list)
    props: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    symbols: list[str] = field(default_factory=list)
    default_symbol: str | None = None
    fields: list[_Field] = field(default_factory=list)
    items: _Node | None = None
    branches: list[_Node] = field(default_factory=list)
    is_error: bool = False

    @cached_property
    def alias_set(self) -> frozenset[str]:
        return frozenset(self.aliases)

    @property
    def full_name(self) -> str:
        return f"{self.namespace}.{self.name}" if self.namespace else self.name


class AvroSchema:
    """An Avro schema. `InvalidSchema` if the text, or one of the references, is none."""

    schema_type = AVRO

    def __init__(self, text: str, references: References, *, is_new: bool = False) -> None:
        parser = _Parser(is_new)
        for name, reference in references.items():
            try:
                parser.parse(_loaded(reference), "", 0)
            except InvalidSchema as error:
                raise InvalidSchema(f"reference {name}: {error}") from None
        self._foreign = set(parser.named)
        self.root = parser.parse(_loaded(text), "", 0)

    def canonical(self) -> str:
        return _dumps(_java(self.root, "", set(self._foreign)))

    def normalized(self) -> str:
        return _dumps(_normal(self.root, set(self._foreign)))

    def formatted(self, form: str) -> str:
        if form != "resolved":
            return self.canonical()
        return _dumps(_java(self.root, "", set()))

    def unreadable(self, writer: ParsedSchema) -> list[str]:
        assert isinstance(writer, AvroSchema)
        try:
            found = _Comparison().compare(self.root, writer.root, ("",))
            return limited(difference.text() for difference in found)
        except (_Ambiguous, TooComplex) as error:
            return [f"Unexpected exception during compatibility check: {error}"]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise InvalidSchema("the schema is nested too deeply") from None
    except ValueError as error:
        if text.strip() in _PRIMITIVES:
            return text.strip()
        raise InvalidSchema(f"an Avro schema must be JSON: {error}") from None


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:50]} is too large")
    return value


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _dumps(value: Any) -> str:
    """The JSON text as Java's Jackson writes it: without white space, and with Java's form of doubles."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{_dumps(key)}:{_dumps(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_dumps, value))}]"
    return _java_double(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _java_double(value: float) -> str:
    """The text of Java's `Double.toString`: 1.5, 1.0E8."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    first, *rest = map(str, digits)
    return f"{'-' if sign else ''}{first}.{''.join(rest) or '0'}E{exponent + len(rest)}"


class _Parser:
    """Parses one schema after the other; named types of earlier ones are known to later ones."""

    def __init__(self, is_new: bool) -> None:
        self.named: dict[str, _Node] = {}
        self._is_new = is_new

    def parse(self, node: Any, namespace: str, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise InvalidSchema(f"the schema is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(node, str):
            return self._of_name(node, namespace)
        if isinstance(node, list):
            return self._union(node, namespace, depth)
        if not isinstance(node, dict):
            raise InvalidSchema(f"{_dumps(node)} is not an Avro type")
        kind = node.get("type")
        if isinstance(kind, dict | list):
            return self.parse(kind, namespace, depth + 1)
        if not isinstance(kind, str):
            raise InvalidSchema(f"No type: {_dumps(node)[:500]}")
        if kind in ("record", "error", "enum", "fixed"):
            return self._declared(kind, node, namespace, depth)
        if kind in _PRIMITIVES:
            return _Node(kind, props=_props(node, _RESERVED))
        if kind in ("array", "map"):
            key = "items" if kind == "array" else "values"
            if key not in node:
                raise InvalidSchema(f"{kind} without {key!r}: {_dumps(node)[:500]}")
            items = self.parse(node[key], namespace, depth + 1)
            return _Node(kind, items=items, props=_props(node, _RESERVED))
        return self._of_name(kind, namespace)

    def _of_name(self, name: str, namespace: str) -> _Node:
        if name in _PRIMITIVES:
            return _Node(name)
        for full in ([] if "." in name or not namespace else [f"{namespace}.{name}"]) + [name.removeprefix(".")]:
            if full in self.named:
                return self.named[full]
        raise InvalidSchema(f'Undefined name: "{name}"')

    def _declared(self, kind: str, node: dict[str, Any], namespace: str, depth: int) -> _Node:
        name = node.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidSchema(f"No name in schema: {_dumps(node)[:500]}")
        given = node.get("namespace")
        if "." in name:
            space, _, name = name.rpartition(".")
        else:
            space = given if isinstance(given, str) else namespace
        self._check_name(name)
        for part in space.split(".") if space else ():
            self._check_name(part)
        schema = _Node("record" if kind == "error" else kind, name, space, is_error=kind == "error")
        if schema.full_name in _PRIMITIVES:
            raise InvalidSchema(f"Schemas may not be named after primitives: {schema.full_name}")
        if schema.full_name in self.named:
            raise InvalidSchema(f"Can't redefine: {schema.full_name}")
        doc = node.get("doc")
        schema.doc = doc if isinstance(doc, str) else None
        schema.aliases = [_qualified(alias, space) for alias in _texts(node.get("aliases", []), "aliases")]
        schema.props = _props(node, _RESERVED_OF_ENUM if kind == "enum" else _RESERVED)
        self.named[schema.full_name] = schema
        if kind == "fixed":
            size = node.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise InvalidSchema(f"Invalid or no size: {_dumps(node)[:500]}")
            schema.size = size
        elif kind == "enum":
            self._enum(schema, node)
        else:
            self._fields(schema, node, depth)
        return schema

    def _check_name(self, name: str) -> None:
        if self._is_new and not _NAME.fullmatch(name):
            raise InvalidSchema(f"Illegal name: {name!r}: a name has letters, digits and _, and begins with no digit")

    def _enum(self, schema: _Node, node: dict[str, Any]) -> None:
        if not isinstance(node.get("symbols"), list):
            raise InvalidSchema(f"Enum has no symbols: {_dumps(node)[:500]}")
        schema.symbols = _texts(node["symbols"], "symbols")
        if len(set(schema.symbols)) != len(schema.symbols):
            raise InvalidSchema(f"enum {schema.full_name} has a symbol twice")
        for symbol in schema.symbols:
            self._check_name(symbol)
        default = node.get("default")
        if default is not None:
            if default not in schema.symbols:
                raise InvalidSchema(
                    f"The Enum Default: {default} is not in the enum symbol set: [{', '.join(schema.symbols)}]"
                )
            schema.default_symbol = default

    def _fields(self, schema: _Node, node: dict[str, Any], depth: int) -> None:
        if not isinstance(node.get("fields"), list):
            raise InvalidSchema(f"Record has no fields: {_dumps(node)[:500]}")
        seen = set()
        for entry in node["fields"]:
            name = entry.get("name") if isinstance(entry, dict) else None
            if not isinstance(name, str) or not name or "type" not in entry:
                raise InvalidSchema(f"record {schema.full_name}: a field without name or type: {_dumps(entry)[:500]}")
            self._check_name(name)
            if name in seen:
                raise InvalidSchema(f"Duplicate field {name} in record {schema.full_name}")
            seen.add(name)
            made = self.parse(entry["type"], schema.namespace, depth + 1)
            order = entry.get("order", "ascending")
            if not isinstance(order, str) or order.lower() not in _ORDERS:
                raise InvalidSchema(f"field {name} of record {schema.full_name}: order {order!r}")
            doc = entry.get("doc")
            default = [entry["default"]] if "default" in entry else []
            if default and self._is_new and not _Default().is_of(default[0], made):
                raise InvalidSchema(
                    f"Invalid default for field {name}: {_dumps(default[0])[:2000]} not a "
                    f"{_dumps(_java(made, '', set()))[:2000]}"
                )
            schema.fields.append(
                _Field(
                    name,
                    made,
                    doc if isinstance(doc, str) else None,
                    order.lower(),
                    _texts(entry.get("aliases", []), "aliases"),
                    _props(entry, _RESERVED_OF_FIELD),
                    default,
                )
            )

    def _union(self, nodes: list[Any], namespace: str, depth: int) -> _Node:
        branches = [self.parse(node, namespace, depth + 1) for node in nodes]
        seen = set()
        for branch in branches:
            if branch.kind == "union":
                raise InvalidSchema("Nested union: a union may not be directly in a union")
            key = branch.full_name or branch.kind
            if key in seen:
                raise InvalidSchema(f"Duplicate in union: {key}")
            seen.add(key)
        return _Node("union", branches=branches)


def _props(node: dict[str, Any], reserved: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in reserved}


def _texts(values: Any, what: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidSchema(f"{what} must be a list of strings: {_dumps(values)[:500]}")
    return list(values)


def _qualified(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


class _Default:
    """Whether a JSON value is a default of a type; any branch of a union will do, as since Avro 1.12."""

    def __init__(self) -> None:
        #: Results by value and type: unions in unions try the same again and again.
        self._known: dict[tuple[int, int], bool] = {}

    def is_of(self, value: Any, schema: _Node) -> bool:
        key = id(value), id(schema)
        if key not in self._known:
            if len(self._known) >= _MOST_CHECKED:
                raise InvalidSchema(f"a default has more than {_MOST_CHECKED:,} pairs of a value and a type to check")
            self._known[key] = self._check(value, schema)
        return self._known[key]

    def _check(self, value: Any, schema: _Node) -> bool:
        kind = schema.kind
        if kind == "union":
            return any(self.is_of(value, branch) for branch in schema.branches)
        if kind == "null":
            return value is None
        if kind == "boolean":
            return isinstance(value, bool)
        if kind in ("int", "long"):
            bits = 31 if kind == "int" else 63
            return isinstance(value, int) and not isinstance(value, bool) and -(1 << bits) <= value < 1 << bits
        if kind in ("float", "double"):
            return isinstance(value, int | float) and not isinstance(value, bool)
        if kind in ("string", "bytes", "enum", "fixed"):
            return isinstance(value, str)
        if kind == "array":
            assert schema.items is not None
            items = schema.items
            return isinstance(value, list) and all(self.is_of(item, items) for item in value)
        if kind == "map":
            assert schema.items is not None
            values = schema.items
            return isinstance(value, dict) and all(self.is_of(item, values) for item in value.values())
        return isinstance(value, dict) and all(
            self.is_of(value[item.name], item.type) if item.name in value else bool(item.default)
            for item in schema.fields
        )


def _java(schema: _Node, namespace: str, seen: set[str]) -> Any:
    """The JSON value whose text is that of Java's `Schema.toString`, in a place whose namespace is `namespace`."""
    kind = schema.kind
    if kind == "union":
        return [_java(branch, namespace, seen) for branch in schema.branches]
    if kind in ("array", "map"):
        assert schema.items is not None
        key = "items" if kind == "array" else "values"
        return {"type": kind, key: _java(schema.items, namespace, seen)} | schema.props
    if kind in _PRIMITIVES:
        return {"type": kind} | schema.props if schema.props else kind
    if schema.full_name in seen:
        return schema.name if schema.namespace == namespace else schema.full_name
    seen.add(schema.full_name)
    made: dict[str, Any] = {"type": "error" if schema.is_error else kind, "name": schema.name}
    if schema.namespace != namespace:
        made["namespace"] = schema.namespace
    if schema.doc is not None:
        made["doc"] = schema.doc
    if kind == "fixed":
        made["size"] = schema.size
    elif kind == "enum":
        made["symbols"] = schema.symbols
        if schema.default_symbol is not None:
            made["default"] = schema.default_symbol
    else:
        made["fields"] = [_java_field(item, schema.namespace, seen) for item in schema.fields]
    made |= schema.props
    if schema.aliases:
        made["aliases"] = [
            alias.rpartition(".")[2] if alias.rpartition(".")[0] == schema.namespace else alias
            for alias in schema.aliases
        ]
    return made


def _java_field(item: _Field, namespace: str, seen: set[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"name": item.name, "type": _java(item.type, namespace, seen)}
    if item.doc is not None:
        made["doc"] = item.doc
    if item.default:
        made["default"] = item.default[0]
    if item.order != "ascending":
        made["order"] = item.order
    if item.aliases:
        made["aliases"] = item.aliases
    return made | item.props


def _normal(schema: _Node, seen: set[str]) -> Any:
    """The JSON value of the normalized text: full names, sorted properties and aliases, one order of attributes."""
    kind = schema.kind
    if kind == "union":
        return [_normal(branch, seen) for branch in schema.branches]
    if kind in ("array", "map"):
        assert schema.items is not None
        key = "items" if kind == "array" else "values"
        return {"type": kind, key: _normal(schema.items, seen)} | _normal_props(schema.props)
    if kind in _PRIMITIVES:
        return {"type": kind} | _normal_props(schema.props) if schema.props else kind
    if schema.full_name in seen:
        return schema.full_name
    seen.add(schema.full_name)
    made: dict[str, Any] = {"name": schema.full_name, "type": kind}
    if kind == "enum":
        made["symbols"] = schema.symbols
    elif kind == "fixed":
        made["size"] = schema.size
    else:
        made["fields"] = [_normal_field(item, seen) for item in schema.fields]
    props = _normal_props(schema.props)
    made.update((key, props[key]) for key in _LOGICAL if "logicalType" in props and key in props)
    if schema.doc:
        made["doc"] = schema.doc
    if schema.aliases:
        made["aliases"] = sorted(set(schema.aliases))
    if schema.default_symbol is not None:
        made["default"] = schema.default_symbol
    return made | props


def _normal_props(props: dict[str, Any]) -> dict[str, Any]:
    """Properties in order of their names, those of a logical type first."""
    first = [key for key in _LOGICAL if "logicalType" in props and key in props]
    if "scale" in first and props["scale"] == 0:
        first.remove("scale")
        props = {key: value for key, value in props.items() if key != "scale"}
    return {key: _ordered(props[key]) for key in first + sorted(props.keys() - set(first))}


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def _normal_field(item: _Field, seen: set[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"name": item.name, "type": _normal(item.type, seen), "order": item.order}
    if item.doc is not None:
        made["doc"] = item.doc
    if item.aliases:
        made["aliases"] = sorted(set(item.aliases))
    if item.default:
        made["default"] = _ordered(item.default[0])
    return made | _normal_props(item.props)


@dataclass(frozen=True)
class _Difference:
    """Why a reader can't read what a writer wrote; names of the kinds are those of Avro for Java."""

    kind: str
    path: tuple[str, ...]
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", self.message[:_MOST_LETTERS])

    def text(self) -> str:
        where = "/" + "/".join(token.replace("~", "~0").replace("/", "~1") for token in self.path[1:])
        described = {
            "FIXED_SIZE_MISMATCH": (
                f"The size of FIXED type field at path '{where}' in the {READER} schema does not match with the "
                f"{WRITER} schema"
            ),
            "TYPE_MISMATCH": (
                f"The type (path '{where}') of a field in the {READER} schema does not match with the {WRITER} schema"
            ),
            "NAME_MISMATCH": f"The name of the schema has changed (path '{where}')",
            "MISSING_ENUM_SYMBOLS": (
                f"The {READER} schema is missing enum symbols '{self.message}' at path '{where}' in the {WRITER} schema"
            ),
            "MISSING_UNION_BRANCH": (
                f"The {READER} schema is missing a type inside a union field at path '{where}' in the {WRITER} schema"
            ),
            "READER_FIELD_MISSING_DEFAULT_VALUE": (
                f"The field '{self.message}' at path '{where}' in the {READER} schema has no default value and is "
                f"missing in the {WRITER} schema"
            ),
        }[self.kind]
        return f"{{errorType:'{self.kind}', description:'{described}', additionalInfo:'{self.message}'}}"


class _Ambiguous(Exception):
    """A reader's field means several of the writer's, by its aliases: Java refuses to compare such schemas."""


class _Comparison:
    """The rules of the specification's "Schema Resolution", for all data of a writer's schema."""

    def __init__(self) -> None:
        #: Results by reader and writer; a pair that is being compared is taken for compatible.
        self._compared: dict[tuple[int, int], list[_Difference]] = {}
        self._names = 0

    def compare(self, reader: _Node, writer: _Node, path: tuple[str, ...]) -> list[_Difference]:
        pair = (id(reader), id(writer))
        if pair in self._compared:
            return self._compared[pair]
        if len(self._compared) >= _MOST_PAIRS:
            raise TooComplex(f"more than {_MOST_PAIRS:,} pairs of their types would have to be compared")
        self._compared[pair] = []
        # not all: they double with each level of types that use the one below twice
        self._compared[pair] = list(islice(self._differences(reader, writer, path), MOST_DIFFERENCES))
        return self._compared[pair]

    def _differences(self, reader: _Node, writer: _Node, path: tuple[str, ...]) -> Iterator[_Difference]:
        if reader.kind == writer.kind:
            yield from self._same_kind(reader, writer, path)
        elif writer.kind == "union":
            for index, branch in enumerate(writer.branches):
                yield from self.compare(reader, branch, (*path, str(index)))
        elif reader.kind == "union":
            if all(self.compare(branch, writer, ("",)) for branch in reader.branches):
                yield _Difference(
                    "MISSING_UNION_BRANCH", path, f"reader union lacking writer type: {writer.kind.upper()}"
                )
        elif writer.kind not in _PROMOTED.get(reader.kind, ()):
            message = f"reader type: {reader.kind.upper()} not compatible with writer type: {writer.kind.upper()}"
            yield _Difference("TYPE_MISMATCH", path, message)

    def _same_kind(self, reader: _Node, writer: _Node, path: tuple[str, ...]) -> Iterator[_Difference]:
        kind = reader.kind
        if kind in ("array", "map"):
            assert reader.items is not None
            assert writer.items is not None
            yield from self.compare(reader.items, writer.items, (*path, "items" if kind == "array" else "values"))
        elif kind == "union":
            for index, branch in enumerate(writer.branches):
                if self.compare(reader, branch, ("",)):
                    message = f"reader union lacking writer type: {branch.kind.upper()}"
                    yield _Difference("MISSING_UNION_BRANCH", (*path, str(index)), message)
        elif kind not in _PRIMITIVES:
            if reader.name != writer.name and writer.full_name not in reader.alias_set:
                yield _Difference("NAME_MISMATCH", (*path, "name"), f"expected: {writer.full_name}")
            if kind == "fixed" and reader.size != writer.size:
                message = f"expected: {writer.size}, found: {reader.size}"
                yield _Difference("FIXED_SIZE_MISMATCH", (*path, "size"), message)
            elif kind == "enum":
                missing = sorted(set(writer.symbols) - set(reader.symbols))
                if missing and reader.default_symbol is None:
                    yield _Difference("MISSING_ENUM_SYMBOLS", (*path, "symbols"), f"[{', '.join(missing)}]")
            elif kind == "record":
                yield from self._fields(reader, writer, path)

    def _fields(self, reader: _Node, writer: _Node, path: tuple[str, ...]) -> Iterator[_Difference]:
        written = {item.name: item for item in writer.fields}
        self._names += len(written)
        for index, item in enumerate(reader.fields):
            place = (*path, "fields", str(index))
            self._names += 1 + len(item.aliases)
            if self._names > _MOST_NAMES:
                raise TooComplex(f"more than {_MOST_NAMES:,} names and aliases of fields would have to be looked for")
            names = [name for name in (item.name, *item.aliases) if name in written]
            if len(names) > 1:
                raise _Ambiguous(f"field {item.name} of {reader.full_name} matches several fields: {', '.join(names)}")
            if names:
                yield from self.compare(item.type, written[names[0]].type, (*place, "type"))
            elif not item.default:
                if item.type.kind == "enum" and item.type.default_symbol is not None:
                    yield from self.compare(item.type, writer, (*place, "type"))
                else:
                    yield _Difference("READER_FIELD_MISSING_DEFAULT_VALUE", place, item.name)
