"""A streaming program as a user would write it, for tests that kill it: a topic to another topic, exactly once.

python copy_program.py '{"servers": ..., "from": ..., "to": ..., "checkpoint": ..., "tasks": of a micro-batch, at least,
                         "records": of a micro-batch, null for all, "to_the_end": stop where the topic ends}'
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from tests.spark.program import main


def run(spark: SparkSession, given: dict[str, Any]) -> None:
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
    writer = reader.load().select("key", "value").writeStream.format("klog").option("topic", given["to"])
    writer = writer.option("kafka.bootstrap.servers", given["servers"])
    writer = writer.option("deliveryGuarantee", "exactly-once").option("checkpointLocation", given["checkpoint"])
    if given["to_the_end"]:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime="100 milliseconds")
    writer.start().awaitTermination()


if __name__ == "__main__":
    main(run)
