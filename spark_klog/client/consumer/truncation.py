"""Ends of leader epochs, by which a consumer notices that a log was truncated (KIP-320, OffsetForLeaderEpoch).

A new leader may lack the last records of the former one (unclean election). A position that was reached by records of
epoch E is still right if the new leader's records of epochs up to E end at it or later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spark_klog.client.answers import answer_error, by_key
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.consumer.assigned import Assigned
from spark_klog.errors import (
    ConnectionFailed,
    ErrorCode,
    KlogError,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import OFFSET_FOR_LEADER_EPOCH
from spark_klog.protocol.codec import Message

#: A consumer's replica id.
_CONSUMER = -1
#: Brokers before 2.3 answer only other brokers if there are rules.
_DECLINED = ErrorCode.CLUSTER_AUTHORIZATION_FAILED


class EpochEnd(NamedTuple):
    """The last leader epoch up to the position's one that the leader has, and the offset after its last record."""

    epoch: int
    offset: int


def epoch_ends(
    cluster: Cluster, items: Iterable[Assigned]
) -> tuple[dict[TopicPartition, EpochEnd | None], dict[TopicPartition, KlogError]]:
    """Ask the leaders of the partitions once for the end of the epoch before the position.

    Returns the ends (None: the broker can't tell), and the errors of the other partitions. `DecodeError` for a bad
    response.
    """
    wanted: dict[int, dict[TopicPartition, Assigned]] = {}
    for item in items:
        if item.leader is not None:
            wanted.setdefault(item.leader.node, {})[item.key] = item
    found: dict[TopicPartition, EpochEnd | None] = {}
    failed: dict[TopicPartition, KlogError] = {}
    requests = {node: _request(asked.values()) for node, asked in wanted.items()}
    for node, answer in cluster.request_each(OFFSET_FOR_LEADER_EPOCH, requests).items():
        try:
            if isinstance(answer, KlogError):
                raise answer
            entries = (
                ((topic["topic"], entry["partition"]), entry)
                for topic in answer["topics"]
                for entry in topic["partitions"]
            )
            by_partition = by_key(OFFSET_FOR_LEADER_EPOCH, answer, entries, wanted[node])
        except UnsupportedVersionError:  # before 0.11
            found |= dict.fromkeys(wanted[node])
            continue
        except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
            failed |= dict.fromkeys(wanted[node], error)
            continue
        for key, entry in by_partition.items():
            code = entry["error_code"]
            if code and code != _DECLINED:
                failed[key] = answer_error(OFFSET_FOR_LEADER_EPOCH, code, f"leader epochs of {key[0]}-{key[1]}")
            else:
                is_known = not code and entry["end_offset"] >= 0
                found[key] = EpochEnd(entry["leader_epoch"], entry["end_offset"]) if is_known else None
    return found, failed


def _request(items: Iterable[Assigned]) -> Message:
    topics: dict[str, list[Message]] = {}
    for item in items:
        assert item.leader is not None
        entry = {
            "partition": item.partition,
            "current_leader_epoch": item.leader.epoch,
            "leader_epoch": item.epoch,
        }
        topics.setdefault(item.topic, []).append(entry)
    return {
        "replica_id": _CONSUMER,
        "topics": [{"topic": topic, "partitions": entries} for topic, entries in topics.items()],
    }
