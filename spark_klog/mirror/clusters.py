"""The two clusters of a mirror: its name, and whether it can run between them."""

from __future__ import annotations

from spark_klog.client import Admin
from spark_klog.errors import ConfigError
from spark_klog.mirror.settings import MirrorSettings, check_name


def mirror_name(settings: MirrorSettings, source: Admin) -> str:
    """The name of the mirror: as set, or else the id of the source's cluster, and the prefix.

    Copies with another prefix have a progress of their own.
    """
    source.list_topics()
    if settings.name is not None:
        return settings.name
    name = source.cluster.cluster_id
    if name is None:
        raise ConfigError("the source's brokers have no cluster id (before Kafka 0.10.1): name the mirror (--name)")
    return check_name(f"{name}-{settings.prefix}" if settings.prefix else name)


def check_clusters(settings: MirrorSettings, source: Admin, target: Admin) -> None:
    """Raise `ConfigError` if the mirror would copy topics into themselves."""
    target.list_topics()
    cluster = source.cluster.cluster_id
    if cluster is not None and cluster == target.cluster.cluster_id and not settings.prefix:
        raise ConfigError(f"source and target are the same cluster, {cluster}: give the copies other names (--prefix)")
