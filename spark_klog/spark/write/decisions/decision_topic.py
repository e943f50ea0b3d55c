"""The compacted topic with the decision logs of queries: create it, or check the one that is there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from spark_klog.client.admin.admin import Admin, create_compacted, replicas_for, settings_of_compacted
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.decoding import ConsumerRecord, RecordDecoder
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.errors import ErrorCode, ProtocolError

_log = logging.getLogger(__name__)
_ENOUGH_REPLICAS = 3
#: Records that are decoded at a time.
_MOST_ROWS = 10_000
#: Of a batch, compressed: the decision of about 100,000 tasks.
_LARGEST_BYTES = 4 * 1024 * 1024
_UNCLEAN, _IN_SYNC = "unclean.leader.election.enable", "min.insync.replicas"
_REFUSED = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED})


def settings_of_topic(replicas: int | None) -> dict[str, str]:
    """The settings of the topic, beside its compaction. Segments are small, as brokers do not compact the last one,
    which each start reads."""
    settings = {
        _UNCLEAN: "false",
        "segment.bytes": str(_LARGEST_BYTES),
        "max.message.bytes": str(_LARGEST_BYTES),
        "min.cleanable.dirty.ratio": "0.1",
    }
    if replicas is not None:
        settings[_IN_SYNC] = str(max(1, replicas - 1))
    return settings


def is_there(cluster: Cluster, topic: str) -> bool:
    return topic in cluster.attempt(lambda: cluster.partitions([topic], missing_ok=True))


def read_records(cluster: Cluster, topic: str, start: int, end: int) -> Iterator[tuple[Iterator[ConsumerRecord], int]]:
    """The records from `start` to `end`, and perhaps more: those of each fetch, and the offset after them.

    Raises what `fetch_range` does.
    """
    decoder = RecordDecoder(cluster.config.decompressed_max_bytes, _MOST_ROWS)
    for fetched in fetch_range(cluster, topic, 0, start, end):
        yield (record for records, _ in decoder.parts(fetched) for record in records), fetched.next_offset


def prepare_topic(cluster: Cluster, topic: str) -> None:
    """Create the topic if it is missing, or check the one that is there.

    It gets three replicas, or one for each broker if there are fewer, and min.insync.replicas one below; a warning says
    so if one that is there has less. Of its partitions only the first one is used. Raises `ConfigError` if it is there
    and not compacted; `ProtocolError` if ACLs forbid it.
    """
    admin = Admin(cluster)
    was_there = is_there(cluster, topic)
    if not was_there:
        create_compacted(admin, topic, settings_of_topic)
        cluster.attempt(lambda: cluster.partitions([topic]))
    try:
        settings = settings_of_compacted(admin, topic, "decisions")
    except ProtocolError as error:
        if error.code not in _REFUSED:
            raise
        _log.info("whether topic %s is compacted is not checked: %s", topic, error)
        return
    if was_there:
        replicas = len(admin.describe_topic(topic).partitions[0].replicas)
        if risks := _risks(replicas, settings, replicas_for(admin)):
            _log.warning(
                "topic %s, which keeps decisions of exactly-once writes, may lose some when brokers fail: it has %s. "
                "Rows may be written twice then, see docs/recipes/exactly-once.md",
                topic,
                ", ".join(risks),
            )


def _risks(replicas: int, settings: Mapping[str, str | None], possible: int) -> list[str]:
    """What a topic has that does not keep decisions safe, if it could have this many `possible` replicas."""
    unclean, in_sync = settings.get(_UNCLEAN), settings.get(_IN_SYNC)
    risks = []
    if replicas < possible:
        risks.append(f"{replicas} of {possible} replicas")
    if replicas > 1 and unclean == "true":
        risks.append(f"{_UNCLEAN}=true")
    if replicas >= _ENOUGH_REPLICAS and in_sync == "1":
        risks.append(f"{_IN_SYNC}=1")
    return risks


def refused_access(error: ProtocolError, topic: str) -> ProtocolError:
    """The error of any request about the topic; for want of ACLs with those that are needed."""
    if error.code not in _REFUSED:
        return error
    settings = {"cleanup.policy": "compact"} | settings_of_topic(_ENOUGH_REPLICAS)
    configs = " ".join(f"--config {name}={value}" for name, value in settings.items())
    advice = (
        f"allow Read, Write and Describe on topic {topic}, which keeps decisions of exactly-once writes; and Create, "
        f"or create it: klog topics create {topic} --partitions 1 --replication-factor {_ENOUGH_REPLICAS} {configs}"
    )
    return ProtocolError(error.code, error.what, advice=advice)
