"""DeleteTopics v0-6: delete topics by name or (v6) by topic id.

Their logs are removed here at once. The answer waits until all live brokers have dropped theirs, or for `timeout_ms`.
"""

from __future__ import annotations

import time
from uuid import UUID

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop.large_requests import repeated
from spark_klog.broker.handlers.create_topics import NAMED_TWICE
from spark_klog.broker.metadata.errors import UnknownTopic
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if request.version >= 6:
        requested = [(entry["name"], entry["topic_id"]) for entry in message["topics"]]
    else:
        requested = [(name, UUID(int=0)) for name in message["topic_names"]]
    if not broker.authorizer.is_admin(request.session):
        code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return {"responses": [{"name": name, "topic_id": topic_id, "error_code": code} for name, topic_id in requested]}
    deadline = time.monotonic() + message["timeout_ms"] / 1000
    twice = repeated(requested)
    refused = {"error_code": ErrorCode.INVALID_REQUEST, "error_message": NAMED_TWICE}
    responses = [{"name": name, "topic_id": topic_id} | refused for name, topic_id in twice]
    responses += [await _delete(broker, *one) for one in requested if one not in twice]
    return {"responses": [await _finish(broker, response, deadline) for response in responses]}


async def _finish(broker: Broker, response: Message, deadline: float) -> Message:
    """The answer to a deletion that has begun."""
    name = response["name"]
    if response["error_code"] or name is None:
        return response
    try:
        brokers = await broker.deletion(name, deadline)
    except DirectoryError as error:
        return response | {"error_code": ErrorCode.UNKNOWN_SERVER_ERROR, "error_message": str(error)}
    if brokers is None:
        return response
    why = f"broker {', '.join(map(str, brokers))} may still know it" if brokers else "the controller has not ended that"
    reason = f"topic {name} is being deleted, but {why}"
    return response | {"error_code": ErrorCode.REQUEST_TIMED_OUT, "error_message": reason}


async def _delete(broker: Broker, name: str | None, topic_id: UUID) -> Message:
    by_id, deletions = name is None, broker.registry.deletions
    if by_id:
        named = await broker.topic_by_id(topic_id)
        being_deleted = (other for other, pending in deletions.pending.items() if pending == topic_id)
        name = next(being_deleted, None) if named is None else named.name
    topic = None if name is None else await broker.topic(name)
    if name is not None and topic is None and (pending := deletions.pending.get(name)) is not None:
        return {"name": name, "topic_id": pending, "error_code": ErrorCode.NONE}  # an earlier request has begun it
    if topic is None or name is None:
        code = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": "no such topic"}
    try:
        await broker.delete_topic(name, topic_id if by_id else None)
    except UnknownTopic as error:
        refused = {"error_code": ErrorCode.UNKNOWN_TOPIC_ID, "error_message": str(error)}
        return {"name": None, "topic_id": topic_id} | refused
    except DirectoryError as error:
        refused = {"error_code": ErrorCode.UNKNOWN_SERVER_ERROR, "error_message": str(error)}
        return {"name": name, "topic_id": topic.topic_id} | refused
    return {"name": name, "topic_id": topic.topic_id, "error_code": ErrorCode.NONE}
