"""Query whose broker is killed and does not return: python outage_program.py SERVERS TOPIC FOLDER.

It prints a line when the first records are written; the test then kills the broker. The last line of standard output
is the query's error.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession


def main() -> None:
    servers, topic, folder = sys.argv[1:]
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    options = {
        "kafka.bootstrap.servers": servers,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "kafka.request.timeout.ms": "6000",
        "kafka.socket.connection.setup.timeout.ms": "6000",
    }
    rows = spark.readStream.format("klog").options(**options).load()
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(Path(folder, "checkpoint")))
    query = writer.start(str(Path(folder, "rows")))
    query.processAllAvailable()
    sys.stdout.write("written\n")
    sys.stdout.flush()
    try:
        while query.isActive:
            time.sleep(0.1)
        query.awaitTermination()
    except StreamingQueryException as error:
        sys.stdout.write(str(error).replace("\n", " ") + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
