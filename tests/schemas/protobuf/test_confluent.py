"""Both ways with confluent-kafka's Protobuf serializer and deserializer, through our registry."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.columns.schema import FULL
from spark_klog.schemas.column_format import ColumnDecoder, ColumnFormat, RegistrySettings
from spark_klog.schemas.column_writing import WriteFormat
from spark_klog.schemas.prefix import id_prefix
from spark_klog.schemas.protobuf.schema import parse_schema
from spark_klog.security.config import Settings
from tests.schemas.registry.conftest import registry

from .support import WIDE, message_class, order, schema

__all__ = ["registry"]
_NESTED = """syntax = "proto3";
package nested;
message First { map<string, int32> counts = 1; message Inner { int64 id = 1; message Deep { int64 id = 1; } } }
message Second { int64 id = 1; message Inner { int64 id = 2; } }
"""


def _settings(url: str) -> RegistrySettings:
    return RegistrySettings(Settings({"url": url}))


def _decoder(url: str, subject: str, **more: Any) -> ColumnDecoder:
    return ColumnFormat("value", "protobuf", _settings(url), subject=subject, **more).reader().decoder()


def _write(url: str, topic: str, messages: list[Any], **conf: Any) -> list[bytes]:
    client = SchemaRegistryClient({"url": url})
    serialize = ProtobufSerializer(type(messages[0]), client, {"use.deprecated.format": False, **conf})
    context = SerializationContext(topic, MessageField.VALUE, [])
    return [serialize(message, context) for message in messages]


def _read(url: str, kind: Any, values: list[bytes | None], topic: str = "t") -> list[Any]:
    client = SchemaRegistryClient({"url": url})
    deserialize = ProtobufDeserializer(kind, {"use.deprecated.format": False}, client)
    context = SerializationContext(topic, MessageField.VALUE, [])
    return [deserialize(value, context) for value in values]


def _binary(values: list[bytes | None]) -> Any:
    return pa.array(values, pa.binary())


def test_all_types_both_ways(registry: str) -> None:
    made = schema(WIDE)
    messages = [order(made, number) for number in range(7)]
    values = _write(registry, "wide", messages)
    decoder = _decoder(registry, "wide-value")
    decoded = decoder.decode(_binary(values), None)
    assert not decoded.bad
    assert [row["id"] for row in decoded.values.to_pylist()] == list(range(7))
    source = ColumnFormat("value", "protobuf", _settings(registry), subject="wide-value")
    writer = WriteFormat(source, uses_latest=True).writer(decoder.type)
    written = writer.encoder().encode(decoded.values).to_pylist()
    for message in messages:  # fields that have no columns
        message.ClearField("nothing")
    assert _read(registry, message_class(made), written) == messages
    assert [value[:6] for value in written] == [value[:6] for value in values]


def test_each_record_by_its_own_schema(registry: str) -> None:
    old = schema('syntax = "proto3"; package p; message M { int32 id = 1; string gone = 2; }')
    new = schema('syntax = "proto3"; package p; message M { int64 id = 1; optional string note = 3; }')
    values = _write(registry, "evolved", [message_class(old)(id=1, gone="x")])
    SchemaRegistryClient({"url": registry}).set_compatibility("evolved-value", "NONE")
    values += _write(registry, "evolved", [message_class(new)(id=2**40, note="n")])
    decoded = _decoder(registry, "evolved-value").decode(_binary([*values, None, values[0]]), None)
    first, second = {"id": 1, "note": None}, {"id": 2**40, "note": "n"}
    assert decoded == (decoded.values, [])
    assert decoded.values.to_pylist() == [first, second, None, first]


def test_records_of_another_format(registry: str) -> None:
    """Their ids tell, whether or not their bytes look like the indexes of a message."""
    client = SchemaRegistryClient({"url": registry})
    avro, own = client.register_schema("mixed-avro", Schema('"long"', "AVRO")), schema(WIDE)
    (right,) = _write(registry, "mixed", [order(own, 1)])
    payloads = (b"\1", b"", b"\2\2", b"\0", b"\x80" * 9)
    values = [
        right,
        *(id_prefix(avro) + payload for payload in payloads),
        id_prefix(900_000) + b"\1",
        right[:5] + b"\1",
    ]
    decoder = _decoder(registry, "mixed-value")
    for _ in range(2):  # what the registry has told is kept
        decoded = decoder.decode(_binary(values), None)
        assert [row and row["id"] for row in decoded.values.to_pylist()] == [1, *[None] * 7]
        reasons = dict(decoded.bad)
        assert [*reasons] == list(range(1, 8))
        assert {reasons[row] for row in range(1, 6)} == {f"schema id {avro}: it is avro, not protobuf"}
        assert reasons[6].startswith("schema id 900000: the schema registry")
        assert reasons[7].endswith(
            ": -1 message indexes: the record is no Protobuf of a schema registry, or is damaged"
        )


def test_messages_in_messages(registry: str) -> None:
    values: dict[str, bytes] = {}
    for name in ("nested.First", "nested.First.Inner", "nested.First.Inner.Deep", "nested.Second"):
        made = schema(_NESTED, name)
        (values[name],) = _write(registry, "nested", [message_class(made)()])
    # the message that the map's entries are counts, as the schema that the client has registered has it
    assert [value[5:] for value in values.values()] == [b"\0", b"\4\0\2", b"\6\0\2\0", b"\2\2"]
    column = _binary([*values.values(), values["nested.Second"][:5], values["nested.Second"][:5] + b"\4\0"])
    decoder = _decoder(registry, "nested-value", message="nested.Second")
    decoded = decoder.decode(column, None)
    assert decoded.values.to_pylist() == [None, None, None, {"id": 0}, None, None]
    assert [(row, reason.split(": ")[-1]) for row, reason in decoded.bad] == [
        (0, "it is message nested.First, another one than nested.Second"),
        (1, "it is message nested.First.Inner, another one than nested.Second"),
        (2, "it is message nested.First.Inner.Deep, another one than nested.Second"),
        (4, "the message indexes are cut off"),
        (5, "the message indexes are cut off"),
    ]
    source = ColumnFormat("value", "protobuf", _settings(registry), text=_NESTED, message="Second.Inner")
    with pytest.raises(Exception, match=r"the file has no messages Second\.Inner, but nested\.First, "):
        WriteFormat(source, "n").writer(decoder.type)
    source = ColumnFormat("value", "protobuf", _settings(registry), text=_NESTED, message="nested.Second.Inner")
    writer = WriteFormat(source, "own", "record").writer(decoder.type)
    assert SchemaRegistryClient({"url": registry}).get_latest_version("nested.Second.Inner").schema_id == writer.id
    (written,) = writer.encoder().encode(pa.array([{"id": 5}], decoder.type)).to_pylist()
    assert written[5:] == b"\4\2\0\x10\5"


def test_ids_in_headers(registry: str) -> None:
    made = schema(_NESTED, "Second")
    headers: list[tuple[str, bytes]] = []
    conf = {"use.deprecated.format": False, "schema.id.serializer": header_schema_id_serializer}
    serialize = ProtobufSerializer(message_class(made), SchemaRegistryClient({"url": registry}), conf)
    value = serialize(message_class(made)(id=3), SerializationContext("headed", MessageField.VALUE, headers))
    assert value == b"\x08\x03"
    ((name, content),) = headers
    column = pa.array([[{"key": name, "value": content}], []], FULL.field("headers").type)
    decoder = _decoder(registry, "headed-value", message="Second")
    decoded = decoder.decode(_binary([value, content[:1] + b"\0\0\0\0"]), column)
    assert decoded.values.to_pylist() == [{"id": 3}, None]


def test_references(registry: str) -> None:
    client = SchemaRegistryClient({"url": registry})
    part = 'syntax = "proto3"; package parts; message Part { string text = 1; google.protobuf.Timestamp at = 2; }'
    part = part.replace(" package", ' import "google/protobuf/timestamp.proto"; package')
    whole = (
        'syntax = "proto3"; package whole; import "lib/part.proto"; message Whole { repeated parts.Part parts = 1; }'
    )
    made = parse_schema(whole, {"lib/part.proto": part})
    message = message_class(made)()
    message.parts.add(text="x").at.seconds = 1
    (value,) = _write(registry, "whole", [message])
    assert [one.name for one in client.get_latest_version("whole-value").schema.references] == ["lib/part.proto"]
    decoded = _decoder(registry, "whole-value").decode(_binary([value]), None)
    assert decoded.values.to_pylist()[0]["parts"][0]["text"] == "x"


def test_a_schema_of_the_columns_type(registry: str) -> None:
    kind = pa.struct(
        [
            pa.field("id", pa.int64(), False),
            pa.field("name", pa.string()),
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("tags", pa.list_(pa.string())),
            pa.field("inner", pa.struct([pa.field("x", pa.int32())])),
            pa.field("counts", pa.map_(pa.string(), pa.int64())),
        ]
    )
    source = ColumnFormat("value", "protobuf", _settings(registry), message="shop.Made")
    writer = WriteFormat(source, "made", "topic-record").writer(kind)
    rows = [
        {"id": 0, "name": None, "at": None, "tags": [], "inner": None, "counts": []},
        {"id": 1, "name": "", "at": None, "tags": ["a"], "inner": {"x": None}, "counts": [("k", 5)]},
    ]
    values = writer.encoder().encode(pa.array([*rows, None], kind)).to_pylist()
    client = SchemaRegistryClient({"url": registry})
    found = client.get_latest_version("made-shop.Made")
    assert isinstance(found.schema, Schema)
    made = parse_schema(found.schema.schema_str or "", {})
    read = _read(registry, message_class(made), values)
    assert [(one.id, one.HasField("name"), list(one.tags)) for one in read[:2]] == [(0, False, []), (1, True, ["a"])]
    assert read[2] is None
    decoded = _decoder(registry, "made-shop.Made").decode(_binary(values), None)
    assert decoded.values.to_pylist() == [*rows, None]
