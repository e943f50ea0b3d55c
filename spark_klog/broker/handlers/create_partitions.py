"""CreatePartitions v0-3 (KIP-195): add partitions to existing topics."""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop.large_requests import repeated
from spark_klog.broker.handlers.create_topics import NAMED_TWICE
from spark_klog.broker.metadata.errors import InvalidAssignment, InvalidPartitions, UnknownTopic
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message

_CODES: dict[type[Exception], ErrorCode] = {
    UnknownTopic: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    InvalidPartitions: ErrorCode.INVALID_PARTITIONS,
    InvalidAssignment: ErrorCode.INVALID_REPLICA_ASSIGNMENT,
}


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        refused = {"error_code": ErrorCode.TOPIC_AUTHORIZATION_FAILED, "error_message": "only admins add partitions"}
        return {"results": [{"name": entry["name"]} | refused for entry in message["topics"]]}
    twice = repeated(entry["name"] for entry in message["topics"])
    refused = {"error_code": ErrorCode.INVALID_REQUEST, "error_message": NAMED_TWICE}
    return {
        "results": [{"name": name} | refused for name in twice]
        + [
            await _grow(broker, entry, message["validate_only"])
            for entry in message["topics"]
            if entry["name"] not in twice
        ]
    }


async def _grow(broker: Broker, entry: dict[str, Any], validate_only: bool) -> Message:
    name, assignments = entry["name"], entry["assignments"]
    chosen = None if assignments is None else [item["broker_ids"] for item in assignments]
    try:
        await broker.create_partitions(name, entry["count"], chosen, validate_only=validate_only)
    except (ConfigError, DirectoryError) as error:
        code = _CODES.get(type(error), ErrorCode.UNKNOWN_SERVER_ERROR)
        return {"name": name, "error_code": code, "error_message": str(error)}
    return {"name": name, "error_code": ErrorCode.NONE}
