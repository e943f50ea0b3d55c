"""Load topics into Parquet: a run loads all available records and stops; the next run continues there.

    spark-submit jobs/batch_load.py --bootstrap-servers HOST:PORT --topics clicks,views \
        --output /data/parquet --checkpoint /data/checkpoint [--group G --zookeeper HOST:PORT] \
        [--command-config client.properties]

Every record is written exactly once, also for readers other than Spark:

    OUTPUT/batch=N/part-*.parquet   the records of micro-batch N; one rename makes all files visible
    OUTPUT/batch=N/_manifest.json   written last: the query, the offsets, the files and their sizes
    OUTPUT.staging/N-*/             where micro-batch N is written before the rename; removed once N is committed
    OUTPUT.staging/N-*.json         the manifest, written before the rename
    CHECKPOINT/                     Spark's: it has the offsets of micro-batch N before N is read

A killed run leaves at most a staging folder, or a micro-batch that was renamed but not committed. Spark then repeats
that micro-batch with the same offsets, and the job finds that its output exists.

An object store renames a folder by copying its files one by one, so a killed run may leave only some of them. The
next run sees this by the manifest in OUTPUT.staging, removes them and writes the micro-batch again. Readers of an
object store should therefore only read folders that have a _manifest.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession, functions as f
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from spark_klog.cli.clusters import cluster_settings
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import KlogError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.spark.offsets import Offsets, from_json
from spark_klog.spark.versions import HAS_ADMISSION_CONTROL


class LoadError(KlogError):
    """The load can't continue; the message says what to do."""


class Files:
    """The operations of Hadoop's file systems that a load needs, for any URI that Spark can write to."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._fs = jvm.org.apache.hadoop.fs
        self._gateway = spark.sparkContext._gateway
        self._conf = spark._jsc.hadoopConfiguration()

    def _open(self, path: str) -> tuple[Any, Any]:
        target = self._fs.Path(path)
        return target.getFileSystem(self._conf), target

    def exists(self, path: str) -> bool:
        system, target = self._open(path)
        return bool(system.exists(target))

    def delete(self, path: str) -> None:
        system, target = self._open(path)
        system.delete(target, True)

    def delete_if_empty(self, path: str) -> None:
        system, target = self._open(path)
        try:
            system.delete(target, False)
        except Py4JJavaError:
            if not self.names(path):
                raise

    def names(self, path: str) -> list[str]:
        system, target = self._open(path)
        return [entry.getPath().getName() for entry in system.listStatus(target)] if system.exists(target) else []

    def sizes(self, path: str) -> dict[str, int]:
        """The files in a folder and their sizes in bytes."""
        system, target = self._open(path)
        return {entry.getPath().getName(): int(entry.getLen()) for entry in system.listStatus(target) if entry.isFile()}

    def read(self, path: str) -> str:
        system, target = self._open(path)
        stream = system.open(target)
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        system, target = self._open(path)
        stream = system.create(target, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def rename(self, source: str, target: str) -> None:
        """Rename in one step; fails if the target exists (FileSystem.rename would move `source` into it)."""
        assert self._gateway is not None
        options = self._gateway.new_array(self._fs.Options.Rename, 0)
        destination = self._fs.Path(target)
        self._open(target)[0].mkdirs(destination.getParent())
        qualified = self._open(target)[0].makeQualified(destination)
        context = self._fs.FileContext.getFileContext(qualified.toUri(), self._conf)
        context.rename(self._open(source)[0].makeQualified(self._fs.Path(source)), qualified, options)


class Checkpoint:
    """The query's id and offsets in Spark's checkpoint."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path.rstrip("/")

    @property
    def query_id(self) -> str:
        found: str = json.loads(self._files.read(f"{self._path}/metadata"))["id"]
        return found

    def committed(self) -> Offsets:
        """The end offsets of the last committed micro-batch; empty before the first."""
        last = self.last_committed()
        return self.planned(last) if last >= 0 else {}

    def last_committed(self) -> int:
        """The id of the last committed micro-batch; -1 before the first."""
        return max((int(name) for name in self._files.names(f"{self._path}/commits") if name.isdecimal()), default=-1)

    def planned(self, batch_id: int) -> Offsets:
        """The end offsets of a micro-batch: the last line of its entry in the offset log."""
        line = self._files.read(f"{self._path}/offsets/{batch_id}").strip().splitlines()[-1]
        return from_json(json.loads(line))


class MicroBatchWriter:
    """Writes each micro-batch once; the module's docstring says how."""

    def __init__(self, files: Files, checkpoint: Checkpoint, output: str) -> None:
        self._files = files
        self._checkpoint = checkpoint
        self._output = output.rstrip("/")
        self._staging = f"{self._output}.staging"
        self.written: list[dict[str, Any]] = []

    def __call__(self, micro_batch: DataFrame, batch_id: int) -> None:
        target = f"{self._output}/batch={batch_id}"
        if self._is_written(target, batch_id):
            return
        staging = f"{self._staging}/{batch_id}-{uuid.uuid4().hex}"
        micro_batch.write.parquet(staging)
        partitions = _statistics(micro_batch.sparkSession.read.parquet(staging))
        if not partitions:
            self._files.delete(staging)
            return
        manifest = {
            "query": self._checkpoint.query_id,
            "batch": batch_id,
            "partitions": partitions,
            "files": self._files.sizes(staging),
        }
        self._files.write(f"{staging}.json", json.dumps(manifest, indent=1))
        try:
            self._files.rename(staging, target)
        except Exception:
            # An earlier process of this query that is still exiting may have written it.
            if not self._is_written(target, batch_id):
                raise
            return
        # A local rename is not atomic: of two runs at the same moment, one may move its folder into the other's.
        if not self._is_written(target, batch_id):
            raise LoadError(f"{target} was changed while it was written: is another run of this load active?")

    def tidy(self) -> None:
        """Remove staging folders of committed micro-batches; another run may still be writing a later one."""
        committed = self._checkpoint.last_committed()
        for name in self._files.names(self._staging):
            batch_id = name.partition("-")[0]
            if batch_id.isdecimal() and int(batch_id) <= committed:
                self._files.delete(f"{self._staging}/{name}")
        self._files.delete_if_empty(self._staging)

    def _is_written(self, target: str, batch_id: int) -> bool:
        """Whether the micro-batch is complete in `target`. Completes or removes the output of a killed copy."""
        if not self._files.exists(target):
            return False
        manifest = self._manifest(f"{target}/_manifest.json")
        if not manifest:
            renamed = self._renamed(batch_id)
            if not renamed:
                raise self._of_another_load(target)
            found = self._files.sizes(target)
            whole = [item for item in renamed if item["files"].items() <= found.items()]
            if not whole:
                self._files.delete(target)
                return False
            manifest = whole[0]
            for name in self._files.names(target):
                if name not in manifest["files"]:
                    self._files.delete(f"{target}/{name}")
            self._files.write(f"{target}/_manifest.json", json.dumps(manifest, indent=1))
        elif manifest.get("query") != self._checkpoint.query_id:
            raise self._of_another_load(target)
        self.written += manifest["partitions"]
        return True

    def _manifest(self, path: str) -> dict[str, Any]:
        """Read a manifest; empty if it is missing or incomplete."""
        try:
            value = json.loads(self._files.read(path))
        except (Py4JJavaError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _renamed(self, batch_id: int) -> list[dict[str, Any]]:
        """The manifests of this query's staging folders for the micro-batch, whether or not they were renamed."""
        names = self._files.names(self._staging)
        found = [
            self._manifest(f"{self._staging}/{name}") for name in names if re.fullmatch(rf"{batch_id}-\w+\.json", name)
        ]
        return [item for item in found if item.get("query") == self._checkpoint.query_id]

    def _of_another_load(self, target: str) -> LoadError:
        return LoadError(
            f"{target} belongs to another load: use the --checkpoint that belongs to --output, or another --output"
        )


def _statistics(batch: DataFrame) -> list[dict[str, Any]]:
    size = f.coalesce(f.length("key"), f.lit(0)) + f.coalesce(f.length("value"), f.lit(0))
    rows = batch.groupBy("topic", "partition").agg(
        f.min("offset").alias("from"),
        (f.max("offset") + 1).alias("until"),
        f.count("*").alias("records"),
        f.sum(size).alias("bytes"),
    )
    return [row.asDict() for row in rows.orderBy("topic", "partition").collect()]


def _offsets(options: argparse.Namespace, place: int) -> Offsets:
    with Cluster.connect(options.settings) as cluster:
        found = cluster.partitions(options.topics)
        return list_offsets(cluster, {(topic, number): place for topic in found for number in found[topic]})


def _start(spark: SparkSession, options: argparse.Namespace, write: MicroBatchWriter) -> Any:
    reader = (
        spark.readStream.format("klog")
        .options(**{f"kafka.{name}": value for name, value in options.settings.items()})
        .option("subscribe", ",".join(options.topics))
        .option("startingOffsets", "earliest")
        .option("failOnDataLoss", options.fail_on_data_loss)
        .option("includeHeaders", "true")
    )
    if HAS_ADMISSION_CONTROL:  # otherwise Spark ends after one micro-batch, so that has to reach the logs' ends
        reader = reader.option("maxOffsetsPerTrigger", options.max_offsets_per_batch)
    if options.group:
        reader = reader.option("kafka.group.id", options.group)
    if options.zookeeper:
        reader = reader.option("kafka.zookeeper.connect", options.zookeeper)
    if options.offsets_path:
        reader = reader.option("offsetsPath", options.offsets_path)
    return (
        reader.load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", options.checkpoint)
        .trigger(availableNow=True)
        .start()
    )


def _follow(query: Any, total: int, console: Console) -> None:
    """Show a progress bar until the query ends."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("records", total=total)
        while query.isActive:
            done = {item["batchId"]: item["numInputRows"] for item in query.recentProgress}
            progress.update(bar, completed=sum(done.values()))
            time.sleep(0.2)
        query.awaitTermination()
        progress.update(bar, completed=total)


def _report(before: Offsets, after: Offsets, latest: Offsets, written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per partition: the checkpoint's offsets before and after the run, the output between them, and the lag."""
    rows = []
    for key in sorted(after):
        parts = [item for item in written if (item["topic"], item["partition"]) == key]
        rows.append(
            {
                "topic": key[0],
                "partition": key[1],
                "from": before.get(key, min((item["from"] for item in parts), default=after[key])),
                "until": after[key],
                "records": sum(item["records"] for item in parts),
                "bytes": sum(item["bytes"] for item in parts),
                "lag": max(0, latest.get(key, after[key]) - after[key]),
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="loaded", title_justify="left")
    names = ("topic", "partition", "from", "until", "records", "bytes", "lag")
    for name in names:
        table.add_column(name, justify="left" if name == "topic" else "right")
    for row in rows:
        table.add_row(*(f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in names))
    totals = (f"{sum(row[name] for row in rows):,}" for name in ("records", "bytes", "lag"))
    table.add_section()
    table.add_row("all", "", "", "", *totals)
    return table


def _cause(error: Exception) -> str:
    """The package's error inside Spark's message, else Java's last cause, else the first line."""
    for pattern in (r"^(?:spark_klog\.errors\.|(?=LoadError: ))(\w+: .+)$", r"^(?:Caused by)?: (.+)$"):
        found = re.findall(pattern, str(error), re.MULTILINE)
        if found:
            return str(found[-1])
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _topics(text: str) -> list[str]:
    topics = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise argparse.ArgumentTypeError(f"{text!r} names no topic")
    return topics


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="batch_load.py", description="Load topics into Parquet, each record once.")
    parser.add_argument("--bootstrap-servers", metavar="HOST:PORT[,...]")
    parser.add_argument("--cluster", metavar="NAME", help="a cluster of clusters.toml, see KLOG_CONFIG")
    parser.add_argument("--command-config", type=Path, metavar="FILE", help="client settings: TLS, SASL, ...")
    parser.add_argument("--topics", required=True, type=_topics, metavar="TOPIC[,...]")
    parser.add_argument("--output", required=True, help="folder or URI for the Parquet files")
    parser.add_argument("--checkpoint", required=True, help="folder or URI of this load's checkpoint; keep it")
    parser.add_argument("--group", help="publish the progress as the offsets of this group")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--zookeeper", metavar="HOST:PORT[/CHROOT]", help="publish to /consumers/GROUP/offsets there")
    place.add_argument("--offsets-path", metavar="URI", help="publish to the same tree in plain files")
    parser.add_argument(
        "--max-offsets-per-batch", type=_count, default=1_000_000, metavar="N", help="without effect before pyspark 4.2"
    )
    parser.add_argument("--fail-on-data-loss", choices=("true", "false"), default="true")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and no progress")
    options = parser.parse_args(argv)
    if (options.zookeeper or options.offsets_path) and not options.group:
        parser.error("--zookeeper and --offsets-path need --group")
    if options.bootstrap_servers is None and options.command_config is None and options.cluster is None:
        parser.error("give --bootstrap-servers, --cluster, or bootstrap.servers in the file of --command-config")
    if options.group and not (options.zookeeper or options.offsets_path):
        parser.error("--group needs --zookeeper or --offsets-path, where the offsets are published")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    errors = Console(stderr=True, quiet=options.json)
    try:
        options.settings = cluster_settings(
            options.bootstrap_servers, options.command_config, "--bootstrap-servers", options.cluster
        )
        latest = _offsets(options, LATEST)
        earliest = _offsets(options, EARLIEST)
    except (KlogError, OSError) as error:
        Console(stderr=True).print(f"batch_load: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    spark = SparkSession.builder.appName("klog batch load").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    files = Files(spark)
    checkpoint = Checkpoint(files, options.checkpoint)
    write = MicroBatchWriter(files, checkpoint, options.output)
    try:
        before = checkpoint.committed()
        total = sum(max(0, offset - before.get(key, earliest[key])) for key, offset in latest.items())
        _follow(_start(spark, options, write), total, errors)
        write.tidy()
        rows = _report(before, checkpoint.committed(), _offsets(options, LATEST), write.written)
    except Exception as error:
        Console(stderr=True).print(f"batch_load: {_cause(error)}", style="red", markup=False, soft_wrap=True)
        return 1
    finally:
        spark.stop()
    if options.json:
        sys.stdout.write(json.dumps({"partitions": rows, "output": options.output}) + "\n")
    else:
        Console().print(_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
