"""Read and write Avro with Spark's own `from_avro` and `to_avro`, in one session. It imports nothing from the project.

    python spark_avro.py JAR

Standard input is a JSON array of cases {"writer": text, "reader": text, "rows": [hex]}; standard output an array of
answers: {"type": Spark's type as DDL, "rows": what `from_avro` reads, "written": [hex] of `to_avro` by the reader's
schema of the rows that `from_avro` has read}, or {"error": text}. Bytes are hex, maps are lists of pairs.
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
import sys
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.avro.functions import from_avro, to_avro
from pyspark.sql.types import StructType


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Row):
        return {name: plain(value[name]) for name in value.__fields__}
    if isinstance(value, dict):
        return sorted([plain(key), plain(item)] for key, item in value.items())
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, bytearray | bytes):
        return bytes(value).hex()
    if isinstance(value, datetime.datetime):
        return str(value.astimezone(datetime.timezone.utc).replace(tzinfo=None) if value.tzinfo else value)
    if isinstance(value, datetime.date | decimal.Decimal):
        return str(value)
    return repr(value) if isinstance(value, float) else value


def main() -> None:
    # Standard output is only for the answer: redirect the output of Spark's processes to standard error.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", sys.argv[1])
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("FATAL")
    answers = [_answer(spark, **case) for case in json.load(sys.stdin)]
    spark.stop()
    with answer:
        json.dump(answers, answer)


def _answer(spark: SparkSession, writer: str, reader: str, rows: list[str]) -> dict[str, Any]:
    try:
        frame = spark.createDataFrame([(bytearray.fromhex(row),) for row in rows], "value binary")
        # one task, so that the rows stay in order
        frame = frame.coalesce(1).select(
            from_avro("value", writer, {"avroSchema": reader, "mode": "PERMISSIVE"}).alias("v")
        )
        read = [plain(row.v) for row in frame.collect()]
        written = None
        try:
            columns = [row.v for row in frame.select(to_avro("v", reader).alias("v")).collect()]
            written = [None if value is None else bytes(value).hex() for value in columns]
        except Exception as error:
            written = str(error)[:200]
        kind = frame.schema["v"].dataType
        assert isinstance(kind, StructType)
        return {"type": kind.simpleString(), "rows": read, "written": written}
    except Exception as error:
        return {"error": str(error)[:500]}


if __name__ == "__main__":
    main()
