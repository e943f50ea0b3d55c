"""Transaction markers: the control batches that end a transaction in each of its partitions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from spark_klog.base.clock import system_ms
from spark_klog.base.names import PLAINTEXT, TRANSACTIONS_2, TopicPartition
from spark_klog.broker.event_loop import within
from spark_klog.broker.groups.coordinator import GroupCoordinator
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.metadata.registry import Registry
from spark_klog.broker.partitions import ServedPartitions
from spark_klog.broker.transactions.records import marker_batch, partitions_by_topic
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import ConnectionFailed, DecodeError, ErrorCode, KlogError
from spark_klog.log.partition_log import BatchTooLarge
from spark_klog.log.producer_state import ProducerRefused, check_late_marker
from spark_klog.protocol.apis import WRITE_TXN_MARKERS
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.transactions import FIRST_MARKERS_WITH_VERSION
from spark_klog.wire.primitives import MAX_FRAME, SIZE, frame_size

_SECONDS = 5.0
_CORRELATION_ID = 1
_CLIENT_ID = "klog-broker"
#: What `ask` raises.
UNANSWERED = (KlogError, OSError, asyncio.TimeoutError)
_log = logging.getLogger(__name__)
#: The WriteTxnMarkers of brokers that serve only earlier transactions.
_FIRST_VERSION = 1
#: Upper bound of a marker batch.
_MARKER_BYTES = 128


async def ask(registry: Registry, node: int, api: Api, version: int, message: Message) -> Message:
    """Ask another broker at its PLAINTEXT listener. Raises one of `UNANSWERED`."""
    for endpoint in registry.brokers.get(node, ()):
        if endpoint.security_protocol == PLAINTEXT:
            return await within(_SECONDS, _ask(endpoint.host, endpoint.port, api, version, message))
    raise ConnectionFailed(f"broker {node} has no PLAINTEXT listener, or is not in the cluster")


async def _ask(host: str, port: int, api: Api, version: int, message: Message) -> Message:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = encode_request(api, version, _CORRELATION_ID, _CLIENT_ID, message).to_bytes()
        writer.write(SIZE.pack(len(request)) + request)
        size = frame_size(await reader.readexactly(SIZE.size), MAX_FRAME)
        _, answer = decode_response(api, version, await reader.readexactly(size))
        return answer
    except asyncio.IncompleteReadError:
        raise ConnectionFailed(f"{host}:{port} closed the connection without an answer") from None
    finally:
        writer.close()


class MarkerEntry(NamedTuple):
    """The end of a producer's transaction; `coordinator_epoch` is the leader epoch of its __transaction_state.

    `version` is the transaction.version by which it has ended: from 2 on the producer's epoch is that of its next
    transaction, which a late marker must not end (KIP-1228).
    """

    producer: ProducerIdAndEpoch
    commits: bool
    coordinator_epoch: int
    version: int


async def write_marker(
    partitions: ServedPartitions, groups: GroupCoordinator, key: TopicPartition, marker: MarkerEntry
) -> ErrorCode:
    """Append a marker to a partition that this broker leads; returns NONE or the error. Offsets are those of `groups`.

    Waits for room in the log, and for the flush that flush.messages requires.
    """
    if not await partitions.is_current():
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    log = partitions.logs.get(*key)
    if log is not None:
        await partitions.flushes.make_early_room(log, _MARKER_BYTES)
    leads = partitions.registry.leads(*key)
    if not leads:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if leads is None else ErrorCode.NOT_LEADER_OR_FOLLOWER
    log = partitions.logs.get(*key)  # again: the topic may have been recreated meanwhile
    if log is None:
        return ErrorCode.KAFKA_STORAGE_ERROR
    if key[0] == OFFSETS_TOPIC and groups.is_loading:  # the loader would miss a marker appended now
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    if not partitions.serves(log):
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    producer, commits, epoch, version = marker
    try:
        if version >= TRANSACTIONS_2:
            check_late_marker(log.producers, producer.producer_id, producer.epoch)
        log.append(
            memoryview(marker_batch(producer, commits=commits, coordinator_epoch=epoch, now_ms=system_ms())),
            flushes=False,
        )
        if key[0] == OFFSETS_TOPIC:
            groups.offsets.complete(key[1], producer.producer_id, committed=commits)
        await partitions.flushes.flush_many(log)
    except ProducerRefused as error:
        _log.warning("no marker for %s: %s", log.directory.name, error)
        return error.code
    except (BatchTooLarge, DecodeError, OSError) as error:  # DecodeError: the transaction index is damaged
        _log.error("a marker can't be written to %s: %s", log.directory, error)
        return ErrorCode.KAFKA_STORAGE_ERROR
    partitions.purgatory.wake(key)
    return ErrorCode.NONE


class MarkerSender:
    """Sends markers to the other brokers that lead the partitions."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: Brokers that do not answer.
        self._silent: set[int] = set()

    async def send(
        self, node: int, markers: Mapping[MarkerEntry, list[TopicPartition]]
    ) -> set[tuple[int, TopicPartition, ErrorCode]]:
        """Make another broker write markers; returns (producer id, partition, error) of each.

        Empty if it does not answer, which is logged once.
        """
        entries = [
            {
                "producer_id": marker.producer.producer_id,
                "producer_epoch": marker.producer.epoch,
                "transaction_result": marker.commits,
                "topics": [
                    {"name": name, "partition_indexes": numbers} for name, numbers in partitions_by_topic(keys).items()
                ],
                "coordinator_epoch": marker.coordinator_epoch,
                "transaction_version": marker.version,
            }
            for marker, keys in markers.items()
        ]
        try:
            version = (
                FIRST_MARKERS_WITH_VERSION if self._registry.transaction_version >= TRANSACTIONS_2 else _FIRST_VERSION
            )
            answer = await ask(self._registry, node, WRITE_TXN_MARKERS, version, {"markers": entries})
            written = {
                (entry["producer_id"], (topic["name"], part["partition_index"]), ErrorCode(part["error_code"]))
                for entry in answer["markers"]
                for topic in entry["topics"]
                for part in topic["partitions"]
            }
            if all(code is not ErrorCode.CLUSTER_AUTHORIZATION_FAILED for _, _, code in written):
                self._silent.discard(node)
                return written
            reason = "it answers CLUSTER_AUTHORIZATION_FAILED: brokers connect as ANONYMOUS, make it an admin there"
        except UNANSWERED as error:
            reason = str(error)
        if node not in self._silent:
            _log.warning("broker %d can't be asked to write markers, will retry: %s", node, reason)
        self._silent.add(node)
        return set()
