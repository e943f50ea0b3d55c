"""Streaming program as a user would write it: copies a topic to Parquet files, exactly once. Tests kill it.

python stream_program.py '{"servers": ..., "topic": ..., "group": ..., "output": ..., "checkpoint": ...,
                           "records": most per micro-batch, or null, "to_the_end": stop at the end of the topic,
                           "options": more options of the source}'
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from tests.spark.program import main


def run(spark: SparkSession, given: dict[str, Any]) -> None:
    reader = spark.readStream.format("klog").options(
        **{
            "kafka.bootstrap.servers": given["servers"],
            "subscribe": given["topic"],
            "startingOffsets": "earliest",
            "kafka.group.id": given["group"],
            "commitOffsets": "true",
            **given["options"],
        }
    )
    if given["records"] is not None:
        reader = reader.option("maxOffsetsPerTrigger", str(given["records"]))
        # Many small requests make tasks long enough to be killed.
        reader = reader.option("kafka.max.partition.fetch.bytes", "1")
    writer = reader.load().writeStream.format("parquet").option("path", given["output"])
    writer = writer.option("checkpointLocation", given["checkpoint"])
    if given["to_the_end"]:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime="100 milliseconds")
    writer.start().awaitTermination()


if __name__ == "__main__":
    main(run)
