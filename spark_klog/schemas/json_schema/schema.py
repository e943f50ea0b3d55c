"""Parsed JSON Schemas: of drafts 4, 6, 7, 2019-09 and 2020-12, with their references resolved.

`connect.type`, and titles of Kafka Connect's logical types, say more than JSON's own types, as Confluent's converter
writes them:

    {"type": "integer", "connect.type": "int16"}
    {"type": "number", "connect.type": "bytes", "title": "org.apache.kafka.connect.data.Decimal",
     "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from spark_klog.errors import SchemaError
from spark_klog.schemas.json_references import Documents, UnknownReference, base_of
from spark_klog.schemas.json_schema.columns import ANY, NO_DEFAULT, NULL, Column, Form, Property, Size, check_depth
from spark_klog.schemas.json_schema.merging import narrowed, widened
from spark_klog.schemas.json_schema.row_values import is_value
from spark_klog.schemas.registry.schemas import NO_REFERENCES, References

CONNECT: Final = "org.apache.kafka.connect.data."
MOST_DIGITS: Final = 38
_FORMATS: Final[dict[str, Form]] = {
    "date-time": "timestamp",
    "date-time-local": "local-timestamp",
    "date": "date",
}
_INTEGERS: Final = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
#: Keywords that say of a schema without a type what it is about, if not that other values are invalid.
_TYPES_OF_KEYWORDS: Final = {
    "object": frozenset(("properties", "required", "additionalProperties", "patternProperties")),
    "array": frozenset(("items", "prefixItems")),
    "string": frozenset(("pattern", "minLength", "maxLength", "format", "contentEncoding")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
}
#: Dialects in which nothing beside a $ref counts.
_OLD: Final = ("draft-03", "draft-04", "draft-06", "draft-07")


@dataclass(frozen=True)
class JsonSchema:
    """A schema: the column of its values, its title, and the JSON of itself and of its references by name."""

    column: Column
    name: str
    document: Any
    documents: dict[str, Any]


def parse_schema(text: str, references: References = NO_REFERENCES) -> JsonSchema:
    """Parse a schema's text. `references` are texts by the names that $refs have for them.

    `SchemaError` names what is wrong, or has no Arrow type, and where.
    """
    document = _loaded(text, "a JSON Schema")
    documents = {name: _loaded(other, f"reference {name}") for name, other in references.items()}
    try:
        column = _Reader(documents).column(document, document, "", "", 0)
        check_depth(column)
    except RecursionError:
        raise SchemaError("the schema is nested too deeply") from None
    title = document.get("title") if isinstance(document, dict) else None
    return JsonSchema(column, title if isinstance(title, str) else "", document, documents)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _loaded(text: str, what: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise SchemaError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise SchemaError(f"{what} must be JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise SchemaError(f"{what} must be an object, true or false")
    if isinstance(value, dict) and not isinstance(value.get("$schema", ""), str):
        raise SchemaError(f"{what}: '$schema' must be a string")
    return value


def _at(path: str) -> str:
    return f"field {path}" if path else "the schema"


class _Reader:
    """Makes columns of schemas."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self._documents = Documents(documents)
        self._size = Size()
        #: Objects whose columns are being made: one that is met again contains itself.
        self._open: set[int] = set()

    def column(self, value: Any, document: Any, base: str, path: str, depth: int) -> Column:
        self._size.add(depth)
        if value is True:
            return ANY
        if not isinstance(value, dict):
            raise SchemaError(f"{_at(path)}: {json.dumps(value)[:200]} is not a schema")
        if id(value) in self._open:
            return ANY
        self._open.add(id(value))
        try:
            base = base_of(value, base)
            below = _Below(self, document, base, depth + 1)
            return self._all_of(value, below, path)
        except UnknownReference as error:
            raise SchemaError(f"{_at(path)}: {error}") from None
        finally:
            self._open.discard(id(value))

    def _all_of(self, value: dict[str, Any], below: _Below, path: str) -> Column:
        """The column of everything that a schema says."""
        parts = []
        reference = value.get("$ref", value.get("$dynamicRef", value.get("$recursiveRef")))
        if isinstance(reference, str):
            target, document, base = self._documents.resolve(reference, below.document, below.base)
            parts.append(self.column(target, document, base, path, below.depth))
            dialect = below.document.get("$schema", "") if isinstance(below.document, dict) else ""
            if any(name in str(dialect) for name in _OLD):
                return parts[0]
        parts.append(self._typed(value, below, path))
        for one in _list(value, "allOf", path):
            parts.append(below.column(one, path))
        for keyword in ("anyOf", "oneOf"):
            branches = [one for one in _list(value, keyword, path) if one is not False]
            if branches:
                columns = [below.column(one, path) for one in branches]
                # what stands beside the branches is for each of them: `required` alone says nothing of a kind
                outside = reduce(lambda one, other: narrowed(one, other, path), parts)
                if outside.kind != "any":
                    columns = [narrowed(outside, one, path) for one in columns if _may_meet(outside, one)] or [outside]
                parts = [reduce(widened, columns)]
        if "const" in value:
            parts.append(_of_values([value["const"]]))
        if isinstance(value.get("enum"), list) and value["enum"]:
            parts.append(_of_values(value["enum"]))
        return reduce(lambda one, other: narrowed(one, other, path), parts)

    def _typed(self, value: dict[str, Any], below: _Below, path: str) -> Column:
        """The column of `type` and the keywords that belong to it."""
        types = value.get("type")
        if types is None:
            meant = [name for name, keywords in _TYPES_OF_KEYWORDS.items() if not keywords.isdisjoint(value)]
            return replace(self._of_type(meant[0], value, below, path), nullable=True) if len(meant) == 1 else ANY
        names = types if isinstance(types, list) else [types]
        if not names:
            raise SchemaError(f"{_at(path)}: 'type' is an empty list")
        return reduce(widened, [self._of_type(name, value, below, path) for name in names])

    def _of_type(self, name: Any, value: dict[str, Any], below: _Below, path: str) -> Column:
        if name == "object":
            return self._object(value, below, path)
        if name == "array":
            items = value.get("prefixItems", value.get("items", True))
            after = value.get("items" if "prefixItems" in value else "additionalItems", True)
            inside = f"{path}[]"
            if not isinstance(items, list):
                column = ANY if items is False else below.column(items, inside)
            else:
                columns = [below.column(one, inside) for one in items if one is not False]
                if after is not False:
                    columns.append(below.column(after, inside))
                column = reduce(widened, columns) if columns else ANY
            return Column("array", items=column)
        if name == "string":
            encoding, kind = value.get("contentEncoding"), value.get("connect.type")
            if kind == "bytes" or (isinstance(encoding, str) and encoding.lower() == "base64"):
                return Column("string", refined="binary")
            return Column("string", refined=_FORMATS.get(str(value.get("format"))))
        if name == "integer":
            logical = {"Date": "days", "Timestamp": "milliseconds"}.get(_logical(value))
            if logical is not None:
                return Column("integer", refined=logical)  # type: ignore[arg-type]
            return Column("integer", bits=_INTEGERS.get(str(value.get("connect.type")), 64))
        if name == "number":
            if _logical(value) == "Decimal":
                return _decimal(value, path)
            return Column("number", bits=32 if value.get("connect.type") == "float32" else 64)
        if name == "boolean":
            return Column("boolean")
        if name == "null":
            return NULL
        raise SchemaError(f"{_at(path)}: {json.dumps(name)[:200]} is not a type of JSON Schema")

    def _object(self, value: dict[str, Any], below: _Below, path: str) -> Column:
        named = _object(value, "properties", path)
        required = [name for name in _list(value, "required", path) if isinstance(name, str)]
        places = [one.get("connect.index") if isinstance(one, dict) else None for one in named.values()]
        if all(isinstance(place, int) for place in places):
            named = dict(sorted(named.items(), key=lambda item: int(item[1]["connect.index"])))
        properties = []
        for name, one in named.items():
            if one is False:
                continue
            column = below.column(one, f"{path}.{name}" if path else name)
            default = one.get("default", NO_DEFAULT) if isinstance(one, dict) else NO_DEFAULT
            if default is not NO_DEFAULT and not is_value(default, column):
                default = NO_DEFAULT
            properties.append(Property(name, column, name in required, default))
        others = list(_object(value, "patternProperties", path).values())
        more = value.get("additionalProperties", not others)
        if more is not False:
            others.append(more)
        columns = [below.column(one, path + "{}") for one in others if one is not False]
        values = reduce(widened, columns) if columns else None
        if named or values is None or values == ANY:  # else it is a map, of which some keys are certain to be there
            extra = [name for name in dict.fromkeys(required) if name not in named]
            properties += [Property(name, ANY, is_required=True) for name in extra]
        is_closed = value.get("additionalProperties") is False and not columns
        return Column(
            "object", properties=tuple(properties), values=None if values == ANY else values, is_closed=is_closed
        )


@dataclass(frozen=True)
class _Below:
    """Where the schemas within one are."""

    reader: _Reader
    document: Any
    base: str
    depth: int

    def column(self, value: Any, path: str) -> Column:
        return self.reader.column(value, self.document, self.base, path, self.depth)


def _may_meet(outside: Column, branch: Column) -> bool:
    """Whether a branch of anyOf or oneOf says anything about the kind that its surroundings have."""
    kinds = {outside.kind, branch.kind}
    return len(kinds) == 1 or "any" in kinds or kinds == {"integer", "number"} or (outside.nullable and "null" in kinds)


def _list(value: dict[str, Any], keyword: str, path: str) -> list[Any]:
    found = value.get(keyword)
    if isinstance(found, bool):  # draft 3: a property is required
        return []
    if found is not None and not isinstance(found, list):
        raise SchemaError(f"{_at(path)}: {keyword!r} must be an array")
    return found or []


def _object(value: dict[str, Any], keyword: str, path: str) -> dict[str, Any]:
    found = value.get(keyword)
    if found is not None and not isinstance(found, dict):
        raise SchemaError(f"{_at(path)}: {keyword!r} must be an object")
    return found or {}


def _logical(value: dict[str, Any]) -> str:
    """The name of Kafka Connect's logical type."""
    title = value.get("title")
    return title.removeprefix(CONNECT) if isinstance(title, str) and title.startswith(CONNECT) else ""


def _decimal(value: dict[str, Any], path: str) -> Column:
    parameters = value.get("connect.parameters")
    if not isinstance(parameters, dict) or "scale" not in parameters:
        raise SchemaError(f'{_at(path)}: a {CONNECT}Decimal needs its scale, as "connect.parameters": {{"scale": "2"}}')
    try:
        scale = int(parameters["scale"])
        precision = int(parameters.get("connect.decimal.precision", MOST_DIGITS))
    except (TypeError, ValueError):
        scale, precision = -1, -1
    if not 0 <= scale <= precision <= MOST_DIGITS or not precision:
        raise SchemaError(
            f"{_at(path)}: a decimal with {json.dumps(parameters)[:200]} has no type: at most {MOST_DIGITS} digits"
        )
    return Column("number", refined="decimal", precision=precision, scale=scale)


def _of_values(values: Iterable[Any]) -> Column:
    """The column of a const's or enum's values."""
    return reduce(widened, [_of_value(value) for value in values])


def _of_value(value: Any) -> Column:
    if value is None:
        return NULL
    if isinstance(value, bool):
        return Column("boolean")
    if isinstance(value, int | float):
        return Column("integer" if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else "number")
    if isinstance(value, str):
        return Column("string", symbols=(value,))
    return Column("array", items=ANY) if isinstance(value, list) else Column("object")
