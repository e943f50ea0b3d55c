"""Rows written as Avro records, which confluent-kafka reads, with schemas in franz-go's registry."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr, struct

from spark_klog.errors import ConfigError
from spark_klog.schemas.avro.from_arrow import schema_of
from spark_klog.spark.versions import arrow_schema
from spark_klog.spark.write.sink_options import sink_options
from tests.spark.support import consume, create_topic, error_of, read
from tests.support.clients.srfake import SrFake, serving_srfake

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("one_attempt")]
_AT = dt.datetime(2024, 5, 6, 7, 8, 9, 10, dt.timezone.utc)
_COLUMNS = """
    id, if(id % 2 = 0, null, concat('\u20ac ', id)) AS name, timestamp_micros(1714979289000010) AS at,
    CAST(id AS DECIMAL(10, 2)) / 4 AS price, map('k', array(id)) AS tags, struct(id AS inner) AS address
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SrFake]:
    with serving_srfake(tmp_path_factory.mktemp("registry")) as process:
        yield process


def _rows(spark: SparkSession, count: int, columns: str = _COLUMNS) -> DataFrame:
    return spark.range(count).coalesce(1).selectExpr(f"struct({columns}) AS value")


def _write(frame: DataFrame, servers: str, topic: str, **options: str) -> None:
    writer = frame.write.format("klog").option("kafka.bootstrap.servers", servers).option("topic", topic)
    writer.options(**options).option("valueFormat", "avro").mode("append").save()


def _read_by_confluent(registry: SrFake, servers: str, topic: str, subject: str | None = None) -> list[Any]:
    conf = {"subject.name.strategy": lambda *_: subject or f"{topic}-value"}
    deserialize = AvroDeserializer(SchemaRegistryClient({"url": registry.url}), conf=conf)
    context = SerializationContext(topic, MessageField.VALUE, [])
    return [deserialize(record.value, context) for record in consume(servers, topic)]


def test_what_is_written_confluent_reads(spark: SparkSession, servers: str, registry: SrFake) -> None:
    topic = "written"
    create_topic(servers, topic)
    _write(_rows(spark, 3), servers, topic, schemaRegistryUrl=registry.url)
    expected = [
        {
            "id": number,
            "name": None if number % 2 == 0 else f"\u20ac {number}",
            "at": _AT,
            "price": Decimal(number) / 4,
            "tags": {"k": [number]},
            "address": {"inner": number},
        }
        for number in range(3)
    ]
    assert _read_by_confluent(registry, servers, topic) == expected
    client = SchemaRegistryClient({"url": registry.url})
    assert client.get_subjects().count("written-value") == 1
    text = json.loads(client.get_latest_version("written-value").schema.schema_str)
    assert text["name"] == "topLevelRecord"
    assert text["fields"][1] == {"name": "name", "type": ["null", "string"], "default": None}
    options = {"subscribe": topic, "valueFormat": "avro", "schemaRegistryUrl": registry.url}
    back = read(spark, servers, **options).orderBy("offset").select("value.*")
    assert back.collect() == _rows(spark, 3).select("value.*").collect()


def test_headers_of_the_source_do_not_name_the_schema(spark: SparkSession, servers: str, registry: SrFake) -> None:
    topic = "copied"
    create_topic(servers, topic)
    client = SchemaRegistryClient({"url": registry.url})
    old = json.dumps({"type": "record", "name": "Old", "fields": [{"name": name, "type": "long"} for name in "xyz"]})
    stale = (b"\0" + client.register_schema("old-value", Schema(old, "AVRO")).to_bytes(4, "big")).hex()
    headers = ", ".join(f"struct('{name}' AS key, X'{stale}' AS value)" for name in ("__value_schema_id", "h"))
    frame = _rows(spark, 2, "id").selectExpr("value", f"if(value.id = 0, array({headers}), null) AS headers")
    _write(frame, servers, topic, schemaRegistryUrl=registry.url)
    options = {"subscribe": topic, "valueFormat": "avro", "schemaRegistryUrl": registry.url, "includeHeaders": "true"}
    rows = read(spark, servers, **options).orderBy("offset").select("value.id", "headers.key").collect()
    assert [tuple(row) for row in rows] == [(0, ["h"]), (1, None)]
    assert [[name for name, _ in record.headers] for record in consume(servers, topic)] == [["h"], []]


def test_keys_nulls_and_a_text(spark: SparkSession, servers: str, registry: SrFake) -> None:
    topic = "keyed"
    create_topic(servers, topic)
    schema = json.dumps({"type": "record", "name": "a.V", "fields": [{"name": "id", "type": "int"}]})
    frame = (
        spark.range(2)
        .coalesce(1)
        .select(expr("CAST(id AS INT) AS key"), expr("if(id = 0, null, struct(CAST(id AS INT) AS id)) AS value"))
    )
    keys = {"keyFormat": "avro", "keySchema": '"int"'}
    _write(
        frame,
        servers,
        topic,
        schemaRegistryUrl=registry.url,
        valueSchema=schema,
        valueSubjectNameStrategy="io.confluent.kafka.serializers.subject.TopicRecordNameStrategy",
        **keys,
    )
    client = SchemaRegistryClient({"url": registry.url})
    value = client.get_latest_version("keyed-a.V")
    key = client.get_latest_version("keyed-key")
    assert [(record.key, record.value) for record in consume(servers, topic)] == [
        (b"\0" + key.schema_id.to_bytes(4, "big") + b"\0", None),
        (b"\0" + key.schema_id.to_bytes(4, "big") + b"\2", b"\0" + value.schema_id.to_bytes(4, "big") + b"\2"),
    ]


@pytest.mark.test_all("long")
def test_the_subjects_latest_version(spark: SparkSession, servers: str, registry: SrFake) -> None:
    topic = "governed"
    create_topic(servers, topic)
    client = SchemaRegistryClient({"url": registry.url})
    fields = [{"name": "id", "type": "long"}, {"name": "note", "type": "string", "default": "-"}]
    text = json.dumps({"type": "record", "name": "a.Governed", "fields": fields})
    number = client.register_schema("governed-value", Schema(text, "AVRO"))
    options = {"schemaRegistryUrl": registry.url, "useLatestVersion": "true"}
    _write(_rows(spark, 1, "id"), servers, topic, **options)
    _write(
        _rows(spark, 1, "7 AS id, 'x' AS note"),
        servers,
        topic,
        schemaRegistryUrl=registry.url,
        valueSchemaId=str(number),
    )
    assert _read_by_confluent(registry, servers, topic) == [{"id": 0, "note": "-"}, {"id": 7, "note": "x"}]
    text = error_of(lambda: _write(_rows(spark, 1, "id, 1 AS other"), servers, topic, **options))
    assert "column value: " in text
    assert "other" in text
    text = error_of(lambda: _write(_rows(spark, 1, "CAST(null AS LONG) AS id"), servers, topic, **options))
    assert "column value, row 0: " in text
    named = {"schemaRegistryUrl": registry.url, "valueSubjectNameStrategy": "RecordNameStrategy"}
    text = error_of(lambda: _write(_rows(spark, 1), servers, topic, **named))
    assert "RecordNameStrategy calls the subject: set valueSchema, or valueSubject" in text
    text = error_of(lambda: _write(_rows(spark, 1), servers, topic, **options, valueSubject="none"))
    assert "column value: subject none, version latest: the schema registry" in text
    assert "leave useLatestVersion out to register one" in text
    text = error_of(lambda: _write(_rows(spark, 1), servers, topic, schemaRegistryUrl=registry.url, valueSchemaId="99"))
    assert "column value: schema id 99: the schema registry" in text
    missing = {"schemaRegistryUrl": registry.url, "autoRegisterSchemas": "false"}
    text = error_of(lambda: _write(_rows(spark, 1), servers, topic, **missing))
    assert "column value can't be written under subject governed-value: the schema registry" in text
    assert "set autoRegisterSchemas=true" in text
    assert len(consume(servers, topic)) == 2
    assert client.get_versions("governed-value") == [1]


_TYPES = """
    true AS b, CAST(1 AS BYTE) AS i8, CAST(-2 AS SHORT) AS i16, CAST(3 AS INT) AS i32, -4L AS i64, 1.5F AS f,
    -2.5D AS d, CAST(12.34 AS DECIMAL(38, 10)) AS wide, X'00FF' AS x, date'1969-12-31' AS day,
    timestamp'1900-01-01 00:00:00.000001' AS at, timestamp_ntz'2024-02-29 23:59:59.999999' AS ntz,
    array(struct(1 AS z, null AS nothing), null) AS items, map('a', map('b', array(1.5D, null))) AS nested,
    struct(struct(struct('deep' AS s) AS c) AS b) AS a, CAST(null AS LONG) AS no
"""


def test_all_types_come_back(spark: SparkSession, servers: str) -> None:
    topic = "all-types"
    create_topic(servers, topic)
    frame = _rows(spark, 2, f"id, {_TYPES}").selectExpr("if(value.id = 0, value, null) AS value")
    _write(frame, servers, topic)
    text = schema_of(arrow_schema(frame.schema).field("value").type)
    back = read(spark, servers, subscribe=topic, valueFormat="avro", valueSchema=text).select("value")
    assert [row.asDict(recursive=True) for row in back.collect()] == [
        row.asDict(recursive=True) for row in frame.collect()
    ]


def test_without_a_registry(spark: SparkSession, servers: str) -> None:
    topic = "bare-sink"
    create_topic(servers, topic)
    schema = {"type": "record", "name": "V", "fields": [{"name": "id", "type": "long"}]}
    _write(_rows(spark, 2, "id"), servers, topic, valueSchema=json.dumps(schema))
    parsed = fastavro.parse_schema(schema)
    values = [
        fastavro.schemaless_reader(io.BytesIO(record.value or b""), parsed, None) for record in consume(servers, topic)
    ]
    assert values == [{"id": 0}, {"id": 1}]


def test_a_stream(spark: SparkSession, servers: str, registry: SrFake, tmp_path: Path) -> None:
    topic = "stream-exactly-once"
    create_topic(servers, topic)
    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    writer = frame.select(struct("value").alias("value")).writeStream.format("klog")
    writer = writer.option("kafka.bootstrap.servers", servers).option("topic", topic)
    writer = writer.option("valueFormat", "avro").option("schemaRegistryUrl", registry.url)
    writer = writer.option("deliveryGuarantee", "exactly-once").option("checkpointLocation", str(tmp_path))
    before = len(registry.requests)
    query = writer.start()
    try:
        while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < 2):
            query.awaitTermination(0.2)
    finally:
        query.stop()
    seen = [row["value"] for row in _read_by_confluent(registry, servers, topic)]
    assert sorted(seen)[:10] == list(range(10))
    assert len(seen) == len(set(seen))
    asked = registry.requests[before:]
    assert f"POST /subjects/{topic}-value/versions?normalize=false" in asked


def test_what_is_not_compatible(spark: SparkSession, servers: str) -> None:
    class Conflict(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            data = json.dumps({"error_code": 409, "message": "READER_FIELD_MISSING_DEFAULT_VALUE: id"}).encode()
            self.send_response(409)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Conflict)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        text = error_of(lambda: _write(_rows(spark, 1), servers, "conflict", schemaRegistryUrl=url))
    finally:
        server.shutdown()
        server.server_close()
    assert "column value can't be written under subject conflict-value" in text
    assert "READER_FIELD_MISSING_DEFAULT_VALUE: id" in text
    assert "set useLatestVersion=true" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"autoRegisterSchemas": "false"}, "option autoRegisterSchemas needs schemaRegistryUrl"),
        ({"valueFormat": "avro", "mode": "PERMISSIVE"}, "option mode is for reading"),
        (
            {"valueFormat": "avro", "schemaRegistryUrl": "http://a", "valueSubjectNameStrategy": "Mine"},
            "option valueSubjectNameStrategy=Mine must be one of TopicNameStrategy, RecordNameStrategy",
        ),
        (
            {
                "valueFormat": "avro",
                "schemaRegistryUrl": "http://a",
                "useLatestVersion": "true",
                "autoRegisterSchemas": "true",
            },
            "exclude each other",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sink_options({"kafka.bootstrap.servers": "a:1", "topic": "t", **options})


@pytest.mark.test_all("long")
def test_a_column_of_topics(spark: SparkSession, servers: str, registry: SrFake) -> None:
    for topic in ("one", "two"):
        create_topic(servers, topic)
    frame = _rows(spark, 2, "id").withColumn("topic", expr("if(value.id = 0, 'one', 'two')"))
    writer = frame.write.format("klog").option("kafka.bootstrap.servers", servers).mode("append")
    writer = writer.option("valueFormat", "avro").option("schemaRegistryUrl", registry.url)
    assert "rows go to the topics of a column" in error_of(writer.save)
    writer.option("valueSubject", "both").save()
    for number, topic in enumerate(("one", "two")):
        assert _read_by_confluent(registry, servers, topic, "both") == [{"id": number}]
