"""Schema resolution (Avro specification, "Schema Resolution"): a plan of how a writer's values become a reader's.

If the specification leaves a choice, Java's implementation decides, which is Spark's:

- Records need not have one name, except among the branches of a union. Enums and fixed need the same name without
  namespace, or an alias of the reader's.
- A value for a reader's union goes to the first branch of the same type and name; then to the first whose name without
  namespace is the same; then to the first record that it resolves to; then to the first type that it is promoted to.
- A writer's union may have branches that do not match: only a value of such a branch is an error.

Unlike Java, the units of times count: a timestamp-millis read as timestamp-micros is the same time. So do the scales of
decimals, which must be equal. An array whose items do not match is an error even if it is empty.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from spark_klog.errors import SchemaError
from spark_klog.schemas.avro.columns import UNITS, unit_of
from spark_klog.schemas.avro.schema import NO_DEFAULT, PROMOTIONS, AvroField, AvroSchema
from spark_klog.schemas.rows import FieldPair
from spark_klog.wire.primitives import append_varlong

_INT32, _INT64 = 1 << 31, 1 << 63
#: Pairs of a writer's and a reader's type to compare: unions in unions multiply them.
MAX_PAIRS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Mismatch:
    """No value of the writer's type is one of the reader's type."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReadValue:
    """A value of a primitive type, enum or fixed, promoted to the reader's type.

    `unit`: fractions of a second that a number counts, 0 if it is not a time.
    """

    writer: AvroSchema
    reader: AvroSchema
    unit: int = 0


@dataclass(frozen=True, slots=True)
class Skip:
    """A value that the reader has no place for."""

    writer: AvroSchema


@dataclass(frozen=True, slots=True)
class ReadItems:
    """An array, or a map."""

    writer: AvroSchema
    reader: AvroSchema
    item: Plan


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """A record: for each of the writer's fields in turn the reader's field (-1: none) and its plan; then defaults.

    A default is the index of the reader's field, the default in Avro's binary form, and the plan that reads it.
    """

    writer: AvroSchema
    reader: AvroSchema
    steps: tuple[tuple[int, Plan], ...]
    defaults: tuple[tuple[int, bytes, Plan], ...]


@dataclass(frozen=True, slots=True)
class ReadUnion:
    """A value of the writer's union, by its branch."""

    writer: AvroSchema
    branches: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class IntoBranch:
    """A value that becomes one of the reader's union, of the given branch."""

    reader: AvroSchema
    branch: int
    plan: Plan


Plan = ReadValue | Skip | ReadItems | ReadRecord | ReadUnion | IntoBranch | Mismatch


def resolve(writer: AvroSchema, reader: AvroSchema) -> Plan:
    """The plan of how a value of `writer` is read as one of `reader`; `SchemaError` if none can be."""
    plan = _Resolution().plan(writer, reader, "")
    if isinstance(plan, Mismatch):
        raise SchemaError(f"a value of the writer's schema can't be read by the reader's: {plan.reason}")
    return plan


@dataclass
class _Resolution:
    #: Pairs that may still be compared.
    left: int = MAX_PAIRS

    def plan(self, writer: AvroSchema, reader: AvroSchema, path: str) -> Plan:
        self.left -= 1
        if self.left < 0:
            raise SchemaError(f"more than {MAX_PAIRS} pairs of types to compare: too many unions in unions")
        if writer.kind == "union":
            branches = tuple(self.plan(branch, reader, path) for branch in writer.branches)
            mismatches = [branch for branch in branches if isinstance(branch, Mismatch)]
            return mismatches[-1] if len(mismatches) == len(branches) else ReadUnion(writer, branches)
        if reader.kind == "union":
            return self._into_union(writer, reader, path)
        if writer.kind == reader.kind == "record":
            return self._record(writer, reader, path)
        if writer.kind == reader.kind and writer.kind in ("array", "map"):
            assert writer.items is not None
            assert reader.items is not None
            item = self.plan(writer.items, reader.items, path + ("[]" if writer.kind == "array" else "{}"))
            return item if isinstance(item, Mismatch) else ReadItems(writer, reader, item)
        return _value(writer, reader, path)

    def _into_union(self, writer: AvroSchema, reader: AvroSchema, path: str) -> Plan:
        """The plan for the reader's branch that fits best; the first of equal ones."""

        def distance(branch: AvroSchema) -> int:
            return _nearness(writer, branch) if branch.kind == writer.kind else 1 + _OTHER_NAME

        numbers = range(len(reader.branches))
        for number in sorted(numbers, key=lambda number: distance(reader.branches[number])):
            plan = self.plan(writer, reader.branches[number], path)
            if not isinstance(plan, Mismatch):
                return IntoBranch(reader, number, plan)
        return _mismatch(writer, reader, path)

    def _record(self, writer: AvroSchema, reader: AvroSchema, path: str) -> Plan:
        sources = _sources(writer, reader)
        targets = {source: index for index, source in enumerate(sources) if source is not None}
        steps: list[tuple[int, Plan]] = []
        for entry in writer.fields:
            index = targets.get(entry.name, -1)
            if index < 0:
                steps.append((index, Skip(entry.schema)))
                continue
            plan = self.plan(entry.schema, reader.fields[index].schema, f"{path}.{entry.name}" if path else entry.name)
            if isinstance(plan, Mismatch):
                return plan
            steps.append((index, plan))
        defaults: list[tuple[int, bytes, Plan]] = []
        for index, (field, source) in enumerate(zip(reader.fields, sources, strict=True)):
            if source is None:
                below = f"{path}.{field.name}" if path else field.name
                if field.default is NO_DEFAULT:
                    return Mismatch(
                        f"field {below}: the writer's record {writer.name} has no such field, and no default"
                    )
                plan = self.plan(field.schema, field.schema, below)
                if isinstance(plan, Mismatch):  # can't be: a schema matches itself
                    return plan
                defaults.append((index, encoded_default(field, below), plan))
        return ReadRecord(writer, reader, tuple(steps), tuple(defaults))


def _value(writer: AvroSchema, reader: AvroSchema, path: str) -> ReadValue | Mismatch:
    if writer.kind != reader.kind and reader.kind not in PROMOTIONS.get(writer.kind, ()):
        return _mismatch(writer, reader, path)
    if reader.kind in ("enum", "fixed") and _nearness(writer, reader) == _OTHER_NAME:
        return _mismatch(writer, reader, path)
    if reader.kind == "fixed" and writer.size != reader.size:
        return _mismatch(writer, reader, path, f": {writer.size} bytes are not {reader.size}")
    if writer.logical == reader.logical == "decimal" and writer.scale != reader.scale:
        return _mismatch(writer, reader, path, ": the scales differ")
    both = (writer.logical, reader.logical)
    units = [UNITS[unit_of(logical)] if logical and "time" in logical else 0 for logical in both]
    return ReadValue(writer, reader, (units[0] or units[1]) if units[1] else 0)


def _mismatch(writer: AvroSchema, reader: AvroSchema, path: str, why: str = "") -> Mismatch:
    return Mismatch(f"{f'field {path}: ' if path else ''}{writer} is not {reader}{why}")


#: How near the name of a writer's named type is to a reader's.
_SAME_NAME, _SAME_SHORT_NAME, _OTHER_NAME = range(3)


def _nearness(writer: AvroSchema, reader: AvroSchema) -> int:
    if writer.name == reader.name or writer.name in reader.aliases:
        return _SAME_NAME
    return _SAME_SHORT_NAME if writer.short_name == reader.short_name else _OTHER_NAME


def _sources(writer: AvroSchema, reader: AvroSchema) -> list[str | None]:
    """For each of the reader's fields the name of the writer's field: the same one, else an alias."""
    left = {field.name for field in writer.fields}
    sources: list[str | None] = [field.name if field.name in left else None for field in reader.fields]
    left -= {source for source in sources if source}
    for index, field in enumerate(reader.fields):
        if sources[index] is None:
            alias = next((alias for alias in field.aliases if alias in left), None)
            if alias is not None:
                sources[index] = alias
                left.discard(alias)
    return sources


def encoded_default(field: AvroField, path: str) -> bytes:
    """The default of a field in Avro's binary form; `SchemaError` if it is no value of the field's type."""
    result = bytearray()
    try:
        _encode(field.default, field.schema, result, iter(range(MAX_PAIRS)))
    except (TypeError, ValueError, KeyError, OverflowError, struct.error):
        raise SchemaError(f"field {path}: the default {json.dumps(field.default)} is no {field.schema}") from None
    return bytes(result)


def _encode(value: Any, schema: AvroSchema, result: bytearray, steps: Iterator[int]) -> None:
    """Append a default, as JSON has it, in binary form; `ValueError` and others if it is not of the type."""
    if next(steps, None) is None:
        raise SchemaError(f"a default takes more than {MAX_PAIRS} steps: too many unions in unions")
    kind = schema.kind
    if kind == "union":
        _encode_branch(value, schema, result, steps)
    elif kind == "record":
        if not isinstance(value, dict):
            raise TypeError
        for field in schema.fields:
            given = value.get(field.name, field.default)
            if given is NO_DEFAULT:
                raise KeyError(field.name)
            _encode(given, field.schema, result, steps)
    elif kind in ("array", "map"):
        _encode_items(value, schema, result, steps)
    elif kind == "null":
        if value is not None:
            raise TypeError
    elif kind == "boolean":
        if not isinstance(value, bool):
            raise TypeError
        result.append(value)
    elif kind in ("int", "long"):
        limit = _INT32 if kind == "int" else _INT64
        if isinstance(value, bool) or int(value) != value or not -limit <= value < limit:
            raise ValueError
        append_varlong(result, int(value))
    elif kind in ("float", "double"):
        special = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
        if isinstance(value, bool) or not (isinstance(value, int | float) or value in special):
            raise TypeError
        result += struct.pack("<f" if kind == "float" else "<d", special.get(value, value))
    elif kind == "enum":
        append_varlong(result, schema.symbols.index(value))
    else:
        if not isinstance(value, str):
            raise TypeError
        data = value.encode() if kind == "string" else value.encode("latin-1")
        if kind == "fixed" and len(data) != schema.size:
            raise ValueError
        if kind != "fixed":
            append_varlong(result, len(data))
        result += data


def _encode_branch(value: Any, schema: AvroSchema, result: bytearray, steps: Iterator[int]) -> None:
    """Encode by the first branch that the default is of: before Avro 1.12 it had to be the union's first."""
    for number, branch in enumerate(schema.branches):
        part = bytearray()
        append_varlong(part, number)
        try:
            _encode(value, branch, part, steps)
        except (TypeError, ValueError, KeyError, OverflowError, struct.error):
            continue
        result += part
        return
    raise ValueError


def _encode_items(value: Any, schema: AvroSchema, result: bytearray, steps: Iterator[int]) -> None:
    assert schema.items is not None
    if not isinstance(value, list if schema.kind == "array" else dict):
        raise TypeError
    if value:
        append_varlong(result, len(value))
        for item in value:
            if schema.kind == "map":
                _encode(item, AvroSchema("string"), result, steps)
                item = value[item]
            _encode(item, schema.items, result, steps)
    result.append(0)


def read_symbols(writer: AvroSchema, reader: AvroSchema) -> list[int | None]:
    """For each symbol of the writer's enum the index of the reader's: the same one, else its default, else None."""
    indexes = {symbol: index for index, symbol in enumerate(reader.symbols)}
    default = None if reader.default_symbol is None else indexes[reader.default_symbol]
    return [indexes.get(symbol, default) for symbol in writer.symbols]


def field_pairs(plan: Plan, path: tuple[str, ...]) -> list[FieldPair]:
    """See `codec.Decoder`."""
    pairs: list[FieldPair] = []
    for part in _within(plan):
        if not isinstance(part, ReadRecord):
            if not path and (loss := _loss(part)):
                pairs.append(FieldPair("", "", loss))
            continue
        names = [field.name for field in part.reader.fields]
        for entry, (index, below) in zip(part.writer.fields, part.steps, strict=True):
            name = names[index] if index >= 0 else None
            if not path:
                pairs.append(FieldPair(entry.name, name, next(filter(None, map(_loss, _within(below))), "")))
            elif name == path[0]:
                pairs += field_pairs(below, path[1:])
        if not path:
            given = [index for index, _, _ in part.defaults if part.reader.fields[index].default is not None]
            pairs += [FieldPair(None, names[index]) for index in given]
    return pairs


def _within(plan: Plan) -> Iterator[Plan]:
    """The plans of the values that a plan has, whatever unions they are in."""
    if isinstance(plan, ReadUnion):
        for branch in plan.branches:
            yield from _within(branch)
    elif isinstance(plan, IntoBranch):
        yield from _within(plan.plan)
    else:
        yield plan


def _loss(plan: Plan) -> str:
    """Why different values may be read as the same; "" if they are not."""
    if not isinstance(plan, ReadValue):
        return ""
    writer, reader = plan.writer, plan.reader
    if writer.kind == "enum" and reader.kind == "enum" and reader.default_symbol is not None:
        unknown = [symbol for symbol in writer.symbols if symbol not in reader.symbols]
        return f"has the symbols {', '.join(unknown)}, which are read as {reader.default_symbol}" if unknown else ""
    is_rounded = (writer.kind, reader.kind) in (("int", "float"), ("long", "float"), ("long", "double"))
    return f"is {writer}, which is rounded to {reader}" if is_rounded else ""


def smallest(schema: AvroSchema) -> int:
    """Bytes that the smallest value of a schema has; no more than a bound, which is enough for what it is good for."""
    if schema.kind == "record":
        size = sum(smallest(field.schema) for field in schema.fields)
    elif schema.kind == "union":
        size = 1 + min(map(smallest, schema.branches))
    else:
        size = {"null": 0, "float": 4, "double": 8, "fixed": schema.size}.get(schema.kind, 1)
    return min(size, 1 << 20)
