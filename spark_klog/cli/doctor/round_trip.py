"""Write rows through Spark to a broker that this module starts, and read them: `python -m` runs it alone."""

from __future__ import annotations

import sys
import time

ROWS = 1000


def main() -> int:
    from pyspark.sql import SparkSession

    from spark_klog.embedded import EmbeddedCluster

    started = time.monotonic()
    with EmbeddedCluster() as cluster:
        builder = SparkSession.builder.master("local[2]").appName("klog doctor").config("spark.ui.enabled", "false")
        spark = builder.getOrCreate()
        began = time.monotonic()
        options = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
        rows = spark.range(ROWS).selectExpr("CAST(id AS STRING) AS value")
        rows.write.format("klog").options(**options, topic="doctor", createTopics="2").mode("append").save()
        found = spark.read.format("klog").options(**options, subscribe="doctor").load().select("value").distinct()
        count = found.count()
        spark.stop()
    times = f"Spark started in {began - started:.1f} s, the rows took {time.monotonic() - began:.1f} s"
    sys.stdout.write(f"{count} of {ROWS} rows written and read; {times}\n")
    return 0 if count == ROWS else 1


if __name__ == "__main__":
    sys.exit(main())
