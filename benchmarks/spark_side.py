"""One side of a Spark benchmark: a process with one Spark session, which runs work on request.

    python spark_side.py --format klog|kafka [--master local[2]] [--conf name=value ...]

Each line of JSON on standard input is a run, {"work": "count_sum", "options": {...}}; its answer is a line of JSON on
standard output, {"seconds": 1.2, ...} or {"error": "..."}. The first line of output says that the session is up. The
process ends at the end of its input. It runs on any pyspark and imports nothing of the project, except
`no_op_source.py` and `ready_rows.py` with --format no-op, and what the works `load`, `load_topics` and `avro` need.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TextIO

import pyspark
from pyspark.sql import Column, DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

Request = dict[str, Any]


def _frame(spark: SparkSession, source: str, request: Request) -> DataFrame:
    return spark.read.format(request.get("format", source)).options(**request["options"]).load()


def count_sum(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Count the records and add up the lengths of their values."""
    frame = _frame(spark, source, request)
    row = frame.agg(F.count("*"), F.sum(F.length("value"))).collect()[0]
    return {"rows": row[0], "bytes": row[1] or 0}


#: Over all fields of `benchmarks.schemas.SCHEMA`.
_SUMS = (
    *("count(*) AS rows", "sum(id) AS id", "sum(user) AS user", "sum(length(item)) AS item"),
    *("round(sum(price)) AS price", "sum(quantity) AS quantity", "count_if(status = 'PAID') AS status"),
    *("sum(length(note)) AS note", "round(sum(discount)) AS discount", "count_if(paid) AS paid"),
    "max(unix_micros(at)) AS at",
)


def _sums(rows: DataFrame) -> dict[str, Any]:
    answer = rows.selectExpr(*_SUMS).collect()[0].asDict()
    return {"rows": answer.pop("rows"), "sums": answer}


def sum_rows(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Add up all fields of values that the source reads as rows."""
    return _sums(_frame(spark, source, request).select("value.*"))


def sum_from_avro(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Add up all fields of values that Spark's own function decodes, after a registry's prefix."""
    from pyspark.sql.avro.functions import from_avro

    value = from_avro(F.expr("substring(value, 6)"), request["schema"]).alias("value")
    return _sums(_frame(spark, source, request).select(value).select("value.*"))


def sum_by_fastavro(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Add up all fields of values that fastavro decodes one by one."""
    import fastavro
    import pandas as pd

    names = "id long, user int, item string, price double, quantity int, status string, note string"
    schema = json.loads(request["schema"])

    def decode(frames: Iterator[Any]) -> Iterator[Any]:
        parsed = fastavro.parse_schema(schema)
        for frame in frames:
            yield pd.DataFrame(
                [fastavro.schemaless_reader(io.BytesIO(value[5:]), parsed, None) for value in frame.value]
            )

    values = _frame(spark, source, request).select("value")
    return _sums(values.mapInPandas(decode, f"{names}, discount double, paid boolean, at timestamp"))


def parquet_rows(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Write values that the source reads as rows to Parquet files, for `write_rows` and `write_to_avro`."""
    _frame(spark, source, request).select("value.*").write.parquet(request["folder"])
    return {}


def write_rows(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Write the rows of Parquet files as values."""
    frame = spark.read.parquet(request["folder"]).select(F.struct("*").alias("value"))
    frame.write.format(source).options(**request["options"]).mode("append").save()
    return {}


def write_to_avro(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Write the rows of Parquet files as values that Spark's own function encodes."""
    from pyspark.sql.avro.functions import to_avro

    frame = spark.read.parquet(request["folder"]).select(to_avro(F.struct("*"), request["schema"]).alias("value"))
    frame.write.format(source).options(**request["options"]).mode("append").save()
    return {}


def parquet(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Read all columns into Parquet files, which replace the folder; only that is timed."""
    started = time.perf_counter()
    writer = _frame(spark, source, request).write.mode("overwrite").options(**request.get("write", {}))
    writer.parquet(request["folder"])
    seconds = time.perf_counter() - started
    written = spark.read.parquet(request["folder"])
    row = written.agg(F.count("*"), F.sum(F.length("value"))).collect()[0]
    return {"seconds": seconds, "rows": row[0], "bytes": row[1] or 0}


def load(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Run the project's load of a topic into a new folder, as jobs/batch_load.py does."""
    from spark_klog.load.run import LoadOptions, load as run_load
    from spark_klog.load.settings import WriteSettings
    from spark_klog.load.tasks.task import SparkRunner

    options = request["options"]
    formats: tuple[Any, ...] = ()
    if "registry" in options:
        from spark_klog.schemas.column_format import ColumnFormat
        from spark_klog.schemas.registry.client import RegistrySettings
        from spark_klog.security.config import Settings

        formats = (ColumnFormat("value", "avro", RegistrySettings(Settings({"url": options["registry"]}))),)
    client = {"bootstrap.servers": options["servers"]}
    schema = options.get("schema", "")
    settings = WriteSettings(infers=schema == "infer", schema="" if schema == "infer" else schema)
    asked = LoadOptions(client, [options["topic"]], request["folder"], settings, formats=formats)
    started = time.perf_counter()
    loaded = run_load(asked, SparkRunner(lambda: spark))
    return {"seconds": time.perf_counter() - started, "rows": sum(item.records for item in loaded.partitions)}


_LOADS: dict[str, Any] = {}


def load_topics(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """A round of the project's loads by topic, as jobs/batch_load.py --follow does it; the process keeps the loads."""
    from spark_klog.load.by_topic import Loads, example_of
    from spark_klog.load.run import LoadOptions
    from spark_klog.load.tasks.task import SparkRunner

    options, topics = request["options"], request["options"]["topics"].split(",")
    output = options["output"]
    if output not in _LOADS:
        asked = LoadOptions({"bootstrap.servers": options["servers"]}, topics[:1], example_of(output))
        runner = SparkRunner(lambda: spark)
        _LOADS[output] = Loads(asked, topics, None, output, runner, lambda _total, _done: nullcontext())
    started = time.perf_counter()
    outcomes = _LOADS[output].round()
    seconds = time.perf_counter() - started
    if errors := [str(outcome.error) for outcome in outcomes if outcome.error]:
        raise RuntimeError(errors[0])
    rows = sum(part.records for outcome in outcomes if outcome.has_news for part in outcome.loaded.partitions)
    return {"seconds": seconds, "rows": rows}


def plan(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Plan a batch: everything before the first task, until Spark knows its input partitions."""
    return {"rows": _frame(spark, source, request)._jdf.queryExecution().toRdd().getNumPartitions()}


def stream(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Read with AvailableNow into a sink that drops everything; time the query from start to end."""
    frame = spark.readStream.format(source).options(**request["options"]).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", request["folder"])
    started = time.perf_counter()
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    seconds = time.perf_counter() - started
    rows = [progress["numInputRows"] for progress in query.recentProgress]
    plans = [progress["durationMs"].get("latestOffset", 0) for progress in query.recentProgress]
    return {"seconds": seconds, "rows": sum(rows), "batches": sum(count > 0 for count in rows), "plans_ms": plans}


def sink(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Read all columns with AvailableNow into Spark's sink of a new Delta table; time the query from start to end."""
    folder = request["folder"]
    frame = spark.readStream.format(source).options(**request["options"]).load()
    writer = frame.writeStream.format("delta").option("checkpointLocation", f"{folder}-checkpoint")
    started = time.perf_counter()
    writer.trigger(availableNow=True).start(folder).awaitTermination()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "rows": spark.read.format("delta").load(folder).count()}


def merge(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Read changes with AvailableNow, and merge each micro-batch into a new Delta table by the record's key."""
    folder = request["folder"]
    write = _upsert(folder) if source == "klog" else _merge_into(spark, folder)
    frame = spark.readStream.format(source).options(**request["options"]).load()
    writer = frame.writeStream.option("checkpointLocation", f"{folder}-checkpoint").foreachBatch(write)
    started = time.perf_counter()
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "batches": sum(progress["numInputRows"] > 0 for progress in query.recentProgress)}


def statement(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Run a statement of SQL."""
    spark.sql(request["text"]).collect()
    return {}


def _upsert(folder: str) -> Callable[[DataFrame, int], None]:
    from spark_klog.tables import upsert

    return upsert(f"delta:{folder}")


def _merge_into(spark: SparkSession, folder: str) -> Callable[[DataFrame, int], None]:
    columns = "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP"
    spark.sql(f"CREATE TABLE delta.`{folder}` ({columns}) USING delta")

    def write(batch: DataFrame, _: int) -> None:
        change = F.struct("value", "partition", "offset", "timestamp")
        last = batch.groupBy("key").agg(F.max_by(change, "offset").alias("last")).select("key", "last.*")
        last.createOrReplaceTempView("changes")
        batch.sparkSession.sql(
            f"MERGE INTO delta.`{folder}` t USING changes c ON t.key = c.key "
            "WHEN MATCHED AND c.value IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET * "
            "WHEN NOT MATCHED AND c.value IS NOT NULL THEN INSERT *"
        )

    return write


#: A log line in JSON; the column id makes each line different.
_LINE = """concat('{"ts":', 1700000000000 + id * 17, ',"level":"', element_at(array('INFO', 'WARN', 'ERROR'), cast(1 +
    pmod(hash(id), 10) / 4 as int)), '","host":"web-', id % 20, '","ms":', pmod(hash(id + 1), 2000), ',"msg":"')"""
_TEXT = "request served from cache order paid by card user retry timeout "


def _lines(spark: SparkSession, request: Request) -> DataFrame:
    """`rows` rows with a column value of `size` bytes, in `files` tasks."""
    frame = spark.range(0, int(request["rows"]), 1, int(request["files"]))
    return frame.selectExpr(f"rpad({_LINE}, {int(request['size'])}, '{_TEXT}') as value")


def make_rows(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Write rows to Parquet files for `write`."""
    _lines(spark, request).write.parquet(request["folder"])
    return {}


def write(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Write the rows of Parquet files, or with `rows` generated rows."""
    frame = _lines(spark, request) if "rows" in request else spark.read.parquet(request["folder"])
    frame.write.format(source).options(**request["options"]).mode("append").save()
    return {}


def write_stream(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Write Parquet files as a stream, one file per micro-batch."""
    schema = spark.read.parquet(request["folder"]).schema
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(request["folder"])
    writer = frame.writeStream.format(source).options(**request["options"])
    writer = writer.option("checkpointLocation", request["checkpoint"])
    started = time.perf_counter()
    writer.trigger(availableNow=True).start().awaitTermination()
    return {"seconds": time.perf_counter() - started}


def batch_stream(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Write Parquet files as `write_stream` does, in `foreachBatch`: by `save()`, or by `write_updates`."""
    import spark_klog

    schema = spark.read.parquet(request["folder"]).schema
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(request["folder"])
    options = request["options"]

    def save(df: DataFrame, _: int) -> None:
        df.write.format(source).options(**options).mode("append").save()

    def update(df: DataFrame, batch_id: int) -> None:
        spark_klog.write_updates(df, batch_id, name="rows", **options)

    process = {"save": save, "write_updates": update}[request["by"]]
    writer = frame.writeStream.foreachBatch(process).option("checkpointLocation", request["checkpoint"])
    started = time.perf_counter()
    writer.trigger(availableNow=True).start().awaitTermination()
    return {"seconds": time.perf_counter() - started}


def avro(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Decode a column of Avro records from Parquet files into rows that nobody looks at."""
    options = request["options"]
    rows = _AVRO[options["by"]](options["schema"])
    started = time.perf_counter()
    frame = spark.read.parquet(request["folder"]).select(rows.alias("row"))
    frame.write.format("noop").mode("overwrite").save()
    return {"seconds": time.perf_counter() - started}


def _by_klog(schema: str) -> Column:
    from spark_klog.schemas import from_avro

    return from_avro("value", schema)


def _by_spark(schema: str) -> Column:
    from pyspark.sql.avro.functions import from_avro

    return from_avro("value", schema)


def _by_fastavro(schema: str) -> Column:
    import fastavro
    import pandas as pd

    names = {"long": "bigint", "timestamp-micros": "timestamp", "enum": "string"}
    kinds = []
    for field in json.loads(schema)["fields"]:
        kind = field["type"][1] if isinstance(field["type"], list) else field["type"]
        kind = kind.get("logicalType", kind["type"]) if isinstance(kind, dict) else kind
        kinds.append(f"{field['name']} {names.get(kind, kind)}")

    def decode(values: Any) -> Any:
        parsed = fastavro.parse_schema(json.loads(schema))
        return pd.DataFrame([fastavro.schemaless_reader(io.BytesIO(value), parsed, None) for value in values])

    return F.pandas_udf(decode, ", ".join(kinds), F.PandasUDFType.SCALAR)("value")  # type: ignore[no-any-return]


_AVRO: dict[str, Callable[[str], Column]] = {"klog": _by_klog, "spark": _by_spark, "fastavro": _by_fastavro}


def copy(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Start a query that copies a topic, with the options `to`, until `stop`."""
    frame = spark.readStream.format(source).options(**request["options"]).load().select("key", "value")
    writer = frame.writeStream.format(source).options(**request["to"])
    writer = writer.option("checkpointLocation", request["folder"]).trigger(processingTime="0 seconds")
    _queries.append(writer.start())
    return {}


def probes(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Start a query that reports, for each micro-batch until `stop`, how many records of each probe it had."""

    def arrived(frame: DataFrame, _: int) -> None:
        counts: dict[str, int] = {}
        for row in frame.select("value").collect():
            probe = bytes(row[0]).split(b" ", 1)[0].decode()
            counts[probe] = counts.get(probe, 0) + 1
        _answer(_answers[0], {"probes": counts})

    frame = spark.readStream.format(source).options(**request["options"]).load()
    writer = frame.writeStream.option("checkpointLocation", request["folder"]).trigger(processingTime="0 seconds")
    _queries.append(writer.foreachBatch(arrived).start())
    return {}


def stop(spark: SparkSession, source: str, request: Request) -> dict[str, Any]:
    """Stop the queries of `probes` and `copy`."""
    while _queries:
        _queries.pop().stop()
    return {"stopped": True}


#: The work that a line of input may name.
WORK: dict[str, Callable[[SparkSession, str, Request], dict[str, Any]]] = {
    work.__name__: work
    for work in (
        *(
            count_sum,
            parquet,
            load,
            load_topics,
            sink,
            merge,
            statement,
            plan,
            stream,
            make_rows,
            write,
            write_stream,
            batch_stream,
            avro,
            copy,
            probes,
            stop,
        ),
        *(sum_rows, sum_from_avro, sum_by_fastavro, parquet_rows, write_rows, write_to_avro),
    )
}
_queries: list[StreamingQuery] = []
_answers: list[TextIO] = []


def main() -> None:
    answers = _own_standard_output()
    _answers.append(answers)
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", required=True)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--conf", action="append", default=[])
    arguments = parser.parse_args()
    started = time.perf_counter()
    try:
        spark = _session(arguments.master, [conf.split("=", 1) for conf in arguments.conf])
        if arguments.format == "no-op":
            _register_bounds(spark)
    except Exception as error:
        _answer(answers, {"error": _reason(error)})
        sys.exit(1)
    _answer(
        answers,
        {
            "seconds": time.perf_counter() - started,
            "pyspark": pyspark.__version__,
            "python": platform.python_version(),
        },
    )
    for line in sys.stdin:
        _answer(answers, _run(spark, arguments.format, json.loads(line)))
    spark.stop()


def _run(spark: SparkSession, source: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        started = time.perf_counter()
        figures = WORK[request["work"]](spark, source, request)
        return {"seconds": time.perf_counter() - started, **figures}
    except Exception as error:
        return {"error": _reason(error)}


def _session(master: str, confs: list[list[str]]) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("benchmark").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    for name, value in confs:
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _register_bounds(spark: SparkSession) -> None:
    from no_op_source import NoOp
    from ready_rows import ReadyRows

    spark.dataSource.register(NoOp)
    spark.dataSource.register(ReadyRows)


def _own_standard_output() -> TextIO:
    """Keep standard output for the answers: Spark's processes, which inherit it, write to standard error instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _reason(error: Exception) -> str:
    """The error's text without Java stack frames; the middle of a long text is left out."""
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if not line.startswith("\tat ")]
    text = "\n".join(lines).strip()
    return text if len(text) < 2000 else f"{text[:800]} ... {text[-1000:]}"


if __name__ == "__main__":
    main()
