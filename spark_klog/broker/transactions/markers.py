"""Markers: the ends of transactions, written into the partitions that they have written to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from spark_klog.broker.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.transactions.peers import ask, peer_address
from spark_klog.broker.transactions.records import marker_batch, partitions_by_topic
from spark_klog.broker.transactions.transaction import Producer, TopicPartition
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import BatchTooLarge, system_ms
from spark_klog.log.sequences import ProducerRefused
from spark_klog.protocol.apis import WRITE_TXN_MARKERS

if TYPE_CHECKING:
    from spark_klog.broker.broker import Broker

_log = logging.getLogger(__name__)
_VERSION = 1
#: A marker's batch takes less.
_MARKER_BYTES = 128


class Marker(NamedTuple):
    """What ends a producer's transaction; `coordinator_epoch` is the leader epoch of its __transaction_state."""

    producer: Producer
    commits: bool
    coordinator_epoch: int


async def write_marker(broker: Broker, key: TopicPartition, marker: Marker) -> ErrorCode:
    """Append a marker to a partition that this broker leads, or why it can't be.

    It waits for room in the log, and for the flush that flush.messages asks for.
    """
    log = broker.logs.get(*key)
    if log is not None:
        await broker.flushes.make_early_room(log, _MARKER_BYTES)
    leads = broker.registry.leads(*key)
    if not leads:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if leads is None else ErrorCode.NOT_LEADER_OR_FOLLOWER
    log = broker.logs.get(*key)  # again, as the topic may have been made anew
    if log is None:
        return ErrorCode.KAFKA_STORAGE_ERROR
    if key[0] == OFFSETS_TOPIC and broker.coordinator.is_loading:  # the loader would not see a marker behind its back
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    producer, commits, epoch = marker
    try:
        log.append(
            memoryview(marker_batch(producer, commits=commits, coordinator_epoch=epoch, now_ms=system_ms())),
            flushes=False,
        )
        if key[0] == OFFSETS_TOPIC:
            broker.offsets.complete(key[1], producer.producer_id, committed=commits)
        await broker.flushes.flush_many(log)
    except ProducerRefused as error:
        _log.warning("no marker for %s: %s", log.directory.name, error)
        return error.code
    except (BatchTooLarge, OSError) as error:
        _log.error("a marker can't be written to %s: %s", log.directory, error)
        return ErrorCode.KAFKA_STORAGE_ERROR
    broker.purgatory.wake(key)
    return ErrorCode.NONE


async def send_markers(
    broker: Broker, node: int, wanted: Mapping[Marker, list[TopicPartition]]
) -> set[tuple[int, TopicPartition, ErrorCode]]:
    """Have another broker write markers: (producer id, partition, error) of each; errors as of `peers.ask`."""
    entries = []
    for marker, keys in wanted.items():
        topics = partitions_by_topic(keys)
        entries.append(
            {
                "producer_id": marker.producer.producer_id,
                "producer_epoch": marker.producer.epoch,
                "transaction_result": marker.commits,
                "topics": [{"name": name, "partition_indexes": found} for name, found in topics.items()],
                "coordinator_epoch": marker.coordinator_epoch,
            }
        )
    address = peer_address(broker.registry, node)
    answer = await ask(address, WRITE_TXN_MARKERS, _VERSION, {"markers": entries})
    return {
        (entry["producer_id"], (topic["name"], found["partition_index"]), ErrorCode(found["error_code"]))
        for entry in answer["markers"]
        for topic in entry["topics"]
        for found in topic["partitions"]
    }
