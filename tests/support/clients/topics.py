"""Create, delete and list topics with the package's admin client."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import Producer

from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster


def create_topic(cluster: Cluster, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
    """Create a topic with one replica; works with brokers of any version."""
    Admin(cluster).create_topic(name, partitions, replication_factor=1, configs=configs)


def make_topic(servers: str, name: str, partitions: int) -> None:
    """Create a topic in a test that has no `Cluster`."""
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(name, partitions, replication_factor=1)


def learn_topic(producer: Producer, name: str) -> None:
    """Fetch a topic's metadata into librdkafka, so that the next records make one batch, whatever the load.

    Without metadata it holds records back, and later moves them to their partition one by one: a flush that is
    already waiting sends the first ones alone.
    """
    producer.list_topics(name, timeout=30)


def delete_topic(cluster: Cluster, name: str) -> None:
    Admin(cluster).delete_topic(name)


def list_topics(cluster: Cluster) -> list[str]:
    """The names of all topics except internal ones, sorted."""
    return [topic.name for topic in Admin(cluster).list_topics()]
