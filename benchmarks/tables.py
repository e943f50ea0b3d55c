"""The load into tables of Delta and Iceberg, beside files and beside Spark's own sink and MERGE."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from confluent_kafka import Producer
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

from benchmarks.brokers import check_count, create_topic
from benchmarks.data import PARTITIONS, RECORD_SIZE, ToolFailed, produce
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import take_turns
from benchmarks.schemas import SCHEMA
from benchmarks.sides import JVM, SideFailed, SparkSide, project_environment, topic_options
from benchmarks.typed import fill_orders
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.prefix import id_prefix
from spark_klog.schemas.registry.client import RegistryClient
from spark_klog.schemas.registry.schemas import Schema
from spark_klog.schemas.registry.settings import registry_config
from tests.support.servers.kafka import Kafka
from tests.support.spark.jvm_connector import connector_jars
from tests.support.spark.spark_tables import table_python, table_settings

_CATALOG, _NAMESPACE = "bench", "web"
#: With --records 4,000,000: 1,000,000 changes of 100,000 keys, in ten micro-batches.
_CHANGES, _KEYS, _BATCHES = 4, 40, 10
#: MERGE takes minutes.
_MERGE_REPEATS = 2
_SECONDS = 600.0
_NAMES = itertools.count()


def _tables(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("tables")
    with Kafka("3.9.1", folder / "broker", {"log.retention.ms": "-1"}, full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        create_topic(servers, "long")
        produce(kafka.libs, servers, "long", bench.records, "lz4", folder)
        with _klog(folder / "klog") as klog, _jvm(folder / "jvm") as jvm:
            klog.start()
            jvm.start()
            yield from _appends(bench, kafka, klog, jvm, folder)
            yield _rows(bench, kafka, klog, folder)
            yield _merges(bench, kafka, klog, jvm, folder)


def _klog(folder: Path) -> SparkSide:
    """The project's side, with a catalog of Iceberg in a SQLite database."""
    (folder / "iceberg").mkdir(parents=True)
    place = {"URI": f"sqlite:///{folder / 'catalog.db'}", "WAREHOUSE": str(folder / "iceberg"), "TYPE": "sql"}
    SqlCatalog(_CATALOG, uri=place["URI"], warehouse=place["WAREHOUSE"]).create_namespace(_NAMESPACE)
    catalog = {f"PYICEBERG_CATALOG__{_CATALOG.upper()}__{name}": value for name, value in place.items()}
    return SparkSide("klog", "klog", folder, environment=project_environment() | catalog)


def _jvm(folder: Path) -> SparkSide:
    """The connector and the real Delta."""
    confs = table_settings("delta")
    confs["spark.jars"] = f"{connector_jars()},{confs['spark.jars']}"
    # the same as the load's
    confs["spark.sql.parquet.compression.codec"] = "zstd"
    return SparkSide(JVM, "kafka", folder, python=table_python("delta"), confs=confs)


def _load(side: SparkSide, kafka: Kafka, topic: str, records: int, place: Callable[[], str], **more: str) -> float:
    """M records a second of a load into a new place."""
    answer = side.ask("load", {"servers": kafka.bootstrap_servers, "topic": topic, **more}, folder=place())
    return _rate(answer["seconds"], answer["rows"], records)


def _rate(seconds: float, found: int, records: int) -> float:
    if found != records:
        raise SideFailed(f"{found} records were written; there are {records}")
    return records / 1e6 / seconds


def _delta(folder: Path) -> str:
    return f"delta:{folder / f'delta-{next(_NAMES)}'}"


def _appends(bench: Bench, kafka: Kafka, klog: SparkSide, jvm: SparkSide, folder: Path) -> Iterator[Result]:
    files, delta, iceberg = Side("klog, into Parquet"), Side("klog, into Delta"), Side("klog, into Iceberg")
    sink = Side(f"{JVM}, Spark's Delta sink")

    def stream() -> float:
        options = topic_options(kafka.bootstrap_servers, "long") | {"includeHeaders": "true"}
        answer = jvm.ask("sink", options, folder=str(folder / f"sink-{next(_NAMES)}"))
        return _rate(answer["seconds"], answer["rows"], bench.records)

    places: tuple[tuple[Side, Callable[[], str]], ...] = (
        (files, lambda: str(folder / f"files-{next(_NAMES)}")),
        (delta, partial(_delta, folder)),
        (iceberg, lambda: f"iceberg:{_CATALOG}.{_NAMESPACE}.t{next(_NAMES)}"),
    )
    runs = [(side, partial(_load, klog, kafka, "long", bench.records, place)) for side, place in places]
    take_turns([*runs, (sink, stream)], bench.repeat)
    work = f"log to a table, all columns, zstd, {bench.records:,} records of {RECORD_SIZE} B, lz4, local[2]"
    for ours, peer in ((delta, files), (iceberg, files), (delta, sink)):
        yield Result(work, "M records/s", ours, peer, bench.command)


def _rows(bench: Bench, kafka: Kafka, klog: SparkSide, folder: Path) -> Result:
    """Avro values as rows of ten columns, and as the bytes that they are."""
    servers, records = kafka.bootstrap_servers, bench.records // 2
    create_topic(servers, "orders")
    work = f"log to a Delta table, {records:,} Avro records of 10 fields, 55 B, lz4, as rows and as bytes, local[2]"
    result = Result(work, "M records/s", Side("klog, rows"), peer := Side("klog, bytes"), bench.command)
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as registry:
        client = RegistryClient(registry_config({"url": registry.url}))
        number = client.register("orders-value", Schema(json.dumps(SCHEMA)))
        fill_orders(servers, "orders", id_prefix(number), records)
        check_count(kafka, "orders", records)
        load = partial(_load, klog, kafka, "orders", records, partial(_delta, folder))
        take_turns([(result.klog, partial(load, registry=registry.url)), (peer, load)], bench.repeat)
    return result


def _merges(bench: Bench, kafka: Kafka, klog: SparkSide, jvm: SparkSide, folder: Path) -> Result:
    """Changes of random keys into a Delta table, a tenth of them a micro-batch; some of them are deletes."""
    records, keys = bench.records // _CHANGES, bench.records // _KEYS
    create_topic(kafka.bootstrap_servers, "changes")
    rows = _fill_changes(kafka.bootstrap_servers, "changes", records, keys)
    check_count(kafka, "changes", records)
    options = topic_options(kafka.bootstrap_servers, "changes")
    options["maxOffsetsPerTrigger"] = str(records // _BATCHES)

    def run(side: SparkSide) -> float:
        place = str(folder / f"merged-{next(_NAMES)}")
        answer = side.ask("merge", options, folder=place)
        merged = dict(
            zip(*DeltaTable(place).to_pyarrow_table(columns=["key", "value"]).to_pydict().values(), strict=True)
        )
        if merged != rows:
            raise SideFailed(f"the table has {len(merged)} rows, not the last ones of the {len(rows)} keys")
        if answer["batches"] < _BATCHES:
            raise SideFailed(f"{answer['batches']} micro-batches")
        return records / 1e6 / float(answer["seconds"])

    work = f"{records:,} changes of {keys:,} keys into a Delta table, {_BATCHES} micro-batches, foreachBatch, local[2]"
    result = Result(work, "M changes/s", Side("klog, upsert"), peer := Side(f"{JVM}, MERGE"), bench.command)
    take_turns([(result.klog, partial(run, klog)), (peer, partial(run, jvm))], min(bench.repeat, _MERGE_REPEATS))
    return result


def _fill_changes(servers: str, topic: str, records: int, keys: int) -> dict[bytes, bytes]:
    """Fill a topic with changes of random keys, 5 % of them tombstones; return the values of keys that are left."""
    chance = random.Random(7)
    left: dict[bytes, bytes] = {}
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "compression.type": "lz4"})
    for number in range(records):
        index = chance.randrange(keys)
        key, value = b"key-%07d" % index, None
        if chance.random() < 0.05:
            left.pop(key, None)
        else:
            left[key] = value = (b'{"key":%d,"change":%d}' % (index, number)).ljust(RECORD_SIZE)
        producer.produce(topic, value, key, partition=index % PARTITIONS)
        if not number % 10_000:
            while len(producer) > 50_000:
                producer.poll(0.05)
    if producer.flush(_SECONDS):
        raise ToolFailed(f"{topic} could not be filled")
    return left


TABLES = Work(
    "tables",
    _tables,
    (
        "Tables: topics of Kafka 3.9.1 on the same machine into new tables, each side in a session that is up; "
        "ours from the call of the load to its commit, Delta by deltalake, Iceberg by pyiceberg with a catalog in "
        "SQLite; Spark's from the start of a query with AvailableNow to its end, in one micro-batch, with "
        "delta-spark 4.1.0. All files have zstd. Changes go through foreachBatch on both sides: into `tables.upsert`, "
        "and into MERGE with the last change of each key, both by the record's key and offset.",
        "Wanted: 0.9 of the load into Parquet for both formats, 5 times the connector and Spark's sink, 0.5 of bytes "
        "for rows, 3 times MERGE.",
    ),
)
