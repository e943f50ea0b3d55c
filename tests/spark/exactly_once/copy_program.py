"""Streaming program as a user would write it: copies a topic to another one, exactly once. Tests kill it.

python copy_program.py '{"servers": ..., "from": TOPIC, "to": TOPIC, "checkpoint": ..., "tasks": least per micro-batch,
                         "records": most per micro-batch, or null, "to_the_end": stop at the end of the topic,
                         "master": default local[2,4], "confs": settings of Spark,
                         "markers": folder for `straggling`}'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.program import main

_SECONDS = 120.0


def straggling(folder: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Pass rows on. Attempt 0 of a stage's task 0 waits until a later attempt has passed all rows on (its marker)."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == 0:
            marker = folder / str(context.stageId())
            deadline = time.monotonic() + _SECONDS
            if context.attemptNumber() > 0:
                marker.touch()
            while not marker.exists() and time.monotonic() < deadline:
                time.sleep(0.02)

    return run


def start(spark: SparkSession, given: dict[str, Any]) -> StreamingQuery:
    reader = spark.readStream.format("klog").options(
        **{
            "kafka.bootstrap.servers": given["servers"],
            "subscribe": given["from"],
            "startingOffsets": "earliest",
            "minPartitions": str(given["tasks"]),
        }
    )
    if given["records"] is not None:
        reader = reader.option("maxOffsetsPerTrigger", str(given["records"]))
    rows = reader.load().select("key", "value")
    if given.get("markers"):
        rows = rows.mapInArrow(straggling(Path(given["markers"])), rows.schema)
    writer = rows.writeStream.format("klog").option("topic", given["to"])
    writer = writer.option("kafka.bootstrap.servers", given["servers"])
    writer = writer.option("deliveryGuarantee", "exactly-once").option("checkpointLocation", given["checkpoint"])
    if given["to_the_end"]:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime="100 milliseconds")
    return writer.start()


def run(spark: SparkSession, given: dict[str, Any]) -> None:
    start(spark, given).awaitTermination()


if __name__ == "__main__":
    main(run)
