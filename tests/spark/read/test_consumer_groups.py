"""Kafka's own tool for groups shows a query's offsets and lag."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.support import Job, create_topic, produce, values, wait_for
from tests.support.clients.consumer_groups import seen_by_kafka
from tests.support.servers.kafka import Kafka
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]


@pytest.fixture(scope="module")
def kafka(shared_kafkas: SharedKafkas) -> Kafka:
    return shared_kafkas.get("3.9.1")


def test_offsets_and_lag_of_a_query(spark: SparkSession, kafka: Kafka, topic: str, tmp_path: Path) -> None:
    servers, group = kafka.bootstrap_servers, f"{topic}-group"
    create_topic(servers, topic, 3)
    produce(servers, topic, values(600, partitions=3))
    options = {"kafka.group.id": group, "commitOffsets": "true", "maxOffsetsPerTrigger": "150"}
    job = Job(spark, servers, tmp_path, subscribe=topic, **options)
    query = job.start(processingTime="100 milliseconds")
    try:
        wait_for(lambda: sum(job.committed().values()) == 600, "the end", query=query)
        # The last micro-batch's offsets are published when Spark asks for the next ones, at the next trigger.
        wait_for(
            lambda: seen_by_kafka(servers, group) == {(topic, partition): (200, 200, 0) for partition in range(3)},
            "the group at the end of the topic",
            query=query,
        )
    finally:
        query.stop()

    produce(servers, topic, [record._replace(partition=1) for record in values(70, 600)])
    produce(servers, topic, [record._replace(partition=2) for record in values(5, 670)])
    assert seen_by_kafka(servers, group) == {
        (topic, 0): (200, 200, 0),
        (topic, 1): (200, 270, 70),
        (topic, 2): (200, 205, 5),
    }

    # A bounded run; the tool shows the group after its end.
    assert sum(job.run()) == 75
    ends = {(topic, 0): (200, 200, 0), (topic, 1): (270, 270, 0), (topic, 2): (205, 205, 0)}
    assert seen_by_kafka(servers, group) == ends
