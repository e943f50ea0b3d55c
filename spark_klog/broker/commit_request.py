"""Common parts of OffsetCommit and TxnOffsetCommit: which offsets may be committed, and the response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.offset_manager import DEFAULT_RETENTION, Commit, EncodedCommits, encoded_commits
from spark_klog.broker.security.authorizer import READ
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import BatchTooLarge
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
Codes = dict[tuple[str, int], ErrorCode]
Offsets = dict[tuple[str, int], Commit]
#: Offsets encoded in the event loop, which takes a few milliseconds.
_ENCODED_AT_ONCE = 200


async def check_offsets(broker: Broker, request: Request, message: Message) -> tuple[Codes, Offsets]:
    """(preliminary error code of each partition, offsets to commit: offset, leader epoch, metadata).

    Other requests are served meanwhile, so the caller checks afterwards whether the client may commit at all.
    """
    codes: Codes = {}
    offsets: Offsets = {}
    for topic in message["topics"]:
        await broker.turns.take()
        for entry in topic["partitions"]:
            await broker.turns.take()
            key = topic["name"], entry["partition_index"]
            metadata = entry["committed_metadata"] or ""
            codes[key] = ErrorCode.NONE
            if refusal := broker.authorizer.refusal(request.session, READ, topic["name"]):
                codes[key] = refusal
            elif broker.registry.leads(*key) is None:
                codes[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif len(metadata.encode()) > broker.config.offset_metadata_max_bytes:
                codes[key] = ErrorCode.OFFSET_METADATA_TOO_LARGE
            else:
                offsets[key] = entry["committed_offset"], entry["committed_leader_epoch"], metadata
    return codes, offsets


async def encode_commits(
    group: str, offsets: Offsets, retention_ms: int = DEFAULT_RETENTION, producer: tuple[int, int] | None = None
) -> EncodedCommits | None:
    """Encode the batch to append, None without offsets; many offsets are encoded in a thread."""
    if not offsets:
        return None
    if len(offsets) <= _ENCODED_AT_ONCE:
        return encoded_commits(group, offsets, retention_ms, producer)
    return await asyncio.to_thread(encoded_commits, group, offsets, retention_ms, producer)


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
