"""Program that test_checkpoint_switch.py runs with Spark's own Kafka connector: queries change format between runs.

python switch_program.py JARS BOOTSTRAP_SERVERS FOLDER    writes FOLDER/found.json

Each query reads numbers from topics and keeps its checkpoint; more records arrive between two runs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions as F

from spark_klog.client import Admin, NewTopic, Producer

_SECONDS = 120


class Queries:
    """Produces numbers, each once, and runs queries over them."""

    def __init__(self, spark: SparkSession, servers: str, folder: Path) -> None:
        self._spark = spark
        self.folder = folder
        self._servers = {"kafka.bootstrap.servers": servers}
        self._next = 0
        self.sent: dict[str, list[int]] = {}

    def send(self, topic: str, count: int, partition: int) -> None:
        first, self._next = self._next, self._next + count
        self.sent.setdefault(topic, []).extend(range(first, self._next))
        with Producer({"bootstrap.servers": self._servers["kafka.bootstrap.servers"]}) as producer:
            for number in range(first, self._next):
                producer.send(topic, b"%d" % number, partition=partition)

    def stream(self, form: str, **options: Any) -> DataFrame:
        given = {"startingOffsets": "earliest"} | self._servers | options
        frame = self._spark.readStream.format(form).options(**given).load()
        return frame.select(F.col("value").cast("string").cast("long").alias("number"))

    def run(self, name: str, frame: DataFrame, mode: str = "append", is_limited: bool = False) -> list[int]:
        """Run a query up to the current end; return the row counts of the micro-batches that are not empty."""

        def write(batch: DataFrame, number: int) -> None:
            batch.coalesce(1).write.mode("overwrite").json(str(self.folder / name / "rows" / f"{number}"))

        writer = frame.writeStream.foreachBatch(write).outputMode(mode)
        writer = writer.option("checkpointLocation", str(self.folder / name / "checkpoint"))
        if is_limited:  # before pyspark 4.2 Trigger.AvailableNow ends after one micro-batch
            query = writer.trigger(processingTime="0 seconds").start()
            query.processAllAvailable()
            query.stop()
        else:
            query = writer.trigger(availableNow=True).start()
            if not query.awaitTermination(_SECONDS):
                raise TimeoutError(name)
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def main() -> None:
    jars, servers, where = sys.argv[1:]
    folder = Path(where)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jars)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    queries = Queries(spark, servers, folder)
    found: dict[str, Any] = {"sent": queries.sent, "batches": []}
    with Admin({"bootstrap.servers": servers}) as admin:
        for one in ("kafka", "klog"):
            _follow(queries, admin, one, "klog" if one == "kafka" else "kafka", found)
    (folder / "found.json").write_text(json.dumps(found))
    os._exit(0)  # without waiting for the JVM


def _follow(queries: Queries, admin: Admin, one: str, other: str, found: dict[str, Any]) -> None:
    """Run each query three times: with format `one`, with `other`, and with `one` again."""
    a, b, c, late = (f"{one}-{name}" for name in ("a", "b", "c", "late"))
    admin.create_topics([NewTopic(a, 2), NewTopic(b, 1), NewTopic(late, 1)]).check()
    queries.send(late, 7, 0)
    for turn, form in enumerate([one, other, one]):
        if turn == 1:  # more partitions, and a topic that matches the pattern
            admin.create_partitions({a: 4}).check()
            admin.create_topics([NewTopic(c, 1)]).check()
            queries.send(c, 11, 0)
        for partition in range(4 if turn else 2):
            queries.send(a, 10, partition)
        queries.send(b, 5, 0)
        # stateless, two sources, one of them with a pattern
        both = queries.stream(form, subscribePattern=f"{one}-[ac]").union(queries.stream(form, subscribe=b))
        queries.run(f"{one}-stateless", both)
        # stateful: the counts continue
        counted = queries.stream(form, subscribe=f"{a},{b}").groupBy((F.col("number") % 3).alias("rest")).count()
        queries.run(f"{one}-stateful", counted, "complete")
        # with a limit
        limited = queries.stream(form, subscribe=a, maxOffsetsPerTrigger=12)
        found["batches"] += queries.run(f"{one}-limited", limited, is_limited=True)
        # the first run starts at latest, and the checkpoint keeps that start
        queries.run(f"{one}-latest", queries.stream(form, subscribe=late, startingOffsets="latest"))
        queries.send(late, 3, 0)


if __name__ == "__main__":
    main()
