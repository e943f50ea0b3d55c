"""The cluster and its topics, in a few requests however many topics there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spark_klog.client import Admin
from spark_klog.client.admin.configs import ConfigResource
from spark_klog.client.admin.topics import TopicDescription
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import KlogError
from spark_klog.protocol.tables.records import EARLIEST, LATEST

#: Topics shown; the page says how many there are.
_MAX_TOPICS = 10_000


def overview(admin: Admin) -> dict[str, Any]:
    """Brokers, and for each topic its partitions, records (offsets between the first and the last) and bytes."""
    described = admin.describe_cluster()
    listed = admin.list_topics(include_internal=True)
    names = [topic.name for topic in listed[:_MAX_TOPICS]]
    found = admin.describe_topics(names) if names else {}
    topics = {name: topic for name, topic in found.items() if isinstance(topic, TopicDescription)}
    led = [
        (name, one.partition) for name, topic in topics.items() for one in topic.partitions if one.leader is not None
    ]
    first, end = _ends(admin, led)
    sizes, logs = _sizes(admin)
    rows = []
    for name, topic in topics.items():
        keys = [(name, one.partition) for one in topic.partitions]
        rows.append(
            {
                "name": name,
                "internal": topic.is_internal,
                "partitions": len(keys),
                "offline": sum(one.leader is None for one in topic.partitions),
                "records": sum(end[key] - first[key] for key in keys if key in end),
                "latest": sum(end[key] for key in keys if key in end),
                "bytes": None if sizes is None else sum(sizes.get(key, 0) for key in keys),
            }
        )
    return {
        "clusterId": described.cluster_id,
        "brokers": [
            {
                "id": broker.node,
                "host": broker.host,
                "port": broker.port,
                "rack": broker.rack,
                "controller": broker.node == described.controller,
                "leads": sum(one.leader == broker.node for topic in topics.values() for one in topic.partitions),
                "bytes": logs.get(broker.node),
            }
            for broker in described.brokers
        ],
        "topics": rows,
        "topicCount": len(listed),
    }


def _ends(
    admin: Admin, partitions: Iterable[TopicPartition]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """The first and the end offset of each partition."""
    wanted = list(partitions)
    with admin.exclusive() as cluster:
        first, end = (list_offsets(cluster, dict.fromkeys(wanted, place)) for place in (EARLIEST, LATEST))
    return first, end


def _sizes(admin: Admin) -> tuple[dict[TopicPartition, int] | None, dict[int, int]]:
    """Bytes of each partition (the largest copy; None if no broker tells) and of each broker. Best effort."""
    try:
        answered = admin.describe_log_dirs()
    except KlogError:  # before Kafka 1.0, or not allowed
        return None, {}
    sizes: dict[TopicPartition, int] = {}
    brokers: dict[int, int] = {}
    for node, directories in answered.items():
        if isinstance(directories, KlogError):
            continue
        brokers[node] = 0
        for directory in directories.values():
            for key, replica in directory.replicas.items():
                sizes[key] = max(sizes.get(key, 0), replica.size)
                brokers[node] += replica.size
    return (sizes if brokers else None), brokers


def topic(admin: Admin, name: str) -> dict[str, Any]:
    """A topic's partitions and settings; `ProtocolError` if it does not exist."""
    found = admin.describe_topic(name)
    led = [(name, one.partition) for one in found.partitions if one.leader is not None]
    first, end = _ends(admin, led)
    sizes = _sizes(admin)[0] or {}
    settings, error = _settings(admin, name)
    return {
        "name": name,
        "id": None if found.topic_id is None else str(found.topic_id),
        "internal": found.is_internal,
        "settings": settings,
        "settingsError": error,
        "partitions": [
            {
                "partition": one.partition,
                "leader": one.leader,
                "replicas": list(one.replicas),
                "inSync": list(one.in_sync),
                "earliest": first.get((name, one.partition)),
                "latest": end.get((name, one.partition)),
                "bytes": sizes.get((name, one.partition)),
            }
            for one in found.partitions
        ],
    }


def _settings(admin: Admin, name: str) -> tuple[list[dict[str, Any]], str | None]:
    """The topic's settings, those that differ from the defaults first; or none, and why the broker refuses them."""
    try:
        found = admin.describe_configs([("topic", name)])[ConfigResource("topic", name)]
    except KlogError as error:  # before Kafka 0.11
        return [], str(error)
    if isinstance(found, KlogError):
        return [], str(found)
    rows = [
        {"name": one.name, "value": one.value, "source": one.source, "default": one.is_default}
        for one in found.values()
    ]
    return sorted(rows, key=lambda row: (bool(row["default"]), str(row["name"]))), None
