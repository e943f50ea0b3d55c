"""One column of several schemas: what all of them say (allOf), and what any of them says (anyOf, oneOf)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema.columns import ANY, NO_DEFAULT, NULL, Column, Form, Property

#: Digits that integers of so many bits have.
_DIGITS: Final = {8: 3, 16: 5, 32: 10, 64: 19}


def narrowed(one: Column, other: Column, path: str) -> Column:
    """The column of values that both schemas describe; `SchemaError` if there are none."""
    nullable = one.nullable and other.nullable
    for general, special in ((one, other), (other, one)):
        if general.kind == "any":
            return replace(special, nullable=nullable) if special.kind != "null" else special
        if special.kind == "null" and general.nullable:
            return special
    kinds = {one.kind, other.kind}
    if kinds == {"integer", "number"}:
        return replace(one if one.kind == "integer" else other, nullable=nullable)
    if len(kinds) > 1:
        if nullable:  # null is all that both have
            return NULL
        where = f"field {path}" if path else "the schema"
        raise SchemaError(f"{where}: no value is {one} and also {other}, as allOf, $ref or enum say")
    if one.kind == "array":
        assert one.items is not None
        assert other.items is not None
        return replace(one, nullable=nullable, items=narrowed(one.items, other.items, f"{path}[]"))
    if one.kind == "object":
        return _both_objects(one, other, nullable, path)
    special = one if other.refined is None else other
    symbols = one.symbols if other.symbols is None else other.symbols
    if one.symbols is not None and other.symbols is not None:
        symbols = tuple(symbol for symbol in one.symbols if symbol in other.symbols)
    return replace(special, nullable=nullable, bits=min(one.bits, other.bits), symbols=symbols)


def _both_objects(one: Column, other: Column, nullable: bool, path: str) -> Column:
    theirs = {item.name: item for item in other.properties}
    properties = []
    for mine in one.properties:
        same = theirs.pop(mine.name, None)
        if same is not None:
            column = narrowed(mine.column, same.column, f"{path}.{mine.name}" if path else mine.name)
            default = mine.default if same.default is NO_DEFAULT else same.default
            mine = Property(mine.name, column, mine.is_required or same.is_required, default)
        properties.append(mine)
    if one.values is None or other.values is None:
        values = other.values if one.values is None else one.values
    else:
        values = narrowed(one.values, other.values, path + "{}")
    is_closed = one.is_closed or other.is_closed
    return Column("object", nullable, properties=(*properties, *theirs.values()), values=values, is_closed=is_closed)


def widened(one: Column, other: Column) -> Column:
    """The column of values that either schema describes; of different kinds it is JSON text."""
    nullable = one.nullable or other.nullable
    if one.kind == "null" or other.kind == "null":
        return replace(other if one.kind == "null" else one, nullable=True)
    kinds = {one.kind, other.kind}
    mixed = replace(ANY, nullable=nullable)
    if kinds == {"integer", "number"}:
        number, integer = (one, other) if one.kind == "number" else (other, one)
        if integer.refined is not None:
            return mixed
        if number.refined == "decimal":
            digits = number.precision - number.scale >= _DIGITS[integer.bits]
            return replace(number, nullable=nullable) if digits else Column("number", nullable)
        return Column("number", nullable)
    if len(kinds) > 1 or one.kind == "any":
        return mixed
    if one.kind == "array":
        assert one.items is not None
        assert other.items is not None
        return replace(one, nullable=nullable, items=widened(one.items, other.items))
    if one.kind == "object":
        return _either_object(one, other, nullable)
    symbols = None
    if one.symbols is not None and other.symbols is not None:
        symbols = tuple(dict.fromkeys(one.symbols + other.symbols))
    bits = max(one.bits, other.bits)
    if _refinement(one) == _refinement(other):
        return replace(one, nullable=nullable, bits=bits, symbols=symbols)
    if one.kind == "integer":  # days and milliseconds: what a number means is not to be seen
        return Column("integer", nullable)
    return Column(one.kind, nullable, symbols=symbols)


def _refinement(column: Column) -> tuple[Form | None, int, int]:
    return column.refined, column.precision, column.scale


def _either_object(one: Column, other: Column, nullable: bool) -> Column:
    if (one.form == "struct") != (other.form == "struct"):  # named properties, and any others
        return Column("object", nullable)
    theirs = {item.name: item for item in other.properties}
    properties = []
    for mine in one.properties:
        same = theirs.pop(mine.name, None)
        if same is None:
            mine = replace(mine, is_required=False)
        else:
            default = mine.default if mine.default == same.default else NO_DEFAULT
            is_required = mine.is_required and same.is_required
            mine = Property(mine.name, widened(mine.column, same.column), is_required, default)
        properties.append(mine)
    properties += [replace(item, is_required=False) for item in theirs.values()]
    values = None
    if one.values is not None and other.values is not None:
        values = widened(one.values, other.values)
    is_closed = one.is_closed and other.is_closed
    return Column("object", nullable, properties=tuple(properties), values=values, is_closed=is_closed)
