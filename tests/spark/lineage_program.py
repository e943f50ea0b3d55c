"""Streaming program with lineage, as a user would write it. Tests let it end, or kill it.

python lineage_program.py '{"servers": ..., "topic": ..., "checkpoint": ..., "end": ...}'

"end" is when the program ends: "at the end of the topic", "while the query runs" (after a micro-batch), then also "with
a stopped session", or "killed".
"""

from __future__ import annotations

import time
from typing import Any

from pyspark.sql import SparkSession

from spark_klog.spark.lineage import LineageListener
from tests.spark.program import main


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
    query = writer.start()
    while query.lastProgress is None or not query.lastProgress["numInputRows"]:
        time.sleep(0.1)
    if given["end"] == "killed":
        query.awaitTermination()
    if given["end"] == "with a stopped session":
        spark.stop()


if __name__ == "__main__":
    main(run)
