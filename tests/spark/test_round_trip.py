"""Topic to Spark to topic, all columns: written by the sink, copied by an exactly-once stream, read back, compared.

SPARK_KLOG_ROUND_TRIP is the number of records (2,000; make soak: 1,000,000, and Apache Kafka as well).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession

from spark_klog.embedded import EmbeddedCluster
from tests.support.shared_kafka import SharedKafkas

from .support import create_topic, needs_admission_control, read

RECORDS = int(os.environ.get("SPARK_KLOG_ROUND_TRIP", "2000"))
PARTITIONS, _MICRO_BATCHES = 4, 2
_FIRST_MS = 1_700_000_000_000
#: chispa collects both sides.
_COMPARED = 50_000
_SECONDS = 1800

_HEADERS = "array<struct<key: string, value: binary>>"
_COLUMNS = {
    "key": """case id % 4 when 0 then null when 1 then cast('' as binary)
              when 2 then encode(concat('k\u00fc', id % 999), 'utf-8')
              else unhex(lpad(hex(id * 2654435761), 20, 'F')) end""",
    "value": """case id % 5 when 0 then null when 1 then cast('' as binary)
                when 2 then unhex(sha2(cast(id as string), 512))
                else cast(repeat(concat(id, ' '), cast(id % 40 as int)) as binary) end""",
    "partition": f"cast(id * 7 % {PARTITIONS} as int)",
    "timestamp": f"timestamp_millis({_FIRST_MS} + id)",
    "headers": f"""case id % 6
        when 1 then cast(array(struct('n', cast(cast(id as string) as binary))) as {_HEADERS})
        when 2 then cast(array(struct('\u00fc', null), struct('', cast('' as binary))) as {_HEADERS})
        when 3 then cast(array(struct('n', unhex('00FF')), struct('n', unhex('FF')), struct('m', null)) as {_HEADERS})
        end""",
}


@pytest.fixture(
    params=[
        "ours",
        pytest.param(
            "4.1.0",
            marks=[pytest.mark.peer, pytest.mark.skipif("SPARK_KLOG_ROUND_TRIP" not in os.environ, reason="make soak")],
        ),
    ]
)
def servers(request: pytest.FixtureRequest) -> str:
    if request.param == "ours":
        cluster: EmbeddedCluster = request.getfixturevalue("cluster")
        return cluster.bootstrap_servers
    kafkas: SharedKafkas = request.getfixturevalue("shared_kafkas")
    return kafkas.get(request.param).bootstrap_servers


def records(spark: SparkSession, topic: str) -> DataFrame:
    """Records that Spark makes up, each with a timestamp of its own."""
    columns = [f"{text} as {name}" for name, text in _COLUMNS.items()]
    return spark.range(0, RECORDS, 1, 4).selectExpr(*columns, f"'{topic}' as topic", "0 as timestampType")


@needs_admission_control
def test_all_columns(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    source, target = f"{topic}-from", f"{topic}-to"
    for name in (source, target):
        create_topic(servers, name, PARTITIONS)
    address = {"kafka.bootstrap.servers": servers}
    records(spark, source).drop("timestampType").write.format("klog").options(
        **address, **{"kafka.compression.type": "lz4"}
    ).mode("append").save()

    stream = spark.readStream.format("klog").options(**address, subscribe=source, startingOffsets="earliest")
    stream = stream.options(includeHeaders="true", maxOffsetsPerTrigger=RECORDS // _MICRO_BATCHES)
    copied = stream.load().selectExpr(f"'{target}' as topic", *_COLUMNS)
    writer = copied.writeStream.format("klog").options(**address, **{"kafka.compression.type": "zstd"})
    writer = writer.options(deliveryGuarantee="exactly-once", checkpointLocation=str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(_SECONDS)
    assert len([one for one in query.recentProgress if one["numInputRows"]]) >= _MICRO_BATCHES

    options = {"subscribe": target, "includeHeaders": True, "kafka.isolation.level": "read_committed"}
    names = [*_COLUMNS, "topic", "timestampType"]
    read(spark, servers, **options).select(*names).write.parquet(str(tmp_path / "found"))
    found, wanted = spark.read.parquet(str(tmp_path / "found")), records(spark, target)
    assert found.count() == RECORDS
    for first in range(0, RECORDS, _COMPARED):
        end = min(RECORDS, first + _COMPARED)
        part = f"timestamp >= timestamp_millis({_FIRST_MS + first}) and timestamp < timestamp_millis({_FIRST_MS + end})"
        theirs, ours = (frame.where(part).orderBy("timestamp") for frame in (wanted, found))
        assert theirs.count() == end - first
        assert_df_equality(ours, theirs, ignore_nullable=True)
