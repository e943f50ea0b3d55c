"""What test_kerberos.py starts, as Kerberos's settings are the process's: a write, a batch read and a stream.

python -m tests.spark.kerberos_program SPARK_HOME FOLDER OPTIONS(JSON)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    home, folder, given = sys.argv[1:]
    os.environ["SPARK_HOME"] = home
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.warehouse.dir", folder).getOrCreate()
    options = json.loads(given)
    rows = spark.range(0, 20, 1, 1).selectExpr("cast(id as string) as value")
    rows.write.format("klog").options(**options).option("topic", "written").mode("append").save()
    read = spark.read.format("klog").options(**options, subscribe="written", startingOffsets="earliest").load()
    found = [row.value.decode() for row in read.orderBy("offset").collect()]
    stream = spark.readStream.format("klog").options(**options, subscribe="written", startingOffsets="earliest").load()
    writer = stream.select("value").writeStream.format("klog").options(**options, topic="streamed")
    query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
    query.awaitTermination()
    streamed = spark.read.format("klog").options(**options, subscribe="streamed", startingOffsets="earliest").load()
    Path(folder, "found.json").write_text(json.dumps([found, [row.value.decode() for row in streamed.collect()]]))
    spark.stop()


if __name__ == "__main__":
    main()
