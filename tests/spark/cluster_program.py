"""Program that test_cluster_masters.py submits: a batch read, a stream, a write, and the origin of the package.

spark-submit ... cluster_program.py BOOTSTRAP_SERVERS TOPIC OUTPUT_TOPIC FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession, functions as F


def _of_a_task(_: int) -> tuple[str, str]:
    import spark_klog
    from spark_klog.records import kernels

    return str(spark_klog.__file__), kernels.load().name


def main() -> None:
    servers, topic, output_topic, folder = sys.argv[1:]
    spark = SparkSession.builder.getOrCreate()
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    rows, size = spark.read.format("klog").options(**options).load().agg(F.count("*"), F.sum(F.length("value"))).first()
    stream = spark.readStream.format("klog").options(**options, maxOffsetsPerTrigger="400").load()
    writer = (
        stream.select("value")
        .writeStream.format("klog")
        .options(
            **{"kafka.bootstrap.servers": servers, "topic": output_topic}, checkpointLocation=f"{folder}/checkpoint"
        )
    )
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    found = {
        "rows": rows,
        "bytes": size,
        "streamed": sum(progress["numInputRows"] for progress in query.recentProgress),
        "executors": spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos().__len__() - 1,
        "packages": sorted(set(spark.sparkContext.parallelize(range(4), 4).map(_of_a_task).collect())),
    }
    Path(folder, "found.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
