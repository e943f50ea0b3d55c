"""Parsed schemas: names, references, logical types, and what is refused."""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import SchemaError
from spark_klog.registry.formats import InvalidSchema
from spark_klog.registry.formats.avro import AvroSchema as Registered
from spark_klog.schemas.avro.columns import columns_of
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.from_arrow import schema_of
from spark_klog.schemas.avro.resolution import resolve
from spark_klog.schemas.avro.schema import NO_DEFAULT, parse_schema

from .support import encode, record, written


def test_names_and_namespaces() -> None:
    inner = {"type": "fixed", "name": "Inner", "size": 2}
    other = {"type": "enum", "name": "x.Other", "symbols": ["A"], "aliases": ["Old", "y.Older"]}
    schema = parse_schema(
        record(("a", inner), ("b", "Inner"), ("c", other), ("d", "x.Other"), ("e", "a.b.Inner"), namespace="a.b")
    )
    assert schema.name == "a.b.R"
    assert [field.schema.name for field in schema.fields] == [
        "a.b.Inner",
        "a.b.Inner",
        "x.Other",
        "x.Other",
        "a.b.Inner",
    ]
    assert schema.fields[2].schema.aliases == ("x.Old", "y.Older")
    assert schema.fields[2].schema.short_name == "Other"


def test_references_of_a_registry() -> None:
    money = json.dumps(record(("amount", "long"), name="shop.Money"))
    price = json.dumps(record(("money", "shop.Money"), name="shop.Price"))
    schema = parse_schema(record(("price", "Price"), ("tax", "shop.Money"), name="shop.Order"), [money, price])
    assert columns_of(schema).type.field("price").type.field("money").type == pa.struct(
        [pa.field("amount", pa.int64(), False)]
    )


@pytest.mark.parametrize(
    "text", ['"string"', "string", '{"type": "string"}', '{"type": {"type": "string"}}', b'"string"']
)
def test_texts_of_a_primitive(text: str | bytes) -> None:
    assert parse_schema(text).kind == "string"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("{", "must be JSON"),
        (record(("a", "Unknown")), 'field a: "Unknown" is neither an Avro type nor a name'),
        (record(("a", "int"), ("a", "int")), 'record R has two fields "a"'),
        (record(("next", ["null", "R"])), "field next: record R contains itself"),
        (
            record(("a", {"type": "array", "items": {"type": "map", "values": "R"}})),
            r"field a\[\]{}: record R contains",
        ),
        (record(("a", ["int", ["null"]])), "field a: a union directly in a union"),
        (record(("a", ["int", {"type": "int", "logicalType": "date"}])), "is twice in a union"),
        (record(("a", [])), "field a: a union without branches"),
        (record(("a", {"type": "fixed", "name": "F", "size": -1})), "fixed F with the size -1"),
        (record(("a", {"type": "enum", "name": "E", "symbols": ["A", "A"]})), "a symbol twice"),
        (record(("a", {"type": "enum", "name": "E", "symbols": ["A"], "default": "B"})), 'the default "B"'),
        (record(("a", {"type": "array"})), "array without 'items'"),
        (record(("a", {"type": "fixed", "name": "R", "size": 1})), "R is defined twice"),
        ({"type": "record", "name": "R"}, "record R without a list 'fields'"),
        (record(("a", 7)), "field a: 7 is not an Avro type"),
        (
            record(("a", {"type": "bytes", "logicalType": "decimal", "precision": 40})),
            "field a: bytes .decimal.40, 0.. has more than 38 digits.* decimal.handling.mode=string or double",
        ),
    ],
)
def test_refused(schema: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        columns_of(parse_schema(schema))


#: Schemas, or fields of a record, that parsers read differently, and what is wrong with each: for the registry and for
#: rows if they alone refuse it, as it has no columns; None if nothing.
_ODD: list[tuple[Any, str | None, str | None]] = [
    ([], None, "a union without branches has no values"),
    ({"type": "array", "items": []}, None, r"field \[\]: a union without branches"),
    ({"type": "fixed", "name": ".F", "size": 1}, None, None),
    ({"type": "fixed", "name": "F.", "size": 1}, 'fixed with the name "F."', None),
    ({"type": "fixed", "name": "F", "namespace": None, "size": 1}, None, None),
    ({"type": "fixed", "name": "F", "namespace": 7, "size": 1}, None, None),
    ({"type": "fixed", "name": "F", "size": 1 << 31}, "fixed F with the size 2147483648", None),
    ({"type": "fixed", "name": "F", "size": True}, "fixed F with the size true", None),
    (
        {"type": "fixed", "name": "F", "size": 1, "aliases": "G"},
        "aliases of fixed F must be a list",
        None,
    ),
    (
        {"type": "fixed", "name": "F", "size": 1, "aliases": None},
        "aliases of fixed F must be a list",
        "",
    ),
    ({"type": "fixed", "name": "long", "size": 1}, 'with the name "long", which is an Avro type\'s', None),
    ({"type": "fixed", "name": "n.long", "size": 1}, None, None),
    ({"type": "enum", "name": "E", "symbols": [1]}, "the symbols of enum E must be a list of strings", None),
    ({"type": "enum", "name": "E", "symbols": ["A"], "default": ["A"]}, 'the default \\["A"\\] of enum E', None),
    ({"type": "enum", "name": "E", "symbols": []}, None, None),
    ({"type": "error", "name": "E", "fields": []}, None, None),
    ({"type": ["null", "int"]}, None, None),
    ({"type": {"type": {"type": "int"}}}, None, None),
    ({"type": "array", "items": {"type": 7}}, r'field \[\]: {"type": 7} has no type', None),
    ({"type": "int", "logicalType": 7}, None, None),
    (["int", {"type": "int", "logicalType": "date"}], "is twice in a union", None),
    ("Unknown", '"Unknown" is neither an Avro type nor a name', None),
    (None, "null is not an Avro type", None),
    (record(("next", ["null", "R"])), None, "field next: record R contains itself"),
    (record(("a", ["int", "R"]), ("b", {"type": "map", "values": "R"})), None, "field a: record R contains itself"),
    ({"type": "record", "name": "R", "fields": [{"name": "", "type": "int"}]}, "a field without name or type", None),
    ({"type": "record", "name": "R", "fields": [7]}, "a field without name or type: 7", None),
    ({"type": "record", "name": "R", "fields": {}}, "record R without a list 'fields'", None),
]
_ODD_FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({"order": "up"}, 'field f: the order "up"; ascending, descending and ignore are known'),
    ({"order": None}, "field f: the order null"),
    ({"order": "Ignore"}, None),
    ({"aliases": "g"}, 'field f: the aliases must be a list of strings, not "g"'),
    ({"aliases": [1]}, "field f: the aliases must be a list of strings"),
    ({"aliases": None}, "field f: the aliases must be a list of strings"),
    ({"default": float("nan")}, "must be JSON: NaN is not JSON"),
    ({"default": float("inf")}, "must be JSON: Infinity is not JSON"),
    ({"default": 1.5}, None),
    ({"doc": 7}, None),
]
_ODD += [
    ({"type": "record", "name": "R", "fields": [{"name": "f", "type": "double"} | more]}, why, None)
    for more, why in _ODD_FIELDS
]


@pytest.mark.parametrize(("schema", "refusal", "of_rows"), _ODD, ids=str)
def test_an_odd_schema_has_one_answer(schema: Any, refusal: str | None, of_rows: str | None) -> None:
    """The registry and rows refuse the same, in the same words, but that rows also refuse what has no columns."""
    text = json.dumps(schema)
    if refusal is None:
        assert json.loads(Registered(text, {}).canonical()) is not None
    else:
        with pytest.raises(InvalidSchema, match=refusal) as refused:
            Registered(text, {})
    if refusal is None and of_rows is None:
        columns_of(parse_schema(text))
        return
    with pytest.raises(SchemaError, match=of_rows or refusal) as refused_rows:
        columns_of(parse_schema(text))
    assert refusal is None or str(refused_rows.value) == str(refused.value)


@pytest.mark.parametrize("text", ['{"type":"int","x":1e400}', "NaN", "{", "", "[" * 100_000])
def test_a_text_that_is_no_json_has_one_answer(text: str) -> None:
    reasons = []
    for parse in (lambda: Registered(text, {}), lambda: parse_schema(text)):
        with pytest.raises(ValueError, match=r"JSON|nested too deeply") as refused:
            parse()
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]


def test_schemas_are_sent_to_other_processes() -> None:
    schema = parse_schema(record(("a", "int"), ("b", ["null", "int"], None)))
    sent = pickle.loads(pickle.dumps(schema))  # noqa: S301
    assert [str(entry.schema) for entry in sent.fields] == ["int", "union<null, int>"]
    assert sent.fields[0].default is NO_DEFAULT


def test_a_full_name_may_end_with_that_of_a_type() -> None:
    rows = pa.array([{"string": {"a": 1}}], pa.struct([("string", pa.struct([("a", pa.int32())]))]))
    text = schema_of(rows.type)
    assert encode(text, rows) == written(json.loads(text), *rows.to_pylist())
    with pytest.raises(SchemaError, match='record with the name "string", which is'):
        parse_schema(record(("a", "int"), name="string"))


def _doubling(depth: int, leaf: Any) -> Any:
    """A schema of that many records, each of which has the one before twice."""
    made: Any = leaf
    for number in range(depth):
        made = record(("a", made), ("b", f"L{number - 1}" if number else leaf), name=f"L{number}")
    return made


@pytest.mark.parametrize("leaf", ["int", "null"])
def test_types_that_are_named_too_often(leaf: str) -> None:
    """A text of 3 KB that would be billions of columns, or of steps to skip them."""
    parse_schema(_doubling(10, leaf))
    with pytest.raises(SchemaError, match="more than 32768 types, each counted as often as it is named"):
        parse_schema(_doubling(40, leaf))


def _unions(depth: int, leaf: str) -> Any:
    """Records in unions in records, which differ at the deepest level only."""
    made: Any = leaf
    for number in range(depth):
        named = [f"{leaf}{number - 1}{side}" for side in "ab"] if number else leaf
        made = [record(("f", made), name=f"{leaf}{number}a"), record(("f", named), name=f"{leaf}{number}b")]
    return made


def test_unions_that_multiply() -> None:
    writer, reader = parse_schema(_unions(12, "int")), parse_schema(_unions(12, "boolean"))
    with pytest.raises(SchemaError, match="too many unions in unions"):
        resolve(writer, reader)


def test_nested_too_deeply() -> None:
    schema: Any = "int"
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SchemaError, match="more than 64 levels"):
        parse_schema(schema)
    names = [f"R{number}" for number in range(2000)]
    chain = [json.dumps(record(("a", below), name=name)) for name, below in zip(names, ["int", *names], strict=False)]
    with pytest.raises(SchemaError, match="more than 64 levels"):
        parse_schema('"R1999"', chain)
    with pytest.raises(SchemaError, match="nested too deeply"):
        parse_schema("[" * 100_000)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "int", "logicalType": "timestamp-millis"},
        {"type": "long", "logicalType": "unheard-of"},
        {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3},
        {"type": "bytes", "logicalType": "decimal"},
        {"type": "fixed", "name": "F", "size": 2, "logicalType": "decimal", "precision": 5},
        {"type": "fixed", "name": "F", "size": 11, "logicalType": "duration"},
        {"type": "fixed", "name": "F", "size": 15, "logicalType": "uuid"},
    ],
)
def test_an_invalid_logical_type_is_ignored(schema: Any) -> None:
    assert parse_schema(schema).logical is None


_LOGICAL = {
    "date": ("int", pa.date32(), pa.date32()),
    "time-millis": ("int", pa.int32(), pa.time32("ms")),
    "time-micros": ("long", pa.int64(), pa.time64("us")),
    "timestamp-millis": ("long", pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
    "timestamp-micros": ("long", pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
    "timestamp-nanos": ("long", pa.int64(), pa.timestamp("ns", "UTC")),
    "local-timestamp-millis": ("long", pa.timestamp("us"), pa.timestamp("ms")),
    "local-timestamp-micros": ("long", pa.timestamp("us"), pa.timestamp("us")),
    "local-timestamp-nanos": ("long", pa.int64(), pa.timestamp("ns")),
    "uuid": ("string", pa.string(), pa.string()),
}


@pytest.mark.parametrize("logical", _LOGICAL)
def test_types_of_logical_types(logical: str) -> None:
    kind, spark, arrow = _LOGICAL[logical]
    schema = parse_schema({"type": kind, "logicalType": logical})
    assert columns_of(schema).type == spark
    assert columns_of(schema, "arrow").type == arrow


@pytest.mark.parametrize(
    ("schema", "spark", "arrow"),
    [
        (["null", "string"], pa.string(), pa.string()),
        (["int", "long"], pa.int64(), pa.int64()),
        (["double", "null", "float"], pa.float64(), pa.float64()),
        (["null"], pa.null(), pa.null()),
        (
            ["string", "null", "int"],
            pa.struct([("member0", pa.string()), ("member1", pa.int32())]),
            pa.struct([("member0", pa.string()), ("member1", pa.int32())]),
        ),
        (
            {"type": "map", "values": ["null", "int"]},
            pa.map_(pa.string(), pa.int32()),
            pa.map_(pa.string(), pa.int32()),
        ),
        (
            {"type": "array", "items": "int"},
            pa.list_(pa.field("element", pa.int32(), False)),
            pa.list_(pa.field("element", pa.int32(), False)),
        ),
        ({"type": "fixed", "name": "F", "size": 3}, pa.binary(), pa.binary(3)),
        (
            {"type": "fixed", "name": "F", "size": 12, "logicalType": "duration"},
            pa.binary(),
            pa.month_day_nano_interval(),
        ),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, pa.string(), pa.dictionary(pa.int32(), pa.string())),
        (
            {"type": "fixed", "name": "F", "size": 8, "logicalType": "decimal", "precision": 18, "scale": 2},
            pa.decimal128(18, 2),
            pa.decimal128(18, 2),
        ),
    ],
    ids=str,
)
def test_types(schema: Any, spark: pa.DataType, arrow: pa.DataType) -> None:
    assert columns_of(parse_schema(schema)).type == spark
    assert columns_of(parse_schema(schema), "arrow").type == arrow


def test_the_depth_of_named_types_does_not_depend_on_their_order() -> None:
    def nested(name: str, levels: int, inner: Any) -> Any:
        for level in range(levels):
            inner = record(("f", inner), name=f"{name}{level}")
        return inner

    deep = nested("Deep", 40, "int")
    uses = [("flat", deep), ("deep", nested("Outer", 40, "Deep39"))]
    others = [("deep", nested("Outer", 40, deep)), ("flat", "Deep39")]
    for fields in (uses, others):
        with pytest.raises(SchemaError, match="more than 64 levels"):
            parse_schema(record(*fields))


def test_a_program_keeps_no_schema() -> None:
    """A process keeps programs for long."""
    writer = parse_schema(record(("a", "int"), ("b", ["null", record(("c", "string"), name="B")])))
    decoder = AvroDecoder(parse_schema(record(("a", "long"))))
    program, kept = decoder.program(writer), weakref.ref(writer)
    del writer
    gc.collect()
    assert kept() is None
    assert program.code
