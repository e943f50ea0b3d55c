"""Spark's own switches for its way to Python: what each gives for reads, writes, micro-batches and `from_avro`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.brokers import check_count, topic
from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.machine import processor_time
from benchmarks.schemas import SCHEMA, encoded_orders
from benchmarks.sides import SideFailed, SparkSide, alternate, project_environment, read_all, recorded, topic_options
from tests.support.servers.kafka import Kafka

#: Distinct orders of each Parquet file.
_ORDERS, _FILES = 65_536, 8
#: Records of a micro-batch, and micro-batches of a run.
_NEW, _BATCHES = 100, 40
#: With --records 4,000,000, 2,000,000 rows are written.
_PART = 2
_NAMES = itertools.count()
_DEFAULT = "Spark's defaults"
_SOCKET = {"unix.domain.socket.enabled=true": {"spark.python.unix.domain.socket.enabled": "true"}}
_ARROW = "spark.sql.execution.arrow."
_BATCH_SIZES = {
    "maxRecordsPerBatch=2000": {f"{_ARROW}maxRecordsPerBatch": "2000"},
    "maxRecordsPerBatch=50000": {f"{_ARROW}maxRecordsPerBatch": "50000"},
    "maxBytesPerBatch=2147483647": {f"{_ARROW}maxBytesPerBatch": "2147483647"},
}
_PIPELINED = {"spark.python.udf.pipelined.enabled": "true"}
_COLUMNAR = {f"{_ARROW}pythonUDF.columnarInput.enabled": "true"}
_OF_FUNCTIONS = {
    "udf.pipelined.enabled=true": _PIPELINED,
    "pythonUDF.columnarInput.enabled=true": _COLUMNAR,
    "both of these": {**_PIPELINED, **_COLUMNAR},
}


class _Task(NamedTuple):
    """A piece of work: how to do it once, in seconds, which times `scale` is a figure in `unit`."""

    name: str
    unit: str
    scale: float
    switches: Mapping[str, Mapping[str, str]]
    run: Callable[[SparkSide], float]


def _switches(bench: Bench) -> Iterator[Result]:
    """Run all work without and with each switch, in sessions that take turns: seconds, and those of processors."""
    folder = bench.folder("switches")
    with Kafka("3.9.1", folder / "broker", {"log.segment.delete.delay.ms": "1000"}, full_speed=True) as kafka:
        tasks = list(_tasks(bench, kafka, folder))
        confs: dict[str, Mapping[str, str]] = {_DEFAULT: {}}
        for task in tasks:
            confs |= task.switches
        wall, busy = ({(task.name, name): Side(name) for task in tasks for name in confs} for _ in range(2))

        def all_work(side: SparkSide) -> float:
            for task in tasks:  # also what this switch is not for: a JVM that has done less is slower
                figures = wall[task.name, side.name], busy[task.name, side.name]
                if figures[0].failed is None:
                    with recorded(*figures):
                        before = processor_time(side.pid)
                        figures[0].add(task.run(side) * task.scale)
                        figures[1].add((processor_time(side.pid) - before) * task.scale)
            return 0.0

        def maker(name: str, place: Path) -> Callable[[], SparkSide]:
            return lambda: SparkSide(name, "klog", place, confs=confs[name], environment=project_environment())

        sessions = [(Side(name), maker(name, folder / f"{number}")) for number, name in enumerate(confs)]
        alternate(sessions, bench.repeat, all_work)
    for task in tasks:
        for name in task.switches:
            for sides, kind in ((wall, ""), (busy, " of processor time")):
                work, ours, default = f"{task.name}, {name}", sides[task.name, name], sides[task.name, _DEFAULT]
                yield Result(work, f"{task.unit}{kind}", ours, default, bench.command, higher_is_better=False)


def _tasks(bench: Bench, kafka: Kafka, folder: Path) -> Iterator[_Task]:
    servers, count, rows = kafka.bootstrap_servers, bench.records, bench.records // _PART
    kafka.create_topic("reads", partitions=PARTITIONS)
    produce(kafka.libs, servers, "reads", count, "lz4", folder)
    reads = topic_options(servers, "reads")
    work = f"Batch read of {count:,} records, lz4"
    yield _Task(work, "s", 1, _SOCKET, lambda side: read_all(side, reads, count))

    kafka.create_topic("small", partitions=PARTITIONS)
    produce(kafka.libs, servers, "small", _NEW * _BATCHES, "none", folder)
    small = topic_options(servers, "small") | {"maxOffsetsPerTrigger": str(_NEW)}

    def micro_batches(side: SparkSide) -> float:
        answer = side.ask("stream", small, folder=str(folder / f"checkpoint-{next(_NAMES)}"))
        if answer["rows"] != _NEW * _BATCHES:
            raise SideFailed(f"{answer['rows']} rows")
        return float(answer["seconds"])

    work = f"Micro-batch that reads {_NEW} records"
    yield _Task(work, "ms", 1000 / _BATCHES, _SOCKET, micro_batches)

    with SparkSide("maker", "klog", folder / "maker", environment=project_environment()) as maker:
        maker.start()
        for name, total, files in (("rows", rows, 4), ("few", _NEW * _BATCHES, _BATCHES)):
            given = {"rows": str(total), "size": str(RECORD_SIZE), "files": str(files)}
            maker.ask("make_rows", {}, folder=str(folder / name), **given)

    def write(side: SparkSide, work: str, place: str, total: int) -> float:
        with topic(servers, f"write-{next(_NAMES)}") as name:
            options = {"kafka.bootstrap.servers": servers, "topic": name, "kafka.compression.type": "lz4"}
            checkpoint = str(folder / f"checkpoint-{name}")
            answer = side.ask(work, options, folder=str(folder / place), checkpoint=checkpoint)
            check_count(kafka, name, total)
        return float(answer["seconds"])

    work = f"Write of {rows:,} rows of {RECORD_SIZE} B from Parquet, lz4"
    switches = {**_SOCKET, **_BATCH_SIZES}
    yield _Task(work, "s", 1, switches, lambda side: write(side, "write", "rows", rows))
    work = f"Micro-batch that writes {_NEW} rows"
    total = _NEW * _BATCHES
    yield _Task(work, "ms", 1000 / _BATCHES, _SOCKET, lambda side: write(side, "write_stream", "few", total))

    (folder / "avro").mkdir()
    values = pa.table({"value": pa.array(encoded_orders(_ORDERS, b""), pa.binary())})
    for number in range(_FILES):
        pq.write_table(values, folder / "avro" / f"{number}.parquet")
    asked = {"by": "klog", "schema": json.dumps(SCHEMA)}

    def decode(side: SparkSide) -> float:
        return float(side.ask("avro", asked, folder=str(folder / "avro"))["seconds"])

    work = f"from_avro of {_ORDERS * _FILES:,} records of ten fields in Parquet"
    yield _Task(work, "s", 1, {**_SOCKET, **_OF_FUNCTIONS, **_BATCH_SIZES}, decode)


SWITCHES = Work(
    "switches",
    _switches,
    (
        "Spark's switches: local[2], each session with one of Spark's switches beside one with its defaults, in turns; "
        "seconds of wall time, and of processor time of the driver, its JVM and its Pythons. Records are "
        f"{RECORD_SIZE} B in {PARTITIONS} partitions of Kafka 3.9.1. Micro-batches are those of AvailableNow: a run of "
        f"{_BATCHES}, with its start and end, by their number. Names are spark.python.NAME and "
        "spark.sql.execution.arrow.NAME.",
    ),
)
