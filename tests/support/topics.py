"""Topics for tests, made by the package's admin client through a cluster that the test has."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import Producer

from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster


def create_topic(cluster: Cluster, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
    """Create a topic with one replica, at a broker of any version."""
    Admin(cluster).create_topic(name, partitions, replication_factor=1, configs=configs)


def make_topic(servers: str, name: str, partitions: int) -> None:
    """`create_topic` for tests that have no cluster."""
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(name, partitions, replication_factor=1)


def learn_topic(producer: Producer, name: str) -> None:
    """Have librdkafka know a topic before it gets records that should be one batch, whatever the load.

    Else it keeps them apart until it has metadata, and moves them to their partition one by one: a flush that waits
    sends the first ones alone.
    """
    producer.list_topics(name, timeout=30)


def delete_topic(cluster: Cluster, name: str) -> None:
    Admin(cluster).delete_topic(name)


def list_topics(cluster: Cluster) -> list[str]:
    """The names of all topics except internal ones, sorted."""
    return [topic.name for topic in Admin(cluster).list_topics()]
