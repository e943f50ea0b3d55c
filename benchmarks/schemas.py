"""Records with a schema, without a network: to Arrow and back, and in Spark's columns."""

from __future__ import annotations

import datetime as dt
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import speed, take_turns
from benchmarks.sides import SideFailed, SparkSide, alternate, project_environment
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.schema import parse_schema
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.encoder import JsonSchemaEncoder
from spark_klog.schemas.json_schema.schema import parse_schema as parse_json_schema
from tests.support.spark.jvm_connector import spark_artifact
from tests.support.spark.pyspark_versions import WITH_CONNECTOR, with_connector

if TYPE_CHECKING:
    from pyspark.sql import Column

_ROWS = 65_536
#: Rows of the sides that take one after the other.
_FEW = 4_096
#: Files of that many rows for Spark.
_FILES = 32
#: What a Confluent serializer writes before a record: a zero, and the schema's id.
_PREFIX = b"\x00\x00\x00\x00\x01"
#: Ten fields of an order.
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "user", "type": "int"},
        {"name": "item", "type": "string"},
        {"name": "price", "type": "double"},
        {"name": "quantity", "type": "int"},
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID", "SENT"]}},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "discount", "type": ["null", "double"], "default": None},
        {"name": "paid", "type": "boolean"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
#: A reader's schema of the same orders: a promoted, a renamed, a missing and a new field, another order.
_EVOLVED: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "long", "aliases": ["user"]},
        *SCHEMA["fields"][2:8],
        {"name": "currency", "type": "string", "default": "EUR"},
    ],
}


def orders(count: int) -> Iterator[dict[str, Any]]:
    """Random orders, as fastavro takes them."""
    source = random.Random(7)
    for number in range(count):
        yield {
            "id": 1_000_000_000 + number,
            "user": source.randrange(1_000_000),
            "item": f"item-{source.randrange(100_000)}",
            "price": source.random() * 100,
            "quantity": source.randrange(100),
            "status": source.choice(("NEW", "PAID", "SENT")),
            "note": "leave it with the neighbours" if source.random() < 0.3 else None,
            "discount": 0.1 if source.random() < 0.5 else None,
            "paid": source.random() < 0.5,
            "at": 1_700_000_000_000_000 + 1000 * number,
        }


def encoded_orders(count: int, prefix: bytes = _PREFIX) -> list[bytes]:
    """The orders' records in binary form, each after the prefix."""
    parsed = fastavro.parse_schema(SCHEMA)
    values = []
    for order in orders(count):
        stream = io.BytesIO()
        stream.write(prefix)
        fastavro.schemaless_writer(stream, parsed, order)
        values.append(stream.getvalue())
    return values


def _speed(work: Callable[[], int]) -> float:
    """M records a second of processor time: a side may have threads."""
    return speed(work, time.process_time)


def _decode(bench: Bench) -> Iterator[Result]:
    values = encoded_orders(_ROWS)
    column = pa.array(values, pa.binary())
    bare = [value[len(_PREFIX) :] for value in values]
    native = Side("klog, native kernel")
    python, rust = Side("fastavro, to dicts"), Side("pyruhvro, one thread")
    sides: list[tuple[Side, Callable[[], float]]] = [
        (native, lambda: _decoded(column, SCHEMA)),
        (python, lambda: _speed(lambda: _by_fastavro(bare[:_FEW]))),
        (rust, lambda: _speed(lambda: _by_pyruhvro(bare))),
    ]
    take_turns(sides, bench.repeat)
    for peer in (python, rust):
        yield Result("decode Avro records of 10 fields, 55 B, to Arrow", "M records/s", native, peer, bench.command)
    evolved = Side("klog, native kernel")
    take_turns([(evolved, lambda: _decoded(column, _EVOLVED))], bench.repeat)
    yield Result("decode them by another reader's schema", "M records/s", evolved, None, bench.command)


def _decoded(column: pa.Array, reader: dict[str, Any]) -> float:
    decoder = AvroDecoder(parse_schema(reader))
    programs = [decoder.program(parse_schema(SCHEMA))]

    def once() -> int:
        decoded = decoder.decode(column, programs, starts=len(_PREFIX))
        if decoded.bad or len(decoded.values) != len(column):
            raise SideFailed(f"{len(decoded.bad)} bad rows")
        return len(column)

    return _speed(once)


def _by_fastavro(values: list[bytes]) -> int:
    parsed = fastavro.parse_schema(SCHEMA)
    rows = [fastavro.schemaless_reader(io.BytesIO(value), parsed, None) for value in values]
    return len(rows)


def _by_pyruhvro(values: list[bytes]) -> int:
    import pyruhvro

    return int(pyruhvro.deserialize_array(values, json.dumps(SCHEMA)).num_rows)


def _encode(bench: Bench) -> Iterator[Result]:
    values = encoded_orders(_ROWS)
    decoder = AvroDecoder(parse_schema(SCHEMA))
    decoded = decoder.decode(
        pa.array(values, pa.binary()), [decoder.program(decoder.reader)], starts=len(_PREFIX)
    ).values
    few = list(orders(_FEW))
    native = Side("klog, native kernel")
    python, rust = Side("fastavro, from dicts"), Side("pyruhvro, one thread")
    sides: list[tuple[Side, Callable[[], float]]] = [
        (native, lambda: _encoded(decoded, values)),
        (python, lambda: _speed(lambda: _written_by_fastavro(few))),
        (rust, lambda: _speed(_pyruhvro_writer([value[len(_PREFIX) :] for value in values]))),
    ]
    take_turns(sides, bench.repeat)
    for peer in (python, rust):
        yield Result("encode Arrow rows of 10 fields to Avro, 55 B", "M records/s", native, peer, bench.command)


def _encoded(rows: pa.Array, values: list[bytes]) -> float:
    encoder = AvroEncoder(parse_schema(SCHEMA), rows.type)
    if encoder.encode(rows, _PREFIX).to_pylist() != values:
        raise SideFailed("other bytes than fastavro's")

    def once() -> int:
        return len(encoder.encode(rows, _PREFIX))

    return _speed(once)


def _written_by_fastavro(rows: list[dict[str, Any]]) -> int:
    parsed = fastavro.parse_schema(SCHEMA)
    for row in rows:
        stream = io.BytesIO()
        stream.write(_PREFIX)
        fastavro.schemaless_writer(stream, parsed, row)
        stream.getvalue()
    return len(rows)


def _pyruhvro_writer(values: list[bytes]) -> Callable[[], int]:
    import pyruhvro

    text = json.dumps(SCHEMA)
    batch = pyruhvro.deserialize_array(values, text)
    if pyruhvro.serialize_record_batch(batch, text, 1)[0].to_pylist() != values:
        raise SideFailed("other bytes than fastavro's")
    return lambda: len(pyruhvro.serialize_record_batch(batch, text, 1)[0])


def _functions(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("functions")
    values = encoded_orders(_ROWS, b"")
    column = pa.chunked_array([pa.array(values, pa.binary())] * _FILES)
    (folder / "values").mkdir()
    for number, chunk in enumerate(column.chunks):
        pq.write_table(pa.table({"value": chunk}), folder / "values" / f"{number}.parquet")

    def with_jar() -> SparkSide:
        confs = {"spark.jars": str(spark_artifact("spark-avro"))}
        return SparkSide("spark", "spark", folder, python=with_connector(), confs=confs)

    def speed(side: SparkSide) -> float:
        options = {"by": side.name, "schema": json.dumps(SCHEMA)}
        return len(column) / 1e6 / float(side.ask("avro", options, folder=str(folder / "values"))["seconds"])

    def in_project(name: str) -> Callable[[], SparkSide]:
        return lambda: SparkSide(name, name, folder, environment=project_environment())

    ours, python = Side("klog, from_avro"), Side("fastavro in a pandas UDF")
    jvm = Side(f"from_avro of spark-avro {WITH_CONNECTOR}, in the JVM")
    makers = [(ours, in_project("klog")), (python, in_project("fastavro")), (jvm, with_jar)]
    alternate(makers, bench.repeat, speed)
    for peer in (python, jvm):
        yield Result(f"Spark decodes {len(column):,} Avro records", "M rows/s", ours, peer, bench.command)


FUNCTIONS = Work(
    "functions",
    _functions,
    (
        "Functions: a column of the Avro records of the section avro, without a prefix, in Parquet files, decoded to a "
        "struct in local[2]; the rows go to Spark's sink noop. Spark moves the column to Python's processes and back "
        "with two of the sides, which takes klog's most of the time.",
    ),
)

AVRO = Work(
    "avro",
    lambda bench: iter((*_decode(bench), *_encode(bench))),
    (
        f"Avro: one process, processor time; {_ROWS:,} orders of ten fields (long, int, string, double, int, enum, two "
        "that are null or not, boolean, timestamp) after a registry's prefix of five bytes, to Arrow and back. "
        "fastavro makes dicts of Python and takes them: the way to Arrow is not in its figures. pyruhvro is in Rust, "
        "and makes Arrow; it knows neither a reader's schema nor the prefix, which is cut off before. The last peer of "
        "each is what a machine without a C compiler has.",
    ),
)

#: The same ten fields.
JSON_SCHEMA: dict[str, Any] = {
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "user": {"type": "integer", "connect.type": "int32"},
        "item": {"type": "string"},
        "price": {"type": "number"},
        "quantity": {"type": "integer", "connect.type": "int32"},
        "status": {"enum": ["NEW", "PAID", "SENT"]},
        "note": {"type": ["string", "null"]},
        "discount": {"type": ["number", "null"]},
        "paid": {"type": "boolean"},
        "at": {"type": "string", "format": "date-time"},
    },
    "required": ["id", "user", "item", "price", "quantity", "status", "note", "discount", "paid", "at"],
}
_DDL = (
    "id BIGINT, user INT, item STRING, price DOUBLE, quantity INT, status STRING, note STRING, discount DOUBLE, "
    "paid BOOLEAN, at TIMESTAMP"
)
#: A map beside them, which Arrow's parser does not read.
_WITH_MAP = {"tags": {"type": "object", "additionalProperties": {"type": "string"}}}
_EPOCH = dt.datetime(1970, 1, 1)
#: Runs in which a JVM becomes as fast as it gets.
_SPARK_WARM_UP = 15


def _json_orders(count: int) -> list[dict[str, Any]]:
    times = (
        f"{(_EPOCH + dt.timedelta(microseconds=order['at'])).isoformat('T', 'microseconds')}Z"
        for order in orders(count)
    )
    return [{**order, "at": time} for order, time in zip(orders(count), times, strict=True)]


def _json_decode(bench: Bench) -> Iterator[Result]:
    rows = _json_orders(_ROWS)
    bare = [json.dumps(row).encode() for row in rows]
    column = pa.array([_PREFIX + value for value in bare], pa.binary())
    tagged = {**JSON_SCHEMA, "properties": {**JSON_SCHEMA["properties"], **_WITH_MAP}}
    tags = {"color": "red", "size": "XL"}
    with_tags = pa.array([_PREFIX + json.dumps({**row, "tags": tags}).encode() for row in rows[:_FEW]], pa.binary())
    ours, mapped = Side("klog"), Side("klog, with a map of two keys")
    python, spark = Side("json.loads, to dicts"), Side("Spark's from_json")
    with _spark(bare, reads=True) as by_spark:
        sides: list[tuple[Side, Callable[[], float]]] = [
            (ours, lambda: _json_decoded(column, JSON_SCHEMA)),
            (mapped, lambda: _json_decoded(with_tags, tagged)),
            (python, lambda: _speed(lambda: len([json.loads(value) for value in bare[:_FEW]]))),
            (spark, by_spark),
        ]
        take_turns(sides, bench.repeat)
    work = f"decode JSON records of 10 fields, {len(bare[0])} B, to Arrow"
    for peer in (spark, python, mapped):
        yield Result(work, "M records/s", ours, peer, bench.command)


def _json_decoded(column: pa.Array, reader: dict[str, Any]) -> float:
    decoder = JsonDecoder(parse_json_schema(json.dumps(reader)).column)

    def once() -> int:
        decoded = decoder.decode(column, [None], starts=len(_PREFIX))
        if decoded.bad or len(decoded.values) != len(column):
            raise SideFailed(f"{len(decoded.bad)} bad rows")
        return len(column)

    return _speed(once)


def _json_encode(bench: Bench) -> Iterator[Result]:
    rows = _json_orders(_ROWS)
    bare = [json.dumps(row).encode() for row in rows]
    schema = parse_json_schema(json.dumps(JSON_SCHEMA))
    values = JsonDecoder(schema.column).decode(pa.array(bare, pa.binary()), [None]).values
    encoder = JsonSchemaEncoder(schema, values.type)
    if list(map(json.loads, encoder.encode(values[:_FEW]).to_pylist())) != rows[:_FEW]:
        raise SideFailed("other rows than Python's")
    ours = Side("klog")
    python, spark = Side("json.dumps, from dicts"), Side("Spark's to_json")
    with _spark(bare, reads=False) as by_spark:
        sides: list[tuple[Side, Callable[[], float]]] = [
            (ours, lambda: _speed(lambda: len(encoder.encode(values, _PREFIX)))),
            (python, lambda: _speed(lambda: len([json.dumps(row).encode() for row in rows[:_FEW]]))),
            (spark, by_spark),
        ]
        take_turns(sides, bench.repeat)
    work = f"encode Arrow rows of 10 fields to JSON, {len(bare[0])} B"
    for peer in (spark, python):
        yield Result(work, "M records/s", ours, peer, bench.command)


@contextmanager
def _spark(values: list[bytes], *, reads: bool) -> Iterator[Callable[[], float]]:
    """How fast Spark makes rows of JSON text, or text of rows, from memory: M records a second of its JVM's processor
    time.
    """
    import psutil
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import col, from_json, to_json

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.session.timeZone", "UTC").config("spark.log.level", "ERROR").getOrCreate()
    try:
        texts = pa.table({"value": pa.array([value.decode() for value in values])})
        frame = spark.createDataFrame(texts).coalesce(1)
        parsed: Column = from_json(col("value"), _DDL)
        frame = frame.select("value", parsed.alias("row")).cache()
        if frame.filter("row.at IS NULL OR row.id IS NULL").count():
            raise SideFailed("rows that Spark does not read")
        wanted = parsed if reads else to_json(col("row"))

        def once() -> int:
            frame.select(wanted.alias("made")).write.format("noop").mode("overwrite").save()
            return len(values)

        def processor_time() -> float:
            return float(
                sum(child.cpu_times().user + child.cpu_times().system for child in this.children(recursive=True))
            )

        this = psutil.Process()
        for _ in range(_SPARK_WARM_UP):
            once()
        yield lambda: speed(once, processor_time)
    finally:
        spark.stop()


JSON_RECORDS = Work(
    "json-schema",
    lambda bench: iter((*_json_decode(bench), *_json_encode(bench))),
    (
        f"JSON Schema: one process, processor time; the same {_ROWS:,} orders as JSON with date-time, after a "
        "registry's prefix. json makes dicts of Python and takes them: the way to Arrow is not in its figures. Spark "
        "has its rows in memory, and no prefix to cut off; its JVM is warm. A map "
        "in the schema is read row by row, by Python's parser.",
    ),
)
