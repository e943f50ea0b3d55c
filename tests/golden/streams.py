"""The streams and writes of the golden directories, which their tests go on with."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

from spark_klog.tables import upsert
from tests.golden.support import NUMBERS

#: The topics that streams copy `NUMBERS` to, with their guarantees.
STREAMS = {"copied": "at-least-once", "exact": "exactly-once"}
#: The table that a stream merges them into, with its checkpoint of that name, and the topic of a batch write.
UPSERTED, ONCE = "upserted", "once"


def start_copy(spark: SparkSession, servers: str, checkpoints: Path, to: str, most: int = 25) -> StreamingQuery:
    """Start the stream that copies the values of `NUMBERS` to a topic, to the end; a micro-batch has `most` offsets."""
    writer = _numbers(spark, servers, most).select("value").writeStream.format("klog")
    writer = writer.option("kafka.bootstrap.servers", servers).option("topic", to)
    writer = writer.option("deliveryGuarantee", STREAMS[to]).option("checkpointLocation", str(checkpoints / to))
    return writer.trigger(availableNow=True).start()


def start_upsert(spark: SparkSession, servers: str, checkpoints: Path, table: Path) -> StreamingQuery:
    """Start the stream that merges the values of `NUMBERS` into a Delta table, by their ids."""
    changes = _numbers(spark, servers, 25).withColumn("value", F.from_json(F.col("value").cast("string"), "id bigint"))
    writer = changes.writeStream.foreachBatch(upsert(f"delta:{table}", key="id"))
    return writer.option("checkpointLocation", str(checkpoints / UPSERTED)).trigger(availableNow=True).start()


def _numbers(spark: SparkSession, servers: str, most: int) -> DataFrame:
    stream = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", NUMBERS)
    return stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", str(most)).load()


def write_once(spark: SparkSession, servers: str) -> None:
    """The batch write to the topic `ONCE`, with a name: a second one writes nothing."""
    writer = spark.range(5).select(F.col("id").cast("string").alias("value")).write.format("klog").mode("append")
    writer = writer.option("kafka.bootstrap.servers", servers).option("deliveryGuarantee", "exactly-once")
    writer.option("topic", ONCE).option("writeId", "golden").save()
