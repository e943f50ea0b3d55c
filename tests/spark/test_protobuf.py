"""Topics of Protobuf records read and written as rows, with our registry and confluent-kafka on the other side."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.message_factory import GetMessageClass
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.schemas.protobuf.schema import parse_schema
from spark_klog.spark.options import source_options
from tests.schemas.protobuf.support import WIDE, message_class, order, schema

from .support import Sent, consume, create_topic, error_of, produce, read

pytestmark = pytest.mark.usefixtures("one_attempt")
_CONF: dict[str, Any] = {"use.deprecated.format": False}


@pytest.fixture(scope="module")
def cluster(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(data_dir=module_server_dir / "cluster", schema_registry=True) as running:
        yield running


def _sent(url: str, topic: str) -> list[Sent]:
    """Good records at the offsets 0, 2, 5 (null) and 6."""
    made = schema(WIDE)
    serialize = ProtobufSerializer(message_class(made), SchemaRegistryClient({"url": url}), _CONF)
    context = SerializationContext(topic, MessageField.VALUE, [])
    values = [serialize(order(made, number), context) for number in range(3)]
    return [
        Sent(value) for value in (values[0], values[1][:-1], values[1], b"{}", values[1][:5] + b"\2\2", None, values[2])
    ]


def test_read(spark: SparkSession, cluster: EmbeddedCluster, tmp_path: Path) -> None:
    topic, servers, url = "orders", cluster.bootstrap_servers, cluster.schema_registry_url
    assert url is not None
    create_topic(servers, topic)
    produce(servers, topic, _sent(url, topic))
    options = {"subscribe": topic, "valueFormat": "protobuf", "schemaRegistryUrl": url}
    kept = read(spark, servers, **options, badRecords="deadletter", badRecordsPath=tmp_path / "letters")
    rows = kept.orderBy("offset").select("offset", "value").collect()
    assert [row.offset for row in rows] == [0, 2, 5, 6]
    assert len(list((tmp_path / "letters").glob("*.json"))) == 3
    assert rows[2].value is None
    value = rows[1].value
    assert (value.id, value.name, value.at) == (1, "\u20ac 1", dt.datetime(2023, 11, 14, 22, 13, 19, 5))
    assert value.took == -dt.timedelta(seconds=1, microseconds=7)
    assert value.lines["l"].prices == [1.5, -1.0]
    assert (value.gift["count"], value.cash) == (3, None)
    assert value.kinds == ["RETAIL", "UNKNOWN", "UNKNOWN_ENUM_VALUE_Kind_7"]
    names = {field.name: field.dataType.simpleString() for field in kept.schema["value"].dataType.fields}
    assert names["at"] == "timestamp"
    assert names["took"] == "interval day to second"
    assert names["tip"] == "struct<value:bigint>"


@pytest.mark.test_all("long")  # test_avro_sink.py has the way, test_schema_functions.py what to_protobuf writes
def test_write(spark: SparkSession, cluster: EmbeddedCluster) -> None:
    topic, servers, url = "written", cluster.bootstrap_servers, cluster.schema_registry_url
    assert url is not None
    create_topic(servers, topic)
    columns = """
        struct(id, if(id % 2 = 0, null, concat('n', id)) AS name, timestamp_micros(1714979289000010) AS at,
        map('k', struct(id AS x)) AS tags, array(id, 2) AS numbers) AS value
    """
    frame = spark.range(3).coalesce(1).selectExpr("struct(id) AS key", columns)
    writer = frame.write.format("klog").option("kafka.bootstrap.servers", servers).option("topic", topic)
    writer = writer.options(valueFormat="protobuf", keyFormat="protobuf", schemaRegistryUrl=url)
    writer.options(valueMessage="shop.Row", valueSubjectNameStrategy="RecordNameStrategy").mode("append").save()
    client = SchemaRegistryClient({"url": url})
    assert "written-key" in client.get_subjects()
    made = parse_schema(client.get_latest_version("shop.Row").schema.schema_str or "", {})
    deserialize = ProtobufDeserializer(GetMessageClass(made.message), _CONF, client)
    context = SerializationContext(topic, MessageField.VALUE, [])
    seen = [deserialize(record.value, context) for record in consume(servers, topic)]
    assert [(one.id, one.name, one.at.nanos, dict(one.tags)["k"].x, list(one.numbers)) for one in seen] == [
        (number, f"n{number}" if number % 2 else "", 10_000, number, [number, 2]) for number in range(3)
    ]
    options = {"subscribe": topic, "valueFormat": "protobuf", "keyFormat": "protobuf", "schemaRegistryUrl": url}
    back = read(spark, servers, **options, valueSubject="shop.Row").orderBy("offset")
    assert back.select("key", "value").collect() == frame.collect()
    writer = spark.range(1).selectExpr("struct(CAST(id AS DECIMAL(10, 2)) AS price) AS value").write.format("klog")
    writer = writer.options(valueFormat="protobuf", topic=topic, schemaRegistryUrl=url).mode("append")
    text = error_of(writer.option("kafka.bootstrap.servers", servers).save)
    assert "column value: field price: Protobuf has no type for decimal128(10, 2): cast it" in text


def test_options() -> None:
    base = {"kafka.bootstrap.servers": "a:1", "subscribe": "t", "valueFormat": "avro", "valueSchema": '"int"'}
    with pytest.raises(ConfigError, match="option valueMessage needs valueFormat=protobuf"):
        source_options({**base, "valueMessage": "M"}, streaming=False)
    with pytest.raises(ConfigError, match="option keyMessage needs keyFormat"):
        source_options({**base, "keyMessage": "M"}, streaming=False)
