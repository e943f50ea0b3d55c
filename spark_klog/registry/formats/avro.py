"""Avro schemas for a registry (Avro specification 1.12): parsed, in Java's text form, normalized, compared.

The parser is that of rows, but a type may contain itself here. The canonical text is what Java's `Schema.toString`
gives: Confluent's registry stores that, so ids depend on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any, Final

from spark_klog.errors import SchemaError
from spark_klog.registry.formats import (
    AVRO,
    MOST_DIFFERENCES,
    READER,
    WRITER,
    InvalidSchema,
    ParsedSchema,
    TooComplex,
    limited,
)
from spark_klog.schemas.avro.schema import (
    NO_DEFAULT,
    PRIMITIVES,
    PROMOTIONS,
    AvroField,
    AvroParser,
    AvroSchema as Node,
)
from spark_klog.schemas.registry.schemas import References

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Values and types that are compared for one default.
_MOST_CHECKED: Final = 200_000
#: Pairs of a reader's and a writer's types that are compared, and names of fields that are looked for in all of them.
_MOST_PAIRS: Final = 200_000
_MOST_NAMES: Final = 2_000_000
#: Letters of names in a difference.
_MOST_LETTERS: Final = 1000
#: Properties of a logical type, in the order in which a normalized text has them.
_LOGICAL: Final = ("logicalType", "precision", "scale")


class AvroSchema:
    """An Avro schema. `InvalidSchema` if the text, or one of the references, is none."""

    schema_type = AVRO

    def __init__(self, text: str, references: References, *, is_new: bool = False) -> None:
        parser = AvroParser()
        for name, reference in references.items():
            try:
                _parsed(parser, reference, is_new=is_new)
            except InvalidSchema as error:
                raise InvalidSchema(f"reference {name}: {error}") from None
        self._foreign = set(parser.named)
        self.root = _parsed(parser, text, is_new=is_new)

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


def _parsed(parser: AvroParser, text: str, *, is_new: bool) -> Node:
    before = len(parser.named)
    try:
        parsed = parser.parse(text)
    except SchemaError as error:
        raise InvalidSchema(str(error)) from None
    if is_new:
        for schema in islice(parser.named.values(), before, None):
            _check_new(schema)
    return parsed


def _dumps(value: Any) -> str:
    """The JSON text as Java's Jackson writes it: without white space, and with Java's form of doubles."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{_dumps(key)}:{_dumps(entry)}' for key, entry in value.items())}}}"
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


def _check_new(schema: Node) -> None:
    """`InvalidSchema` of names and defaults that registries once accepted."""
    for name in [*schema.name.split("."), *schema.symbols, *(entry.name for entry in schema.fields)]:
        if not _NAME.fullmatch(name):
            raise InvalidSchema(f"Illegal name: {name!r}: a name has letters, digits and _, and begins with no digit")
    for entry in schema.fields:
        if entry.default is not NO_DEFAULT and not _Default().is_of(entry.default, entry.schema):
            raise InvalidSchema(
                f"Invalid default for field {entry.name}: {_dumps(entry.default)[:2000]} not a "
                f"{_dumps(_java(entry.schema, '', set()))[:2000]}"
            )


class _Default:
    """Whether a JSON value is a default of a type; any branch of a union will do, as since Avro 1.12."""

    def __init__(self) -> None:
        #: Results by value and type: unions in unions try the same again and again.
        self._known: dict[tuple[int, int], bool] = {}

    def is_of(self, value: Any, schema: Node) -> bool:
        key = id(value), id(schema)
        if key not in self._known:
            if len(self._known) >= _MOST_CHECKED:
                raise InvalidSchema(f"a default has more than {_MOST_CHECKED:,} pairs of a value and a type to check")
            self._known[key] = self._check(value, schema)
        return self._known[key]

    def _check(self, value: Any, schema: Node) -> bool:
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
        if (items := schema.items) is not None:
            values = value.values() if isinstance(value, dict) else value
            return isinstance(value, list if kind == "array" else dict) and all(
                self.is_of(each, items) for each in values
            )
        return isinstance(value, dict) and all(
            self.is_of(value[field.name], field.schema) if field.name in value else field.default is not NO_DEFAULT
            for field in schema.fields
        )


def _unnamed(schema: Node, props: dict[str, Any], below: Callable[[Node], Any]) -> Any:
    """The JSON value of a type without a name."""
    if schema.kind == "union":
        return list(map(below, schema.branches))
    if schema.items is not None:
        return {"type": schema.kind, "items" if schema.kind == "array" else "values": below(schema.items)} | props
    return {"type": schema.kind} | props if props else schema.kind


def _java(schema: Node, namespace: str, seen: set[str]) -> Any:
    """The JSON value whose text is that of Java's `Schema.toString`, in a place whose namespace is `namespace`."""
    kind = schema.kind
    if not schema.name:
        return _unnamed(schema, schema.props, lambda node: _java(node, namespace, seen))
    if schema.name in seen:
        return schema.short_name if schema.namespace == namespace else schema.name
    seen.add(schema.name)
    made: dict[str, Any] = {"type": "error" if schema.is_error else kind, "name": schema.short_name}
    if schema.namespace != namespace:
        made["namespace"] = schema.namespace
    if schema.doc is not None:
        made["doc"] = schema.doc
    if kind == "fixed":
        made["size"] = schema.size
    elif kind == "enum":
        made["symbols"] = list(schema.symbols)
        if schema.default_symbol is not None:
            made["default"] = schema.default_symbol
    else:
        made["fields"] = [_java_field(field, schema.namespace, seen) for field in schema.fields]
    made |= schema.props
    if schema.aliases:
        made["aliases"] = [
            alias.rpartition(".")[2] if alias.rpartition(".")[0] == schema.namespace else alias
            for alias in schema.aliases
        ]
    return made


def _java_field(field: AvroField, namespace: str, seen: set[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"name": field.name, "type": _java(field.schema, namespace, seen)}
    if field.doc is not None:
        made["doc"] = field.doc
    if field.default is not NO_DEFAULT:
        made["default"] = field.default
    if field.order != "ascending":
        made["order"] = field.order
    if field.aliases:
        made["aliases"] = list(field.aliases)
    return made | field.props


def _normal(schema: Node, seen: set[str]) -> Any:
    """The JSON value of the normalized text: full names, sorted properties and aliases, one order of attributes."""
    kind = schema.kind
    if not schema.name:
        return _unnamed(schema, _normal_props(schema.props), lambda node: _normal(node, seen))
    if schema.name in seen:
        return schema.name
    seen.add(schema.name)
    made: dict[str, Any] = {"name": schema.name, "type": kind}
    if kind == "enum":
        made["symbols"] = list(schema.symbols)
    elif kind == "fixed":
        made["size"] = schema.size
    else:
        made["fields"] = [_normal_field(field, seen) for field in schema.fields]
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
    return [_ordered(entry) for entry in value] if isinstance(value, list) else value


def _normal_field(field: AvroField, seen: set[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"name": field.name, "type": _normal(field.schema, seen), "order": field.order}
    if field.doc is not None:
        made["doc"] = field.doc
    if field.aliases:
        made["aliases"] = sorted(set(field.aliases))
    if field.default is not NO_DEFAULT:
        made["default"] = _ordered(field.default)
    return made | _normal_props(field.props)


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

    def compare(self, reader: Node, writer: Node, path: tuple[str, ...]) -> list[_Difference]:
        pair = (id(reader), id(writer))
        if pair in self._compared:
            return self._compared[pair]
        if len(self._compared) >= _MOST_PAIRS:
            raise TooComplex(f"more than {_MOST_PAIRS:,} pairs of their types would have to be compared")
        self._compared[pair] = []
        # not all: they double with each level of types that use the one below twice
        self._compared[pair] = list(islice(self._differences(reader, writer, path), MOST_DIFFERENCES))
        return self._compared[pair]

    def _differences(self, reader: Node, writer: Node, path: tuple[str, ...]) -> Iterator[_Difference]:
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
        elif reader.kind not in PROMOTIONS.get(writer.kind, ()):
            message = f"reader type: {reader.kind.upper()} not compatible with writer type: {writer.kind.upper()}"
            yield _Difference("TYPE_MISMATCH", path, message)

    def _same_kind(self, reader: Node, writer: Node, path: tuple[str, ...]) -> Iterator[_Difference]:
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
        elif kind not in PRIMITIVES:
            if reader.short_name != writer.short_name and writer.name not in reader.alias_set:
                yield _Difference("NAME_MISMATCH", (*path, "name"), f"expected: {writer.name}")
            if kind == "fixed" and reader.size != writer.size:
                message = f"expected: {writer.size}, found: {reader.size}"
                yield _Difference("FIXED_SIZE_MISMATCH", (*path, "size"), message)
            elif kind == "enum":
                missing = sorted(set(writer.symbols) - set(reader.symbols))
                if missing and reader.default_symbol is None:
                    yield _Difference("MISSING_ENUM_SYMBOLS", (*path, "symbols"), f"[{', '.join(missing)}]")
            elif kind == "record":
                yield from self._fields(reader, writer, path)

    def _fields(self, reader: Node, writer: Node, path: tuple[str, ...]) -> Iterator[_Difference]:
        written = {field.name: field for field in writer.fields}
        self._names += len(written)
        for index, field in enumerate(reader.fields):
            place = (*path, "fields", str(index))
            self._names += 1 + len(field.aliases)
            if self._names > _MOST_NAMES:
                raise TooComplex(f"more than {_MOST_NAMES:,} names and aliases of fields would have to be looked for")
            names = [name for name in (field.name, *field.aliases) if name in written]
            if len(names) > 1:
                raise _Ambiguous(f"field {field.name} of {reader.name} matches several fields: {', '.join(names)}")
            if names:
                yield from self.compare(field.schema, written[names[0]].schema, (*place, "type"))
            elif field.default is NO_DEFAULT:
                if field.schema.kind == "enum" and field.schema.default_symbol is not None:
                    yield from self.compare(field.schema, writer, (*place, "type"))
                else:
                    yield _Difference("READER_FIELD_MISSING_DEFAULT_VALUE", place, field.name)
