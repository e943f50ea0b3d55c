"""Both ways with confluent-kafka's Avro serializer and deserializer, with its registry in memory."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.columns.schema import FULL
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.program import Program
from spark_klog.schemas.avro.schema import parse_schema
from spark_klog.schemas.decoder import RecordDecoder
from spark_klog.schemas.prefix import SchemaKey, id_prefix

from .support import record

pytestmark = pytest.mark.usefixtures("kernel")
_V1 = record(
    ("id", "long"),
    ("name", ["null", "string"], None),
    ("price", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}),
    ("at", {"type": "long", "logicalType": "timestamp-micros"}),
    ("tags", {"type": "map", "values": {"type": "array", "items": "string"}}),
    ("kind", {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}),
    ("address", ["null", record(("city", "string"), ("zip", ["null", "int"]), name="Address")]),
    name="shop.Order",
)
_V2 = {**_V1, "fields": [*_V1["fields"][1:], {"name": "note", "type": "string", "default": "-"}, _V1["fields"][0]]}
_AT = dt.datetime(2024, 5, 6, 7, 8, 9, 10, dt.timezone.utc)


def _order(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "name": None if number % 2 else f"\u20ac {number}",
        "price": Decimal("-12.34") * number,
        "at": _AT,
        "tags": {"k": ["a", "b"], "l": []},
        "kind": "AB"[number % 2],
        "address": {"city": "Bonn", "zip": number or None} if number % 3 else None,
        **more,
    }


def _registry() -> Any:
    return SchemaRegistryClient.new_client({"url": "mock://avro"})


def _decoder(registry: Any, reader: Any) -> RecordDecoder:
    decoder = AvroDecoder(parse_schema(reader))

    def program(key: SchemaKey) -> Program:
        found = registry.get_schema(key.id) if isinstance(key.id, int) else registry.get_schema_by_guid(str(key.id))
        return decoder.program(parse_schema(found.schema_str), key.rest)

    return RecordDecoder(decoder, program)


def _rows(values: pa.Array) -> list[Any]:
    return [{**row, "tags": dict(row["tags"])} for row in values.to_pylist()]


def test_what_confluent_writes_is_read() -> None:
    registry = _registry()
    context = SerializationContext("orders", MessageField.VALUE, [])
    old = AvroSerializer(registry, json.dumps(_V1))
    new = AvroSerializer(registry, json.dumps(_V2))
    values = [old(_order(number), context) for number in range(6)]
    values += [new(_order(number, note="n"), context) for number in range(6)]
    decoder = _decoder(registry, _V2)
    decoded = decoder.decode(pa.array(values, pa.binary()))
    assert not decoded.bad
    assert _rows(decoded.values) == [_order(number, note=note) for note in "-n" for number in range(6)]


def test_ids_in_headers() -> None:
    registry = _registry()
    config = {"schema.id.serializer": header_schema_id_serializer}
    serializer = AvroSerializer(registry, json.dumps(_V1), conf=config)
    headers: list[tuple[str, bytes]] = []
    value = serializer(_order(1), SerializationContext("orders", MessageField.VALUE, headers))
    assert [name for name, _ in headers] == ["__value_schema_id"]
    column = pa.array([[{"key": name, "value": content} for name, content in headers]], FULL.field("headers").type)
    decoded = _decoder(registry, _V1).decode(pa.array([value], pa.binary()), column)
    assert not decoded.bad
    assert _rows(decoded.values) == [_order(1)]


@pytest.mark.parametrize("reader", ["bytes", ["null", "bytes"]])
def test_bytes_are_written_without_their_length(reader: Any) -> None:
    registry = _registry()
    context = SerializationContext("raw", MessageField.VALUE, [])
    rows = [b"hello", b"\nabcde", b""]
    values = [AvroSerializer(registry, '"bytes"')(row, context) for row in rows]
    decoded = _decoder(registry, reader).decode(pa.array(values, pa.binary()))
    assert not decoded.bad
    assert decoded.values.to_pylist() == rows
    schema_id = int.from_bytes(values[0][1:5], "big")
    encoded = AvroEncoder(parse_schema("bytes"), pa.binary()).encode(pa.array([*rows, None]), id_prefix(schema_id))
    assert encoded.to_pylist() == [*values, None]
    # theirs refuses what has nothing after the id
    assert [AvroDeserializer(registry)(value, context) for value in encoded.to_pylist()[:2]] == rows[:2]


def test_bytes_read_as_a_string_are_text() -> None:
    registry = _registry()
    context = SerializationContext("raw", MessageField.VALUE, [])
    values = [AvroSerializer(registry, '"bytes"')(row, context) for row in (b"text", b"\xff")]
    decoded = _decoder(registry, "string").decode(pa.array(values, pa.binary()))
    assert decoded.values.to_pylist() == ["text", None]
    assert [bad.reason.partition(": ")[2] for bad in decoded.bad] == ["a string that is not UTF-8"]


def test_what_is_written_confluent_reads() -> None:
    registry = _registry()
    text = json.dumps(_V1)
    schema_id = registry.register_schema("orders-value", Schema(text, "AVRO"))
    context = SerializationContext("orders", MessageField.VALUE, [])
    parsed = parse_schema(text)
    values = pa.array([_order(number) for number in range(6)], AvroDecoder(parsed).type)
    encoded = AvroEncoder(parsed, values.type).encode(values, id_prefix(schema_id))
    read = AvroDeserializer(registry)
    assert [read(value, context) for value in encoded.to_pylist()] == [_order(number) for number in range(6)]
    serializer = AvroSerializer(registry, text)
    assert encoded.to_pylist() == [serializer(_order(number), context) for number in range(6)]
