"""A Spark session with the real Delta or Iceberg, which runs what it is asked for. It imports nothing from the project.

    python spark_tables_session.py NAME=VALUE...

The arguments are settings of Spark. Each line of standard input is a JSON object, {"work": "table", ...}, and its
answer a line of standard output, {...} or {"error": text}. Rows are handed over as files of Arrow's IPC format.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

_SECONDS = 240


def table(spark: SparkSession, sql: str, path: str) -> dict[str, Any]:
    """Run a statement of SQL; its rows go into the file."""
    frame = spark.sql(sql)
    rows = frame.toArrow()
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    return {"columns": [[field.name, field.dataType.simpleString()] for field in frame.schema]}


def statement(spark: SparkSession, sql: str) -> dict[str, Any]:
    """Run a statement whose answer Arrow may not be able to have, as that of Delta's OPTIMIZE."""
    spark.sql(sql).collect()
    return {}


def delete_by_value(spark: SparkSession, name: str, column: str, value: str) -> dict[str, Any]:
    """Delete the rows of an unpartitioned snapshot of an Iceberg table in which a column of strings has a value, by an
    equality delete of Iceberg's library, as Flink's sink writes them; Spark writes none."""
    jvm: Any = spark._jvm
    iceberg, data = jvm.org.apache.iceberg, jvm.org.apache.iceberg.data
    table = iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, name)
    of_column = table.schema().select([column])
    ids = spark._sc._gateway.new_array(jvm.int, 1)
    ids[0] = table.schema().findField(column).fieldId()
    spec = iceberg.PartitionSpec.unpartitioned()
    factory = data.GenericAppenderFactory(table.schema(), spec, ids, of_column, None)
    file_format = iceberg.FileFormat.PARQUET
    files = iceberg.io.OutputFileFactory.builderFor(table, 1, 1).format(file_format).build()
    writer = factory.newEqDeleteWriter(files.newOutputFile(), file_format, None)
    record = data.GenericRecord.create(of_column)
    record.setField(column, value)
    writer.write(record)
    writer.close()
    table.newRowDelta().addDeletes(writer.toDeleteFile()).commit()
    return {}


def stream(
    spark: SparkSession,
    source: str,
    options: dict[str, str],
    sink: str,
    target: str,
    checkpoint: str,
    application: str | None = None,
    wait: bool = True,
) -> dict[str, Any]:
    """Start a query into a table; with `wait` it has the trigger AvailableNow, and ends before the answer.

    `sink` is "delta", "iceberg", or "batches" for foreachBatch into Delta; there `application` is the txnAppId, and
    None is a write without one.
    """
    writer = spark.readStream.format(source).options(**options).load().writeStream
    writer = writer.option("checkpointLocation", checkpoint)
    if sink == "batches":
        writer = writer.foreachBatch(_appender(target, application))
    else:
        writer = writer.format(sink).outputMode("append")
    writer = writer.trigger(availableNow=True) if wait else writer.trigger(processingTime="0 seconds")
    query = writer.toTable(target) if sink == "iceberg" else writer.start(*[target][: sink == "delta"])
    if wait and not query.awaitTermination(_SECONDS):
        raise TimeoutError(f"the query did not end in {_SECONDS} s")
    return {"id": query.id}


def _appender(path: str, application: str | None) -> Callable[[DataFrame, int], None]:
    def append(batch: DataFrame, number: int) -> None:
        writer = batch.write.format("delta").mode("append")
        if application is not None:
            writer = writer.option("txnAppId", application).option("txnVersion", number)
        writer.save(path)

    return append


_WORK: dict[str, Callable[..., dict[str, Any]]] = {
    work.__name__: work for work in (table, statement, delete_by_value, stream)
}


def main() -> None:
    # Standard output is only for answers: redirect the output of Spark's processes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    builder = SparkSession.builder
    for setting in sys.argv[1:]:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _WORK[request.pop("work")](spark, **request)
        except Exception as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    spark.stop()


if __name__ == "__main__":
    main()
