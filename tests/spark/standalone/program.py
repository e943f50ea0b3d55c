"""Actions that tests submit to a standalone cluster. No `tests` and no checkout is on the path: only what is packed.

spark-submit ... program.py ACTION FILE    the file has a JSON object
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

SCHEMA = """{"type": "record", "name": "r", "fields": [
    {"name": "id", "type": "long"}, {"name": "text", "type": "string"}]}"""


def slowly(seconds: float, markers: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Pass rows on; after them wait for `seconds`, meanwhile there is a file in `markers` that is named by the pid."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        marker = Path(markers, str(os.getpid()))
        marker.touch()
        time.sleep(seconds)
        marker.unlink()

    return run


def copy(spark: SparkSession, given: dict[str, Any]) -> None:
    """Copy rows by Avro from topic to topic, exactly once, until the program is killed, or else to the end."""
    servers = {"kafka.bootstrap.servers": given["servers"], **given.get("options", {})}
    avro = {"valueFormat": "avro", "valueSchema": SCHEMA}
    reader = spark.readStream.format("klog").options(**servers, **avro, subscribe=given["from"])
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", given["records"])
    rows = reader.load().select("partition", "value")
    if "markers" in given:
        rows = rows.mapInArrow(slowly(given["seconds"], given["markers"]), rows.schema)
    rows.explain(extended=True)
    writer = rows.writeStream.format("klog").options(**servers, **avro, topic=given["to"])
    writer = writer.options(deliveryGuarantee="exactly-once", checkpointLocation=given["checkpoint"])
    trigger: dict[str, Any] = {"processingTime": "0 seconds"}
    if given.get("to_the_end"):
        trigger = {"availableNow": True}
    writer.trigger(**trigger).start().awaitTermination()


def read(spark: SparkSession, given: dict[str, Any]) -> None:
    """Read all topics, as a batch and as a stream in turn: once for each file `go-N` in a folder, to its `done-N`."""
    options = {"kafka.bootstrap.servers": given["servers"], "subscribePattern": "t.*", "startingOffsets": "earliest"}
    options |= {"minPartitions": given["tasks"], "maxOffsetsPerTrigger": given["records"]}
    for number in count():
        folder = Path(given["folder"])
        while not (folder / f"go-{number}").exists():
            time.sleep(0.05)
        if number % 2 == 0:
            spark.read.format("klog").options(**options).load().write.format("noop").mode("overwrite").save()
        else:
            writer = spark.readStream.format("klog").options(**options).load().writeStream.format("noop")
            writer = writer.option("checkpointLocation", str(folder / f"checkpoint-{number}"))
            writer.trigger(availableNow=True).start().awaitTermination()
        (folder / f"done-{number}").touch()


if __name__ == "__main__":
    globals()[sys.argv[1]](SparkSession.builder.getOrCreate(), json.loads(Path(sys.argv[2]).read_text()))
