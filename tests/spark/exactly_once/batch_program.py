"""Program that makes several batch writes, each exactly once by its writeId. Tests kill it.

python batch_program.py '{"servers": ..., "to": TOPIC, "rows": of a write, "writes": ..., "place": file}'

The file has the number of the last write that has begun; a run begins with some before it, or else with the first one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.spark.program import main

#: How many writes a run makes again.
_AGAIN = 3


def run(spark: SparkSession, given: dict[str, Any]) -> None:
    place = Path(given["place"])
    last = int(place.read_text() or "0") if place.exists() else 0
    for number in range(max(0, last - _AGAIN), given["writes"]):
        last = max(last, number)
        place.write_text(str(last))
        rows = spark.range(number * given["rows"], (number + 1) * given["rows"], numPartitions=3)
        writer = rows.selectExpr("cast(id AS string) AS value").write.format("klog").mode("append")
        writer = writer.option("kafka.bootstrap.servers", given["servers"]).option("topic", given["to"])
        writer.option("deliveryGuarantee", "exactly-once").option("writeId", f"{given['to']}/{number}").save()


if __name__ == "__main__":
    main(run)
