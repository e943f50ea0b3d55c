"""confluent-kafka's registry client and serializers against the registry, in the three formats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.registry.formats import parse
from tests.schemas.registry.asking import record, with_default

_POINT = """syntax = "proto3";
package geo;
message Point { double x = 1; double y = 2; }
"""
_CLICK = """syntax = "proto3";
package clicks;
import "klog_test_point.proto";
import "google/protobuf/timestamp.proto";
// not kept
message Click {
  google.protobuf.Timestamp at = 1;
  geo.Point where = 2;
  map<string, geo.Point> others = 3;
  oneof who { int64 id = 4; string name = 5; }
  optional int32 count = 6;
  message Tag { string text = 1 [deprecated = true]; }
  repeated Tag tags = 7;
  enum Kind { UNKNOWN = 0; LEFT = 1; }
  Kind kind = 8;
  reserved 9, 11 to 13;
}
message Other { Click.Tag tag = 1; }
"""


@pytest.fixture
def client(registry: str) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": registry})


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The classes that protoc generates of _CLICK."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "klog_test_point.proto").write_text(_POINT)
    (folder / "klog_test_click.proto").write_text(_CLICK)
    names = ["klog_test_point.proto", "klog_test_click.proto"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--python_out={folder}", *names]
    subprocess.run(command, check=True)
    sys.path.insert(0, str(folder))
    import klog_test_click_pb2

    yield klog_test_click_pb2
    sys.path.remove(str(folder))


def _of(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def test_the_client(client: SchemaRegistryClient) -> None:
    first = Schema(record("client"), "AVRO")
    id = client.register_schema("client", first)
    assert client.get_schema(id).schema_str == record("client").replace(": ", ":").replace(", ", ",")
    assert client.lookup_schema("client", first).version == 1
    assert "client" in client.get_subjects()
    assert client.get_versions("client") == [1]
    assert client.test_compatibility("client", Schema(record("client", "b"), "AVRO")) is False
    with pytest.raises(SchemaRegistryError, match="READER_FIELD_MISSING_DEFAULT_VALUE") as refused:
        client.register_schema("client", Schema(record("client", "b"), "AVRO"))
    assert (refused.value.http_status_code, refused.value.error_code) == (409, 409)
    assert client.set_compatibility("client", "FULL") == {"compatibility": "FULL"}
    assert client.get_compatibility("client") == "FULL"
    client.register_schema("client", Schema(record("client", with_default("b")), "AVRO"))
    assert client.get_latest_version("client").version == 2
    assert client.get_version("client", 1).schema_id == id
    assert client.delete_version("client", 1) == 1
    assert client.delete_subject("client") == [2]
    assert client.delete_subject("client", permanent=True) == [1, 2]


def test_avro(client: SchemaRegistryClient) -> None:
    text = json.dumps(
        {
            "type": "record",
            "name": "Node",
            "namespace": "tree",
            "fields": [
                {"name": "value", "type": {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 2}},
                {"name": "next", "type": ["null", "Node"], "default": None},
            ],
        }
    )
    from decimal import Decimal

    value = {"value": Decimal("1.25"), "next": {"value": Decimal("2.50"), "next": None}}
    data = AvroSerializer(client, text)(value, _of("avro"))
    assert AvroDeserializer(SchemaRegistryClient(_conf(client)))(data, _of("avro")) == value


def test_avro_with_a_reference(client: SchemaRegistryClient) -> None:
    client.register_schema("kind", Schema('{"type":"enum","name":"Kind","symbols":["A","B"]}', "AVRO"))
    text = record({"name": "kind", "type": "Kind"})
    schema = Schema(text, "AVRO", [SchemaReference("Kind", "kind", 1)])
    data = AvroSerializer(client, schema)({"kind": "B"}, _of("avro-reference"))
    assert AvroDeserializer(SchemaRegistryClient(_conf(client)))(data, _of("avro-reference")) == {"kind": "B"}


def test_json_schema(client: SchemaRegistryClient) -> None:
    point = '{"$id":"point.json","type":"object","properties":{"x":{"type":"number"}},"required":["x"]}'
    client.register_schema("point-json", Schema(point, "JSON"))
    text = '{"title":"Click","type":"object","properties":{"where":{"$ref":"point.json"},"n":{"type":"integer"}}}'
    schema = Schema(text, "JSON", [SchemaReference("point.json", "point-json", 1)])
    value = {"where": {"x": 1.5}, "n": 3}
    data = JSONSerializer(schema, client)(value, _of("json"))
    other = SchemaRegistryClient(_conf(client))
    assert JSONDeserializer(schema, schema_registry_client=other)(data, _of("json")) == value
    assert other.get_latest_version("json-value").schema.schema_type == "JSON"
    narrower = text.replace('"integer"', '"string"')
    with pytest.raises(SchemaRegistryError, match='errorType:"TYPE_CHANGED"'):
        client.register_schema("json-value", Schema(narrower, "JSON", schema.references))


def test_protobuf(client: SchemaRegistryClient, messages: ModuleType) -> None:
    click = messages.Click(name="me", count=3, kind=1)
    click.where.x = 1.5
    click.others["home"].y = 2.5
    click.tags.add(text="tag")
    click.at.FromSeconds(4711)
    conf = {"use.deprecated.format": False}
    data = ProtobufSerializer(messages.Click, client, conf)(click, _of("proto"))
    for reader in (client, SchemaRegistryClient(_conf(client))):
        assert ProtobufDeserializer(messages.Click, conf, schema_registry_client=reader)(data, _of("proto")) == click
    nested = messages.Click.Tag(text="nested")  # message indexes 0, 0: the order of messages stays
    data = ProtobufSerializer(messages.Click.Tag, client, conf)(nested, _of("proto"))
    assert ProtobufDeserializer(messages.Click.Tag, conf)(data, _of("proto")) == nested

    latest = SchemaRegistryClient(_conf(client)).get_latest_version("proto-value")
    assert latest.version == 1
    assert [reference.name for reference in latest.schema.references] == ["klog_test_point.proto"]
    # the base64 that the serializer sends, and the text, are the same schema
    references = {"klog_test_point.proto": _POINT}
    assert parse("PROTOBUF", latest.schema.schema_str, references).normalized() == (
        parse("PROTOBUF", _CLICK, references).normalized()
    )
    changed = latest.schema.schema_str.replace("optional int32 count", "optional string count")
    with pytest.raises(SchemaRegistryError, match="FIELD_SCALAR_KIND_CHANGED"):
        client.register_schema("proto-value", Schema(changed, "PROTOBUF", latest.schema.references))


def _conf(client: SchemaRegistryClient) -> dict[str, str]:
    """The settings of another client, which has no cache yet."""
    return {"url": client._rest_client.base_urls[0]}
