"""The load into files, and the memory of Python workers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.bare_load import NAME as BARE, bare_load
from benchmarks.brokers import check_count, create_topic, delete_topic, topic as new_topic
from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import take_turns
from benchmarks.schemas import SCHEMA
from benchmarks.sides import (
    JVM,
    SideFailed,
    SparkSide,
    jvm_side,
    klog_side,
    project_environment,
    read_all,
    recorded,
    topic_options,
)
from benchmarks.spark_reads import fill_evenly
from benchmarks.typed import fill_orders
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.prefix import id_prefix
from spark_klog.schemas.registry.client import RegistryClient
from spark_klog.schemas.registry.schemas import Schema
from spark_klog.schemas.registry.settings import registry_config
from tests.jobs.support import BATCH_LOAD, spark_submit
from tests.support.servers.kafka import Kafka
from tests.support.spark.pyspark_versions import child_environment

_SIZE = 1024
#: With --records 4,000,000, 10 GiB are read.
_MEMORY_RECORDS = 2.62144
_READ_LIMIT_MB, _WRITE_LIMIT_MB = 400, 300
_CODECS = ("none", "lz4")


def _worker_memory(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("worker-memory")
    records = int(bench.records * _MEMORY_RECORDS)
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        for codec in _CODECS:
            topic = f"long-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, kafka.bootstrap_servers, topic, records, codec, folder, _SIZE)
            result = Result(
                f"peak memory of a Python worker, {records * _SIZE / 1e9:.1f} GB of {_SIZE:,} B records, {codec}",
                "MB",
                Side("klog"),
                None,
                bench.command,
                higher_is_better=False,
            )
            with recorded(result.klog), klog_side(folder / codec) as side:
                side.start()
                options = topic_options(kafka.bootstrap_servers, topic)
                peak = peak_memory(side, partial(read_all, side, options, records, _SIZE))
                if peak > _READ_LIMIT_MB:
                    raise SideFailed(f"{peak:.0f} MB; {_READ_LIMIT_MB} are allowed")
                result.klog.samples.append(peak)
            yield result
            delete_topic(kafka.bootstrap_servers, topic)
            yield _writing(bench, kafka, folder / f"write-{codec}", records, codec)


def _writing(bench: Bench, kafka: Kafka, folder: Path, records: int, codec: str) -> Result:
    work = f"peak memory of a Python worker that writes {records * _SIZE / 1e9:.1f} GB of {_SIZE:,} B rows, {codec}"
    result = Result(work, "MB", Side("klog"), None, bench.command, higher_is_better=False)
    with recorded(result.klog), klog_side(folder) as side, new_topic(kafka.bootstrap_servers, f"to-{codec}") as name:
        side.start()
        options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": name, "kafka.compression.type": codec}
        rows = {"rows": str(records), "size": str(_SIZE), "files": "4"}
        peak = peak_memory(side, partial(side.ask, "write", options, **rows))
        check_count(kafka, name, records)
        if peak > _WRITE_LIMIT_MB:
            raise SideFailed(f"{peak:.0f} MB; {_WRITE_LIMIT_MB} are allowed")
        result.klog.samples.append(peak)
    return result


def peak_memory(side: SparkSide, run: Callable[[], object]) -> float:
    """The largest VmHWM, in MB, of the Python processes below the side's JVM."""
    peaks: dict[int, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for pid in _descendants(side.pid):
                with suppress(OSError, ValueError, IndexError):
                    if "python" in Path(f"/proc/{pid}/exe").resolve().name:
                        peaks[pid] = _high_water_mark(pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    if not peaks:
        raise SideFailed("no Python worker was seen")
    return max(peaks.values())


def _descendants(pid: int | None) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(path.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid] if pid is not None else []
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _high_water_mark(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1000
    raise ValueError(f"process {pid} has no VmHWM")


WORKER_MEMORY = Work(
    "worker-memory",
    _worker_memory,
    (
        "Worker memory: VmHWM of the Python processes under Spark's JVM during one read or write in local[2], the "
        "largest. Tasks make up the rows that are written.",
    ),
)


#: With --records 4,000,000: 1,000 partitions of 1,000 records, and 10 GB for the memory.
_RECORDS_A_PARTITION, _LARGE, _RECORDS_FOR_EACH = 1_000, 1024, 2.62144
_LIMIT_MB = 400
_SECONDS = 600.0
_NAMES = itertools.count()
_NOTHING = "from pyspark.sql import SparkSession\n"


def _load(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("load")
    with Kafka("3.9.1", folder / "broker", {"log.retention.ms": "-1"}, full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        create_topic(servers, "long")
        produce(kafka.libs, servers, "long", bench.records, "lz4", folder)
        with klog_side(folder / "klog") as klog, jvm_side(folder / "jvm") as jvm:
            klog.start()
            jvm.start()
            yield from _long(bench, kafka, klog, jvm, folder)
            yield _wide(bench, kafka, klog, jvm, folder)
            yield _rows(bench, kafka, klog, folder)
        yield _idle(bench, kafka, folder / "idle")
        yield _memory(bench, kafka, folder / "memory")


def _ours(side: SparkSide, kafka: Kafka, topic: str, records: int, folder: Path, **more: str) -> float:
    place = str(folder / f"load-{next(_NAMES)}")
    answer = side.ask("load", {"servers": kafka.bootstrap_servers, "topic": topic, **more}, folder=place)
    return _checked(answer["seconds"], answer["rows"], records)


def _theirs(side: SparkSide, kafka: Kafka, topic: str, records: int, folder: Path) -> float:
    options = topic_options(kafka.bootstrap_servers, topic) | {"includeHeaders": "true"}
    answer = side.ask("parquet", options, folder=str(folder / "jvm-out"), write={"compression": "zstd"})
    return _checked(answer["seconds"], answer["rows"], records)


def _checked(seconds: float, found: int, records: int) -> float:
    if found != records:
        raise SideFailed(f"{found} records were written; there are {records}")
    return seconds


def _long(bench: Bench, kafka: Kafka, klog: SparkSide, jvm: SparkSide, folder: Path) -> Iterator[Result]:
    ours, theirs, bare = Side("klog"), Side(f"{JVM}, Spark's writer"), Side(BARE)

    def rate(seconds: Callable[[], float]) -> float:
        return bench.records / 1e6 / seconds()

    out = folder / "bare"
    loop = partial(bare_load, kafka.bootstrap_servers, "long", PARTITIONS, bench.records, out)
    runs = (
        (ours, partial(_ours, klog, kafka, "long", bench.records, folder)),
        (theirs, partial(_theirs, jvm, kafka, "long", bench.records, folder)),
        (bare, loop),
    )
    take_turns([(side, partial(rate, run)) for side, run in runs], bench.repeat)
    work = f"log to Parquet, all columns, zstd, {bench.records:,} records of {RECORD_SIZE} B, lz4"
    yield Result(f"{work}, local[2]", "M records/s", ours, theirs, bench.command)
    yield Result(f"{work}, and a bare loop", "M records/s", ours, bare, bench.command)


def _wide(bench: Bench, kafka: Kafka, klog: SparkSide, jvm: SparkSide, folder: Path) -> Result:
    partitions = max(1, bench.records // 4 // _RECORDS_A_PARTITION)
    records = partitions * _RECORDS_A_PARTITION
    create_topic(kafka.bootstrap_servers, "wide", partitions)
    fill_evenly(kafka.bootstrap_servers, "wide", partitions, _RECORDS_A_PARTITION)
    check_count(kafka, "wide", records, partitions)
    work = f"log to Parquet, all columns, zstd, {partitions:,} partitions of {_RECORDS_A_PARTITION:,} records, local[2]"
    result = Result(work, "s", Side("klog"), peer := Side(f"{JVM}, Spark's writer"), bench.command, False)
    runs = (
        (result.klog, partial(_ours, klog, kafka, "wide", records, folder)),
        (peer, partial(_theirs, jvm, kafka, "wide", records, folder)),
    )
    take_turns(runs, bench.repeat)
    return result


def _rows(bench: Bench, kafka: Kafka, klog: SparkSide, folder: Path) -> Result:
    """Avro values as rows of ten columns, and as the bytes that they are."""
    servers, records = kafka.bootstrap_servers, bench.records // 2
    create_topic(servers, "orders")
    work = f"log to Parquet, zstd, {records:,} Avro records of 10 fields, 55 B, lz4, as rows and as bytes, local[2]"
    result = Result(work, "M records/s", Side("klog, rows"), peer := Side("klog, bytes"), bench.command)
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as registry:
        client = RegistryClient(registry_config({"url": registry.url}))
        prefix = id_prefix(client.register("orders-value", Schema(json.dumps(SCHEMA))))
        fill_orders(servers, "orders", prefix, records)
        check_count(kafka, "orders", records)

        def rate(**more: str) -> float:
            return records / 1e6 / _ours(klog, kafka, "orders", records, folder, **more)

        take_turns([(result.klog, partial(rate, registry=registry.url)), (peer, rate)], bench.repeat)
    return result


def _idle(bench: Bench, kafka: Kafka, folder: Path) -> Result:
    """Duration of a run that finds nothing new, and of a program that does nothing."""
    folder.mkdir(parents=True)
    nothing = folder / "nothing.py"
    nothing.write_text(_NOTHING)
    create_topic(kafka.bootstrap_servers, "idle")
    options = ["--bootstrap-servers", kafka.bootstrap_servers, "--topics", "idle", "--output", str(folder / "out")]

    def submit(code: int, *program: str) -> float:
        started = time.perf_counter()
        done = subprocess.run(
            [spark_submit(), *program],
            cwd=folder,
            env={**child_environment(sys.executable), **project_environment()},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode != code:
            raise SideFailed(f"spark-submit ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
        return time.perf_counter() - started

    work = "start to exit of a run of the load with nothing new, and of a spark-submit that imports pyspark"
    result = Result(work, "s", Side("klog"), peer := Side("spark-submit"), bench.command, False)
    runs = (
        (result.klog, lambda: submit(3, str(BATCH_LOAD), *options)),
        (peer, lambda: submit(0, str(nothing))),
    )
    take_turns(runs, bench.repeat)
    return result


def _memory(bench: Bench, kafka: Kafka, folder: Path) -> Result:
    records = int(bench.records * _RECORDS_FOR_EACH)
    create_topic(kafka.bootstrap_servers, "large")
    produce(kafka.libs, kafka.bootstrap_servers, "large", records, "lz4", folder.parent, _LARGE)
    work = f"peak memory of a Python worker that loads {records * _LARGE / 1e9:.1f} GB of {_LARGE:,} B records, lz4"
    result = Result(work, "MB", Side("klog"), None, bench.command, False)
    with recorded(result.klog), klog_side(folder) as side:
        side.start()
        peak = peak_memory(side, partial(_ours, side, kafka, "large", records, folder))
        if peak > _LIMIT_MB:
            raise SideFailed(f"{peak:.0f} MB; {_LIMIT_MB} are allowed")
        result.klog.samples.append(peak)
    return result


LOAD = Work(
    "load",
    _load,
    (
        "Load: topics of Kafka 3.9.1 on the same machine into new folders of Parquet with zstd, all columns with "
        "headers, each side in a session that is up: ours from the call of the load to its commit (plan, tasks, files "
        "synced to the disk, manifest), Spark's from `read` to the end of `write.parquet`. The bare loop is in two "
        "processes that have imported and connected before. Runs with nothing new are whole processes.",
        "Rows are those of a schema registry in the process of the benchmark; their bytes are loaded as one column.",
        "Wanted: 0.5 of bytes for rows, 4 times the JVM connector, 0.6 of the bare loop, 20 times with 1,000 "
        "partitions, at most 1.5 times a spark-submit that does nothing (a ratio of 0.67), 400 MB.",
    ),
)
