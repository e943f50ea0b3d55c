"""Read topics with Spark's own Kafka connector into Parquet, in one session. It imports nothing from the project.

    python jvm_reader.py JAR,JAR...

Standard input is a JSON object of reads by name, {"options": {...}, "confs": {...}, "stream": false, "path": "..."}:
the options of format("kafka"), settings of Spark, and the folder for the Parquet files. With "stream" it is a query
with the trigger AvailableNow. Standard output is an object of answers by the same names, {"schema": {...},
"batches": [rows of each micro-batch]} or {"error": "..."}, with "seconds". The session starts before the input is read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark.sql import SparkSession

#: Concurrent reads: the connector mostly waits for a broker.
_AT_ONCE = 4
_SECONDS = 120


def main() -> None:
    # Standard output is only for the answer: redirect the output of Spark's processes to standard error.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", sys.argv[1])
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    reads = json.load(sys.stdin)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = dict(zip(reads, pool.map(lambda read: _done(spark, **read), reads.values()), strict=True))
    spark.stop()
    with answer:
        json.dump(answers, answer)


def _done(
    spark: SparkSession, options: dict[str, str], confs: dict[str, str], stream: bool, path: str
) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        session = spark.newSession()
        for name, value in confs.items():
            session.conf.set(name, value)
        answer = (_stream if stream else _batch)(session, options, path)
    except Exception as error:
        answer = {"error": str(error)}
    return {**answer, "seconds": time.perf_counter() - started}


def _batch(spark: SparkSession, options: dict[str, str], path: str) -> dict[str, Any]:
    frame = spark.read.format("kafka").options(**options).load()
    frame.write.parquet(path)
    return {"schema": frame.schema.jsonValue()}


def _stream(spark: SparkSession, options: dict[str, str], path: str) -> dict[str, Any]:
    frame = spark.readStream.format("kafka").options(**options).load()
    writer = frame.writeStream.format("parquet").option("path", path).option("checkpointLocation", f"{path}-checkpoint")
    query = writer.trigger(availableNow=True).start()
    if not query.awaitTermination(_SECONDS):
        raise TimeoutError(f"the query did not end in {_SECONDS} s")
    batches = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    return {"schema": frame.schema.jsonValue(), "batches": batches}


if __name__ == "__main__":
    main()
