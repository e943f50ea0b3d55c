"""Program that test_schema_functions.py runs with another pyspark: Spark's own Avro functions beside ours.

python functions_program.py JAR CASES FOUND

CASES is a JSON array of {"reader": text, "rows": [hex]}, FOUND one of {"type", "rows", "written"}, of which each is a
pair: Spark's, ours.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.avro import functions as spark_functions

from spark_klog import schemas
from tests.support.spark.spark_avro import plain


def main() -> None:
    jar, cases, found = sys.argv[1:]
    builder = SparkSession.builder.master("local[1]").config("spark.jars", jar).config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.session.timeZone", "Asia/Kolkata").getOrCreate()
    answers = [_answer(spark, case["reader"], case["rows"]) for case in json.loads(Path(cases).read_text())]
    Path(found).write_text(json.dumps(answers))
    sys.stdout.flush()
    os._exit(0)  # without waiting for the JVM


def _answer(spark: SparkSession, schema: str, rows: list[str]) -> dict[str, Any]:
    frame = spark.createDataFrame([(bytearray.fromhex(row),) for row in rows], "value binary").coalesce(1)
    both = [functions.from_avro("value", schema) for functions in (spark_functions, schemas)]
    decoded = frame.select(both[0].alias("spark"), both[1].alias("ours"))
    answer: dict[str, Any] = {"type": [field.dataType.simpleString() for field in decoded.schema.fields]}
    try:
        answer["rows"] = [[plain(row[0]), plain(row[1])] for row in decoded.collect()]
        # from ours only: what they write is to be about the writing
        answer["written"] = [_written(decoded, functions, schema) for functions in (spark_functions, schemas)]
    except Exception as error:
        answer["error"] = str(error)[:500]
    return answer


def _written(frame: DataFrame, functions: Any, schema: str) -> list[str]:
    return [bytes(row.value).hex() for row in frame.select(functions.to_avro("ours", schema).alias("value")).collect()]


if __name__ == "__main__":
    main()
