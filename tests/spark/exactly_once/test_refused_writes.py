"""Writes that can't be exactly once fail with the reason, before any request to a broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from spark_klog.errors import ConfigError
from spark_klog.spark.exactly_once.writer import CheckpointMismatch
from spark_klog.spark.source import KlogDataSource
from tests.spark.support import error_of

SCHEMA = StructType([StructField("value", StringType())])
#: No broker listens at this address.
OPTIONS = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", "deliveryGuarantee": "exactly-once"}
_SECONDS = 300


@pytest.mark.parametrize(
    "location",
    [
        "hdfs://namenode:8020/a",
        "hdfs:///a",
        "s3a://bucket/a",
        "abfss://container@account.dfs.core.windows.net/a",
        "gs://bucket/a",
        "wasbs://container@account/a",
        "dbfs:/a",
    ],
)
def test_stores(location: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KlogDataSource({**OPTIONS, "checkpointLocation": location}).streamWriter(SCHEMA, False)
    assert f"needs a checkpointLocation that is a local or mounted folder of the driver, not {location}: " in str(
        caught.value
    )


def refusal(spark: SparkSession, location: str) -> str:
    """The error of a stream with a checkpoint location that Spark accepts."""
    rows = spark.readStream.format("rate").load().selectExpr("cast(value as string) as value")
    query = rows.writeStream.format("klog").options(**OPTIONS).option("checkpointLocation", location).start()
    return config_error(error_of(lambda: query.awaitTermination(_SECONDS)))


def config_error(text: str) -> str:
    """The line of our `ConfigError`; fails if Spark shows an error of pickling instead."""
    return text.split("\nspark_klog.errors.ConfigError: ")[1].splitlines()[0]


@pytest.mark.test_all("long")
def test_streams_with_checkpoints_elsewhere(spark: SparkSession, tmp_path: Path) -> None:
    """A viewfs mount is not a local folder; if viewfs is Spark's default file system, a plain path is not either."""
    mounted, there = tmp_path / "mounted", tmp_path / "there"
    (mounted / "b").mkdir(parents=True)
    spark.conf.set(f"fs.viewfs.mounttable.klog.link.{mounted}", f"file://{there}")
    uri = f"viewfs://klog{mounted}/a"
    assert f"a local or mounted folder of the driver, not {uri}: " in refusal(spark, uri)
    spark.conf.set("fs.defaultFS", "viewfs://klog/")
    try:
        error = refusal(spark, f"{mounted}/b")
    finally:
        spark.conf.unset("fs.defaultFS")
    assert f"checkpointLocation={mounted}/b is not a folder of the driver's machine with Spark's checkpoint" in error
    assert (there / "b" / "metadata").is_file()
    assert list((mounted / "b").iterdir()) == []


def test_batch_writes(spark: SparkSession) -> None:
    writer = spark.range(3).selectExpr("cast(id as string) as value").write.format("klog").mode("append")
    for more in ({}, {"checkpointLocation": "/tmp/a"}):
        error = config_error(error_of(writer.options(**OPTIONS, **more).save))
        assert "exactly-once is for streams (writeStream): a batch write, in foreachBatch too" in error


def test_a_micro_batch_that_does_not_follow_the_last_decision() -> None:
    """Emptying klog_sink is right after at-least-once writes; beside another run it would duplicate rows."""
    behind, ahead = str(CheckpointMismatch(3, 10)), str(CheckpointMismatch(12, 10))
    assert "Stop one of two runs, and start this one again if it is the other. Only if there was no other," in behind
    assert "the rows of micro-batches 3 to 10 are there already, and are written again" in behind
    assert "another run" not in ahead
    assert "To go on, empty the directory klog_sink to write from micro-batch 12 on" in ahead
