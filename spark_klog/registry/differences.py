"""What two versions of a schema differ in, in words, and which levels of compatibility hold between them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from spark_klog.base.names import Format
from spark_klog.registry.formats import InvalidSchema, parse, reasons_of
from spark_klog.schemas.avro.schema import NO_DEFAULT, AvroSchema
from spark_klog.schemas.registry.schemas import LEVELS, NO_REFERENCES, TYPES, References

_DESCRIPTION = re.compile(
    r"""\{errorType:['"]\w+['"], description:['"](.*?)['"](?:, additionalInfo:.*)?\}""", re.DOTALL
)
#: A type that is used twice has its fields twice, and so have those in it.
_MOST_FIELDS = 10_000


class FieldText(NamedTuple):
    """A field in words; `aliases` are other paths that it had."""

    text: str
    aliases: tuple[str, ...] = ()


class Change(NamedTuple):
    """A field that was added, removed, renamed or changed. `before` and `after` are its types, None if it has none."""

    kind: str
    path: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.kind == "added":
            return f"added    {self.path}: {self.after}"
        if self.kind == "removed":
            return f"removed  {self.path}: {self.before}"
        return f"{self.kind:8} {self.path}: {self.before} -> {self.after}"


def changes(
    format: Format,
    old: str,
    new: str,
    old_references: References = NO_REFERENCES,
    new_references: References = NO_REFERENCES,
) -> list[Change]:
    """What happened to the fields, in the order of the new schema, removed ones last.

    `InvalidSchema` for a text that is none; `MissingPackage` for Protobuf without its package.
    """
    before, after = fields_of(format, old, old_references), fields_of(format, new, new_references)
    told, renamed = [], set()
    for path, field in after.items():
        earlier = before.get(path)
        if earlier is None:
            alias = next((one for one in field.aliases if one in before and one not in after), None)
            if alias is None:
                told.append(Change("added", path, None, field.text))
            else:
                renamed.add(alias)
                told.append(Change("renamed", path, f"{alias}: {before[alias].text}", field.text))
        elif earlier.text != field.text:
            told.append(Change("changed", path, earlier.text, field.text))
    gone = [path for path in before if path not in after and path not in renamed]
    return told + [Change("removed", path, before[path].text, None) for path in gone]


def fields_of(format: Format, text: str, references: References = NO_REFERENCES) -> dict[str, FieldText]:
    """The fields of a schema by path: `customer.name`, `lines[].price`, `tags{}`; "" is a schema that has none."""
    if format == "protobuf":
        return dict(_protobuf(text, references))
    if format == "avro":
        from spark_klog.registry.formats import avro

        root = avro.AvroSchema(text, references).root
        return dict(islice(_avro(root, "", ()), _MOST_FIELDS)) or {"": FieldText(_avro_type(root))}
    try:
        value = json.loads(text, parse_int=float)  # `int` refuses thousands of digits, and no number is shown
    except (ValueError, RecursionError) as error:
        raise InvalidSchema(f"the schema is not JSON: {error}") from None
    try:
        return dict(islice(_json_schema(value, value, "", ()), _MOST_FIELDS))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidSchema("the schema is malformed: properties or another keyword has a wrong type") from None


def incompatibilities(
    format: Format, old: Sequence[tuple[str, References]], new: str, references: References = NO_REFERENCES
) -> dict[str, list[str]]:
    """Why each level does not hold between a schema and those before it, the latest first; [] where it holds.

    `InvalidSchema` and `MissingPackage` as of `formats.parse`.
    """
    kind = TYPES[format]
    parsed = parse(kind, new, references)
    earlier = [parse(kind, text, known) for text, known in old]
    # by level without its transitive form
    reasons = {
        "BACKWARD": [reasons_of(parsed, version, "new", "old") for version in earlier],
        "FORWARD": [reasons_of(version, parsed, "old", "new") for version in earlier],
    }
    reasons["FULL"] = [[*first, *second] for first, second in zip(reasons["BACKWARD"], reasons["FORWARD"], strict=True)]
    made: dict[str, list[str]] = {}
    for level in LEVELS[:-1]:
        among = reasons[level.removesuffix("_TRANSITIVE")]
        made[level] = [reason for some in (among if level.endswith("_TRANSITIVE") else among[:1]) for reason in some]
    return made


def in_words(reason: str) -> str:
    """The sentence of a registry's reason: Confluent's have {errorType:'...', description:'...', ...} around it."""
    match = _DESCRIPTION.fullmatch(reason)
    return match[1] if match else reason


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- Avro


def _avro(schema: AvroSchema, path: str, above: tuple[str, ...]) -> Iterator[tuple[str, FieldText]]:
    """The fields below a type; `above` are the records that it is in."""
    if schema.name in above:
        return
    for field in schema.fields:
        below = _below(path, field.name)
        default = "" if field.default is NO_DEFAULT else f" = {json.dumps(field.default)}"
        aliases = tuple(_below(path, alias) for alias in field.aliases)
        yield below, FieldText(_avro_type(field.schema) + default, aliases)
        yield from _avro(field.schema, below, (*above, schema.name))
    for branch in schema.branches:
        yield from _avro(branch, path, above)
    if schema.items is not None:
        yield from _avro(schema.items, path + ("[]" if schema.kind == "array" else "{}"), above)


def _avro_type(schema: AvroSchema) -> str:
    """A type in words, without the fields of records. A logical type is what the text has, known or not."""
    if schema.kind == "union":
        return " | ".join(map(_avro_type, schema.branches)) or "an empty union"
    if schema.items is not None:
        return f"{schema.kind}<{_avro_type(schema.items)}>"
    text = f"{schema.kind} {schema.name}" if schema.name else schema.kind
    if schema.kind == "enum":
        return f"{text} ({', '.join(schema.symbols)})"
    if schema.kind == "fixed":
        text += f" ({schema.size} bytes)"
    logical = schema.props.get("logicalType")
    if logical == "decimal":
        logical = f"decimal({schema.props.get('precision')}, {schema.props.get('scale', 0)})"
    return f"{text} {logical}" if logical else text


# --- JSON Schema


def _json_schema(node: Any, root: Any, path: str, above: tuple[str, ...]) -> Iterator[tuple[str, FieldText]]:
    """The properties below a schema; of several alternatives those of all. `above` are references that led here."""
    while isinstance(node, dict) and "$ref" in node:
        if node["$ref"] in above:
            return
        above = (*above, node["$ref"])
        node = _dereferenced(node["$ref"], root)
    if not isinstance(node, dict):
        return
    required = node.get("required") or ()
    for name, one in (node.get("properties") or {}).items():
        below = _below(path, name)
        yield below, FieldText(_json_type(one, root) + (", required" if name in required else ""))
        yield from _json_schema(one, root, below, above)
    items = node.get("items")
    if isinstance(items, dict):
        yield from _json_schema(items, root, f"{path}[]", above)
    if isinstance(node.get("additionalProperties"), dict):
        yield from _json_schema(node["additionalProperties"], root, path + "{}", above)
    for word in ("allOf", "anyOf", "oneOf"):
        for one in node.get(word) or ():
            yield from _json_schema(one, root, path, above)


def _dereferenced(reference: str, root: Any) -> Any:
    """What a reference within the document refers to; None if it is elsewhere, or nothing."""
    if not reference.startswith("#"):
        return None
    node = root
    for part in reference[1:].split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _json_type(node: Any, root: Any) -> str:
    """A property in words, without the properties below it."""
    if isinstance(node, dict) and "$ref" in node:
        return str(node["$ref"])
    if not isinstance(node, dict):
        return "anything" if node is not False else "nothing"
    kind = node.get("type", "any type")
    text = " | ".join(kind) if isinstance(kind, list) else str(kind)
    if kind == "array" and isinstance(node.get("items"), dict):
        text = f"array<{_json_type(node['items'], root)}>"
    left_out = ("type", "properties", "required", "items", "title", "description", "$comment", "examples")
    rest = [f"{word} {json.dumps(value)}" for word, value in node.items() if word not in left_out]
    return ", ".join([text, *rest])


# --- Protobuf


def _protobuf(text: str, references: References) -> Iterator[tuple[str, FieldText]]:
    """The fields of all messages, and the values of enums, by the names of the file."""
    from spark_klog.registry.formats.protobuf import ProtobufSchema

    def enum_values(enum: Any, path: str) -> Iterator[tuple[str, FieldText]]:
        for value in enum.value:
            yield f"{_below(path, enum.name)}.{value.name}", FieldText(f"enum value {value.number}")

    def fields(message: Any, path: str) -> Iterator[tuple[str, FieldText]]:
        path = _below(path, message.name)
        for field in message.field:
            label = field.Label.Name(field.label).removeprefix("LABEL_").lower()
            kind = field.type_name.lstrip(".") or field.Type.Name(field.type).removeprefix("TYPE_").lower()
            shown = kind if label == "optional" and not field.proto3_optional else f"{label} {kind}"
            if field.HasField("oneof_index") and not field.proto3_optional:
                shown += f" of oneof {message.oneof_decl[field.oneof_index].name}"
            yield f"{path}.{field.name}", FieldText(f"{shown} = {field.number}")
        for nested in message.nested_type:
            yield from fields(nested, path)
        for enum in message.enum_type:
            yield from enum_values(enum, path)

    file = ProtobufSchema(text, references).file
    for message in file.message_type:
        yield from fields(message, "")
    for enum in file.enum_type:
        yield from enum_values(enum, "")
