"""Topics of Avro records read as rows: written by confluent-kafka, with schemas in franz-go's registry."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from spark_klog.errors import ConfigError
from spark_klog.spark.options import source_options
from spark_klog.spark.read.source import KlogDataSource
from tests.spark.support import Sent, create_topic, error_of, produce, read
from tests.support.clients.srfake import SrFake, serving_srfake

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("one_attempt")]
_V1: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "string"}}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
    ],
}
_V2 = {
    **_V1,
    "fields": [_V1["fields"][0], {"name": "note", "type": "string", "default": "-"}, *_V1["fields"][1:4]],
}
_KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SrFake]:
    with serving_srfake(tmp_path_factory.mktemp("registry")) as process:
        yield process


def _order(number: int, **more: Any) -> dict[str, Any]:
    order = {"id": number, "name": None, "at": number * 1_000_000, "tags": {"k": ["a", "b"]}, "price": Decimal(1)}
    return {**order, **more}


class _Writer:
    """Serializes values of a topic as confluent-kafka does."""

    def __init__(self, registry: SrFake, topic: str) -> None:
        self._client = SchemaRegistryClient({"url": registry.url})
        self._topic = topic

    def values(self, schema: Any, rows: Sequence[Any], field: str = MessageField.VALUE, **conf: Any) -> list[Any]:
        write = AvroSerializer(self._client, json.dumps(schema), conf=conf)
        return [write(row, SerializationContext(self._topic, field, [])) for row in rows]

    def with_headers(self, schema: Any, row: Any) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
        conf = {"auto.register.schemas": False, "use.latest.version": True}
        write = AvroSerializer(
            self._client, json.dumps(schema), conf={**conf, "schema.id.serializer": header_schema_id_serializer}
        )
        headers: list[tuple[str, bytes]] = []
        value = write(row, SerializationContext(self._topic, MessageField.VALUE, headers))
        return value, tuple(headers)


def test_each_record_by_its_own_schema(spark: SparkSession, servers: str, registry: SrFake) -> None:
    topic = "orders"
    create_topic(servers, topic)
    writer = _Writer(registry, topic)
    keys = writer.values(_KEY, [{"id": number} for number in range(5)], MessageField.KEY)
    old = writer.values(_V1, [_order(number) for number in range(2)])
    new = writer.values(_V2, [_order(2, note="n")])
    value, headers = writer.with_headers(_V2, _order(3, note="h"))
    sent = [Sent(data, key) for data, key in zip([*old, *new], keys, strict=False)]
    sent += [Sent(value, keys[3], headers=headers), Sent(None, keys[4])]
    produce(servers, topic, sent)
    options = {"subscribe": topic, "valueFormat": "avro", "keyFormat": "avro", "schemaRegistryUrl": registry.url}
    frame = read(spark, servers, **options)
    fields = frame.schema
    assert fields["key"].dataType.simpleString() == "struct<id:int>"
    assert fields["value"].dataType.simpleString() == (
        "struct<id:bigint,note:string,name:string,at:timestamp,tags:map<string,array<string>>>"
    )
    latest = SchemaRegistryClient({"url": registry.url}).get_latest_version("orders-value")
    assert fields["value"].metadata == {
        "klog.schema.id": latest.schema_id,
        "klog.schema.subject": "orders-value",
        "klog.schema.version": latest.version,
    }
    rows = frame.orderBy("offset").select("key.id", "value", col("value.at").cast("long").alias("at")).collect()
    assert [row.id for row in rows] == list(range(5))
    assert [row.at for row in rows] == [0, 1, 2, 3, None]
    assert rows[4].value is None
    assert [row.value.note for row in rows[:4]] == ["-", "-", "n", "h"]
    assert rows[0].value.tags == {"k": ["a", "b"]}
    number = int.from_bytes(old[0][1:5], "big")
    ends = json.dumps({topic: {"0": 2}})
    first = read(spark, servers, **options, valueSchemaId=number, endingOffsets=ends)
    assert first.schema["value"].metadata == {"klog.schema.id": number}
    assert [row.price for row in first.select("value.price").collect()] == [Decimal(1), Decimal(1)]


def test_the_schema_of_a_text_and_bare_records(spark: SparkSession, servers: str) -> None:
    topic = "bare"
    create_topic(servers, topic)
    parsed = fastavro.parse_schema(_V2)
    data = []
    for number in range(3):
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, parsed, _order(number, note="x"))
        data.append(Sent(buffer.getvalue()))
    produce(servers, topic, data)
    frame = read(spark, servers, subscribe=topic, valueFormat="AVRO", valueSchema=json.dumps(_V2))
    assert [row.id for row in frame.orderBy("offset").select("value.id").collect()] == [0, 1, 2]
    assert frame.filter("value.id = 1").count() == 1


def test_wrong_columns_fail_at_analysis(spark: SparkSession, servers: str, registry: SrFake, tmp_path: Path) -> None:
    topic = "analysed"
    create_topic(servers, topic)
    _Writer(registry, topic).values(_V1, [_order(1)])
    options = {"subscribe": topic, "valueFormat": "avro", "schemaRegistryUrl": registry.url}
    assert "FIELD_NOT_FOUND" in error_of(lambda: read(spark, servers, **options).select("value.nothing"))
    assert "subject analysed-key" in error_of(lambda: read(spark, servers, **options, keyFormat="avro"))
    text = error_of(lambda: read(spark, servers, **options, valueSchema='{"type": "rec"}'))
    assert "the schema of column value" in text
    stream = spark.readStream.format("klog").schema("value STRUCT<id: BIGINT>").options(**options)
    stream = stream.option("kafka.bootstrap.servers", servers).option("valueSubject", "none")
    writer = stream.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    text = error_of(lambda: writer.start().awaitTermination(60))
    assert "column value: subject none, version latest: the schema registry" in text
    assert "UnboundLocalError" not in text
    user = spark.read.format("klog").schema("value STRUCT<id: STRING>").options(**options)
    text = error_of(lambda: user.option("kafka.bootstrap.servers", servers).load().collect())
    assert "column value is struct<id:bigint," in text


def test_what_does_not_decode(spark: SparkSession, servers: str, registry: SrFake, tmp_path: Path) -> None:
    topic = "poisoned"
    create_topic(servers, topic)
    good = _Writer(registry, topic).values(_V1, [_order(number) for number in range(3)])
    unknown = b"\0" + (424_242).to_bytes(4, "big") + b"xyz"
    produce(servers, topic, map(Sent, [good[0], good[1][:-3], b"{}", unknown, good[2]]))
    options = {"subscribe": topic, "valueFormat": "avro", "schemaRegistryUrl": registry.url}
    text = error_of(lambda: read(spark, servers, **options).collect())
    schema_id = int.from_bytes(good[0][1:5], "big")
    assert f"{topic}-0: the record at offset 1 has a value that does not decode: schema id {schema_id}:" in text
    skipped = read(spark, servers, **options, badRecords="skip").select("offset", "value.id").orderBy("offset")
    assert [tuple(row) for row in skipped.collect()] == [(0, 0), (4, 2)]
    permissive = read(spark, servers, **options, mode="PERMISSIVE").select("offset", "value.id").orderBy("offset")
    assert [tuple(row) for row in permissive.collect()] == [(0, 0), (1, None), (2, None), (3, None), (4, 2)]
    kept = read(spark, servers, **options, badRecords="deadletter", badRecordsPath=tmp_path / "letters")
    assert kept.count() == 2
    letters = [json.loads(file.read_text()) for file in (tmp_path / "letters").glob("*.json")]
    by_offset = {letter["offset"]: letter for letter in letters}
    assert {offset: base64.b64decode(letter["bytes"]) for offset, letter in by_offset.items()} == {
        1: good[1][:-3],
        2: b"{}",
        3: unknown,
    }
    assert [letter["value"] == letter["bytes"] and letter["key"] is None for letter in letters] == [True] * 3
    assert "schema id 424242: the schema registry" in by_offset[3]["reason"]
    assert "does not have it" in by_offset[3]["reason"]


def test_a_stream(spark: SparkSession, servers: str, registry: SrFake, tmp_path: Path) -> None:
    topic = "streamed"
    create_topic(servers, topic)
    writer = _Writer(registry, topic)
    produce(servers, topic, map(Sent, writer.values(_V1, [_order(number) for number in range(3)])))
    reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    reader = reader.option("valueFormat", "avro").option("schemaRegistryUrl", registry.url)
    frame = reader.option("startingOffsets", "earliest").load().select("value.id", "value.price")
    before = len(registry.requests)
    query = frame.writeStream.format("memory").queryName("streamed").option("checkpointLocation", str(tmp_path)).start()
    try:
        query.processAllAvailable()
        # a new version, in the midst of the stream: its records have the columns of the query's schema, by default
        evolved = {**_V2, "fields": [*_V2["fields"], {**_V1["fields"][4], "default": "\u0001"}]}
        rows = [_order(number, note="n", price=Decimal(2)) for number in range(3, 5)]
        produce(servers, topic, map(Sent, writer.values(evolved, rows)))
        query.processAllAvailable()
    finally:
        query.stop()
    seen = sorted((row.id, float(row.price)) for row in spark.table("streamed").collect())
    assert seen == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    asked = [request for request in registry.requests[before:] if "ids" in request]
    assert 1 <= len(asked) <= 6  # by the processes that plan, and once by each of the workers


@pytest.mark.parametrize("evolution", ["restart", pytest.param("fail", marks=pytest.mark.test_all("long"))])
def test_a_stream_that_ends_with_its_schema(
    spark: SparkSession, servers: str, registry: SrFake, tmp_path: Path, evolution: str
) -> None:
    topic = f"evolving-{evolution}"
    create_topic(servers, topic)
    writer = _Writer(registry, topic)
    first = writer.values(_V1, [_order(0)])
    second = writer.values({**_V1, "doc": "the second"}, [_order(1)])
    produce(servers, topic, map(Sent, [*first, *second]))
    options = {"subscribe": topic, "valueFormat": "avro", "schemaRegistryUrl": registry.url}
    options |= {"startingOffsets": "earliest", "schemaEvolution": evolution}
    if evolution == "fail":
        options["valueSchemaId"] = str(int.from_bytes(second[0][1:5], "big"))
    table = tmp_path / "table"

    def start() -> StreamingQuery:
        reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).options(**options)
        rows = reader.load().select("value.*").writeStream.format("parquet")
        return rows.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(table))

    def failure(query: StreamingQuery) -> str:
        with pytest.raises(StreamingQueryException) as caught:
            query.awaitTermination(60)
        return str(caught.value)

    query = start()
    query.processAllAvailable()
    evolved = {**_V1, "fields": [*_V1["fields"], {"name": "note", "type": "string", "default": "-"}]}
    produce(servers, topic, map(Sent, writer.values(evolved, [_order(2, note="n")])))
    changed = f"subject {topic}-value has records of version 3 now, and the query reads by version 2: "
    if evolution == "restart":
        assert changed + "start it again, from a new load(), to read by the new one" in failure(query)
    else:
        assert changed + "set valueSchemaId to read by the new one" in failure(query)
        assert changed in failure(start())
        options["schemaEvolution"] = "keep"
    query = start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    rows = spark.read.option("mergeSchema", "true").parquet(str(table)).orderBy("id").collect()
    assert [row.id for row in rows] == [0, 1, 2]
    if evolution == "restart":
        assert [row.note for row in rows] == [None, None, "n"]
    else:
        assert "note" not in rows[0].asDict()


@pytest.mark.test_all("long")  # three queries
def test_a_newer_version_without_a_field_is_not_lost(
    spark: SparkSession, servers: str, registry: SrFake, tmp_path: Path
) -> None:
    """With the defaults of Spark and registries, and bad records left out: the next start reads what this one can't."""
    topic = "shrinking"
    create_topic(servers, topic)
    writer = _Writer(registry, topic)
    produce(servers, topic, map(Sent, [*writer.values(_V1, [_order(0)]), b"no record"]))
    table = tmp_path / "table"

    def start() -> StreamingQuery:
        reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
        reader = reader.option("startingOffsets", "earliest").option("badRecords", "skip")
        rows = reader.option("valueFormat", "avro").option("schemaRegistryUrl", registry.url).load().select("value.*")
        rows = rows.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        return rows.start(str(table))

    query = start()
    query.processAllAvailable()
    shrunk = {**_V1, "fields": [field for field in _V1["fields"] if field["name"] != "price"]}
    row = _order(1)
    del row["price"]
    produce(servers, topic, map(Sent, writer.values(shrunk, [row])))
    with pytest.raises(StreamingQueryException, match=r"has records of version 2 now.* from a new load\(\)"):
        query.awaitTermination(60)
    query = start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert sorted(row.id for row in spark.read.option("mergeSchema", "true").parquet(str(table)).collect()) == [0, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"valueFormat": "avro"}, "option valueFormat=avro needs schemaRegistryUrl, or valueSchema"),
        ({"valueFormat": "json"}, "option valueFormat=json needs valueSchema"),
        ({"valueSchema": '"int"'}, "option valueSchema needs valueFormat"),
        ({"keyFormat": "avro", "keySchema": '"int"', "valueSubject": "s"}, "option valueSubject needs valueFormat"),
        ({"schemaRegistryUrl": "http://a"}, "needs valueFormat or keyFormat"),
        ({"mode": "permissive"}, "option mode needs valueFormat"),
        ({"valueFormat": "avro", "valueSchemaId": "7"}, "option valueSchemaId needs schemaRegistryUrl"),
        (
            {"valueFormat": "avro", "schemaRegistryUrl": "http://a", "subscribe": "a,b"},
            "valueFormat=avro of several topics needs valueSubject",
        ),
        (
            {"valueFormat": "avro", "schemaRegistryUrl": "http://a", "valueSchemaId": "7", "valueSchema": "s"},
            "options valueSchema and valueSchemaId exclude each other",
        ),
        ({"schemaEvolution": "restart"}, "option schemaEvolution needs valueFormat"),
        (
            {"valueFormat": "avro", "schemaRegistryUrl": "http://a", "schemaEvolution": "fail"},
            "option schemaEvolution=fail needs valueSchemaId",
        ),
        (
            {"valueFormat": "avro", "valueSchema": '"int"', "schemaEvolution": "restart"},
            "option schemaEvolution=restart needs valueSubject, and no valueSchema",
        ),
        ({"valueFormat": "avro", "schemaRegistry.urls": "x"}, "needs schemaRegistryUrl"),
        ({"valueFormat": "avro", "schemaRegistryUrl": "http://a", "schemaRegistry.x": "x"}, "unknown setting"),
        ({"valueFormat": "avro", "schemaRegistryUrl": "http://u:very-secret@a"}, "has a user in it"),
        (
            {
                "valueFormat": "avro",
                "schemaRegistryUrl": "http://a",
                "schemaRegistry.basic.auth.user.info": "u:very-secret",
            },
            "Spark would show it in plans: set it to env:NAME",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, str], text: str) -> None:
    given = {"kafka.bootstrap.servers": "a:1", "subscribe": "t", **options}
    with pytest.raises(ConfigError, match=text) as caught:
        source_options(given, streaming=True)
    assert "very-secret" not in str(caught.value)


def test_plans_show_no_secret(spark: SparkSession, servers: str, tmp_path: Path) -> None:
    topic = "secret"
    create_topic(servers, topic)
    token = "very-secret"
    basic = base64.b64encode(f"alice:{token}".encode()).decode()
    with serving_srfake(tmp_path / "registry", f"Basic {basic}") as registry:
        theirs = SchemaRegistryClient({"url": registry.url, "basic.auth.user.info": f"alice:{token}"})
        theirs.register_schema("secret-value", Schema(json.dumps(_V1), "AVRO"))
        options = {"subscribe": topic, "valueFormat": "avro", "schemaRegistryUrl": registry.url}
        options |= {"schemaRegistry.basic.auth.username": "alice", "schemaRegistry.basic.auth.password": token}
        reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).options(**options)
        query = reader.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
        try:
            query.processAllAvailable()
            plan = query._jsq.explainInternal(True)
        finally:
            query.stop()
        wrong = {**options, "schemaRegistry.basic.auth.password": "very-secret-too"}
        text = error_of(lambda: read(spark, servers, **wrong))
    assert "klog" in plan
    assert "check schemaRegistry.basic.auth.username" in text
    written = [file.read_text(errors="replace") for file in (tmp_path / "c").rglob("*") if file.is_file()]
    assert not any("very-secret" in shown for shown in [plan, text, *written])


def test_databricks_names() -> None:
    given = {
        "kafka.bootstrap.servers": "a:1",
        "subscribe": "t",
        "valueFormat": "avro",
        "schemaRegistryUrl": "http://a",
        "confluent.schema.registry.basic.auth.credentials.source": "USER_INFO",
        "confluent.schema.registry.basic.auth.user.info": "env:INFO",
    }
    (value,) = source_options(given, streaming=False).formats
    assert value.registry is not None
    assert value.registry.settings == {
        "url": "http://a",
        "basic.auth.credentials.source": "USER_INFO",
        "basic.auth.user.info": "env:INFO",
    }
    assert "INFO" not in repr(value.registry).replace("USER_INFO", "")


def test_a_column_that_is_not_read_is_not_looked_up() -> None:
    options = {
        "kafka.bootstrap.servers": "a:1",
        "subscribe": "t",
        "valueFormat": "avro",
        "schemaRegistryUrl": "http://127.0.0.1:1",
    }
    KlogDataSource(options).reader(StructType().add("offset", "long"))
