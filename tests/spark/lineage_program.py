"""Streaming program with lineage, as a user would write it. Tests let it end, or kill it.

python lineage_program.py '{"servers": ..., "topic": ..., "checkpoint": ..., "end": ...}'

"end" is when the program ends: "at the end of the topic", "while the query runs" (after a micro-batch), "killed", or
"within a micro-batch", by stopping the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from spark_klog.spark.lineage import LineageListener
from tests.spark.program import main


def _slowly(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(30)
        yield batch[["offset"]]


def run(spark: SparkSession, given: dict[str, Any]) -> None:
    spark.streams.addListener(LineageListener(spark))
    reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", given["servers"])
    reader = reader.option("subscribe", given["topic"]).option("startingOffsets", "earliest")
    writer = (
        reader.load().writeStream.queryName("copy").format("noop").option("checkpointLocation", given["checkpoint"])
    )
    if given["end"] == "at the end of the topic":
        writer.trigger(availableNow=True).start().awaitTermination()
        return
    if given["end"] == "within a micro-batch":
        writer.foreachBatch(lambda rows, _batch: rows.mapInPandas(_slowly, "offset long").count()).start()
        while not spark.sparkContext.statusTracker().getActiveStageIds():
            time.sleep(0.1)
        spark.stop()
        return
    query = writer.start()
    while query.lastProgress is None or not query.lastProgress["numInputRows"]:
        time.sleep(0.1)
    if given["end"] == "killed":
        query.awaitTermination()


if __name__ == "__main__":
    main(run)
