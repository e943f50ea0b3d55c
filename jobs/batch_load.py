"""Load topics into Parquet: one run loads what is there and stops; the next goes on where it stopped.

    spark-submit jobs/batch_load.py --bootstrap-servers HOST:PORT --topics clicks,views \
        --output /data/parquet --checkpoint /data/checkpoint [--group G --zookeeper HOST:PORT]

How every record comes once, also for readers that know nothing of Spark:

    OUTPUT/batch=N/part-*.parquet   what micro-batch N read; appears whole, by one rename
    OUTPUT/batch=N/_manifest.json   written last: which query and which offsets it is of, which files, of what sizes
    OUTPUT.staging/N-*/             beside OUTPUT: where batch N is written; left-overs are removed once N is done
    OUTPUT.staging/N-*.json         the manifest, written before the rename
    CHECKPOINT/                     Spark's: the offsets of batch N are written there before it is read

A run that is killed leaves at most a staging folder, or a batch that was renamed and not yet noted as done: Spark reads
that batch again with the same offsets, and it is found to be there.

An object store renames a folder by copying one file after the other. A run that is killed meanwhile leaves some of the
files: the next run knows by the manifest in OUTPUT.staging that they are its own and not all, removes them and writes
the batch again. There a reader should only read folders that have their _manifest.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import uuid
from collections.abc import Sequence
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

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import KlogError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.spark.offsets import Offsets, from_json


class LoadError(KlogError):
    """The load can't go on; the message says what to do."""


class Files:
    """The little of Hadoop's file systems that a load needs, for any URI that Spark can write to."""

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
        """The files in a folder, with their sizes in bytes."""
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
        """One step, and an error where the target is there (unlike FileSystem.rename, which moves into it)."""
        assert self._gateway is not None
        options = self._gateway.new_array(self._fs.Options.Rename, 0)
        destination = self._fs.Path(target)
        self._open(target)[0].mkdirs(destination.getParent())
        qualified = self._open(target)[0].makeQualified(destination)
        context = self._fs.FileContext.getFileContext(qualified.toUri(), self._conf)
        context.rename(self._open(source)[0].makeQualified(self._fs.Path(source)), qualified, options)


class Checkpoint:
    """What Spark's checkpoint says of the query."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path.rstrip("/")

    @property
    def query_id(self) -> str:
        found: str = json.loads(self._files.read(f"{self._path}/metadata"))["id"]
        return found

    def committed(self) -> Offsets:
        """The offsets after the last batch that was noted as done; empty before the first."""
        last = self.last_done()
        return self.planned(last) if last >= 0 else {}

    def last_done(self) -> int:
        """The last batch that was noted as done; -1 before the first."""
        return max((int(name) for name in self._files.names(f"{self._path}/commits") if name.isdecimal()), default=-1)

    def planned(self, batch_id: int) -> Offsets:
        """The end offsets of a batch: the last line of its entry in the offset log."""
        line = self._files.read(f"{self._path}/offsets/{batch_id}").strip().splitlines()[-1]
        return from_json(json.loads(line))


class BatchWriter:
    """Writes each micro-batch once; see the module."""

    def __init__(self, files: Files, checkpoint: Checkpoint, output: str) -> None:
        self._files = files
        self._checkpoint = checkpoint
        self._output = output.rstrip("/")
        self._staging = f"{self._output}.staging"
        self.written: list[dict[str, Any]] = []

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        target = f"{self._output}/batch={batch_id}"
        if self._is_there(target, batch_id):
            return
        staging = f"{self._staging}/{batch_id}-{uuid.uuid4().hex}"
        batch.write.parquet(staging)
        partitions = _statistics(batch.sparkSession.read.parquet(staging))
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
            # Another process of this query, not quite dead yet, may have been first.
            if not self._is_there(target, batch_id):
                raise
            return
        # A local rename looks first, then renames: of two runs at the same instant one may land in the other's.
        if not self._is_there(target, batch_id):
            raise LoadError(f"{target} was changed while it was written: is another run of this load under way?")

    def tidy(self) -> None:
        """Remove what dead runs have left of batches that are done; a later one another run may be writing just now."""
        done = self._checkpoint.last_done()
        for name in self._files.names(self._staging):
            batch_id = name.partition("-")[0]
            if batch_id.isdecimal() and int(batch_id) <= done:
                self._files.delete(f"{self._staging}/{name}")
        self._files.delete_if_empty(self._staging)

    def _is_there(self, target: str, batch_id: int) -> bool:
        """Whether the batch is whole in its place. What a killed copy has left there is completed or removed."""
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
        """Empty where there is none, or not all of it."""
        try:
            value = json.loads(self._files.read(path))
        except (Py4JJavaError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _renamed(self, batch_id: int) -> list[dict[str, Any]]:
        """The manifests of this query's folders that were, or were to be, renamed to become the batch."""
        names = self._files.names(self._staging)
        found = [
            self._manifest(f"{self._staging}/{name}") for name in names if re.fullmatch(rf"{batch_id}-\w+\.json", name)
        ]
        return [item for item in found if item.get("query") == self._checkpoint.query_id]

    def _of_another_load(self, target: str) -> LoadError:
        return LoadError(
            f"{target} is there and of another load; give the --checkpoint that belongs to --output, "
            "or another --output"
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
    with Cluster.connect({"bootstrap.servers": options.bootstrap_servers}) as cluster:
        found = cluster.partitions(options.topics)
        return list_offsets(cluster, {(topic, number): place for topic in found for number in found[topic]})


def _start(spark: SparkSession, options: argparse.Namespace, write: BatchWriter) -> Any:
    reader = (
        spark.readStream.format("klog")
        .option("kafka.bootstrap.servers", options.bootstrap_servers)
        .option("subscribe", ",".join(options.topics))
        .option("startingOffsets", "earliest")
        .option("failOnDataLoss", options.fail_on_data_loss)
        .option("maxOffsetsPerTrigger", options.max_offsets_per_batch)
        .option("includeHeaders", "true")
    )
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
    """A progress bar until the query ends."""
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
    """A row a partition: the checkpoint's offsets before and after, what was written between, what still waits."""
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
    """The package's own words out of what Spark wraps them in, else Java's last cause, else the first line."""
    for pattern in (r"^(?:spark_klog\.errors\.|(?=LoadError: ))(\w+: .+)$", r"^(?:Caused by)?: (.+)$"):
        found = re.findall(pattern, str(error), re.MULTILINE)
        if found:
            return str(found[-1])
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"invalid: {text!r}; a number above 0 is wanted")
    return int(text)


def _topics(text: str) -> list[str]:
    topics = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise argparse.ArgumentTypeError(f"invalid: {text!r} names no topic")
    return topics


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="batch_load.py", description="Load topics into Parquet, once each record.")
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT[,...]")
    parser.add_argument("--topics", required=True, type=_topics, metavar="TOPIC[,...]")
    parser.add_argument("--output", required=True, help="folder or URI for the Parquet files")
    parser.add_argument("--checkpoint", required=True, help="folder or URI of this load's checkpoint; keep it")
    parser.add_argument("--group", help="show the progress under this group's name")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--zookeeper", metavar="HOST:PORT[/CHROOT]", help="in /consumers/GROUP/offsets there")
    place.add_argument("--offsets-path", metavar="URI", help="in the same tree as plain files")
    parser.add_argument("--max-offsets-per-batch", type=_count, default=1_000_000, metavar="N")
    parser.add_argument("--fail-on-data-loss", choices=("true", "false"), default="true")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and no progress")
    options = parser.parse_args(argv)
    if (options.zookeeper or options.offsets_path) and not options.group:
        parser.error("--zookeeper and --offsets-path need --group")
    if options.group and not (options.zookeeper or options.offsets_path):
        parser.error("--group needs --zookeeper or --offsets-path: where the offsets are shown")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    errors = Console(stderr=True, quiet=options.json)
    try:
        latest = _offsets(options, LATEST)
        earliest = _offsets(options, EARLIEST)
    except KlogError as error:
        Console(stderr=True).print(f"batch_load: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    spark = SparkSession.builder.appName("klog batch load").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    files = Files(spark)
    checkpoint = Checkpoint(files, options.checkpoint)
    write = BatchWriter(files, checkpoint, options.output)
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
