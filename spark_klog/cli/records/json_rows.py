"""JSON → values for Arrow columns of a type that is known: the other way round of `schemas/json_schema/texts.py`.

Fields of a record may be left out where the schema has a default: what a value has of its column's type is its shape,
a type of its own. The values are those of a plan of that type (`schemas/json_schema/row_values.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa

from spark_klog.errors import ConfigError
from spark_klog.schemas.json_schema.columns import ROWS, Dialect
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.schemas.json_schema.row_values import Misfit, NestedTooDeeply, RowParser

_MEMBER = re.compile(r"member\d+")
#: Shapes whose parsers are kept.
_MOST_SHAPES = 1_000
#: Characters of a value that an error shows.
_MOST_SHOWN = 60


def shape_of(value: Any, kind: pa.DataType, path: str = "") -> pa.DataType:
    """The type without the fields of records that the value does not have; `ConfigError` for one that it has too many.

    Items of a list and values of a map share one shape. Of a union's members none may be left out.
    """
    if value is None:
        return kind
    if pa.types.is_struct(kind):
        if not isinstance(value, dict):
            return kind
        fields = {field.name: field for field in kind}
        if unknown := [name for name in value if name not in fields]:
            where = f"field {path}: " if path else ""
            raise ConfigError(f"{where}the schema has no field {', '.join(unknown)}")
        is_union = all(_MEMBER.fullmatch(name) for name in fields)
        return pa.struct(
            [
                field.with_type(shape_of(value.get(name), field.type, f"{path}.{name}" if path else name))
                for name, field in fields.items()
                if name in value or is_union
            ]
        )
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            return kind
        return pa.list_(kind.value_field.with_type(_shape_of_all(value, kind.value_type, f"{path}[]")))
    if pa.types.is_map(kind):
        if not isinstance(value, dict):
            return kind
        items = _shape_of_all(list(value.values()), kind.item_type, f"{path}{{}}")
        return pa.map_(kind.key_field, kind.item_field.with_type(items))
    return kind


def _shape_of_all(values: list[Any], kind: pa.DataType, path: str) -> pa.DataType:
    """The shape of several values; a field that only some of them have is null in the others."""
    if not (pa.types.is_nested(kind) and values):
        return kind
    shapes = {shape_of(value, kind, path) for value in values if value is not None}
    return shapes.pop() if len(shapes) == 1 else kind


class RowReader:
    """Makes rows of JSON values of a dialect, for a column of a type."""

    def __init__(self, kind: pa.DataType, dialect: Dialect = ROWS) -> None:
        self._kind, self._dialect = kind, dialect
        self._key_of = _key_of(kind) or (lambda value: None)
        #: Shapes and their parsers, by what values have.
        self._shapes: dict[Any, tuple[pa.DataType, RowParser]] = {}

    def read(self, value: Any) -> tuple[Any, pa.DataType]:
        """What `pyarrow.array` takes for a value, and its shape. `ConfigError` names the field that does not fit."""
        key = self._key_of(value)
        known = self._shapes.get(key)
        if known is None:
            shape = shape_of(value, self._kind)
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            known = self._shapes[key] = shape, RowParser(column_of(shape, self._dialect))
        shape, parser = known
        try:
            return parser.convert(value), shape
        except Misfit as misfit:
            raise ConfigError(f"{misfit}{_shown(misfit.value)}") from None
        except NestedTooDeeply as error:
            raise ConfigError(str(error)) from None


def _shown(value: Any) -> str:
    """A value that does not fit, behind the reason: a text or a number, others may be long."""
    if value is None or isinstance(value, list | dict):
        return ""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value)
    return f": {text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + '...'}"


def _key_of(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What tells the shapes of values apart; None if they have one only."""
    if pa.types.is_struct(kind):
        nested = [(field.name, key_of) for field in kind if (key_of := _key_of(field.type)) is not None]

        def key_of_object(value: Any) -> Any:
            if not isinstance(value, dict):
                return value is None
            names = tuple(value)
            return (names, *(key_of(value.get(name)) for name, key_of in nested)) if nested else names

        return key_of_object
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        key_of_item = _key_of(kind.value_type if pa.types.is_list(kind) else kind.item_type)
        wanted = list if pa.types.is_list(kind) else dict

        def key_of_items(value: Any) -> Any:
            if not isinstance(value, wanted):
                return value is None
            items = value.values() if isinstance(value, dict) else value
            return True if key_of_item is None else frozenset(map(key_of_item, items))

        return key_of_items
    return None
