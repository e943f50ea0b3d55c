"""Common parts of OffsetCommit and TxnOffsetCommit: which offsets may be committed, and the response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.offset_manager import DEFAULT_RETENTION, Commit, EncodedCommits, encoded_commits
from spark_klog.broker.security.authorizer import READ
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
Codes = dict[tuple[str, int], ErrorCode]
Offsets = dict[tuple[str, int], Commit]
#: Offsets encoded in the event loop, which takes a few milliseconds.
_ENCODED_AT_ONCE = 200


class CheckedOffsets(NamedTuple):
    """Preliminary error codes by partition, offsets to commit, and the ids of their topics."""

    codes: Codes
    offsets: Offsets
    topics: dict[str, UUID]

    def refuse_deleted(self, broker: Broker) -> bool:
        """Refuse the offsets of topics that were deleted since the check; return whether there are any."""
        gone = {name for name, topic_id in self.topics.items() if broker.follower.current_id(name) != topic_id}
        for name in gone:
            del self.topics[name]
        for key in [key for key in self.offsets if key[0] in gone]:
            del self.offsets[key]
            self.codes[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return bool(gone)


async def check_offsets(broker: Broker, request: Request, message: Message) -> CheckedOffsets:
    """Check which of the offsets of a request may be committed.

    Other requests are served meanwhile, so the caller checks afterwards whether the client may commit at all, and just
    before the append whether a topic was deleted.
    """
    codes: Codes = {}
    offsets: Offsets = {}
    topics: dict[str, UUID] = {}
    for topic in message["topics"]:
        await broker.turns.take()
        for entry in topic["partitions"]:
            await broker.turns.take()
            key = topic["name"], entry["partition_index"]
            metadata = entry["committed_metadata"] or ""
            codes[key] = ErrorCode.NONE
            if refusal := broker.authorizer.refusal(request.session, READ, topic["name"]):
                codes[key] = refusal
            elif (found := broker.registry.topics.get(topic["name"])) is None or key[1] not in found.assignment:
                codes[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif len(metadata.encode()) > broker.config.offset_metadata_max_bytes:
                codes[key] = ErrorCode.OFFSET_METADATA_TOO_LARGE
            else:
                topics.setdefault(topic["name"], found.topic_id)
                offsets[key] = entry["committed_offset"], entry["committed_leader_epoch"], metadata
    return CheckedOffsets(codes, offsets, topics)


async def encode_commits(
    group: str, offsets: Offsets, retention_ms: int = DEFAULT_RETENTION, producer: tuple[int, int] | None = None
) -> EncodedCommits | None:
    """Encode the batch to append, None without offsets; many offsets are encoded in a thread."""
    if not offsets:
        return None
    if len(offsets) <= _ENCODED_AT_ONCE:
        return encoded_commits(group, offsets, retention_ms, producer)
    return await asyncio.to_thread(encoded_commits, group, offsets, retention_ms, producer)


def not_served(broker: Broker, log: PartitionLog) -> ErrorCode:
    """COORDINATOR_NOT_AVAILABLE if the log is not, this moment, served by this broker: before an append; else NONE."""
    return ErrorCode.NONE if broker.serves(log) else ErrorCode.COORDINATOR_NOT_AVAILABLE


async def unconfirmed(broker: Broker, log: PartitionLog, keys: Iterable[tuple[str, int]]) -> Codes:
    """After an append: the error code of each partition if it can't be acknowledged, else nothing."""
    return {} if await broker.confirms(log) else dict.fromkeys(keys, ErrorCode.COORDINATOR_NOT_AVAILABLE)


def log_failure(group: str, keys: Iterable[tuple[str, int]], error: Exception) -> Codes:
    """Log a failed write, and return the error code of each partition."""
    _log.error("commit of group %s failed: %s", group, error)
    is_refused = isinstance(error, BatchTooLarge)
    return dict.fromkeys(
        keys, ErrorCode.INVALID_COMMIT_OFFSET_SIZE if is_refused else ErrorCode.COORDINATOR_NOT_AVAILABLE
    )


def response(message: Message, codes: Codes) -> Message:
    """The response: an error code for each partition of the request."""
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [
                    {
                        "partition_index": entry["partition_index"],
                        "error_code": codes[topic["name"], entry["partition_index"]],
                    }
                    for entry in topic["partitions"]
                ],
            }
            for topic in message["topics"]
        ]
    }
