"""Spark reads a segment with a flipped bit: badRecords fail, skip and deadletter, in batch queries and streams."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from tests.spark.support import create_topic, error_of, offsets_of, produce, read, values
from tests.support.brokers.batches import walk

# Nothing here is about a second attempt of a task.
pytestmark = pytest.mark.usefixtures("one_attempt")

#: Records per record batch, and number of record batches.
EACH, COUNT = 20, 6
CORRUPT = 2


@pytest.fixture
def corrupt(cluster: EmbeddedCluster, topic: str) -> bytes:
    """Fill the topic's only partition and corrupt one record batch; return that batch's bytes."""
    create_topic(cluster.bootstrap_servers, topic)
    for number in range(COUNT):
        produce(cluster.bootstrap_servers, topic, values(EACH, number * EACH), linger_ms=20_000)
    [segment] = cluster.data_dir.glob(f"**/{topic}-0/*.log")
    batches = list(walk(segment.read_bytes()))
    batch = next(item for item in batches if item.base_offset <= CORRUPT * EACH <= item.last_offset)
    assert (batch.base_offset, batch.last_offset) == (CORRUPT * EACH, CORRUPT * EACH + EACH - 1)
    with segment.open("r+b") as file:
        file.seek(batch.position + batch.size - 3)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x20]))
    return segment.read_bytes()[batch.position : batch.position + batch.size]


def rest(topic: str) -> list[tuple[str, int, int]]:
    return [(topic, 0, offset) for offset in range(COUNT * EACH) if offset // EACH != CORRUPT]


def test_batches(spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path, corrupt: bytes) -> None:
    servers = cluster.bootstrap_servers
    told = error_of(lambda: read(spark, servers, subscribe=topic).collect())
    assert f"CorruptBatchError: {topic}-0: batch of offsets {CORRUPT * EACH}-{CORRUPT * EACH + EACH - 1}: CRC" in told
    assert offsets_of(read(spark, servers, subscribe=topic, badRecords="skip")) == rest(topic)
    assert offsets_of(read(spark, servers, subscribe=topic, badRecords="deadletter", badRecordsPath=tmp_path)) == rest(
        topic
    )
    before = read(spark, servers, subscribe=topic, endingOffsets=json.dumps({topic: {"0": CORRUPT * EACH}}))
    assert offsets_of(before) == rest(topic)[: CORRUPT * EACH], "what ends where the corrupt one begins is readable"
    [path] = tmp_path.glob("*.json")
    letter = json.loads(path.read_text())
    assert (letter["topic"], letter["partition"], letter["offset"]) == (topic, 0, CORRUPT * EACH)
    assert "CRC" in letter["reason"]
    assert base64.b64decode(letter["bytes"]) == corrupt
