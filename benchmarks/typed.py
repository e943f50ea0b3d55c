"""Spark reads and writes rows by a schema: Avro behind a registry, beside Spark's own functions and connector."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from benchmarks.brokers import check_count, create_topic, topic as new_topic
from benchmarks.data import PARTITIONS, ToolFailed
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.schemas import SCHEMA, encoded_orders
from benchmarks.sides import (
    JVM,
    NO_OP,
    SideFailed,
    SparkSide,
    alternate,
    klog_side,
    no_op_side,
    recorded,
    topic_options,
)
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat
from spark_klog.schemas.prefix import id_prefix
from tests.support.servers.kafka import Kafka
from tests.support.spark.jvm_connector import connector_jars, spark_artifact
from tests.support.spark.pyspark_versions import with_connector

_TOPIC = "orders"
_SUBJECT = f"{_TOPIC}-value"
#: Distinct orders; a topic repeats them.
_ORDERS = 65_536
#: With --records 4,000,000, 2,000,000 orders are read and written.
_PART = 2
_UNIT = "M rows/s"
#: Spark measures an Arrow batch before each row that it adds to it, but for this limit, which is its largest: as
#: docs/reference/writing.md recommends.
_UNMEASURED = {"spark.sql.execution.arrow.maxBytesPerBatch": "2147483647"}
_OPTIONS = {"kafka.linger.ms": "50", "kafka.batch.size": "1000000", "kafka.compression.type": "lz4"}
_NAMES = itertools.count()
_BYTES = "klog, bytes as they are"
_FASTAVRO = "klog and fastavro in mapInPandas"


def _typed(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("typed")
    count = bench.records // _PART
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        with SchemaRegistry({"bootstrap.servers": servers}, "127.0.0.1:0") as registry:
            client = SchemaRegistryClient({"url": registry.url})
            number = client.register_schema(_SUBJECT, Schema(json.dumps(SCHEMA), "AVRO"))
            create_topic(servers, _TOPIC, PARTITIONS)
            fill_orders(servers, _TOPIC, id_prefix(number), count)
            check_count(kafka, _TOPIC, count)
            yield from _reads(bench, folder, servers, registry.url, count)
            yield from _writes(bench, folder, kafka, registry.url, count)


def _jvm_side(folder: Path) -> SparkSide:
    """The connector and Spark's own Avro."""
    jars = f"{connector_jars()},{spark_artifact('spark-avro')}"
    return SparkSide(JVM, "kafka", folder / "jvm", python=with_connector(), confs={"spark.jars": jars})


def fill_orders(servers: str, topic: str, prefix: bytes, count: int) -> None:
    """Fill a topic with Avro records of orders after a registry's prefix, over all partitions in turn."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "compression.type": "lz4"})
    values = encoded_orders(_ORDERS, prefix)
    for sent, value in zip(range(count), itertools.cycle(values)):
        producer.produce(topic, value, partition=sent % PARTITIONS)
        if not sent % 10_000:
            while len(producer) > 50_000:
                producer.poll(0.05)
    if producer.flush(120):
        raise ToolFailed(f"{topic} could not be filled")


def _write_batch(file: Path) -> None:
    """An Arrow batch of orders, as the source reads them."""
    decoder = ColumnFormat("value", "avro", text=json.dumps(SCHEMA)).reader().decoder()
    decoded = decoder.decode(pa.array(encoded_orders(_ORDERS, b"")), None)
    if decoded.bad:
        raise ToolFailed(f"an order does not decode: {decoded.bad[0]}")
    batch = pa.RecordBatch.from_arrays([decoded.values], names=["value"])
    with pa.ipc.new_file(str(file), batch.schema) as writer:
        writer.write_batch(batch)


def _reads(bench: Bench, folder: Path, servers: str, url: str, count: int) -> Iterator[Result]:
    options = topic_options(servers, _TOPIC)
    rows = {**options, "valueFormat": "avro", "schemaRegistryUrl": url}
    answers: dict[str, list[object]] = {}

    def speed(
        work: str, options: dict[str, str], repeats_rows: bool = False, **more: str
    ) -> Callable[[SparkSide], float]:
        def run(side: SparkSide) -> float:
            answer = side.ask(work, options, **more)
            if answer["rows"] != count:
                raise SideFailed(f"read {answer['rows']} rows; there are {count}")
            if "sums" in answer and not repeats_rows:
                answers.setdefault(work, []).append(answer["sums"])
                first = next(iter(answers.values()))[0]
                if answer["sums"] != first:
                    raise SideFailed(f"other rows than those of the first side: {answer['sums']}, {first}")
            return count / 1e6 / float(answer["seconds"])

        return run

    text = json.dumps(SCHEMA)
    file = folder / "orders.arrow"
    _write_batch(file)
    ready = {"file": str(file), "records": str(count), "partitions": str(PARTITIONS)}
    ours, undecoded, python, jvm = Side("klog"), Side(_BYTES), Side(_FASTAVRO), Side(f"from_avro, {JVM}")
    bound, fetched = Side(NO_OP), Side("klog, decoding nothing")
    # the Python sources share a session, whose JVM compiles for all of them alike: only what they read differs
    with no_op_side(folder) as side, _jvm_side(folder) as other:
        runs = [
            (ours, side, speed("sum_rows", rows, format="klog")),
            (undecoded, side, speed("count_sum", options, format="klog")),
            (python, side, speed("sum_by_fastavro", options, format="klog", schema=text)),
            (jvm, other, speed("sum_from_avro", options, schema=text)),
            (bound, side, speed("sum_rows", ready, repeats_rows=True)),
            (fetched, side, speed("sum_rows", {**options, "file": str(file)}, repeats_rows=True, format="ready-rows")),
        ]
        for process in (side, other):
            process.start()
        for _ in range(bench.repeat + 1):
            for figures, process, run in runs:
                if figures.failed is None:
                    with recorded(figures):
                        value = run(process)
                        figures.add(value)
    work = f"Spark batch read of {count:,} Avro records of 10 fields, sums of all of them, lz4"
    for peer in (jvm, undecoded, python, fetched, bound):
        yield Result(work, _UNIT, ours, peer, bench.command)
    for peer in (undecoded, python):
        yield Result(f"{work}, without decoding", _UNIT, fetched, peer, bench.command)


def _writes(bench: Bench, folder: Path, kafka: Kafka, url: str, count: int) -> Iterator[Result]:
    orders = str(folder / "orders")
    source = {**topic_options(kafka.bootstrap_servers, _TOPIC), "valueFormat": "avro", "schemaRegistryUrl": url}
    with klog_side(folder / "maker") as maker:
        maker.start()
        maker.ask("parquet_rows", source, folder=orders)

    def speed(side: SparkSide) -> float:
        if side.name == NO_OP:
            return count / 1e6 / float(side.ask("write_rows", {}, folder=orders)["seconds"])
        with new_topic(kafka.bootstrap_servers, f"typed-{next(_NAMES)}") as name:
            options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": name, **_OPTIONS}
            if side.name == JVM:
                answer = side.ask("write_to_avro", options, folder=orders, schema=json.dumps(SCHEMA))
            else:
                options |= {"valueFormat": "avro", "schemaRegistryUrl": url, "valueSchema": json.dumps(SCHEMA)}
                answer = side.ask("write_rows", options, folder=orders)
            check_count(kafka, name, count)
            return count / 1e6 / float(answer["seconds"])

    ours, bound = Side("klog"), Side(NO_OP)
    unmeasured, its_bound = Side("klog, maxBytesPerBatch 2147483647"), Side(f"{NO_OP}, maxBytesPerBatch 2147483647")
    peer = Side(f"to_avro, {JVM}")
    makers = [
        (ours, lambda: klog_side(folder / "klog")),
        (unmeasured, lambda: klog_side(folder / "unmeasured", _UNMEASURED)),
        (peer, lambda: _jvm_side(folder)),
        (bound, lambda: no_op_side(folder)),
        (its_bound, lambda: no_op_side(folder / "unmeasured", _UNMEASURED)),
    ]
    alternate(makers, bench.repeat, speed)
    work = f"Spark write of {count:,} rows of 10 fields from Parquet as Avro, at least once, lz4"
    for other in (peer, bound):
        yield Result(work, _UNIT, ours, other, bench.command)
    for other in (peer, its_bound):
        yield Result(f"{work}, Arrow batches not measured", _UNIT, unmeasured, other, bench.command)


TYPED = Work(
    "typed",
    _typed,
    (
        "Rows by a schema: orders of ten fields, 55 B (see Avro), after a registry's prefix, in a topic of "
        f"{PARTITIONS} partitions of Kafka 3.9.1, with our registry over it; local[2], sums over all ten fields, "
        "whose results must be equal on all sides. The JVM connector's values go through Spark's own `from_avro` "
        "with the prefix cut off by `substring`. The read of bytes is `count(*)` and `sum(length(value))` of the "
        "same topic. Writes are from Parquet to a new topic; ours registers the schema and writes the prefix, the "
        "connector writes bare records of `to_avro`. The bound of what Spark takes from Python and hands to it is a "
        "Python data source that repeats a ready Arrow batch of orders, of the column value alone, and drops what it "
        "gets; that of a decoder which takes no time is klog's own read of all columns with ready rows in place of "
        "the values. Where Arrow batches are not measured, the session has "
        "spark.sql.execution.arrow.maxBytesPerBatch 2147483647: with any other limit, as by default, Spark computes "
        "a batch's size before each row that it adds, over all fields.",
        "Wanted: 1.5 times `from_avro`, 0.6 of the read of bytes, 10 times fastavro in mapInPandas; 1.2 times "
        "`to_avro`.",
    ),
)
