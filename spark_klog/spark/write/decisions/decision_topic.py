"""The compacted topic with the decision logs of queries: create it, or check the one that is there."""

from __future__ import annotations

import logging

from spark_klog.client.admin.admin import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.errors import ConfigError, ErrorCode, ProtocolError

_log = logging.getLogger(__name__)
_MOST_REPLICAS = 3
#: Of a batch, compressed: the decision of about 100,000 tasks.
_LARGEST_BYTES = 4 * 1024 * 1024
_POLICY = "cleanup.policy"
_REFUSED = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED})


def settings_of_topic(replicas: int | None) -> dict[str, str]:
    """The topic's settings. Segments are small, as brokers do not compact the last one, which each start reads."""
    settings = {
        _POLICY: "compact",
        "unclean.leader.election.enable": "false",
        "segment.bytes": str(_LARGEST_BYTES),
        "max.message.bytes": str(_LARGEST_BYTES),
        "min.cleanable.dirty.ratio": "0.1",
    }
    if replicas is not None:
        settings["min.insync.replicas"] = str(max(1, replicas - 1))
    return settings


def prepare_topic(cluster: Cluster, topic: str) -> None:
    """Create the topic if it is missing, or check the one that is there.

    It gets three replicas, or one for each broker if there are fewer, and min.insync.replicas one below. Raises
    `ConfigError` if it is there and not compacted, or has several partitions; `ProtocolError` if ACLs forbid it.
    """
    found = cluster.attempt(lambda: cluster.partitions([topic], missing_ok=True))
    admin = Admin(cluster)
    if topic not in found:
        _create(admin, topic)
        found = cluster.attempt(lambda: cluster.partitions([topic]))
    if len(found[topic]) != 1:
        raise ConfigError(f"topic {topic} has {len(found[topic])} partitions: set decisionTopic to one that has one")
    try:
        (settings,) = admin.describe_configs([("topic", topic)]).check().values()
    except ProtocolError as error:
        if error.code not in _REFUSED:
            raise
        _log.info("whether topic %s is compacted is not checked: %s", topic, error)
        return
    policy = settings[_POLICY].value
    if policy != "compact":
        raise ConfigError(
            f"topic {topic} has cleanup.policy={policy}, which would lose decisions: set it to compact "
            f"(klog topics alter {topic} --config cleanup.policy=compact)"
        )


def _create(admin: Admin, topic: str) -> None:
    replicas: int | None = max(1, min(_MOST_REPLICAS, len(admin.cluster.nodes)))
    while True:
        try:
            admin.create_topic(topic, 1, replication_factor=replicas, configs=settings_of_topic(replicas))
            return
        except ProtocolError as error:
            if error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                return
            if error.code != ErrorCode.INVALID_REPLICATION_FACTOR or replicas is None:
                raise
            replicas = None  # the brokers' default: those of this package do not replicate


def refused_access(error: ProtocolError, topic: str) -> ProtocolError:
    """The error of any request about the topic; for want of ACLs with those that are needed."""
    if error.code not in _REFUSED:
        return error
    settings = settings_of_topic(_MOST_REPLICAS)
    configs = " ".join(f"--config {name}={value}" for name, value in settings.items())
    advice = (
        f"allow Read, Write and Describe on topic {topic}, which keeps decisions of exactly-once writes; and Create, "
        f"or create it: klog topics create {topic} --partitions 1 --replication-factor {_MOST_REPLICAS} {configs}"
    )
    return ProtocolError(error.code, error.what, advice=advice)
