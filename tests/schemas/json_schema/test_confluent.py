"""Both ways with confluent-kafka's JSON serializers, which validate; schemas are in the embedded registry."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.columns.schema import FULL
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import RegistryError, SchemaChanged
from spark_klog.schemas.column_format import ColumnFormat, Evolution, RegistrySettings
from spark_klog.schemas.column_writing import WriteFormat
from spark_klog.security.config import Settings

_CUSTOMER = {"title": "Customer", "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_ORDER: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "at": {"type": "string", "format": "date-time"},
        "customer": {"oneOf": [{"type": "null"}, {"$ref": "customer.json"}]},
        "tags": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
        "kind": {"enum": ["A", "B"]},
        "total": {"type": "number", "minimum": 0},
    },
    "required": ["id", "customer"],
    "additionalProperties": False,
}
_AT = dt.datetime(2024, 5, 6, 7, 8, 9, 10, dt.timezone.utc)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedCluster(schema_registry=True) as cluster:
        assert cluster.schema_registry_url is not None
        yield cluster.schema_registry_url


def _order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "at": f"2024-05-06T07:08:09.{number:06}Z",
        "customer": {"name": f"\u20ac {number}"} if number % 2 else None,
        "tags": {"k": ["a", "b"], "l": []},
        "kind": "AB"[number % 2],
        "total": number / 4,
    }


def _row(number: int) -> dict[str, Any]:
    order = _order(number)
    return {**order, "at": _AT.replace(microsecond=number), "tags": list(order["tags"].items())}


def _schema(client: SchemaRegistryClient, order: dict[str, Any] = _ORDER) -> Schema:
    client.register_schema("customers", Schema(json.dumps(_CUSTOMER), "JSON"))
    return Schema(json.dumps(order), "JSON", [SchemaReference("customer.json", "customers", 1)])


def _format(url: str, topic: str, schema_id: int | None = None, evolution: Evolution = "keep") -> ColumnFormat:
    registry = RegistrySettings(Settings({"url": url}))
    subject = f"{topic}-value"
    return ColumnFormat("value", "json-schema", registry, None, schema_id, subject, evolution=evolution)


def test_what_confluent_writes_is_read(url: str) -> None:
    client = SchemaRegistryClient({"url": url})
    context = SerializationContext("read", MessageField.VALUE, [])
    write = JSONSerializer(_schema(client), client)
    values = [write(_order(number), context) for number in range(6)]
    decoded = _format(url, "read").reader().decoder().decode(pa.array([*values, None], pa.binary()), None)
    assert decoded.bad == []
    assert decoded.values.to_pylist() == [*map(_row, range(6)), None]
    # by a later version, of which another stream gets to know when it meets the first record
    old = _format(url, "read", evolution="restart").reader()
    more = {**_ORDER, "properties": {**_ORDER["properties"], "note": {"type": "string", "default": "-"}}}
    new = JSONSerializer(_schema(client, more), client)
    values.append(new({**_order(6), "note": "n"}, context))
    decoded = _format(url, "read").reader().decoder().decode(pa.array(values, pa.binary()), None)
    assert decoded.bad == []
    assert decoded.values.to_pylist() == [{**_row(number), "note": "n" if number == 6 else "-"} for number in range(7)]
    with pytest.raises(SchemaChanged, match="subject read-value has records of version 2"):
        old.decoder().decode(pa.array(values, pa.binary()), None)


def test_bad_records_name_their_schema(url: str) -> None:
    client = SchemaRegistryClient({"url": url})
    number = client.register_schema("bad-value", _schema(client))
    client.register_schema("avro-value", Schema('"string"'))
    avro = client.get_latest_version("avro-value").schema_id
    prefix = b"\0" + number.to_bytes(4, "big")
    values = [prefix + b'{"id": 1}', prefix + b"{", b"\0\0\0", b"\0" + avro.to_bytes(4, "big") + b"{}", prefix]
    decoded = _format(url, "bad").reader().decoder().decode(pa.array(values, pa.binary()), None)
    assert [(row, reason.partition(": ")[2] if row != 2 else "") for row, reason in decoded.bad] == [
        (1, "no JSON: Expecting property name enclosed in double quotes at character 1"),
        (2, ""),
        (3, "it is avro, not json-schema"),
        (4, "no JSON: it is empty"),
    ]
    assert all(reason.startswith(f"schema id {number}: ") for row, reason in decoded.bad if row in (1, 4))
    assert decoded.values.to_pylist()[0]["id"] == 1


def test_ids_in_headers(url: str) -> None:
    client = SchemaRegistryClient({"url": url})
    write = JSONSerializer(_schema(client), client, conf={"schema.id.serializer": header_schema_id_serializer})
    headers: list[tuple[str, bytes]] = []
    value = write(_order(1), SerializationContext("headers", MessageField.VALUE, headers))
    column = pa.array([[{"key": name, "value": content} for name, content in headers]], FULL.field("headers").type)
    decoded = _format(url, "headers").reader().decoder().decode(pa.array([value], pa.binary()), column)
    assert (decoded.bad, decoded.values.to_pylist()) == ([], [_row(1)])


def test_what_is_written_confluent_reads(url: str) -> None:
    client = SchemaRegistryClient({"url": url})
    client.register_schema("written-value", _schema(client))
    kind = _format(url, "written").reader().decoder().type
    values = pa.array([*map(_row, range(6)), None], kind)
    latest = WriteFormat(_format(url, "written"), "written", registers=False, uses_latest=True)
    written = latest.writer(kind).encoder().encode(values).to_pylist()
    read = JSONDeserializer(None, schema_registry_client=client)
    context = SerializationContext("written", MessageField.VALUE, [])
    assert [read(value, context) for value in written] == [*map(_order, range(6)), None]
    # by the schema of the type
    made = WriteFormat(_format(url, "made"), "made").writer(kind)
    written = made.encoder().encode(values).to_pylist()
    orders = [{name: item for name, item in _order(number).items() if item is not None} for number in range(6)]
    assert [read(value, context) for value in written[:6]] == orders
    wider = pa.struct([*kind, pa.field("note", pa.string())])
    assert WriteFormat(_format(url, "made"), "made").writer(wider).id != made.id  # compatible: a second version
    with pytest.raises(RegistryError, match="column value can't be written under subject made-value"):
        WriteFormat(_format(url, "made"), "made").writer(pa.struct([pa.field("id", pa.string(), nullable=False)]))


def test_subjects_by_title(url: str) -> None:
    source = ColumnFormat("value", "json-schema", RegistrySettings(Settings({"url": url})), json.dumps(_CUSTOMER))
    written = WriteFormat(source, "t", "topic-record").writer(pa.struct([("name", pa.string())]))
    latest = SchemaRegistryClient({"url": url}).get_latest_version("t-Customer")
    assert latest.schema_id == written.id
