"""Arrow columns as JSON, a text a row, made column by column: no Python object is made for a row.

By a plan for a JSON Schema (writing.py); or as values are shown, by `klog consume` and the page, which have for

struct                       an object with all fields           decimal          a number with all digits of its scale
list                         a list                              duration         "1.500000s", as in Protobuf's JSON
map                          an object                           date, time       "2026-11-21", "10:00:00.000000"
bytes                        text if they are UTF-8,             timestamp        "2026-11-21T10:00:00.123456Z", without
                             else {"base64": "..."};                              the Z if it is a local one; a number
NaN, infinity                "NaN", "Infinity", "-Infinity"                       beyond the years of Arrow's calendar

`texts_array` and `literal` make them of Python's objects: `pyarrow.array` and `pyarrow.scalar` import pandas, if it is
installed, and that takes longer than all else of a short command.
"""

from __future__ import annotations

import binascii
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.columns.schema import is_text
from spark_klog.records.contract import json_value
from spark_klog.schemas.json_schema.columns import UNIT_DIGITS, Form
from spark_klog.schemas.json_schema.row_values import FIRST_DAY, FIRST_MS, LAST_DAY, LAST_MS, Misfit, load_json

#: What JSON escapes by two characters; the backslash first.
_ESCAPES = (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t"))
#: As Arrow writes them, and as Avro's and Protobuf's JSON do.
_NOT_FINITE = (("nan", '"NaN"'), ("-inf", '"-Infinity"'), ("inf", '"Infinity"'))


@dataclass(frozen=True)
class Style:
    """How JSON is written. `is_shown`: whatever has no form in a JSON Schema gets one, instead of an error."""

    comma: str = ","
    colon: str = ":"
    is_shown: bool = False
    #: Whether other characters are escaped, for terminals.
    ascii: bool = False
    #: Whether bytes are shown in base64 always, as a JSON Schema has them.
    base64: bool = False


COMPACT: Final = Style()


@dataclass(frozen=True)
class Member:
    """A property that is written: of the struct's field `number`, or the constant `text`, with name and colon."""

    key: str
    plan: Plan | None = None
    number: int = -1
    text: str = ""
    #: Whether null is written as null, or else the property is left out; an error if it may be neither.
    writes_null: bool = False
    omits_null: bool = False


@dataclass(frozen=True)
class Plan:
    """How the values of a column are written. `path` is the field's name for errors."""

    form: Form | None
    path: str
    nullable: bool
    #: Arrow casts the column to it first, None: it is written as it is.
    cast: pa.DataType | None = None
    symbols: tuple[str, ...] | None = None
    #: Of json: the value has to be an object.
    is_object: bool = False
    items: Plan | None = None
    #: Of the names in a map that are no text.
    keys: Plan | None = None
    members: tuple[Member, ...] = ()
    style: Style = COMPACT


def texts_array(texts: Sequence[bytes]) -> pa.Array:
    """A column of texts, large_binary."""
    ends = array("q", accumulate(map(len, texts), initial=0))
    return pa.Array.from_buffers(
        pa.large_binary(), len(texts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    )


def literal(text: bytes | str) -> pa.Scalar:
    return texts_array([text.encode() if isinstance(text, str) else text])[0]


EMPTY, NULL = literal(b""), literal(b"null")
_QUOTE = literal(b'"')
_ZERO = pa.Array.from_buffers(pa.int32(), 1, [None, pa.py_buffer(bytes(4))])[0]


def json_texts(column: pa.Array, ascii: bool = False, *, base64: bool = False) -> pa.Array:
    """The JSON of each value as it is shown, large_binary without nulls; `ascii` and `base64` as of `Style`."""
    style = Style(", ", ": ", is_shown=True, ascii=ascii, base64=base64)
    return plan_texts(_shown(column.type, style), column, column.null_count)


def _shown(kind: pa.DataType, style: Style) -> Plan:
    types = pa.types

    def plan(form: Form | None, **parts: object) -> Plan:
        return Plan(form, "", nullable=True, style=style, **parts)  # type: ignore[arg-type]

    if types.is_dictionary(kind):
        return plan(_shown(kind.value_type, style).form, cast=kind.value_type)
    if types.is_struct(kind):
        members = [
            Member(f"{json.dumps(field.name, ensure_ascii=style.ascii)}: ", _shown(field.type, style), number)
            for number, field in enumerate(kind)
        ]
        return plan("struct", members=tuple(members))
    if types.is_list(kind):
        return plan("list", items=_shown(kind.value_type, style))
    if types.is_map(kind):
        keys = None if is_text(kind.key_type) else _shown(kind.key_type, style)
        return plan("map", keys=keys, items=_shown(kind.item_type, style))
    forms: tuple[tuple[bool, Form], ...] = (
        (types.is_null(kind), "null"),
        (types.is_boolean(kind), "boolean"),
        (types.is_integer(kind), "integer"),
        (types.is_decimal(kind), "decimal"),
        (types.is_floating(kind), "number"),
        (types.is_date32(kind), "date"),
        (types.is_time(kind), "time"),
        (types.is_duration(kind), "duration"),
        (types.is_timestamp(kind), "timestamp" if getattr(kind, "tz", None) else "local-timestamp"),
        (is_text(kind), "string"),
        (style.base64 and types.is_binary(kind), "binary"),
    )
    return plan(next((form for is_one, form in forms if is_one), None))


def misfit_of(plan: Plan, text: str) -> Misfit:
    misfit = Misfit(text)
    misfit.path.append(f".{plan.path}" if plan.path else "")
    return misfit


def plan_texts(plan: Plan, values: pa.Array, nulls: int) -> pa.Array:
    """The JSON of each value, large_binary, "null" for null. More than `nulls` of them have to be allowed by the plan.

    `Misfit` for a value that the plan has no form for.
    """
    if values.null_count > nulls and not plan.nullable:
        raise misfit_of(plan, "is null, which the schema does not allow")
    if plan.cast is not None and values.type != plan.cast:
        try:
            values = values.cast(plan.cast)
        except pa.ArrowInvalid as error:
            raise misfit_of(plan, f"can't be written: {error}") from None
    if plan.form == "struct":
        return _with_nulls(_objects(plan, values), values)
    if plan.form == "list" or plan.form == "map":
        return _with_nulls(_sequences(plan, values), values)
    return _plain(plan, values).cast(pa.large_binary()).fill_null(NULL)


def _joined(columns: list[pa.Array | pa.Scalar]) -> pa.Array:
    return pc.binary_join_element_wise(*columns, EMPTY)


def _with_nulls(texts: pa.Array, values: pa.Array) -> pa.Array:
    return pc.if_else(values.is_null(), NULL, texts) if values.null_count else texts


def _objects(plan: Plan, values: pa.Array) -> pa.Array:
    fields = values.flatten()  # with the nulls of the struct
    parts: list[pa.Array | pa.Scalar] = []
    is_first = True  # whether no property is certain to be there yet
    needs_cut = False
    for member in plan.members:
        comma = "" if is_first and not needs_cut else plan.style.comma
        if member.plan is None:
            parts.append(literal(f"{comma}{member.key}{member.text}"))
            is_first = False
            continue
        field = fields[member.number]
        if member.omits_null and field.null_count:
            if is_first:
                comma, needs_cut = plan.style.comma, True
            text = _joined([literal(f"{comma}{member.key}"), plan_texts(member.plan, field, field.null_count)])
            parts.append(pc.if_else(field.is_valid(), text, EMPTY))
        else:
            allowed = field.null_count if member.writes_null else values.null_count
            parts += [literal(f"{comma}{member.key}"), plan_texts(member.plan, field, allowed)]
            is_first = False
    if not any(isinstance(part, pa.Array) for part in parts):
        return texts_array([b"{%s}" % b"".join(part.as_py() for part in parts)] * len(values))
    if needs_cut:  # a comma stands before the first property
        parts = [pc.binary_slice(_joined(parts), len(plan.style.comma), 1 << 31)]
    return _joined([literal("{"), *parts, literal("}")])


def _sequences(plan: Plan, values: pa.Array) -> pa.Array:
    """The JSON of lists and of maps: that of all items, joined row by row."""
    assert plan.items is not None
    if plan.form == "map":
        entries = pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"])
        values = pa.Array.from_buffers(
            pa.list_(entries.type), len(values), values.buffers()[:2], offset=values.offset, children=[entries]
        )
    offsets = np.zeros(len(values) + 1, np.int32)
    lengths = pc.coalesce(pc.list_value_length(values), _ZERO)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
    items = values.flatten()
    begin, end = "[", "]"
    if plan.form == "list":
        items = plan_texts(plan.items, items, 0)
    else:
        begin, end = "{", "}"
        keys, items = items.flatten()
        if plan.keys is None:
            names = _quoted(keys, plan.style.ascii)
        else:
            names = _joined([_QUOTE, plan_texts(plan.keys, keys, 0), _QUOTE])
        items = _joined([names, literal(plan.style.colon), plan_texts(plan.items, items, 0)])
    ends = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)])
    lists = pa.ListArray.from_arrays(ends, items.cast(pa.binary()))  # `binary_join` knows no large_binary
    joined = pc.binary_join(lists, plan.style.comma.encode()).cast(pa.large_binary())
    return _joined([literal(begin), joined, literal(end)])


def _plain(plan: Plan, values: pa.Array) -> pa.Array:
    """The text of values of one form; null for null."""
    form, style = plan.form, plan.style
    if form == "null":
        return values.cast(pa.string())
    if form == "boolean" or form == "integer":
        return values.cast(pa.string())
    if form == "decimal":
        return _digits(values)
    if form == "number":
        return _numbers(plan, values)
    if form == "string":
        if plan.symbols is not None:
            known = pc.is_in(values, pa.array([*plan.symbols, None], pa.string()))
            if pc.all(known).as_py() is False:
                raise misfit_of(plan, f"is not among the values of its enum, {json.dumps(plan.symbols)[:200]}")
        return _quoted(values, style.ascii)
    if form == "binary":
        texts = [
            None if value is None else f'"{binascii.b2a_base64(value, newline=False).decode()}"'
            for value in values.to_pylist()
        ]
        return pa.array(texts, pa.string())
    if form == "json":
        return _embedded(plan, values)
    if form is None:
        try:
            return _quoted(values.cast(pa.binary()), style.ascii)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return _in_quotes(
                pa.array([None if cell is None else str(cell) for cell in values.to_pylist()], pa.string())
            )
    return _times(plan, values)


def _times(plan: Plan, values: pa.Array) -> pa.Array:
    form, is_shown = plan.form, plan.style.is_shown
    if form == "duration":
        return _in_quotes(_seconds(values), "s")
    if form == "time":
        return _in_quotes(values.cast(pa.string()))
    if form == "days" or form == "date":
        if not is_shown:
            _check_range(plan, values.cast(pa.int32()), FIRST_DAY, LAST_DAY)
        if form == "days":
            return values.cast(pa.int32()).cast(pa.string())
        return _in_range(_in_quotes(values.cast(pa.string())))
    times = values.cast(pa.int64())
    if not is_shown:
        _check_range(plan, times, 1000 * FIRST_MS, 1000 * LAST_MS + 999)
    if form == "milliseconds":
        floored = times.fill_null(0).to_numpy() // 1000
        return pc.if_else(times.is_valid(), pa.array(floored), pa.scalar(None, pa.int64())).cast(pa.string())
    text = times.cast(pa.timestamp(values.type.unit)).cast(pa.string())
    text = pc.replace_substring(text, " ", "T", max_replacements=1)
    return _in_range(_in_quotes(text, "Z" if form == "timestamp" else ""))


def _check_range(plan: Plan, values: pa.Array, first: int, last: int) -> None:
    limits = pc.min_max(values).as_py()
    if limits["min"] is not None and not first <= limits["min"] <= limits["max"] <= last:
        raise misfit_of(plan, "is a time before the year 1 or after 9999")


def _in_quotes(texts: pa.Array, end: str = "") -> pa.Array:
    return _joined([_QUOTE, texts.cast(pa.large_binary()), literal(f'{end}"')])


def _in_range(texts: pa.Array) -> pa.Array:
    """Numbers for times of which Arrow has no text, as they are beyond its calendar."""
    if not pc.any(pc.match_substring(texts, "<")).as_py():
        return texts
    return pc.replace_substring_regex(texts, r'^"<value.out of range: (-?\d+)>Z?"$', r"\1")


def _numbers(plan: Plan, values: pa.Array) -> pa.Array:
    texts = values.cast(pa.string())
    is_finite = pc.all(pc.is_finite(values)).as_py() is not False
    if not plan.style.is_shown:
        if not is_finite:
            raise misfit_of(plan, "is NaN or infinite, which JSON has not")
        return texts
    # with a point, as a number without one is a whole number elsewhere, which has no -0
    texts = pc.replace_substring_regex(texts, r"^(-?\d+)$", r"\1.0")
    for theirs, name in () if is_finite else _NOT_FINITE:
        texts = pc.replace_substring_regex(texts, f"^{theirs}$", name)
    return texts


def _digits(values: pa.Array) -> pa.Array:
    """Decimals with all digits of their scale; Arrow writes small ones with an exponent, 0E-10."""
    texts = values.cast(pa.string())
    if not pc.any(pc.match_substring(texts, "E")).as_py():
        return texts
    return pa.array([None if value is None else f"{value:f}" for value in values.to_pylist()], pa.string())


def _seconds(values: pa.Array) -> pa.Array:
    """Durations as seconds with all digits of their unit."""
    numbers = values.cast(pa.int64()).cast(pa.decimal128(19))
    kind = pa.decimal128(19, UNIT_DIGITS[values.type.unit])
    shifted = pa.Array.from_buffers(kind, len(numbers), numbers.buffers(), numbers.null_count, numbers.offset)
    return _digits(shifted)


def _quoted(values: pa.Array, ascii: bool) -> pa.Array:
    """The JSON of text, and of bytes as they are shown."""
    text = None
    if not ascii:
        try:
            text = values.cast(pa.large_string())
        except pa.ArrowInvalid:  # no UTF-8
            pass
    if text is not None and _has(text, '["\\\\\\x00-\\x1f]'):
        for plain, escaped in _ESCAPES:
            text = pc.replace_substring(text, plain, escaped)
        text = None if _has(text, "[\\x00-\\x1f]") else text
    if text is not None:
        return _in_quotes(text)
    texts = [
        None if value is None else json.dumps(json_value(value), ensure_ascii=ascii).encode()
        for value in values.cast(pa.binary()).to_pylist()
    ]
    return pa.array(texts, pa.large_binary())


def _has(text: pa.Array, pattern: str) -> bool:
    """Whether a text of a column has something of a pattern."""
    return bool(pc.any(pc.match_substring_regex(text, pattern)).as_py())


def _embedded(plan: Plan, values: pa.Array) -> pa.Array:
    """JSON that is given as text: as it is, if it is JSON."""
    for text in values.to_pylist():
        if text is None:
            continue
        try:
            value = load_json(text.encode(), is_strict=True)
        except ValueError as error:
            raise misfit_of(plan, f"must be JSON: {error}") from None
        if plan.is_object and not isinstance(value, dict):
            raise misfit_of(plan, "must be the JSON of an object")
    return values
