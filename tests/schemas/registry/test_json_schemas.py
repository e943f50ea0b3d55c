"""JSON Schemas in a registry: what is one, references, and Confluent's rules of compatibility.

A table of rules; `jsonschema` checks that what is compatible by them also is in fact: all values of the old schema that
are tried are valid for the new one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from jsonschema import Draft7Validator

from spark_klog.registry.differences import fields_of
from spark_klog.registry.formats import InvalidSchema
from spark_klog.registry.formats.json_differences import _SEARCH, differences
from spark_klog.registry.formats.json_schema import JsonSchema

_INT, _STRING = {"type": "integer"}, {"type": "string"}


def _object(*, closed: Any = None, required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if closed is not None:
        made["additionalProperties"] = closed
    return made if required is None else made | {"required": required}


_RULES: list[tuple[Any, Any, str]] = [
    (_INT, {"type": "number"}, "+TYPE_EXTENDED #/"),
    ({"type": "number"}, _INT, "-TYPE_NARROWED #/"),
    (_INT, _STRING, "-TYPE_CHANGED #/"),
    (_INT, True, "+"),
    (False, _INT, "+"),
    (_INT, {"type": ["integer", "string"]}, "+SUM_TYPE_EXTENDED #/"),
    ({"type": ["integer", "string"]}, _INT, "-TYPE_CHANGED #/"),
    ({"type": "string", "maxLength": 3}, {"type": "string", "maxLength": 4}, "+MAX_LENGTH_INCREASED #/maxLength"),
    ({"type": "string", "maxLength": 3}, {"type": "string", "maxLength": 2}, "-MAX_LENGTH_DECREASED #/maxLength"),
    (_STRING, {"type": "string", "minLength": 1}, "-MIN_LENGTH_ADDED #/minLength"),
    ({"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}, "-PATTERN_CHANGED #/pattern"),
    ({"type": "string", "pattern": "a"}, _STRING, "+PATTERN_REMOVED #/pattern"),
    ({"maximum": 3}, {"maximum": 4}, "+MAXIMUM_INCREASED #/maximum"),
    ({"exclusiveMinimum": 3}, {"exclusiveMinimum": 4}, "-EXCLUSIVE_MINIMUM_INCREASED #/exclusiveMinimum"),
    ({"multipleOf": 4}, {"multipleOf": 2}, "+MULTIPLE_OF_REDUCED #/multipleOf"),
    ({"multipleOf": 2}, {"multipleOf": 4}, "-MULTIPLE_OF_EXPANDED #/multipleOf"),
    ({"multipleOf": 0.5}, {"multipleOf": 0.7}, "-MULTIPLE_OF_CHANGED #/multipleOf"),
    ({"enum": ["a"]}, {"enum": ["a", "b"]}, "+ENUM_ARRAY_EXTENDED #/enum"),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, "-ENUM_ARRAY_NARROWED #/enum"),
    ({"enum": [1]}, {"enum": [True]}, "-ENUM_ARRAY_CHANGED #/enum"),
    ({"const": 1}, {"const": 2}, "-ENUM_ARRAY_CHANGED #/const"),
    (_object(a=_INT), _object(a=_INT, b=_INT), "-OPTIONAL_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL #/properties/b"),
    (_object(a=_INT), _object(a=_INT, b={}), "+PROPERTY_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL #/properties/b"),
    (
        _object(a=_INT, closed=False),
        _object(a=_INT, b=_INT, closed=False),
        "+OPTIONAL_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL #/properties/b",
    ),
    (
        _object(a=_INT, closed=False),
        _object(a=_INT, b=_INT, closed=False, required=["b"]),
        "-REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL #/properties/b",
    ),
    (
        _object(a=_INT, closed=False),
        _object(a=_INT, b={"type": "integer", "default": 1}, closed=False, required=["b"]),
        "+REQUIRED_PROPERTY_WITH_DEFAULT_ADDED_TO_UNOPEN_CONTENT_MODEL #/properties/b",
    ),
    (_object(a=_INT), _object(), "+PROPERTY_REMOVED_FROM_OPEN_CONTENT_MODEL #/properties/a"),
    (
        _object(a=_INT, closed=False),
        _object(closed=False),
        "-PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL #/properties/a",
    ),
    (
        _object(a=_INT, closed=_INT),
        _object(closed=_INT),
        "+PROPERTY_REMOVED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL #/properties/a",
    ),
    (_object(a=_INT), _object(a=_INT, required=["a"]), "-REQUIRED_ATTRIBUTE_ADDED #/required/a"),
    (_object(a=_INT, required=["a"]), _object(a=_INT), "+REQUIRED_ATTRIBUTE_REMOVED #/required/a"),
    (_object(closed=False), _object(), "+ADDITIONAL_PROPERTIES_ADDED #/additionalProperties"),
    (_object(), _object(closed=False), "-ADDITIONAL_PROPERTIES_REMOVED #/additionalProperties"),
    (_object(), _object(closed=_INT), "-ADDITIONAL_PROPERTIES_NARROWED #/additionalProperties"),
    (
        {"type": "object", "dependencies": {"a": ["b"]}},
        {"type": "object", "dependencies": {"a": ["b", "c"]}},
        "-DEPENDENCY_ARRAY_EXTENDED #/dependencies/a",
    ),
    ({"type": "array", "items": _INT}, {"type": "array", "items": _STRING}, "-TYPE_CHANGED #/items"),
    ({"type": "array", "items": _INT}, {"type": "array"}, "+SCHEMA_REMOVED #/items"),
    (
        {"type": "array", "items": [_INT]},
        {"type": "array", "items": [_INT, _STRING]},
        "-ITEM_ADDED_TO_OPEN_CONTENT_MODEL #/items/1",
    ),
    (
        {"type": "array", "items": [_INT], "additionalItems": False},
        {"type": "array", "items": [_INT, _STRING], "additionalItems": False},
        "+ITEM_ADDED_TO_CLOSED_CONTENT_MODEL #/items/1",
    ),
    ({"type": "array", "uniqueItems": True}, {"type": "array"}, "+UNIQUE_ITEMS_REMOVED #/uniqueItems"),
    ({"type": "array"}, {"type": "array", "maxItems": 2}, "-MAX_ITEMS_ADDED #/maxItems"),
    ({"oneOf": [_INT]}, {"oneOf": [_INT, _STRING]}, "+SUM_TYPE_EXTENDED #/"),
    ({"oneOf": [_INT, _STRING]}, {"oneOf": [_INT]}, "-SUM_TYPE_NARROWED #/"),
    ({"allOf": [{"maximum": 3}, _INT]}, {"allOf": [_INT]}, "+PRODUCT_TYPE_NARROWED #/"),
    ({"oneOf": [_INT, _STRING]}, {"anyOf": [_STRING, _INT]}, "+COMBINED_TYPE_EXTENDED #/"),
    ({"anyOf": [_INT, _STRING]}, {"allOf": [_INT, _STRING]}, "-COMBINED_TYPE_CHANGED #/"),
    ({"not": {"maximum": 3}}, {"not": {"maximum": 2}}, "+NOT_TYPE_NARROWED #/not"),
    ({"not": {"maximum": 2}}, {"not": {"maximum": 3}}, "-NOT_TYPE_EXTENDED #/not"),
    ({"title": "a", "type": "string"}, {"title": "b", "type": "string"}, "+TITLE_CHANGED #/"),
]
_VALUES: list[Any] = [
    *(None, True, 0, 1, 2, 3, 4, 8, 1.5, 0.5, 0.7, "", "a", "b", "abc", "abcd", [], [1], ["a"], [1, "a"], [1, 1], {}),
    *({"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": "x"}, {"a": 1, "b": 2, "c": 3}, {"c": None}),
]


@pytest.mark.parametrize(("old", "new", "change"), _RULES)
def test_rules_of_compatibility(old: Any, new: Any, change: str) -> None:
    before, after = (JsonSchema(json.dumps(schema), {}) for schema in (old, new))
    found = differences(before.root, after.root)
    assert {f"{each.kind} {each.path}" for each in found} >= ({change[1:]} if change[1:] else set())
    is_compatible = change[0] == "+"
    assert (not after.unreadable(before)) is is_compatible
    has_default = "WITH_DEFAULT" in change  # a reader that applies it accepts them
    if is_compatible and not has_default:
        valid = [value for value in _VALUES if Draft7Validator(old).is_valid(value)]
        assert [value for value in valid if not Draft7Validator(new).is_valid(value)] == []
    for each in after.unreadable(before):
        assert each.startswith('{errorType:"')
        assert 'description:"' in each


def test_recursive_schemas() -> None:
    def tree(value: Any) -> JsonSchema:
        node = {"type": "object", "properties": {"value": value, "next": {"$ref": "#/definitions/node"}}}
        return JsonSchema(json.dumps({"$ref": "#/definitions/node", "definitions": {"node": node}}), {})

    assert tree(_INT).unreadable(tree(_INT)) == []
    assert tree({"type": "number"}).unreadable(tree(_INT)) == []
    assert "'#/properties/value'" in tree(_STRING).unreadable(tree(_INT))[0]


@pytest.mark.parametrize(
    ("pattern", "is_covered"),
    [
        ("^a", True),
        ("b$", True),
        ("^(a|c)+b$", True),
        ("^(x)+$", False),
        ("(", False),
        (r"^\p{L}", False),
        ("^(a+)+$", False),
    ],
)
def test_patterns_of_properties(pattern: str, is_covered: bool) -> None:
    name = "a" * 60 + "b"  # for which the last pattern would need ages
    old = _object(**{name: _INT})
    new = {"type": "object", "patternProperties": {pattern: _INT}, "additionalProperties": False}
    before, after = (JsonSchema(json.dumps(schema), {}) for schema in (old | {"additionalProperties": False}, new))
    assert (not after.unreadable(before)) is is_covered


def test_a_pattern_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_klog.registry.formats.json_differences._SEARCH_SECONDS", 0.5)
    pattern, name = "a*" * 12 + "b$", "a" * 250
    old = {"type": "object", "patternProperties": {pattern: _STRING}, "additionalProperties": False}
    before = JsonSchema(json.dumps(old), {})
    after = JsonSchema(json.dumps(old | {"properties": {f"{name}{n}": _STRING for n in range(2)}}), {})
    compared = threading.Thread(target=after.unreadable, args=[before])
    compared.start()
    gaps = [time.monotonic()]
    while compared.is_alive():
        time.sleep(0.01)
        gaps.append(time.monotonic())
    assert max(later - earlier for earlier, later in pairwise(gaps)) < 1.5
    assert gaps[-1] - gaps[0] < 20


def test_a_search_ends_without_the_process_that_began_it() -> None:
    command = [sys.executable, "-I", "-S", "-c", _SEARCH]
    given = json.dumps(["a*" * 12 + "b$", "a" * 400]).encode()
    assert subprocess.run(command, input=given, timeout=30, check=False).returncode == -signal.SIGALRM


def _nested(depth: int, leaf: Any) -> JsonSchema:
    """Each definition has the one before it twice."""
    made = {"d0": {"type": "object", "properties": {"x": leaf}}}
    for n in range(1, depth):
        reference = {"$ref": f"#/definitions/d{n - 1}"}
        made[f"d{n}"] = {"type": "object", "properties": {"a": reference, "b": dict(reference)}}
    return JsonSchema(json.dumps({"$ref": f"#/definitions/d{depth - 1}", "definitions": made}), {})


def test_differences_do_not_multiply() -> None:
    found = _nested(60, _STRING).unreadable(_nested(60, _INT))
    assert 1 <= len(found) <= 100
    assert "TYPE_CHANGED" in found[0]
    assert len(_nested(3, _STRING).unreadable(_nested(3, _INT))) == 4  # few are all said


def test_schemas_that_are_too_large_to_compare() -> None:
    many = [{"anyOf": [{"const": n + start} for n in range(250)]} for start in (0, 1000)]
    before, after = (JsonSchema(json.dumps(schema), {}) for schema in many)
    assert "more than 50,000 pairs" in after.unreadable(before)[0]
    for name in ("required", "enum"):
        with pytest.raises(InvalidSchema, match="more than 3,000 values of several types"):
            JsonSchema(json.dumps({name: [{str(n): n} for n in range(100_000)]}), {})
    assert JsonSchema(json.dumps({"enum": [f"a{n}" for n in range(10_000)]}), {}).root.kind == "enum"
    named = [{"$id": f"http://x/{n}", "type": "string"} for n in range(1000)]
    references = [{"$ref": "http://x/0"} for n in range(1000)]
    with pytest.raises(InvalidSchema, match="too many"):
        JsonSchema(json.dumps({"type": "array", "items": [*named, *references]}), {})


def test_references() -> None:
    text = (
        '{"properties":{"a":{"$ref":"common.json#/definitions/a"},"b":{"$ref":"#b"}},'
        '"definitions":{"b":{"$id":"#b","type":"integer"}}}'
    )
    first = JsonSchema(text, {"common.json": '{"definitions":{"a":{"type":"integer"}}}'})
    second = JsonSchema(text, {"common.json": '{"definitions":{"a":{"type":"string"}}}'})
    assert first.unreadable(first) == []
    (change,) = second.unreadable(first)
    assert "'#/properties/a'" in change


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "must be JSON"),
        ("7", "must be an object"),
        ('{"const":NaN}', "NaN is not JSON"),
        ('{"type":"nothing"}', "#/type: 'nothing' is not valid"),
        ('{"properties":{"a":{"maxLength":-1}}}', "#/properties/a/maxLength: -1 is less than the minimum"),
        ('{"$ref":"other.json"}', "other.json is neither in the schema nor among its references"),
        ('{"$ref":"http://example.com/x.json"}', "neither in the schema"),  # nothing is fetched
        ('{"$ref":"#/definitions/a"}', "there is no 'definitions'"),
        ('{"$ref":"#a"}', "there is no such anchor"),
        ('{"$ref":"#"}', "refers to itself"),
        ('{"not":' * 100_000 + "{}" + "}" * 100_000, "nested too deeply|must be JSON"),
        ('{"not":' * 250 + '{"type":"string"}' + "}" * 250, "nested"),
    ],
)
def test_what_is_no_schema(text: str, reason: str) -> None:
    with pytest.raises(InvalidSchema, match=reason):
        JsonSchema(text, {})


def test_texts() -> None:
    schema = JsonSchema('{ "b": {"z": 1, "y": [1.50, 1e300, 100000000.0, 0.0000001, 12]},\n "a": "é" }', {})
    # as Java's BigDecimal writes them
    assert schema.canonical() == '{"b":{"z":1,"y":[1.50,1E+300,100000000.0,1E-7,12]},"a":"é"}'
    assert schema.normalized() == '{"a":"é","b":{"y":[1.50,1E+300,100000000.0,1E-7,12],"z":1}}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "the schema is not JSON: Expecting property name"),
        ("[" * 100_000, "the schema is not JSON: maximum recursion depth"),
        ('{"properties": 3}', "properties or another keyword has a wrong type"),
        ('{"$ref": 3}', "properties or another keyword has a wrong type"),
    ],
)
def test_fields_of_what_is_no_schema(text: str, told: str) -> None:
    """The errors of Python's parser are not shown as such."""
    with pytest.raises(InvalidSchema, match=told) as raised:
        fields_of("json-schema", text)
    assert "Error" not in str(raised.value)
    assert fields_of("json-schema", '{"properties": {"a": {"maximum": %s}}}' % ("1" * 5000)).keys() == {"a"}
