"""`spark_klog.read`, and a query of DuckDB on it, beside the same query on what confluent-kafka reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import duckdb
import pyarrow as pa
from confluent_kafka import Consumer as ConfluentConsumer, TopicPartition as ConfluentPartition

import spark_klog
from benchmarks.clients import in_turn, rate_of
from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Bench, Result, Work
from tests.support.servers.kafka import Kafka

_TOPIC = "bench"
_SECONDS = 600.0
_AT_ONCE = 10_000
_WITHOUT_PAUSES = {"fetch.queue.backoff.ms": 1, "queued.min.messages": 1_000_000}
_SCHEMA = pa.schema([("value", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64())])
_QUERY = 'SELECT count(*), sum(octet_length(value)), max("offset") FROM batches'


def _read(servers: str, topic: str) -> int:
    """All columns but headers; nobody looks at them."""
    return sum(batch.num_rows for batch in spark_klog.read(topic, bootstrap_servers=servers))


def _ask(batches: pa.RecordBatchReader, records: int) -> int:
    """Query the batches; the number of records, or -1 if their bytes are not those of so many."""
    with duckdb.connect() as connection:
        count, size, _ = connection.execute(_QUERY).fetchall()[0]
    return int(count) if size == records * RECORD_SIZE else -1


def _duckdb_on_read(servers: str, topic: str, records: int) -> int:
    return _ask(spark_klog.read(topic, bootstrap_servers=servers, columns=_SCHEMA.names), records)


def _duckdb_on_confluent(servers: str, topic: str, records: int, more: Mapping[str, int]) -> int:
    return _ask(pa.RecordBatchReader.from_batches(_SCHEMA, _consumed(servers, topic, records, more)), records)


def _consumed(servers: str, topic: str, records: int, more: Mapping[str, int]) -> Iterator[pa.RecordBatch]:
    consumer = ConfluentConsumer({"bootstrap.servers": servers, "group.id": "bench", **more})
    consumer.assign([ConfluentPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    try:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            found = consumer.consume(_AT_ONCE, 1.0)
            count += len(found)
            columns = zip(*((one.value(), one.partition(), one.offset()) for one in found), strict=True)
            arrays = [pa.array(column, kind) for column, kind in zip(columns, _SCHEMA.types, strict=False)]
            if arrays:
                yield pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
    finally:
        consumer.close()


def _run(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("dataframes")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        servers, records = kafka.bootstrap_servers, bench.records
        for codec in ("lz4", "none"):
            topic = f"{_TOPIC}-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, servers, topic, records, codec, folder)
            readers: dict[str, Callable[[], int]] = {
                "read": lambda topic=topic: _read(servers, topic),
                "DuckDB on read": lambda topic=topic: _duckdb_on_read(servers, topic, records),
                "DuckDB on confluent_kafka": lambda topic=topic: _duckdb_on_confluent(
                    servers, topic, records, _WITHOUT_PAUSES
                ),
            }
            sides = in_turn(bench, {name: lambda run=run: rate_of(run, records) for name, run in readers.items()})
            work = f"{records:,} records of {RECORD_SIZE} B, {codec}"
            yield Result(f"spark_klog.read, {work}", "M records/s", sides["read"], None, bench.command)
            ours, theirs = sides["DuckDB on read"], sides["DuckDB on confluent_kafka"]
            name = f"A query of DuckDB on spark_klog.read, and on confluent_kafka, {work}"
            yield Result(name, "M records/s", ours, theirs, bench.command)


DATAFRAMES = Work(
    "dataframes",
    _run,
    (
        "DataFrames: a topic as in the section consumer, read from the call of spark_klog.read to the last record, "
        "with all columns but headers, which nobody looks at. And a query of DuckDB that counts the records and their "
        "bytes, on the columns value, partition and offset: of spark_klog.read, or of Arrow batches that are made of "
        f"confluent_kafka's messages, {_AT_ONCE} at once, with the settings that are called tuned there. The sides "
        "take turns. Wanted: 8 M records/s of lz4, and the query 5 times as fast.",
    ),
)
