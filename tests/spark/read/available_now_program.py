"""Program that test_available_now.py runs with Spark's own Kafka connector: Trigger.AvailableNow with limits.

python available_now_program.py JARS BOOTSTRAP_SERVERS TOPIC LIMIT FOLDER    writes FOLDER/found.json

Each query copies the topic to Parquet files: the answer has the rows of its micro-batches by run, and the offsets.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.streaming.query import StreamingQuery

import spark_klog
from spark_klog.client import Producer

_SECONDS = 120.0


def main() -> None:
    jars, servers, topic, limit, where = sys.argv[1:]
    folder = Path(where)
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars).config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    found: dict[str, Any] = {}

    def starter(name: str, form: str, **more: Any) -> Callable[..., StreamingQuery]:
        options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest", **more}

        def start(fails: str = "false") -> StreamingQuery:
            rows = spark.readStream.format(form).options(**options, maxOffsetsPerTrigger=limit).load()
            rows = rows.withColumn("value", expr(f"if({fails}, raise_error('no'), value)"))
            writer = rows.writeStream.format("parquet").option("path", f"{folder}/{name}/rows")
            writer = writer.option("checkpointLocation", f"{folder}/{name}/checkpoint")
            query = writer.trigger(availableNow=True).start()
            if name == "arriving":
                with Producer({"bootstrap.servers": servers}) as producer:
                    for partition in range(3):
                        producer.send(topic, b"late", partition=partition)
            return query

        return start

    def note(name: str, queries: list[StreamingQuery]) -> None:
        rows = spark.read.parquet(f"{folder}/{name}/rows").select("partition", "offset").collect()
        found[name] = {
            "offsets": sorted([row.partition, row.offset] for row in rows),
            "runs": [[one["numInputRows"] for one in each.recentProgress if one["numInputRows"]] for each in queries],
        }

    for name, form, more in (("kafka", "kafka", {}), ("klog", "klog", {}), ("all", "klog", {"availableNow": "all"})):
        query = starter(name, form, **more)()
        if not query.awaitTermination(int(_SECONDS)):
            raise TimeoutError(name)
        note(name, [query])
    for name, form in (("again", "klog"), ("kafka again", "kafka"), ("arriving", "klog")):
        note(name, spark_klog.run_available_now(starter(name, form), _SECONDS))
    # the connector goes on from a checkpoint that says what a run has left
    found["cut"] = found.pop("klog")
    query = starter("klog", "kafka")()
    if not query.awaitTermination(int(_SECONDS)):
        raise TimeoutError("klog, then kafka")
    note("klog", [query])
    # a micro-batch that fails, and records that come before the next start
    failed = starter("failed klog", "klog", availableNow="all"), starter("failed kafka", "kafka")
    for start in failed:
        with suppress(StreamingQueryException):
            start("partition = 1 and offset = 3").awaitTermination(int(_SECONDS))
    with Producer({"bootstrap.servers": servers}) as producer:
        for partition in range(3):
            producer.send(topic, b"after the failure", partition=partition)
    note("failed klog", spark_klog.run_available_now(failed[0], _SECONDS))
    with suppress(StreamingQueryException):  # the connector repeats it, and may fail then: docs/recipes/switch.md
        failed[1]().awaitTermination(int(_SECONDS))
    note("failed kafka", spark_klog.run_available_now(failed[1], _SECONDS))
    (folder / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # without waiting for the JVM


if __name__ == "__main__":
    main()
