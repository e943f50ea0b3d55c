"""Clusters for unittest, beside PySpark's test classes too, and in place of containers."""

from __future__ import annotations

import subprocess
import sys
import unittest
from typing import ClassVar

import pytest

from spark_klog import aio
from spark_klog.client import Admin, Producer
from spark_klog.embedded import ClusterStartError
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
def test_beside_the_classes_of_pyspark() -> None:
    """In a process of its own: the class of PySpark begins a Spark context, and there may be one."""
    command = [sys.executable, "-m", "unittest", "tests.unittest_program"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stderr


def test_a_container() -> None:
    container = KlogContainer("confluentinc/cp-kafka:7.6.0", port=9093).with_kraft().with_cluster_id("x")
    of_images = {"KAFKA_HEAP_OPTS": "-Xmx256m", "KAFKA_LOG4J_ROOT_LOGLEVEL": "INFO", "KAFKA_JMX_PORT": "9999"}
    of_images |= {"KAFKA_LISTENERS": "BROKER://0.0.0.0:9092", "KAFKA_ADVERTISED_LISTENERS": "BROKER://kafka:9092"}
    container.with_name("kafka").with_network(None).with_network_aliases("kafka").with_envs(CLUSTER_ID="x", **of_images)
    with container.with_env("KAFKA_NUM_PARTITIONS", "3") as kafka:
        servers = kafka.get_bootstrap_server()
        assert servers == f"{kafka.get_container_host_ip()}:{kafka.get_exposed_port(9093)}"
        with Producer({"bootstrap.servers": servers}) as producer:
            assert producer.partitions("made") == 3
    container.start(timeout=30).stop(force=True)


def test_a_container_does_not_hide_a_misspelt_setting() -> None:
    with pytest.raises(ClusterStartError, match=r"did you mean auto\.create\.topics\.enable"):
        KlogContainer().with_env("KAFKA_AUTO_CREATE_TOPIC_ENABLE", "true").start()
