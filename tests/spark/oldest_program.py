"""Program that test_oldest_pyspark.py runs with another Python and pyspark: reads, writes, streams and the main job.

python oldest_program.py BOOTSTRAP_SERVERS TOPIC FOLDER    writes FOLDER/found.json
"""

from __future__ import annotations

import json
import os
import platform
import runpy
import sys
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

_JOB = Path(__file__).parent.parent.parent / "jobs" / "batch_load.py"
_SECONDS = 120


def main() -> None:
    servers, topic, folder = sys.argv[1:]
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    to_servers = {"kafka.bootstrap.servers": servers}
    options = {**to_servers, "subscribe": topic, "startingOffsets": "earliest"}

    def stream(**more: Any) -> DataFrame:
        return spark.readStream.format("klog").options(**options, **more).load().select("value")

    def written(frame: DataFrame, name: str, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.format("klog").options(**to_servers, topic=f"{topic}-{name}", createTopics="1")
        return writer.option("checkpointLocation", f"{folder}/{name}").trigger(**trigger).start()

    frame = spark.read.format("klog").options(**options).load()
    rows, size = frame.agg(F.count("*"), F.sum(F.length("value"))).first() or (0, 0)
    copies = frame.select("value").write.format("klog").options(**to_servers, createTopics="1").mode("append")
    copies.option("topic", f"{topic}-batch").save()

    written(stream(), "stream", availableNow=True).awaitTermination(_SECONDS)
    limited = written(stream(maxOffsetsPerTrigger="40"), "limited", processingTime="0 seconds")
    limited.processAllAvailable()
    limited.stop()
    # more records, before both queries continue from their checkpoints
    more = spark.range(100).selectExpr("concat('more-', id) AS value").write.format("klog").mode("append")
    more.options(**to_servers, topic=topic).save()
    written(stream(), "stream", availableNow=True).awaitTermination(_SECONDS)
    again = written(stream(maxOffsetsPerTrigger="40"), "limited", processingTime="0 seconds")
    again.processAllAvailable()
    again.stop()
    # more records than one micro-batch may have: Trigger.AvailableNow reads only the first one
    more.options(**to_servers, topic=topic).save()
    short = written(stream(maxOffsetsPerTrigger="40"), "limited", availableNow=True)
    short.awaitTermination(_SECONDS)
    found: dict[str, Any] = {
        "versions": [pyspark.__version__, platform.python_version()],
        "rows": rows,
        "bytes": size,
        "batches": [row["numInputRows"] for query in (limited, again) for row in query.recentProgress],
        "available_now": [row["numInputRows"] for row in short.recentProgress],
    }
    sys.argv = [str(_JOB), "--bootstrap-servers", servers, "--topics", topic, "--json"]
    sys.argv += ["--output", f"{folder}/parquet"]
    try:
        runpy.run_path(str(_JOB), run_name="__main__")
    except SystemExit as ended:
        found["job"] = ended.code
    Path(folder, "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # without waiting for the JVM


if __name__ == "__main__":
    main()
