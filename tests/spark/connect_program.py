"""Program that test_connect.py runs in a process without a JVM: Spark Connect's batches, streams, SQL, functions.

python connect_program.py REMOTE BOOTSTRAP_SERVERS TOPIC FOLDER    writes FOLDER/found.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions as F

from spark_klog.schemas import from_avro, schema_id, to_avro

_SECONDS = 60


def _updates(stream: DataFrame, options: dict[str, Any], folder: str) -> str:
    """Write micro-batches with `write_updates`; return the error of a call that does not name the query."""

    def process(df: DataFrame, batch_id: int) -> None:
        import spark_klog

        query_id = f"query-of-{options['topic']}"
        spark_klog.write_updates(df, batch_id, name="all", key=F.lit("a"), query_id=query_id, **options)
        spark_klog.write_updates(df, batch_id, name="all again", **options)

    query = stream.writeStream.foreachBatch(process).option("checkpointLocation", f"{folder}/updates")
    started = query.trigger(availableNow=True).start()
    try:
        started.awaitTermination(_SECONDS)
    except Exception as error:
        return str(error)
    return "none"


def main() -> None:
    remote, servers, topic, folder = sys.argv[1:]
    spark = SparkSession.builder.remote(remote).getOrCreate()
    to_servers = {"kafka.bootstrap.servers": servers}
    options = {**to_servers, "subscribe": topic, "startingOffsets": "earliest"}
    frame = spark.read.format("klog").options(**options).load()
    rows = frame.groupBy("partition").agg(F.count("*").alias("rows")).orderBy("partition").collect()
    frame.select("value").write.format("klog").options(**to_servers, topic=f"{topic}-batch", createTopics="1").mode(
        "append"
    ).save()
    stream = spark.readStream.format("klog").options(**options).load().select("value")
    writer = stream.writeStream.format("klog").options(**to_servers, topic=f"{topic}-stream", createTopics="1")
    query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
    has_ended = query.awaitTermination(_SECONDS)
    updates = _updates(stream, {**to_servers, "topic": f"{topic}-updates", "createTopics": "1"}, folder)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW clicks USING klog OPTIONS (`kafka.bootstrap.servers` '{servers}', "
        f"subscribe '{topic}', startingOffsets 'earliest')"
    )
    (counted,) = spark.sql("SELECT count(*) AS rows FROM clicks").collect()
    schema = '{"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}'
    records = spark.range(3).select(to_avro(F.struct("id")).alias("record"))
    decoded = records.select(from_avro("record", schema)["id"], schema_id("record")).collect()
    refused = ""
    try:
        spark.read.format("klog").options(**to_servers, topics=topic).load().collect()
    except Exception as error:
        refused = str(error)
    found = {
        "kind": type(spark).__module__,
        "has_jvm": "py4j.java_gateway" in sys.modules and hasattr(spark, "_jvm"),
        "rows": [list(row) for row in rows],
        "has_ended": has_ended,
        "updates": updates,
        "counted": counted["rows"],
        "decoded": sorted(row[0] for row in decoded),
        "refused": refused,
    }
    spark.stop()
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
