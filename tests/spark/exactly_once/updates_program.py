"""Program that counts words by hour into two topics, exactly once in `foreachBatch`. Tests kill it.

python updates_program.py '{"servers": ..., "from": TOPIC, "to": [TOPIC, TOPIC], "checkpoint": ...,
                            "records": most per micro-batch, "to_the_end": stop at the end of the topic}'

Both topics get the same rows: the first by key, the second without keys.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

import spark_klog
from tests.spark.program import main


def start(spark: SparkSession, given: dict[str, Any]) -> StreamingQuery:
    reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", given["servers"])
    reader = reader.option("subscribe", given["from"]).option("startingOffsets", "earliest")
    rows = reader.option("maxOffsetsPerTrigger", str(given["records"])).load()
    word = F.col("key").cast("string").alias("word")
    counts = rows.withWatermark("timestamp", "1 day").groupBy(F.window("timestamp", "1 hour"), word).count()
    options = {"kafka.bootstrap.servers": given["servers"]}

    def process(df: DataFrame, batch_id: int) -> None:
        df = df.withColumn("batch", F.lit(batch_id))
        key, columns = ["window", "word"], ["window", "word", "count", "batch"]
        spark_klog.write_updates(df, batch_id, name="by key", topic=given["to"][0], key=key, columns=columns, **options)
        spark_klog.write_updates(df, batch_id, name="all", topic=given["to"][1], columns=columns, **options)

    writer = counts.writeStream.foreachBatch(process).outputMode("update")
    writer = writer.option("checkpointLocation", given["checkpoint"])
    if given["to_the_end"]:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def run(spark: SparkSession, given: dict[str, Any]) -> None:
    start(spark, given).awaitTermination()


if __name__ == "__main__":
    main(run)
