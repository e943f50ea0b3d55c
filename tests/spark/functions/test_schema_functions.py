"""Columns of records to rows and back in any DataFrame: `spark_klog.schemas.from_avro` and the others."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fastavro
import pandas as pd
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import Phase, given, settings, strategies as st
from pyspark.sql import DataFrame, Row, SparkSession, functions as F
from pyspark.sql.connect.functions.builtin import lit as connect_lit
from pyspark.sql.streaming.query import StreamingQuery

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, RegistryError, SchemaError
from spark_klog.schemas import (
    from_avro,
    from_json_schema,
    from_protobuf,
    schema_id,
    to_avro,
    to_json_schema,
    to_protobuf,
)
from spark_klog.schemas.avro.from_arrow import schema_of
from spark_klog.schemas.registry.client import RegistryClient
from spark_klog.spark.functions.options import FunctionOptions
from spark_klog.spark.functions.udfs import INPUTS, FromRecords
from spark_klog.spark.versions import _OnPandas, arrow_schema
from tests.jobs.support import ROOT
from tests.schemas.avro.model import records, values
from tests.schemas.avro.spark_types import case_of, every_type
from tests.schemas.avro.support import written
from tests.spark.support import Sent, create_topic, error_of, produce
from tests.support.packages.maven import resolve
from tests.support.runs.soak import in_soak
from tests.support.spark.pyspark_versions import WITH_CONNECTOR, child_environment, with_connector

pytestmark = [pytest.mark.usefixtures("one_attempt")]
_V1: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"], "default": None}],
}
_V2 = {**_V1, "fields": [*_V1["fields"], {"name": "note", "type": "string", "default": "-"}]}
_ROWS = """
    struct(id, concat('\u20ac ', id) AS name, timestamp_micros(1 - id * 3600000000) AS at,
    CAST(timestamp_micros(id) AS timestamp_ntz) AS local, CAST(id AS decimal(12, 2)) / 4 AS price,
    map('a', id) AS counts, array(id, null) AS numbers,
    if(id % 2 = 0, null, struct(date_from_unix_date(id) AS day)) AS nested,
    encode('x', 'utf-8') AS bytes, CAST(id AS double) AS real) AS v
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(data_dir=tmp_path_factory.mktemp("cluster"), schema_registry=True) as made:
        yield made


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> str:
    assert cluster.schema_registry_url is not None
    return cluster.schema_registry_url


def _written(registry: str, subject: str, schema: Any, rows: Sequence[Any], **conf: Any) -> list[Any]:
    """Values as confluent-kafka writes them, (value, headers) with ids in headers."""
    conf = {"subject.name.strategy": lambda *_: subject, **conf}
    write = AvroSerializer(SchemaRegistryClient({"url": registry}), json.dumps(schema), conf=conf)
    values = []
    for row in rows:
        headers: list[tuple[str, bytes]] = []
        value = write(row, SerializationContext("t", MessageField.VALUE, headers))
        values.append((value, headers) if "schema.id.serializer" in conf else value)
    return values


def _frame(spark: SparkSession, values: Sequence[bytes | None]) -> DataFrame:
    rows = [(None if value is None else bytearray(value),) for value in values]
    return spark.createDataFrame(rows, "value binary").coalesce(1)


def test_bare_records_both_ways(spark: SparkSession) -> None:
    """All of Spark's types that Avro has, in a session that is not in UTC; and fastavro reads them."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        rows = spark.range(20).coalesce(1).selectExpr(f"if(id = 7, null, {_ROWS.rpartition(' AS v')[0]}) AS v")
        text = schema_of(arrow_schema(rows.schema).field("v").type)
        records = rows.select(to_avro("v").alias("value"))
        assert records.schema["value"].dataType.simpleString() == "binary"
        back = records.select(from_avro("value", text).alias("v"))
        assert back.schema["v"].dataType.simpleString() == rows.schema["v"].dataType.simpleString()
        assert back.collect() == rows.collect()
        again = records.select(from_avro(F.col("value"), jsonFormatSchema=text).alias("v")).select(to_avro("v", text))
        assert again.collect() == records.collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    values = [row.value for row in records.collect()]
    assert values.count(None) == 1
    read = fastavro.schemaless_reader(io.BytesIO(values[3]), fastavro.parse_schema(json.loads(text)), None)
    assert (read["id"], read["name"], read["counts"], read["numbers"]) == (3, "\u20ac 3", {"a": 3}, [3, None])


def test_each_record_by_its_own_schema(spark: SparkSession, registry: str) -> None:
    old = _written(registry, "own", _V1, [{"id": 1, "name": "a"}, {"id": 2, "name": None}])
    new = _written(registry, "own", _V2, [{"id": 3, "name": "c", "note": "n"}])
    v1, v2 = (int.from_bytes(value[1:5], "big") for value in (old[0], new[0]))
    guid = b"\1" + bytes(16)
    values = [old[0], new[0], None, old[1], b"\0\0", guid, b"x" * 9]
    by = {"subject": "own", "schemaRegistryAddress": registry}
    row = from_avro("value", options={"Mode": "PERMISSIVE"}, **by).alias("v")
    rows = _frame(spark, values).select(row, schema_id("value"))
    assert rows.schema.simpleString() == "struct<v:struct<id:bigint,name:string,note:string>,schema_id:int>"
    expected = [((1, "a", "-"), v1), ((3, "c", "n"), v2), (None, None), ((2, None, "-"), v1)]
    assert [tuple(row) for row in rows.collect()] == [*expected, (None, None), (None, None), (None, None)]
    # an older schema, a text for the reader, and Databricks' names in options
    options = {"schema.registry.subject": "own", "schema.registry.address": registry, "schemaId": v1}
    assert _frame(spark, new).select(from_avro("value", options=options)).first() == Row(Row(id=3, name="c"))
    reader = json.dumps({**_V2, "fields": _V2["fields"][2:]})
    one = _frame(spark, values[:2]).select(from_avro("value", reader, {"confluent.schema.registry.url": registry}))
    assert [row[0].note for row in one.collect()] == ["-", "n"]


def test_ids_in_headers(spark: SparkSession, registry: str) -> None:
    conf = {"schema.id.serializer": header_schema_id_serializer}
    ((value, headers),) = _written(registry, "headers", _V1, [{"id": 1, "name": "a"}], **conf)
    (prefixed,) = _written(registry, "headers", _V1, [{"id": 2, "name": "b"}])
    number = int.from_bytes(prefixed[1:5], "big")
    with_number = [("other", b"x"), ("__value_schema_id", b"\0" + number.to_bytes(4, "big"))]
    rows = [(value, headers), (value, with_number), (prefixed, []), (prefixed, None), (None, with_number)]
    rows.append((value, [("__value_schema_id", None), *with_number]))
    rows.append((prefixed, [*headers, ("__value_schema_id", None)]))
    rows.append((b"", [("__key_schema_id", with_number[1][1])]))
    kind = "value binary, headers array<struct<key: string, value: binary>>"
    frame = spark.createDataFrame(rows, kind).coalesce(1)
    options = {"mode": "PERMISSIVE"}
    row = from_avro("value", options=options, subject="headers", schemaRegistryAddress=registry, headers="headers")
    found = frame.select(row.id, schema_id("value", "headers")).collect()
    ids = [None, number, number, number, None, number, number, None]
    assert [tuple(row) for row in found] == list(zip([1, 1, 2, 2, None, 1, 2, None], ids, strict=True))


def test_a_process_asks_for_a_schema_once(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task unpickles its functions anew, and finds what another task's have learnt."""
    (old,) = _written(registry, "once", _V1, [{"id": 1, "name": "a"}])
    (new,) = _written(registry, "once", _V2, [{"id": 2, "name": "b", "note": "c"}])
    keywords = {"subject": "once", "schemaRegistryUrl": registry, "schemaRegistry.cache.capacity": 1}
    reader = FunctionOptions.of("from_avro", "avro", None, keywords, schema=None).reading().reader()
    pickled = pickle.dumps(FromRecords("from_avro", reader))
    asked: list[str] = []
    request = RegistryClient._request

    def counted(client: RegistryClient, method: str, path: str, *more: Any) -> Any:
        asked.append(path)
        return request(client, method, path, *more)

    monkeypatch.setattr(RegistryClient, "_request", counted)
    for _ in range(3):
        function = pickle.loads(pickled)  # noqa: S301 - our own
        rows = function(pa.array([old, new, None], pa.binary())).to_pylist()
        assert rows == [{"id": 1, "name": "a", "note": "-"}, {"id": 2, "name": "b", "note": "c"}, None]
    assert asked == [f"/schemas/ids/{int.from_bytes(old[1:5], 'big')}"]


def test_a_bad_record_fails_its_query_by_name(spark: SparkSession, registry: str) -> None:
    values = [*_written(registry, "bad", _V1, [{"id": 1, "name": "a"}]), b"\0\0\0\0\x63rest", b"no"]
    rows = _frame(spark, values).select(from_avro("value", subject="bad", schemaRegistryAddress=registry))
    text = error_of(rows.collect)
    assert "DecodeError: from_avro: row 1 of a batch of 3 does not decode: schema id 99: the schema registry" in text
    assert "(1 more of its batch do not); mode=PERMISSIVE makes such rows null" in text
    cut = _frame(spark, [b"\x02", b"\x02\x00"]).select(from_avro("value", json.dumps(_V1)))
    assert "row 0 of a batch of 2 does not decode" in error_of(cut.collect)
    text = error_of(spark.range(1).select(from_avro("id", '"long"')).collect)
    assert "ConfigError: from_avro: the column is int64, not binary: cast it" in text
    null = spark.range(1).selectExpr("struct(if(id = 0, null, id) AS id) AS v")
    text = error_of(null.select(to_avro("v", json.dumps({**_V1, "fields": _V1["fields"][:1]}))).collect)
    assert "EncodeError: to_avro: column value, row 0: field id: is null" in text


def test_written_under_a_subject(spark: SparkSession, registry: str) -> None:
    client = SchemaRegistryClient({"url": registry})
    rows = spark.range(3).coalesce(1).selectExpr("struct(id, if(id = 1, null, 'x') AS name) AS v")
    made = rows.select(to_avro("v", subject="made", schemaRegistryAddress=registry).alias("value"), "v.id")
    assert "made" not in client.get_subjects()  # its schema is made of the column's type, which the workers learn
    found = [row.value for row in made.collect()]
    latest = client.get_latest_version("made")
    text = schema_of(arrow_schema(rows.schema).field("v").type)
    assert json.loads(latest.schema.schema_str) == json.loads(text)
    conf = {"subject.name.strategy": lambda *_: "made"}
    deserialize = AvroDeserializer(client, conf=conf)
    context = SerializationContext("t", MessageField.VALUE)
    assert [deserialize(value, context) for value in found] == [
        {"id": number, "name": None if number == 1 else "x"} for number in range(3)
    ]
    # by a text: registered by the call
    to_avro("v", json.dumps(_V2), "text", registry)
    number = client.get_latest_version("text").schema_id
    latest_of: Any = {"options": {"useLatestVersion": True}, "subject": "text", "schemaRegistryAddress": registry}
    first = Row(b"\0" + number.to_bytes(4, "big") + b"\0\2\2x\2-")
    assert rows.select(to_avro("v", **latest_of)).first() == first
    assert rows.select(to_avro("v", options={"schemaRegistryUrl": registry, "schemaId": number})).first() == first
    with pytest.raises(RegistryError, match=r"can't be written under subject text: .*make the columns compatible"):
        to_avro("v", json.dumps({**_V1, "fields": [{"name": "id", "type": "string"}]}), "text", registry)
    with pytest.raises(RegistryError, match="set autoRegisterSchemas=true"):
        to_avro("v", json.dumps(_V1), "none", registry, {"autoRegisterSchemas": "FALSE"})
    assert "SchemaError" in error_of(spark.range(1).select(to_avro("id", **latest_of)).collect)


@pytest.mark.test_all("long")
def test_a_stream_whose_subject_evolves(spark: SparkSession, servers: str, registry: str, tmp_path: Path) -> None:
    """`none` reads on by the query's schema; `restart` ends the query, and its next start has the new column."""
    topic = "evolving"
    create_topic(servers, topic)
    produce(servers, topic, [Sent(value) for value in _written(registry, topic, _V1, [{"id": 1, "name": "a"}])])
    rows: dict[str, list[Row]] = {"none": [], "restart": []}

    def start(mode: str) -> StreamingQuery:
        row = from_avro("value", None, {"avroSchemaEvolutionMode": mode}, topic, registry)
        source = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
        frame = source.option("startingOffsets", "earliest").load().select(row.alias("v")).select("v.*")
        writer = frame.writeStream.foreachBatch(lambda batch, _: rows[mode].extend(batch.collect()))
        return writer.option("checkpointLocation", str(tmp_path / mode)).start()

    first = {mode: start(mode) for mode in rows}
    for query in first.values():
        query.processAllAvailable()
    new = _written(registry, topic, _V2, [{"id": 2, "name": "b", "note": "n"}])
    produce(servers, topic, [Sent(value) for value in new])
    first["none"].processAllAvailable()
    first["none"].stop()
    text = error_of(first["restart"].processAllAvailable)
    assert "SchemaChanged: subject evolving has records of version 2 now" in text
    second = start("restart")
    second.processAllAvailable()
    second.stop()
    assert rows["none"] == [Row(id=1, name="a"), Row(id=2, name="b")]
    assert rows["restart"] == [Row(id=1, name="a"), Row(id=2, name="b", note="n")]


_PROTO = """
    syntax = "proto3"; package shop;
    message Other { string a = 1; }
    message Order { int64 id = 1; optional string name = 2; }
"""
_JSON = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string"}}, "required": ["id"]}


@pytest.mark.test_all("long")
def test_the_other_formats(spark: SparkSession, registry: str) -> None:
    for codec in ("protobuf", "json_schema"):
        pytest.importorskip(f"spark_klog.schemas.{codec}.codec")
    by: Any = {"subject": "proto", "schemaRegistryAddress": registry, "options": {"messageName": "shop.Order"}}
    made: Any = {"subject": "json", "schemaRegistryAddress": registry}
    rows = spark.range(1).selectExpr("struct(id + 5 AS id, 'x' AS name) AS v")
    records = rows.select(
        to_protobuf("v", "shop.Order", schema=_PROTO).alias("bare"),
        to_protobuf("v", schema=_PROTO, **by).alias("proto"),
        to_json_schema("v", json.dumps(_JSON)).alias("text"),
        to_json_schema("v", **made).alias("json"),
    ).collect()
    found = records[0]
    assert bytes(found.bare) == b"\x08\x05\x12\x01x"
    assert bytes(found.proto[5:]) == b"\2\2" + found.bare  # of the second message
    assert bytes(found.text) == found.json[5:] == b'{"id":5,"name":"x"}'
    back = spark.createDataFrame(records, "bare binary, proto binary, text binary, json binary").select(
        from_protobuf("bare", "shop.Order", schema=_PROTO),
        from_protobuf("proto", **by),
        from_json_schema("text", json.dumps(_JSON), {"validate": True}),
        from_json_schema("json", **made),
    )
    assert list(back.first() or ()) == [Row(id=5, name="x")] * 4


def test_how_4_0_calls_functions() -> None:
    """As its worker does: series of objects in, and pyarrow makes the array of what looks like a series."""
    reader = FunctionOptions.of("from_avro", "avro", None, {}, schema=json.dumps(_V1)).reading().reader()
    function = _OnPandas(FromRecords("from_avro", reader), INPUTS[:1])
    result = function(pd.Series([b"\x02\x02\x02a", None, b"\x04\x00"]))
    kind = pa.struct([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    array = pa.Array.from_pandas(result.apply(str), None, pa.list_(pa.field("element", kind)))
    assert array.to_pylist() == [[{"id": 1, "name": "a"}], [None], [{"id": 2, "name": None}]]
    assert (len(result), result.dtype, hasattr(result.array, "__arrow_array__")) == (3, None, True)


@pytest.mark.peer
@pytest.mark.test_all("client")  # schemas/avro/test_spark.py compares decoder and encoder
@in_soak
def test_as_sparks_own_functions(tmp_path: Path) -> None:
    """On pyspark 4.1.1, whose spark-avro is on Maven: types, rows and records of every type and of random schemas."""
    artifact = f"org.apache.spark:spark-avro_2.13:{WITH_CONNECTOR}"
    (jar,) = resolve(f"spark-avro-alone-{WITH_CONNECTOR}", (artifact,), dependencies=False).glob("*.jar")
    cases = [every_type()]

    @settings(max_examples=20, deadline=None, phases=[Phase.generate], database=None)
    @given(data=st.data())
    def addcase(data: st.DataObject) -> None:
        schema = data.draw(records())
        if schema["fields"] and '["null"]' not in json.dumps(schema):  # Spark has an empty struct for the latter
            cases.append(case_of(schema, schema, written(schema, data.draw(values(schema)))))

    addcase()
    paths = [tmp_path / "cases.json", tmp_path / "found.json"]
    paths[0].write_text(json.dumps(cases))
    python = with_connector()
    environment = {**child_environment(python), "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [python, Path(__file__).with_name("functions_program.py"), jar, *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=300,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    answers = json.loads(paths[1].read_text())
    assert len([answer for answer in answers if "error" not in answer]) > len(cases) / 2 > 5
    for case, answer in zip(cases, answers, strict=True):
        if "error" in answer:  # both decode a row, or none: text that is not UTF-8 we refuse
            assert "not UTF-8" in answer["error"], (case, answer)
            continue
        assert answer["type"][0] == answer["type"][1], case
        assert all(theirs == ours for theirs, ours in answer["rows"]), (case, answer)
        if '"map"' not in case["reader"]:  # Java's maps have another order
            assert answer["written"][0] == answer["written"][1], (case, answer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "from_avro: set schema, or subject and schemaRegistryUrl: Spark has to know the type"),
        ({"schema": '"int"', "jsonFormatSchema": '"int"'}, "schema and jsonFormatSchema are the same: remove one"),
        ({"options": {"mod": "FAILFAST"}}, r"unknown option 'mod'; did you mean mode\?, and schemaRegistry\.\*"),
        ({"options": {"mode": "DROPMALFORMED"}, "schema": '"int"'}, "option mode=DROPMALFORMED must be one of"),
        ({"options": {"useLatestVersion": "true"}}, "option useLatestVersion is for the functions of writing"),
        ({"options": {"messageName": "A"}}, "option messageName is for the functions of protobuf"),
        ({"options": {"compression": "snappy"}}, "compression is not supported: records are not compressed"),
        ({"options": {"avroSchema": "{}"}}, "avroSchema is not supported: give the schema that rows are to have"),
        ({"options": {"schemaRegistry.http.read.timeout.ms": 1}}, "http.read.timeout.ms needs schemaRegistryUrl"),
        (
            {"options": {"confluent.schema.registry.basic.auth.usr.info": "u:p"}},
            r"unknown option 'confluent.schema.registry.basic.auth.usr.info': did you mean basic.auth.user.info",
        ),
        ({"options": {"mode": None}}, "option mode must be a text, not a NoneType"),
        ({"options": {"subject": "a"}, "subject": "b"}, "option subject and another name of the same option differ"),
        ({"subject": "s"}, "from_avro: option subject needs schemaRegistryUrl"),
        ({"schemaRegistryAddress": "http://127.0.0.1:1"}, "set subject, or schema"),
        ({"schemaRegistryAddress": "127.0.0.1:1", "subject": "s"}, "schemaRegistryUrl must be http://HOST:PORT"),
        ({"schema": '"int"', "headers": "h"}, "headers need schemaRegistryUrl"),
        (
            {"schemaRegistryAddress": "http://h", "schema": '"int"', "options": {"avroSchemaEvolutionMode": "restart"}},
            "schemaEvolution=restart needs subject, and no schema",
        ),
    ],
)
def test_wrong_calls(spark: SparkSession, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_avro("value", **call)


def test_wrong_calls_of_others(spark: SparkSession, registry: str) -> None:
    for call, message in (
        ({"schemaRegistryAddress": registry}, "to_avro: set subject, such as TOPIC-value, or option schemaId"),
        ({"options": {"mode": "FAILFAST"}}, "option mode is for the functions of reading"),
        ({"options": {"useLatestVersion": "true"}}, "useLatestVersion needs schemaRegistryUrl"),
        (
            {"options": {"useLatestVersion": "true", "schemaId": 1}, "schemaRegistryAddress": registry},
            "option schemaId and option useLatestVersion exclude each other",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            to_avro("value", **call)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="from_protobuf: descFilePath is not supported: give the text"):
        from_protobuf("value", "Event", "/tmp/event.desc")
    with pytest.raises(SchemaError, match="subject missing"):
        from_avro("value", subject="missing", schemaRegistryAddress=registry)
    with pytest.raises(SchemaError):
        from_avro("value", '{"type": "rec"}')
    with pytest.raises(ConfigError, match=r"schema 'order\.avsc' looks like a file's name"):
        from_avro("value", "order.avsc")
    for column in (F.col("subject"), F.lit(1), F.concat(F.lit("a"), F.lit("b"))):
        with pytest.raises(ConfigError, match=r"from_avro: subject must be a text or lit\(TEXT\)"):
            from_avro("value", subject=column, schemaRegistryAddress=registry)
    # as in Databricks' examples, of classic Spark and of Connect
    for column in (F.lit("missing"), connect_lit("missing")):
        with pytest.raises(SchemaError, match="subject missing"):
            from_avro("value", subject=column, schemaRegistryAddress=registry)


@pytest.mark.test_all("long")
def test_records_beside_the_headers_of_others(spark: SparkSession, servers: str, registry: str, topic: str) -> None:
    """As the documents say: a header that names the schema of the record before must not stay."""
    create_topic(servers, topic)
    ((_, headers),) = _written(
        registry, f"{topic}-old", _V1, [{"id": 1}], **{"schema.id.serializer": header_schema_id_serializer}
    )
    frame = spark.createDataFrame(
        [
            Row(
                v=Row(other="x"),
                headers=[Row(key=name, value=bytearray(value)) for name, value in [*headers, ("h", b"1")]],
            )
        ]
    )
    frame.select(
        to_avro("v", subject=f"{topic}-value", schemaRegistryAddress=registry).alias("value"),
        F.filter("headers", lambda header: header["key"] != "__value_schema_id").alias("headers"),
    ).write.format("klog").option("kafka.bootstrap.servers", servers).option("topic", topic).mode("append").save()
    read = spark.read.format("klog").options(
        **{"kafka.bootstrap.servers": servers, "subscribe": topic, "includeHeaders": "true"},
        valueFormat="avro",
        schemaRegistryUrl=registry,
    )
    ((value, kept),) = read.load().select("value", "headers").collect()
    assert (value, kept) == (Row(other="x"), [Row(key="h", value=bytearray(b"1"))])


@contextmanager
def _event_log(spark: SparkSession, folder: Path) -> Iterator[Path]:
    """Spark's event log of what runs meanwhile."""
    jvm, context = spark._jvm, spark._jsc.sc()
    assert jvm is not None
    conf = context.conf().clone().set("spark.eventLog.compress", "false").set("spark.eventLog.rolling.enabled", "false")
    uri = jvm.java.net.URI(folder.as_uri())
    none = jvm.scala.Option.empty()
    listener = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "app", none, uri, conf, context.hadoopConfiguration()
    )
    listener.start()
    context.addSparkListener(listener)
    yield folder / "app"
    context.listenerBus().waitUntilEmpty()
    context.removeSparkListener(listener)
    listener.stop()


def test_secrets_are_in_no_plan(
    spark: SparkSession, registry: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "hunter2-and-more"
    _written(registry, "secret", _V1, [{"id": 1, "name": "a"}])
    options = {
        "confluent.schema.registry.basic.auth.credentials.source": "USER_INFO",
        "confluent.schema.registry.basic.auth.user.info": f"reader:{secret}",
    }
    column = from_avro("value", options=options, subject="secret", schemaRegistryAddress=registry)
    written = to_avro(column, options=options, subject="secret", schemaRegistryAddress=registry)
    frame = _frame(spark, [b"\0\0"]).select(column.alias("v"), written.alias("w"))
    with _event_log(spark, tmp_path) as log:
        frame.explain("extended")
        frame.explain("formatted")
        error = error_of(frame.collect)
    plans = capfd.readouterr().out
    assert "from_avro(value" in plans
    assert "from_avro(value" in log.read_text()
    shown = [plans, repr(column), repr(written), repr(frame), error, log.read_text()]
    with pytest.raises(ConfigError) as wrong:
        from_avro("value", options={**options, "subjects": secret}, schemaRegistryAddress=registry)
    assert secret not in " ".join([*shown, str(wrong.value)])


def test_the_room_imports_neither_pyspark_nor_pyarrow() -> None:
    program = (
        "import sys, spark_klog.schemas; assert not {'pyspark', 'pyarrow', 'fastavro', 'httpx'} & set(sys.modules)\n"
        "sys.modules['pyspark'] = None\n"
        "try:\n    from spark_klog.schemas import from_avro\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert "pyspark" in done.stdout
