"""Random schemas and rows: Arrow's parser against Python's, and what is written against jsonschema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.encoder import JsonSchemaEncoder
from spark_klog.schemas.json_schema.schema import CONNECT, JsonSchema, parse_schema
from tests.support.runs.soak import SOAK

_NAMES = st.sampled_from(["a", "b", "c", 'd "\u20ac"'])
_LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "connect.type": "int8"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "string"},
        {"type": ["string", "null"]},
        {"enum": ["x", "y"]},
        {"enum": ["x", "y", None]},
        {"type": "null"},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": ["integer", "string", "null"]},
        {"type": "object"},
        {},
    ]
)


@st.composite
def _objects(draw: Any, inner: Any) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, inner, min_size=1, max_size=4))
    required = sorted(draw(st.sets(st.sampled_from(sorted(properties)))))
    made: dict[str, Any] = {"type": draw(st.sampled_from(["object", ["object", "null"]])), "properties": properties}
    if required:
        made["required"] = required
    if draw(st.booleans()):
        made["additionalProperties"] = False
    return made


_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda values: {"type": "object", "additionalProperties": values}, inner)
        | _objects(inner)
        | st.builds(lambda one: {"allOf": [one, {"title": "t"}]}, inner)
    ),
    max_leaves=8,
)
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=4,
)


def _valid(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that are valid by a schema."""
    if "allOf" in schema:
        return _valid(schema["allOf"][0])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return st.one_of(*map(_valid, schema[keyword]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of(*[_valid({**schema, "type": one}) for one in kind])
    if kind == "object" and "properties" in schema:
        properties = {name: _valid(one) for name, one in schema["properties"].items()}
        required = {name: properties[name] for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional={k: v for k, v in properties.items() if k not in required})
    if kind == "object":
        return st.dictionaries(_NAMES, _valid(schema.get("additionalProperties", {})), max_size=3)
    if kind == "array":
        return st.lists(_valid(schema["items"]), max_size=3)
    bits = 8 if "connect.type" in schema else 64
    return {
        None: _ANY.filter(_is_finite),
        "integer": st.integers(-(1 << bits - 1), (1 << bits - 1) - 1),
        "number": _FLOATS | st.integers(-(2**53), 2**53),
        "boolean": st.booleans(),
        "string": _TEXTS,
        "null": st.none(),
    }[kind]


def _is_finite(value: Any) -> bool:
    return json.loads(json.dumps(value)) == value


def _of_column(value: Any, schema: dict[str, Any]) -> Any:
    """What a valid value is in the column, by the table in the docs and not by the product."""
    if "allOf" in schema:
        return _of_column(value, schema["allOf"][0])
    if value is None:
        return None
    kinds = schema.get("type", "string" if "enum" in schema else None)
    if "anyOf" in schema:
        return value
    kind = [one for one in kinds if one != "null"] if isinstance(kinds, list) else [kinds]
    if kind == ["object"] and "properties" in schema:
        return {name: _of_column(value.get(name), one) for name, one in schema["properties"].items()}
    if kind == ["object"] and schema.get("additionalProperties", {}) != {}:
        return [(name, _of_column(item, schema["additionalProperties"])) for name, item in value.items()]
    if kind == ["array"]:
        return [_of_column(item, schema["items"]) for item in value]
    if len(kind) > 1 or kind == [None] or kind == ["object"]:
        return ("json", value)
    return value


def _parsed(value: Any, expected: Any) -> Any:
    """The rows of a column, with JSON text parsed where the expected value is JSON."""
    if isinstance(expected, tuple) and len(expected) == 2 and expected[0] == "json":
        return ("json", json.loads(value))
    if isinstance(expected, dict) and isinstance(value, dict):
        return {name: _parsed(item, expected.get(name)) for name, item in value.items()}
    if isinstance(expected, list) and isinstance(value, list) and len(expected) == len(value):
        return [
            (item[0], _parsed(item[1], one[1])) if isinstance(item, tuple) else _parsed(item, one)
            for item, one in zip(value, expected, strict=True)
        ]
    return value


def _free_map(schema: Any) -> bool:
    """Whether a map's values are anything: then the object is JSON text, which the model does not follow."""
    if isinstance(schema, dict):
        more = schema.get("additionalProperties")
        return (isinstance(more, dict) and parse_schema(json.dumps(more)).column.form == "json") or any(
            map(_free_map, schema.values())
        )
    return isinstance(schema, list) and any(map(_free_map, schema))


def _without_arrow(schema: JsonSchema) -> JsonDecoder:
    decoder = JsonDecoder(schema.column)
    decoder._read = None
    return decoder


@given(_SCHEMAS, st.data())
@settings(deadline=None, max_examples=75, derandomize=True, suppress_health_check=list(HealthCheck))
def test_valid_rows(schema: dict[str, Any], data: st.DataObject) -> None:
    _check_valid_rows(schema, data)


def _check_valid_rows(schema: dict[str, Any], data: st.DataObject) -> None:
    parsed = parse_schema(json.dumps(schema))
    rows = data.draw(st.lists(_valid(schema), max_size=5))
    records = pa.array([json.dumps(row, ensure_ascii=data.draw(st.booleans())).encode() for row in rows], pa.binary())
    validator = jsonschema.Draft202012Validator(schema)
    assert all(map(validator.is_valid, rows))
    decoder = JsonDecoder(parsed.column, validates=data.draw(st.booleans()))
    decoded = decoder.decode(records, [decoder.program(parsed)])
    decoded.values.validate(full=True)
    assert decoded.bad == []
    assert _without_arrow(parsed).decode(records, [None]).values.equals(decoded.values)
    if not _free_map(schema):
        expected = [_of_column(row, schema) for row in rows]
        assert [_parsed(*pair) for pair in zip(decoded.values.to_pylist(), expected, strict=True)] == expected
    # what is written is valid, and the same rows again; but null for a record is a null, not JSON's
    encoder = JsonSchemaEncoder(parsed, decoded.values.type, validates=True)
    written = encoder.encode(decoded.values)
    texts = [None if record is None else json.loads(record) for record in written.to_pylist()]
    assert all(text is None or validator.is_valid(text) for text in texts)
    again = JsonDecoder(parsed.column).decode(written, [None])
    assert (again.bad, again.values.to_pylist()) == ([], decoded.values.to_pylist())


_DAMAGE = st.sampled_from(["{}", "[1", "", "null", "NaN", '"a" x', '{"a":1,"a":2}', "1e999", '"\\ud800"', "\x00"])


@given(_SCHEMAS, st.data())
@settings(deadline=None, max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_rows(schema: dict[str, Any], data: st.DataObject) -> None:
    _check_any_rows(schema, data)


def _check_any_rows(schema: dict[str, Any], data: st.DataObject) -> None:
    """Arrow's parser, where it reads a block, reads what Python's does; a row is bad wherever it stands."""
    parsed = parse_schema(json.dumps(schema))
    texts = data.draw(st.lists(st.builds(json.dumps, _valid(schema) | _ANY) | _DAMAGE, max_size=5))
    records = pa.array([text.encode() for text in texts], pa.binary())
    together, by_python = (one.decode(records, [None]) for one in (JsonDecoder(parsed.column), _without_arrow(parsed)))
    assert together.bad == by_python.bad
    assert together.values.equals(by_python.values)
    for row in range(len(texts)):
        alone = JsonDecoder(parsed.column).decode(records[row : row + 1], [None])
        assert alone.values.equals(together.values[row : row + 1])
        assert [reason for _, reason in alone.bad] == [reason for number, reason in together.bad if number == row]
    # what jsonschema finds valid is read, but for numbers that no type has
    validator = jsonschema.Draft202012Validator(schema)
    for row, reason in together.bad:
        try:
            value = json.loads(texts[row])
        except ValueError:
            continue
        limits = ("bits", "can't hold", "too large", "twice", "surrogate", "NaN")
        assert not validator.is_valid(value) or any(word in reason for word in limits), reason


@pytest.mark.test_all("long")
@given(_SCHEMAS, st.data())
@settings(deadline=None, max_examples=1000 if SOAK else 150, suppress_health_check=list(HealthCheck))
def test_more_of_both(schema: dict[str, Any], data: st.DataObject) -> None:
    _check_valid_rows(schema, data)
    _check_any_rows(schema, data)


_KEYWORDS = st.sampled_from(
    [
        *("type", "properties", "required", "items", "prefixItems", "additionalItems", "additionalProperties", "enum"),
        *("patternProperties", "const", "allOf", "anyOf", "oneOf", "$ref", "$id", "$defs", "default", "format", "id"),
        *("$schema", "$anchor", "connect.type", "connect.index", "connect.parameters", "title", "contentEncoding"),
    ]
)
_WORDS = st.sampled_from(
    [
        *("object", "array", "string", "integer", "number", "boolean", "null", "#", "#/$defs/a", "#a", "http://["),
        *("b.json", "date-time", "int8", "bytes", "base64", "https://x/y#/z", "a", "scale"),
        *(f"{CONNECT}Decimal", f"{CONNECT}Date", "http://json-schema.org/draft-07/schema#"),
    ]
)
_INNER = _KEYWORDS | st.sampled_from(["a", "b"])
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 50) | _WORDS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_INNER, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(_KEYWORDS, _JUNK, max_size=6), _ANY)
@settings(deadline=None, max_examples=200, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_schema_breaks_more_than_itself(schema: dict[str, Any], value: Any) -> None:
    try:
        parsed = parse_schema(json.dumps(schema), {"b.json": '{"$id": "https://x/y", "z": {"type": "string"}}'})
        decoder = JsonDecoder(parsed.column, validates=True)
        programs = [decoder.program(parsed)]
    except SchemaError:
        return
    records = pa.array([json.dumps(value).encode()], pa.binary())
    decoded = decoder.decode(records, programs)
    without = JsonDecoder(parsed.column).decode(records, [None])
    decoded.values.validate(full=True)
    assert {row for row, _ in without.bad} <= {row for row, _ in decoded.bad}
