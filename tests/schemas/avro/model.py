"""Random Avro schemas, evolutions of them and values, for hypothesis; and what a value is in Spark's types.

The schemas keep to what fastavro resolves as Avro's Java library does: see `differences` in
docs/explanation/avro.md. Logical types have tests of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from hypothesis import strategies as st

Json = Any
_INTS = st.integers(-(2**31), 2**31 - 1)
_LONGS = st.integers(-(2**63), 2**63 - 1)
_FLOATS = st.floats(width=32, allow_nan=False)
_DOUBLES = st.floats(allow_nan=False)
_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_BYTES = st.binary(max_size=20)
_VALUES = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": _INTS,
    "long": _LONGS,
    "float": _FLOATS,
    "double": _DOUBLES,
    "string": _TEXT,
    "bytes": _BYTES,
}
_PROMOTED = {
    "int": ["long", "float", "double"],
    "long": ["float", "double"],
    "float": ["double"],
    "string": ["bytes"],
    "bytes": ["string"],
}
#: Of each group a union has at most one type, so that a Python value tells its branch, and no other is promoted to it.
_GROUPS = (("int", "long", "float", "double"), ("string", "bytes"), ("boolean",), ("array",), ("map",), ("record",))


@st.composite
def records(draw: st.DrawFn) -> Json:
    """A record with up to six fields."""
    return _record(draw, count(), 3)


def _record(draw: st.DrawFn, names: Iterator[int], depth: int) -> Json:
    number = next(names)
    fields = [
        {"name": f"f{index}", "type": _schema(draw, names, depth - 1)} for index in range(draw(st.integers(0, 5)))
    ]
    return {
        "type": "record",
        "name": f"R{number}",
        "namespace": draw(st.sampled_from(["", "a", "a.b"])),
        "fields": fields,
    }


def _schema(draw: st.DrawFn, names: Iterator[int], depth: int, kinds: tuple[str, ...] = ()) -> Json:
    deep = ("array", "map", "record", "union") if depth > 0 else ()
    kind = draw(st.sampled_from(kinds or (*_VALUES, "fixed", "enum", *deep)))
    if kind in _VALUES:
        return kind
    if kind == "fixed":
        return {"type": "fixed", "name": f"F{next(names)}", "size": draw(st.integers(0, 9))}
    if kind == "enum":
        symbols = [f"S{index}" for index in range(draw(st.integers(1, 4)))]
        return {"type": "enum", "name": f"E{next(names)}", "symbols": symbols}
    if kind == "array":
        return {"type": "array", "items": _schema(draw, names, depth - 1)}
    if kind == "map":
        return {"type": "map", "values": _schema(draw, names, depth - 1)}
    if kind == "record":
        return _record(draw, names, depth)
    groups = draw(st.lists(st.sampled_from(_GROUPS), max_size=3, unique=True))
    branches = [_schema(draw, names, depth - 1, group) for group in groups]
    if not branches or draw(st.booleans()):
        branches.insert(draw(st.integers(0, len(branches))), "null")
    return branches


def kind_of(schema: Json) -> str:
    """The type's name of a schema."""
    if isinstance(schema, list):
        return "union"
    return schema if isinstance(schema, str) else schema["type"]


@st.composite
def values(draw: st.DrawFn, schema: Json) -> Any:
    """A value for fastavro's writer."""
    kind = kind_of(schema)
    if kind in _VALUES:
        return draw(_VALUES[kind])
    if kind == "fixed":
        return draw(st.binary(min_size=schema["size"], max_size=schema["size"]))
    if kind == "enum":
        return draw(st.sampled_from(schema["symbols"]))
    if kind == "array":
        return [draw(values(schema["items"])) for _ in range(draw(st.integers(0, 3)))]
    if kind == "map":
        return {draw(_TEXT): draw(values(schema["values"])) for _ in range(draw(st.integers(0, 3)))}
    if kind == "record":
        return {field["name"]: draw(values(field["type"])) for field in schema["fields"]}
    branch = draw(st.sampled_from(schema))
    value = draw(values(branch))
    return (
        (branch["name"] if not branch.get("namespace") else f"{branch['namespace']}.{branch['name']}", value)
        if kind_of(branch) == "record"
        else value
    )


@st.composite
def evolutions(draw: st.DrawFn, schema: Json) -> Json:
    """A reader's schema for what the given schema wrote."""
    return _evolved(draw, copy.deepcopy(schema), count(1000))


def _evolved(draw: st.DrawFn, schema: Json, names: Iterator[int], in_union: bool = False) -> Json:
    kind = kind_of(schema)
    change = draw(st.integers(0, 3)) == 0
    if kind == "record":
        return _evolved_record(draw, schema, names, change)
    if kind in ("array", "map"):
        key = "items" if kind == "array" else "values"
        return {**schema, key: _evolved(draw, schema[key], names)}
    if kind == "union":
        branches = [_evolved(draw, branch, names, True) for branch in schema]
        if change and len(branches) > 1:
            draw(st.randoms(use_true_random=False)).shuffle(branches)
        return branches
    if not change:
        return schema
    if kind in _PROMOTED:
        schema = draw(st.sampled_from(_PROMOTED[kind]))
    elif kind == "enum":
        symbols = schema["symbols"]
        kept = draw(st.lists(st.sampled_from(symbols), min_size=1, unique=True))
        schema = {**schema, "symbols": [*kept, "NEW"]}
        if draw(st.booleans()):
            schema["default"] = "NEW"
    if not in_union and kind != "null" and draw(st.booleans()):
        return ["null", schema]
    return schema


def _evolved_record(draw: st.DrawFn, schema: Json, names: Iterator[int], change: bool) -> Json:
    fields = []
    for field in schema["fields"]:
        field = {**field, "type": _evolved(draw, field["type"], names)}
        action = draw(st.integers(0, 9))
        if action == 0:
            continue
        if action == 1:
            field = {**field, "name": f"renamed{next(names)}", "aliases": [field["name"]]}
        fields.append(field)
    if change:
        kind = draw(st.sampled_from(sorted(_DEFAULTS, key=str)))
        default = _DEFAULTS[kind]
        new = {"name": f"new{next(names)}", "type": default[0](next(names)), "default": default[1]}
        fields.insert(draw(st.integers(0, len(fields))), new)
    if draw(st.integers(0, 5)) == 0:
        draw(st.randoms(use_true_random=False)).shuffle(fields)
    return {**schema, "fields": fields}


_DEFAULTS: dict[str, tuple[Callable[[int], Json], Any]] = {
    "int": (lambda _: "int", -7),
    "string": (lambda _: "string", "d\u00e9faut"),
    "nullable": (lambda _: ["null", "long"], None),
    "array": (lambda _: {"type": "array", "items": "double"}, [1.5, -2.0]),
    "map": (lambda _: {"type": "map", "values": "boolean"}, {"k": True}),
    "enum": (lambda number: {"type": "enum", "name": f"N{number}", "symbols": ["A", "B"]}, "B"),
    "record": (
        lambda number: {
            "type": "record",
            "name": f"N{number}",
            "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": ["null", "string"], "default": None}],
        },
        {"x": 3, "y": None},
    ),
}


def expected(schema: Json, value: Any) -> Any:
    """What a value that fastavro read with `return_record_name` is in the decoder's Arrow column, as Python has it."""
    kind = kind_of(schema)
    if kind == "record":
        return {field["name"]: expected(field["type"], value[field["name"]]) for field in schema["fields"]}
    if kind == "array":
        return [expected(schema["items"], item) for item in value]
    if kind == "map":
        return [(key, expected(schema["values"], item)) for key, item in value.items()]
    if kind == "union":
        return _expected_member(schema, value)
    return value


def _expected_member(schema: list[Json], value: Any) -> Any:
    branches = [branch for branch in schema if branch != "null"]
    if value is None:
        return None
    numbers = [number for number, branch in enumerate(branches) if _is_of(branch, value)]
    assert len(numbers) == 1, (schema, value)
    branch = branches[numbers[0]]
    value = expected(branch, value[1] if kind_of(branch) == "record" else value)
    if len(branches) == 1:
        return value
    return {f"member{number}": value if number == numbers[0] else None for number in range(len(branches))}


def _is_of(branch: Json, value: Any) -> bool:
    types: dict[str, type] = {
        "boolean": bool,
        "int": int,
        "long": int,
        "float": float,
        "double": float,
        "string": str,
        "bytes": bytes,
        "array": list,
        "map": dict,
        "record": tuple,
        "fixed": bytes,
        "enum": str,
    }
    return type(value) is types[kind_of(branch)]
