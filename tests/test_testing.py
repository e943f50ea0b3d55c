"""Clusters for unittest, beside PySpark's test classes too, and in place of containers."""

from __future__ import annotations

import unittest
from typing import ClassVar

import pytest
from pyspark.testing.sqlutils import ReusedSQLTestCase

from spark_klog import aio
from spark_klog.client import Admin, Producer
from spark_klog.testing import KlogContainer, KlogTestCase


class TestOrders(KlogTestCase, unittest.IsolatedAsyncioTestCase):
    seen: ClassVar[set[str]] = set()

    def test_topics(self) -> None:
        self.seen.add(self.klog_cluster.bootstrap_servers)
        name = self.klog_topic(3, {"retention.ms": "1000"})
        with Admin({"bootstrap.servers": self.klog_cluster.bootstrap_servers}) as admin:
            assert len(admin.describe_topics([name]).check()[name].partitions) == 3

    async def test_coroutines(self) -> None:
        self.seen.add(self.klog_cluster.bootstrap_servers)
        topic = self.klog_topic()
        async with aio.Producer({"bootstrap.servers": self.klog_cluster.bootstrap_servers}) as producer:
            assert (await producer.send(topic, b"v")).offset == 0

    @classmethod
    def tearDownClass(cls) -> None:
        assert len(cls.seen) <= 1
        super().tearDownClass()


@pytest.mark.test_all("long")
class TestStream(KlogTestCase, ReusedSQLTestCase):  # type: ignore[misc]  # its class has no types
    """That of docs/recipes/testing.md."""

    def test_counts(self) -> None:
        servers, topic = self.klog_cluster.bootstrap_servers, self.klog_topic()
        with Producer({"bootstrap.servers": servers}) as producer:
            for page in (b"home", b"cart", b"home"):
                producer.send(topic, page)
        source = self.spark.readStream.format("klog").option("kafka.bootstrap.servers", servers)
        rows = source.option("subscribe", topic).option("startingOffsets", "earliest").load()
        counts = rows.selectExpr("cast(value AS string) AS page").groupBy("page").count()
        query = counts.writeStream.format("memory").queryName("counts").outputMode("complete")
        query.trigger(availableNow=True).start().awaitTermination()
        assert {tuple(row) for row in self.spark.table("counts").collect()} == {("home", 2), ("cart", 1)}


def test_a_container() -> None:
    container = KlogContainer("confluentinc/cp-kafka:7.6.0", port=9093).with_kraft()
    with container.with_env("KAFKA_NUM_PARTITIONS", "3").with_env("CLUSTER_ID", "x") as kafka:
        servers = kafka.get_bootstrap_server()
        assert servers == f"{kafka.get_container_host_ip()}:{kafka.get_exposed_port(9093)}"
        with Producer({"bootstrap.servers": servers}) as producer:
            assert producer.partitions("made") == 3
