"""Topics of JSON Schema records written and read as rows, with confluent-kafka on the other side."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.sql import SparkSession
from pyspark.sql.types import DecimalType

from spark_klog.errors import ConfigError
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.spark.options import source_options
from spark_klog.spark.write.sink_options import sink_options

from .support import Sent, consume, create_topic, error_of, produce, read

pytestmark = pytest.mark.usefixtures("one_attempt")
_COLUMNS = """
    id, if(id % 2 = 0, null, concat('\u20ac ', id)) AS name, timestamp_micros(1714979289000010) AS at,
    CAST(id AS DECIMAL(10, 2)) / 4 AS price, map('k', array(id)) AS tags, struct(id AS inner, X'00FF' AS data) AS more
"""


@pytest.fixture(scope="module")
def registry(servers: str) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistry({"bootstrap.servers": servers}, "0", "json-schemas") as running:
        yield SchemaRegistryClient({"url": running.url})


def _url(registry: SchemaRegistryClient) -> str:
    return str(registry.config()["url"])


def test_there_and_back(spark: SparkSession, servers: str, registry: SchemaRegistryClient) -> None:
    topic = "json-written"
    create_topic(servers, topic)
    options = {"valueFormat": "json-schema", "keyFormat": "json-schema", "schemaRegistryUrl": _url(registry)}
    rows = spark.range(3).coalesce(1).selectExpr(f"struct({_COLUMNS}) AS value", "id AS key")
    writer = rows.write.format("klog").option("kafka.bootstrap.servers", servers).option("topic", topic)
    writer.options(**options).option("validate", "true").mode("append").save()
    deserialize = JSONDeserializer(None, schema_registry_client=registry)
    context = SerializationContext(topic, MessageField.VALUE, [])
    written = consume(servers, topic)
    assert [deserialize(record.value, context) for record in written] == [
        {
            "id": number,
            **({"name": f"\u20ac {number}"} if number % 2 else {}),
            "at": "2024-05-06T07:08:09.000010Z",
            "price": number / 4,
            "tags": {"k": [number]},
            "more": {"inner": number, "data": "AP8="},
        }
        for number in range(3)
    ]
    assert [record.key and record.key[5:] for record in written] == [b"0", b"1", b"2"]
    frame = read(spark, servers, subscribe=topic, **options)
    kind = frame.schema["value"].dataType
    assert isinstance(kind["price"].dataType, DecimalType)  # type: ignore[index]
    assert frame.schema["value"].metadata["klog.schema.version"] == 1
    found = frame.orderBy("offset").select("key", "value.*").collect()
    assert [(row.key, row.name, row.price, row.tags) for row in found] == [
        (number, f"\u20ac {number}" if number % 2 else None, Decimal(number) / 4, {"k": [number]})
        for number in range(3)
    ]
    assert found[0].at.astimezone(dt.timezone.utc) == dt.datetime(2024, 5, 6, 7, 8, 9, 10, dt.timezone.utc)
    assert found[2].more.data == b"\x00\xff"


def test_what_does_not_decode(
    spark: SparkSession, servers: str, registry: SchemaRegistryClient, tmp_path: Path
) -> None:
    topic = "json-poisoned"
    create_topic(servers, topic)
    schema = {
        "title": "Order",
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0}, "any": {}, "child": {"$ref": "#"}},
        "required": ["id"],
    }
    write = JSONSerializer(Schema(json.dumps(schema), "JSON"), registry)
    context = SerializationContext(topic, MessageField.VALUE, [])
    orders: list[dict[str, Any]] = [{"id": 0, "any": {"x": [1]}}, {"id": 4, "child": {"id": 5}}]
    first, last = [write(order, context) for order in orders]
    assert first is not None
    assert last is not None
    produce(servers, topic, map(Sent, [first, first[:-1], first[:5] + b'{"id": "1"}', first[:5] + b'{"id": -3}', last]))
    options = {"subscribe": topic, "valueFormat": "json-schema", "schemaRegistryUrl": _url(registry)}
    text = error_of(lambda: read(spark, servers, **options).collect())
    assert f"{topic}-0: the record at offset 1 has a value that does not decode: schema id " in text
    assert ": no JSON: Expecting ',' delimiter at character 23" in text
    kept = read(spark, servers, **options, badRecords="deadletter", badRecordsPath=tmp_path)
    rows = kept.orderBy("offset").select("offset", "value.*").collect()
    assert [tuple(row) for row in rows] == [(0, 0, '{"x":[1]}', None), (3, -3, None, None), (4, 4, None, '{"id":5}')]
    letters = {letter["offset"]: letter for letter in map(json.loads, map(Path.read_text, tmp_path.glob("*.json")))}
    assert sorted(letters) == [1, 2]
    assert "field id must be an integer of 64 bits, not a string" in letters[2]["reason"]
    permissive = read(spark, servers, **options, mode="PERMISSIVE", validate="true").orderBy("offset")
    assert [row.id for row in permissive.select("value.id").collect()] == [0, None, None, None, 4]


def test_options() -> None:
    common = {"kafka.bootstrap.servers": "h:1", "valueFormat": "JSON-Schema", "valueSchema": "{}"}
    (one,) = source_options({**common, "subscribe": "t"}, streaming=False).formats
    assert (one.format, one.validates) == ("json-schema", False)
    (one,) = source_options({**common, "subscribe": "t", "validate": "true"}, streaming=False).formats
    assert one.validates
    assert sink_options({**common, "topic": "t", "validate": "true"}).formats[0].source.validates
    with pytest.raises(ConfigError, match="option validate=true needs valueFormat=json-schema"):
        source_options({**common, "subscribe": "t", "valueFormat": "avro", "validate": "true"}, streaming=False)
