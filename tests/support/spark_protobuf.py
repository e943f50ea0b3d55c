"""Read and write Protobuf with Spark's own `from_protobuf` and `to_protobuf`, in one session, without the project.

    python spark_protobuf.py JAR [--speed RECORDS]

Standard input is a JSON array of cases {"files": base64 of a FileDescriptorSet, "message": name, "rows": [hex]};
standard output an array of answers: {"type": Spark's type as DDL, "rows": what `from_protobuf` reads with
emit.default.values, "written": [hex] of `to_protobuf` of these rows, or why it does not}, or {"error": text}.
With --speed an answer is {"decode": records a second of the JVM's processor time}, of the rows again and again.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.protobuf.functions import from_protobuf, to_protobuf
from pyspark.sql.types import StructType

sys.path.insert(0, os.path.dirname(__file__))

from spark_avro import plain as plain_of_avro

_TURNS = 5


def plain(value: Any) -> Any:
    """A value as JSON has it; intervals as microseconds."""
    import datetime

    from pyspark.sql import Row

    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(microseconds=1)
    if isinstance(value, Row):
        return {name: plain(value[name]) for name in value.__fields__}
    if isinstance(value, dict):
        return sorted([plain(key), plain(item)] for key, item in value.items())
    return [plain(item) for item in value] if isinstance(value, list) else plain_of_avro(value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jar")
    parser.add_argument("--speed", type=int)
    arguments = parser.parse_args()
    # Standard output is only for the answer: redirect the output of Spark's processes to standard error.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", arguments.jar)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("FATAL")
    cases = json.load(sys.stdin)
    if arguments.speed:
        answers = [_speed(spark, arguments.speed, **case) for case in cases]
    else:
        answers = [_answer(spark, **case) for case in cases]
    spark.stop()
    with answer:
        json.dump(answers, answer)


def _answer(spark: SparkSession, files: str, message: str, rows: list[str]) -> dict[str, Any]:
    try:
        frame = spark.createDataFrame([(bytearray.fromhex(row),) for row in rows], "value binary")
        options = {"mode": "PERMISSIVE", "emit.default.values": "true"}
        given = base64.b64decode(files)
        # one task, so that the rows stay in order
        read = from_protobuf("value", message, options=options, binaryDescriptorSet=given).alias("v")
        frame = frame.coalesce(1).select(read)
        kind = frame.schema["v"].dataType
        assert isinstance(kind, StructType)
        result = {"type": kind.simpleString(), "rows": [plain(row.v) for row in frame.collect()]}
        try:
            written = frame.select(to_protobuf("v", message, binaryDescriptorSet=given).alias("v")).collect()
            result["written"] = [None if row.v is None else bytes(row.v).hex() for row in written]
        except Exception as error:
            result["written"] = str(error)[:300]
        return result
    except Exception as error:
        return {"error": str(error)[:500]}


def _speed(spark: SparkSession, records: int, files: str, message: str, rows: list[str]) -> dict[str, Any]:
    frame = spark.createDataFrame([(bytearray.fromhex(row),) for row in rows], "value binary").coalesce(1)
    frame = frame.crossJoin(spark.range(0, max(records // len(rows), 1), 1, 1)).select("value").persist()
    count = frame.count()
    read = frame.select(from_protobuf("value", message, binaryDescriptorSet=base64.b64decode(files)).alias("v"))
    system = spark._jvm.java.lang.management.ManagementFactory.getOperatingSystemMXBean()
    spent = []
    for one in (frame, read):
        turns = []
        for _ in range(_TURNS):
            before = system.getProcessCpuTime()
            one.write.format("noop").mode("overwrite").save()
            turns.append(system.getProcessCpuTime() - before)
        spent.append(min(turns) / 1e9)
    return {"decode": count / (spent[1] - spent[0]), "with the scan": count / spent[1]}


if __name__ == "__main__":
    main()
