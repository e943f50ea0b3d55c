"""Source and sink at Apache Kafka 0.10.2.2, which stores message sets of magic 0 or 1, checked by confluent-kafka."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.sql import SparkSession

from tests.support.servers.shared_kafka import SharedKafkas

from .support import (
    KAFKA_SCHEMA_WITH_HEADERS,
    Seen,
    Sent,
    consume,
    create_topic,
    error_of,
    expected_rows,
    mixed_values,
    offsets_of,
    produce,
    read,
    values,
)

pytestmark = [pytest.mark.peer, pytest.mark.test_all("version")]

CODECS = ["none", "gzip", "snappy", "lz4"]
#: message.format.version of a topic, by magic.
FORMATS = {0: "0.9.0", 1: "0.10.2"}
SECONDS = 60


@pytest.fixture(scope="module")
def servers(shared_kafkas: SharedKafkas) -> str:
    return shared_kafkas.get("0.10.2.2").bootstrap_servers


def _contents(records: list[Seen] | list[Sent]) -> Counter[tuple[bytes | None, bytes | None]]:
    return Counter((record.key, record.value) for record in records)


@pytest.mark.parametrize("magic", FORMATS)
def test_batch_round_trip(spark: SparkSession, servers: str, topic: str, magic: int) -> None:
    format_version = {"message.format.version": FORMATS[magic]}
    create_topic(servers, topic, len(CODECS), **format_version)
    sent: list[Sent] = []
    for partition, codec in enumerate(CODECS):
        records = mixed_values(200, partition, with_headers=False)
        produce(servers, topic, records, compression_type=codec)
        sent += records
    kept = sent if magic else [record._replace(timestamp=-1) for record in sent]
    rows = [(*row[:6], 0 if magic else -1, None) for row in expected_rows(topic, kept)]
    found = read(spark, servers, subscribe=topic, includeHeaders=True)
    wanted = spark.createDataFrame(rows, KAFKA_SCHEMA_WITH_HEADERS)
    assert_df_equality(found.orderBy("partition", "offset"), wanted)
    ranges = {"startingOffsets": dict.fromkeys("0123", 13), "endingOffsets": dict.fromkeys("0123", 187)}
    part = read(spark, servers, subscribe=topic, **{name: json.dumps({topic: at}) for name, at in ranges.items()})
    assert offsets_of(part) == [(topic, partition, offset) for partition in range(4) for offset in range(13, 187)]

    for codec in CODECS:
        create_topic(servers, f"{topic}-{codec}", 3, **format_version)
        options = {"kafka.bootstrap.servers": servers, "kafka.compression.type": codec, "topic": f"{topic}-{codec}"}
        found.select("key", "value").write.format("klog").mode("append").options(**options).save()
        written = consume(servers, f"{topic}-{codec}")
        assert _contents(written) == _contents(sent)
        assert {record.timestamp_type for record in written} == {0 if magic else -1}


def test_streams(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    create_topic(servers, source, 2)
    create_topic(servers, target, 3, **{"message.format.version": FORMATS[0]})

    def run() -> None:
        options = {"kafka.bootstrap.servers": servers, "subscribe": source, "startingOffsets": "earliest"}
        frame = spark.readStream.format("klog").options(**options, maxOffsetsPerTrigger="200").load()
        writer = frame.select("key", "value").writeStream.format("klog").trigger(availableNow=True)
        writer = writer.options(**{"kafka.bootstrap.servers": servers, "topic": target})
        query = writer.option("checkpointLocation", str(tmp_path)).start()
        assert query.awaitTermination(SECONDS)

    for start, codec in ((0, "gzip"), (300, "lz4")):
        produce(servers, source, values(300, start, partitions=2), compression_type=codec)
        run()
        written = consume(servers, target)
        assert _contents(written) == _contents(values(start + 300))
    assert offsets_of(read(spark, servers, subscribe=target)) == [
        (target, record.partition, record.offset) for record in written
    ]


def test_headers_are_refused(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    frame = spark.createDataFrame(
        [(b"v", [("h", b"x")])], "value binary, headers array<struct<key: string, value: binary>>"
    )
    options = {"kafka.bootstrap.servers": servers, "topic": topic}
    told = error_of(lambda: frame.write.format("klog").mode("append").options(**options).save())
    assert f"records for {topic}-0 have headers, but the broker supports only Produce 2, which has none:" in told
    assert consume(servers, topic) == []
