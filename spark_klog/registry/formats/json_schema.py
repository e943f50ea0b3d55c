"""JSON Schemas for a registry: checked against their meta-schema, in canonical form, with their references resolved.

A parsed schema is a `Node`: what a JSON Schema says, taken apart as validators for Java do, whose view Confluent's
rules of compatibility are about (`json_differences`). Keywords of several kinds side by side are an allOf of one kind
each, a list of types is an anyOf.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

from spark_klog.base.extras import require
from spark_klog.registry.formats import (
    JSON,
    InvalidSchema,
    ParsedSchema,
    TooComplex,
    limited,
)
from spark_klog.registry.formats.json_differences import Node, differences
from spark_klog.schemas.json_references import Documents, UnknownReference, base_of, objects_in
from spark_klog.schemas.registry.schemas import References

_MAX_DEPTH: Final = 200
#: Values of an enum, or another list without duplicates, that are not all texts or all numbers.
_MOST_UNORDERED: Final = 3000
#: Keywords that make a schema one of arrays, objects, numbers or strings if it has no type.
_OF_ARRAYS: Final = frozenset(
    (
        *("items", "additionalItems", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains"),
    )
)
_OF_OBJECTS: Final = frozenset(
    (
        *("properties", "required", "minProperties", "maxProperties", "dependencies", "dependentRequired"),
        *("dependentSchemas", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    )
)
_OF_NUMBERS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_STRINGS: Final = frozenset(("minLength", "maxLength", "pattern", "format"))
_SNIFFED: Final = (("array", _OF_ARRAYS), ("object", _OF_OBJECTS), ("number", _OF_NUMBERS), ("string", _OF_STRINGS))
#: Dialects whose `items` stands after `prefixItems`.
_MODERN: Final = ("2020-12",)


class JsonSchema:
    """A JSON Schema. `InvalidSchema` if the text is none, or refers to what is not among the references."""

    schema_type = JSON

    def __init__(self, text: str, references: References) -> None:
        require("a registry's JSON Schemas", "jsonschema")
        from jsonschema import FormatChecker
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import Draft7Validator, validator_for

        self._text = text
        self.value = _loaded(text)
        _check_lists(self.value)
        documents = {name: _loaded(reference) for name, reference in references.items()}
        try:
            # no formats: patterns have JavaScript's or Java's syntax, not Python's
            validator = validator_for(self.value, default=Draft7Validator)
            validator.check_schema(self.value, format_checker=FormatChecker(formats=()))
        except SchemaError as error:
            place = "/".join(map(str, error.absolute_path))
            raise InvalidSchema(f"#/{place}: {error.message}") from None
        except RecursionError:
            raise InvalidSchema("the schema is nested too deeply") from None
        self.root = _Loader(documents).document(self.value, "")

    def canonical(self) -> str:
        return _written(json.loads(self._text, parse_float=Decimal), is_sorted=False)

    def normalized(self) -> str:
        return _written(json.loads(self._text, parse_float=Decimal), is_sorted=True)

    def formatted(self, form: str) -> str:
        return self.canonical()

    def unreadable(self, writer: ParsedSchema) -> list[str]:
        assert isinstance(writer, JsonSchema)
        try:
            changes = differences(writer.root, self.root)
        except TooComplex as error:
            return [f"Unexpected exception during compatibility check: {error}"]
        return limited(change.text() for change in changes if not change.is_compatible)


def _written(value: Any, *, is_sorted: bool) -> str:
    """The JSON text as Java's Jackson writes it, with decimals as they were: 1.50, 1E+300."""
    if isinstance(value, dict):
        items = sorted(value.items()) if is_sorted else value.items()
        made = (f"{_written(key, is_sorted=False)}:{_written(below, is_sorted=is_sorted)}" for key, below in items)
        return f"{{{','.join(made)}}}"
    if isinstance(value, list):
        return f"[{','.join(_written(below, is_sorted=is_sorted) for below in value)}]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _loaded(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise InvalidSchema("the schema is nested too deeply") from None
    except ValueError as error:
        raise InvalidSchema(f"a JSON Schema must be JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise InvalidSchema("a JSON Schema must be an object, true or false")
    return value


def _check_lists(value: Any) -> None:
    """Refuse lists of very many values that no order is defined for.

    Meta-schemas want the values to differ, which `jsonschema` then finds out by comparing each with each.
    """
    for below in objects_in(value):
        named = [below.get(name) for name in ("enum", "required", "type")]
        for name in ("dependencies", "dependentRequired"):
            if isinstance(below.get(name), dict):
                named += below[name].values()
        for values in named:
            if isinstance(values, list) and len(values) > _MOST_UNORDERED:
                kinds = {type(below) for below in values}
                if kinds != {str} and not kinds <= {int, float}:
                    raise InvalidSchema(f"a list has more than {_MOST_UNORDERED:,} values of several types")


class _Loader:
    """Makes nodes of schemas, each once: two places with the same reference have the same node."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self._documents = Documents(documents)
        #: Nodes by the identity of the JSON object, and the document that it is in.
        self._nodes: dict[tuple[int, int], Node] = {}
        #: Objects with references that are being followed.
        self._following: set[int] = set()

    def document(self, value: Any, base: str) -> Node:
        return self._load(value, value, base, 0)

    def _load(self, value: Any, document: Any, base: str, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise InvalidSchema(f"the schema is nested more than {_MAX_DEPTH} levels deep")
        if value is True or value == {}:
            return Node("empty")
        if value is False:
            return Node("false")
        if not isinstance(value, dict):
            raise InvalidSchema(f"{json.dumps(value)[:200]} is not a schema")
        key = id(value), id(document)
        if key in self._nodes:
            return self._nodes[key]
        base = base_of(value, base)
        reference = value.get("$ref", value.get("$dynamicRef"))
        if isinstance(reference, str):
            if id(value) in self._following:
                raise InvalidSchema(f"$ref {reference} refers to itself")
            self._following.add(id(value))
            try:
                target, owner, owner_base = self._documents.resolve(reference, document, base)
            except UnknownReference as error:
                raise InvalidSchema(str(error)) from None
            made = self._nodes[key] = self._load(target, owner, owner_base, depth + 1)
            self._following.discard(id(value))
            return made
        made = self._nodes[key] = Node("empty", value)
        parts = list(self._parts(value, document, base, depth))
        if len(parts) == 1:
            made.__dict__.update(parts[0].__dict__)
        elif parts:
            made.kind, made.criterion, made.subschemas = "combined", "allOf", parts
        return made

    def _parts(self, value: dict[str, Any], document: Any, base: str, depth: int) -> Iterator[Node]:
        """The nodes of a schema's kinds."""

        def load(below: Any) -> Node:
            return self._load(below, document, base, depth + 1)

        if "enum" in value:
            yield Node("enum", value)
        for criterion in ("allOf", "anyOf", "oneOf"):
            if isinstance(value.get(criterion), list):
                subschemas = [load(below) for below in value[criterion]]
                yield Node("combined", value, criterion=criterion, subschemas=subschemas)
        if "const" in value:
            yield Node("const", value)
        if "not" in value:
            yield Node("not", value, negated=load(value["not"]))
        if "if" in value:
            branches = [load(value[name]) for name in ("if", "then", "else") if name in value]
            yield Node("conditional", value, subschemas=branches)
        types = value.get("type")
        if isinstance(types, list):
            subschemas = [self._of_type(kind, value, document, load) for kind in types]
            yield Node("combined", value, criterion="anyOf", subschemas=subschemas)
        elif isinstance(types, str):
            yield self._of_type(types, value, document, load)
        else:
            for kind, keywords in _SNIFFED:
                if not keywords.isdisjoint(value):
                    yield self._of_type(kind, value, document, load)

    def _of_type(self, kind: str, value: dict[str, Any], document: Any, load: Callable[[Any], Node]) -> Node:
        def each(name: str) -> dict[str, Node]:
            return {key: load(below) for key, below in (value.get(name) or {}).items()}

        if kind == "integer":
            return Node("number", value | {"type": "integer"})
        if kind == "array":
            made = self._array(value, document, load)
            more = "unevaluatedItems"
        elif kind == "object":
            made = Node("object", value, properties=each("properties"), patterns=each("patternProperties"))
            made.dependent = each("dependentSchemas")
            made.required_with = {key: set(names) for key, names in (value.get("dependentRequired") or {}).items()}
            for key, below in (value.get("dependencies") or {}).items():
                if isinstance(below, list):
                    made.required_with[key] = set(below)
                else:
                    made.dependent[key] = load(below)
            _set_more(made, value.get("additionalProperties", True), load)
            more = "unevaluatedProperties"
        else:
            return Node(kind, value)
        if more in value:
            made.unevaluated = load(value[more])
        return made

    def _array(self, value: dict[str, Any], document: Any, load: Callable[[Any], Node]) -> Node:
        made = Node("array", value)
        dialect = document.get("$schema", "") if isinstance(document, dict) else ""
        is_modern = "prefixItems" in value or any(name in dialect for name in _MODERN)
        items = value.get("items")
        if is_modern and "prefixItems" in value:
            made.first_items = [load(below) for below in value["prefixItems"]]
            _set_more(made, True if items is None else items, load)
            return made
        if isinstance(items, list):
            made.first_items = [load(below) for below in items]
        elif items is not None:
            made.items = load(items)
        _set_more(made, value.get("additionalItems", True), load)
        return made


def _set_more(made: Node, more: Any, load: Callable[[Any], Node]) -> None:
    """What an array or object says of items or properties that it does not name."""
    if more is False:
        made.permits_more = False
    elif more is not True:
        made.more = load(more)
