"""The connector in SQL: temporary views, options with dots, a write from a view; and sources with a name."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster

from .support import consume, create_topic, error_of, produce, values

_SECONDS = 60


def test_a_temporary_view(spark: SparkSession, cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(20, partitions=2))
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW clicks USING klog OPTIONS (`kafka.bootstrap.servers` '{servers}', "
        f"subscribe '{topic}', startingOffsets 'earliest')"
    )
    try:
        rows = spark.sql("SELECT partition, count(*) AS rows, max(offset) AS last FROM clicks GROUP BY 1 ORDER BY 1")
        assert [tuple(row) for row in rows.collect()] == [(0, 10, 9), (1, 10, 9)]
        copy = f"{topic}-copy"
        create_topic(servers, copy)
        chosen = spark.sql("SELECT value FROM clicks WHERE offset < 5")
        chosen.write.format("klog").option("kafka.bootstrap.servers", servers).option("topic", copy).mode(
            "append"
        ).save()
        assert len(consume(servers, copy)) == 10
    finally:
        spark.catalog.dropTempView("clicks")


def test_options_that_are_wrong(spark: SparkSession) -> None:
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW clicks USING klog OPTIONS (topics 'clicks')")
    try:
        assert "did you mean subscribe" in error_of(lambda: spark.sql("SELECT * FROM clicks").collect())
    finally:
        spark.catalog.dropTempView("clicks")


def test_a_table_keeps_no_options(spark: SparkSession, cluster: EmbeddedCluster, topic: str) -> None:
    """Spark drops the options of a table; the error says what works instead, which then works."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(3))
    dropped = f"`kafka.bootstrap.servers` '{servers}', subscribe '{topic}'"
    spark.sql(f"CREATE TABLE klog_table USING klog OPTIONS ({dropped})")
    try:
        for action in ("SELECT * FROM klog_table", "INSERT INTO klog_table (value) VALUES (X'00')"):
            text = error_of(lambda action=action: spark.sql(action).collect())
            assert "Spark drops those of CREATE TABLE ... USING klog. Use CREATE TEMPORARY VIEW" in text, action
        given = f"'kafka.bootstrap.servers' = '{servers}', 'subscribe' = '{topic}'"
        assert spark.sql(f"SELECT * FROM klog_table WITH ({given})").count() == 3
    finally:
        spark.sql("DROP TABLE klog_table")


#: pyspark 4.2 has the method, but no setting that makes Spark keep names in checkpoints.
_HAS_NAMES = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3)


@pytest.mark.test_all("long")
@pytest.mark.skipif(not _HAS_NAMES, reason="needs pyspark 4.3")
def test_a_source_with_a_name(spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """A restarted query finds each source's offsets by its name, although the order of the sources changed."""
    servers = cluster.bootstrap_servers
    names = [f"{topic}-{number}" for number in range(2)]
    for name in names:
        create_topic(servers, name)
        produce(servers, name, values(5))
    setting = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
    spark.conf.set(setting, "true")
    try:
        for order in (names, names[::-1]):
            streams = [
                spark.readStream.format("klog")
                .option("kafka.bootstrap.servers", servers)
                .option("subscribe", name)
                .option("startingOffsets", "earliest")
                .name(name.replace("-", "_"))
                .load()
                .select("topic", "value")
                for name in order
            ]
            frame = streams[0].union(streams[1])
            query = (
                frame.writeStream.format("parquet")
                .option("path", str(tmp_path / "rows"))
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(_SECONDS)
            for name in names:
                produce(servers, name, values(5, 5))
    finally:
        spark.conf.unset(setting)
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    seen = sorted((row.topic, bytes(row.value)) for row in rows)
    assert seen == sorted((name, record.value or b"") for name in names for record in values(10))
