"""An Arrow column → JSON records: the text of each column at once, joined column by column, without a Python object for
a row.
"""

from __future__ import annotations

import binascii
import json
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.errors import EncodeError
from spark_klog.schemas.json_schema.row_values import FIRST_DAY, FIRST_MS, LAST_DAY, LAST_MS, Misfit, load_json
from spark_klog.schemas.json_schema.schema import JsonSchema
from spark_klog.schemas.json_schema.validation import Validator
from spark_klog.schemas.json_schema.writing import Plan, plan_writing

_NULL: Final = pa.scalar("null", pa.string())
#: What JSON has escapes for, beside the quote and the backslash.
_CONTROLS: Final = r"[\x00-\x1f]"


class JsonSchemaEncoder:
    """Encodes Arrow columns of one type as JSON records of one schema; see writing.py for what fits.

    If it `validates`, each record is checked in full against the schema, by jsonschema. `SchemaError` names the field
    whose type does not fit, that is missing, or that the schema does not have.
    """

    def __init__(self, schema: JsonSchema, kind: pa.DataType, *, validates: bool = False) -> None:
        self.schema = schema
        self.type = kind
        self._plan = plan_writing(schema.column, kind)
        self._validator = Validator(schema) if validates else None

    def encode(self, values: pa.Array, prefix: bytes = b"") -> pa.Array:
        """The binary column of the records, each after `prefix`; a null of `values` is a null, whatever the schema.

        `EncodeError` names the row and field that do not fit the schema: null, NaN, no symbol of an enum.
        """
        try:
            text = self._texts(values)
        except Misfit as misfit:
            row = self._first_bad(values)
            raise EncodeError(f"row {row}: {misfit}") from None
        if self._validator is not None:
            for row, record in enumerate(text.cast(pa.binary()).to_pylist()):
                try:
                    if record is not None:
                        self._validator.check(record)
                except ValueError as error:
                    raise EncodeError(f"row {row}: {error}") from None
        data = text.cast(pa.binary())
        return pc.binary_join_element_wise(prefix, data, b"") if prefix else data

    def _texts(self, values: pa.Array) -> pa.Array:
        return pc.if_else(values.is_valid(), _text(self._plan, values, values.null_count), pa.scalar(None, pa.string()))

    def _first_bad(self, values: pa.Array) -> int:
        """The first row that does not fit; one is there."""
        begin, end = 0, len(values)
        while end - begin > 1:
            middle = (begin + end) // 2
            try:
                self._texts(values[begin:middle])
            except Misfit:
                end = middle
            else:
                begin = middle
        return begin


def _misfit(plan: Plan, text: str) -> Misfit:
    misfit = Misfit(text)
    misfit.path.append(f".{plan.path}" if plan.path else "")
    return misfit


def _text(plan: Plan, values: pa.Array, nulls: int) -> pa.Array:
    """The JSON text of each value, "null" for null. More than `nulls` of them have to be allowed by the schema."""
    if values.null_count > nulls and not plan.nullable:
        raise _misfit(plan, "is null, which the schema does not allow")
    if plan.cast is not None and values.type != plan.cast:
        try:
            values = values.cast(plan.cast)
        except pa.ArrowInvalid as error:
            raise _misfit(plan, f"can't be written: {error}") from None
    if plan.form == "struct":
        return _struct(plan, values)
    if plan.form in ("list", "map"):
        return _list(plan, values)
    return _plain(plan, values).fill_null(_NULL)


def _struct(plan: Plan, values: pa.Array) -> pa.Array:
    fields = values.flatten()  # with the nulls of the struct
    parts: list[pa.Array | str] = []
    is_first = True  # whether no property is certain to be there yet
    needs_cut = False
    for member in plan.members:
        comma = "" if is_first and not needs_cut else ","
        if member.plan is None:
            parts.append(f"{comma}{member.key}{member.text}")
            is_first = False
            continue
        field = fields[member.number]
        if member.omits_null and field.null_count:
            if is_first:
                comma, needs_cut = ",", True
            text = pc.binary_join_element_wise(f"{comma}{member.key}", _text(member.plan, field, field.null_count), "")
            parts.append(pc.if_else(field.is_valid(), text, ""))
        else:
            allowed = field.null_count if member.writes_null else values.null_count
            parts += [f"{comma}{member.key}", _text(member.plan, field, allowed)]
            is_first = False
    if all(isinstance(part, str) for part in parts):
        return pc.if_else(values.is_valid(), f"{{{''.join(map(str, parts))}}}", "null")
    if needs_cut:  # a comma stands before the first property
        inner = pc.binary_join_element_wise(*parts, "")
        parts = [pc.binary_slice(inner.cast(pa.binary()), 1, 1 << 31).cast(pa.string())]
    text = pc.binary_join_element_wise("{", *parts, "}", "")
    return text if not values.null_count else pc.if_else(values.is_valid(), text, "null")


def _list(plan: Plan, values: pa.Array) -> pa.Array:
    """The text of lists and of maps: those of all items, joined row by row."""
    assert plan.items is not None
    if plan.form == "map":
        entries = pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"])
        values = pa.Array.from_buffers(
            pa.list_(entries.type), len(values), values.buffers()[:2], offset=values.offset, children=[entries]
        )
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False), out=offsets[1:])
    items = values.flatten()
    if plan.form == "list":
        items, begin, end = _text(plan.items, items, 0), "[", "]"
    else:
        keys, items = items.flatten()
        items = pc.binary_join_element_wise(_quoted(keys.cast(pa.string())), _text(plan.items, items, 0), ":")
        begin, end = "{", "}"
    lists = pa.ListArray.from_arrays(pa.array(offsets), items)
    text = pc.binary_join_element_wise(begin, pc.binary_join(lists, ","), end, "")
    return pc.if_else(values.is_valid(), text, "null") if values.null_count else text


def _plain(plan: Plan, values: pa.Array) -> pa.Array:
    """The text of values of one form; null for null."""
    form = plan.form
    if form == "null":
        return pa.nulls(len(values), pa.string())
    if form == "boolean" or form == "integer":
        return values.cast(pa.string())
    if form == "number":
        if pc.all(pc.is_finite(values)).as_py() is False:
            raise _misfit(plan, "is NaN or infinite, which JSON has not")
        return values.cast(pa.string())
    if form == "decimal":
        return values.cast(pa.string())
    if form == "string":
        if plan.symbols is not None:
            known = pc.is_in(values, pa.array([*plan.symbols, None], pa.string()))
            if pc.all(known).as_py() is False:
                raise _misfit(plan, f"is not among the values of its enum, {json.dumps(plan.symbols)[:200]}")
        return _quoted(values)
    if form == "binary":
        texts = [
            None if value is None else f'"{binascii.b2a_base64(value, newline=False).decode()}"'
            for value in values.to_pylist()
        ]
        return pa.array(texts, pa.string())
    if form == "json":
        return _embedded(plan, values)
    if form == "days" or form == "date":
        days = values.cast(pa.int32())
        _check_range(plan, days, FIRST_DAY, LAST_DAY)
        if form == "days":
            return days.cast(pa.string())
        return pc.binary_join_element_wise('"', values.cast(pa.string()), '"', "")
    times = values.cast(pa.int64())
    _check_range(plan, times, 1000 * FIRST_MS, 1000 * LAST_MS + 999)
    if form == "milliseconds":
        floored = times.fill_null(0).to_numpy() // 1000
        return pc.if_else(times.is_valid(), pa.array(floored), pa.scalar(None, pa.int64())).cast(pa.string())
    text = pc.replace_substring(times.cast(pa.timestamp("us")).cast(pa.string()), " ", "T")
    return pc.binary_join_element_wise('"', text, 'Z"' if form == "timestamp" else '"', "")


def _check_range(plan: Plan, values: pa.Array, first: int, last: int) -> None:
    limits = pc.min_max(values).as_py()
    if limits["min"] is not None and not first <= limits["min"] <= limits["max"] <= last:
        raise _misfit(plan, "is a time before the year 1 or after 9999")


def _quoted(values: pa.Array) -> pa.Array:
    """Strings in quotes, with escapes."""
    if pc.any(pc.match_substring_regex(values, _CONTROLS)).as_py():
        texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values.to_pylist()]
        return pa.array(texts, pa.string())
    for mark in ("\\", '"'):
        if pc.any(pc.match_substring(values, mark)).as_py():
            values = pc.replace_substring(values, mark, f"\\{mark}")
    return pc.binary_join_element_wise('"', values, '"', "")


def _embedded(plan: Plan, values: pa.Array) -> pa.Array:
    """JSON that is given as text: as it is, if it is JSON."""
    for text in values.to_pylist():
        if text is None:
            continue
        try:
            value = load_json(text.encode(), is_strict=True)
        except ValueError as error:
            raise _misfit(plan, f"must be JSON: {error}") from None
        if plan.is_object and not isinstance(value, dict):
            raise _misfit(plan, "must be the JSON of an object")
    return values
