"""Topics and partitions as arguments of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.errors import ConfigError


def parse_topics(before: str, texts: Sequence[str]) -> dict[str, set[int] | None]:
    """Parse TOPIC (all partitions: None) or TOPIC:0,1; errors begin with `before`."""
    found: dict[str, set[int] | None] = {}
    for text in texts:
        name, colon, numbers = text.partition(":")
        parts = numbers.split(",")
        if not name or (colon and not all(part.isascii() and part.isdecimal() for part in parts)):
            raise click.UsageError(f"{before}{text} must be TOPIC or TOPIC:0,1")
        found[name] = {int(part) for part in parts} if colon else None
    return found


def partitions_of(cluster: Cluster, topics: Mapping[str, set[int] | None]) -> list[TopicPartition]:
    """The chosen partitions; `ProtocolError` if a topic does not exist, `ConfigError` if a partition does not."""
    found = []
    for topic, there in cluster.partitions(list(topics)).items():
        numbers = topics[topic]
        if missing := (numbers or set()).difference(there):
            raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, sorted(missing)))}")
        found += [(topic, partition) for partition in there if numbers is None or partition in numbers]
    return found
