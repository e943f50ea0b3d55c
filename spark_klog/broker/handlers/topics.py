"""Topics: CreateTopics, DeleteTopics, CreatePartitions and DeleteRecords."""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import UUID

from spark_klog.base.names import check_topic_name
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop import repeated
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.metadata.nodes import UnknownTopic, refusal
from spark_klog.broker.metadata.registry import MAX_PARTITIONS, Asked, NewTopic
from spark_klog.broker.settings.described_settings import topic_entries
from spark_klog.broker.settings.log_settings import check_of_client
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode, OffsetOutOfRange
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
_HIGH_WATERMARK = -1
_NONE = -1
_DEFAULT = -1
#: None of the entries counts, as in Kafka: which one is meant?
NAMED_TWICE = "the request names it more than once"


async def delete_records(broker: Broker, request: Request, message: Message) -> Message:
    """DeleteRecords v0-2 (KIP-107): delete the records before an offset; -1 is the high watermark."""
    topics = []
    async for topic in broker.turns.each(message["topics"]):
        partitions = [
            await _delete_records_before(broker, request, topic["name"], entry) for entry in topic["partitions"]
        ]
        topics.append({"name": topic["name"], "partitions": partitions})
    return {"topics": topics}


async def _delete_records_before(broker: Broker, request: Request, topic: str, entry: dict[str, Any]) -> Message:
    index, offset = entry["partition_index"], entry["offset"]
    result = {"partition_index": index, "low_watermark": _NONE}
    if not broker.authorizer.is_admin(request.session):
        return result | {"error_code": ErrorCode.TOPIC_AUTHORIZATION_FAILED}
    if topic in INTERNAL_TOPICS:
        return result | {"error_code": ErrorCode.INVALID_TOPIC_EXCEPTION}
    log = await broker.partitions.leader_log(topic, index)
    if isinstance(log, ErrorCode):
        return result | {"error_code": log}
    if not log.config.deletes:
        return result | {"error_code": ErrorCode.POLICY_VIOLATION}  # as in Kafka for compacted topics
    try:
        if offset in (_HIGH_WATERMARK, log.high_watermark) and log.segments[-1].size:  # the log will roll
            await broker.flushes.flush(log, with_snapshot=True)
        start = log.delete_records(log.high_watermark if offset == _HIGH_WATERMARK else offset)
    except OffsetOutOfRange:
        return result | {"error_code": ErrorCode.OFFSET_OUT_OF_RANGE}
    except OSError as error:
        _log.error("records of %s before %d can't be deleted: %s", log.directory, offset, error)
        return result | {"error_code": ErrorCode.KAFKA_STORAGE_ERROR}
    _log.info("%s (%s) deleted the records of %s-%d before %d", request.client_id, request.peer, topic, index, start)
    return result | {"low_watermark": start, "error_code": ErrorCode.NONE}


async def create_topics(broker: Broker, request: Request, message: Message) -> Message:
    """CreateTopics v0-7. The replication factor is 1 or -1 (the default); -1 partitions means num.partitions.

    A request for more than 10,000 partitions gets POLICY_VIOLATION, as from Kafka.
    Settings are those of `broker.settings.log_settings.topic_settings`; others get INVALID_CONFIG, so that no setting
    is accepted without effect.
    """
    if not broker.authorizer.is_admin(request.session):
        code, reason = ErrorCode.TOPIC_AUTHORIZATION_FAILED, "only admins create topics"
        return {"topics": [_refused(entry["name"], code, reason) for entry in message["topics"]]}
    counts = [_partitions(broker, entry) for entry in message["topics"]]
    if sum(count for count in counts if 0 < count <= MAX_PARTITIONS) > MAX_PARTITIONS:
        reason = f"a request creates {MAX_PARTITIONS} partitions at most: create some topics by another one"
        return {"topics": [_refused(entry["name"], ErrorCode.POLICY_VIOLATION, reason) for entry in message["topics"]]}
    twice = repeated(entry["name"] for entry in message["topics"])
    answers = {name: _refused(name, ErrorCode.INVALID_REQUEST, NAMED_TWICE) for name in twice}
    topics: list[NewTopic] = []
    for entry in message["topics"]:
        await broker.turns.take()
        if entry["name"] not in twice:
            topic = await _checked(broker, entry, ahead=len(topics))
            answers[entry["name"]] = topic if isinstance(topic, dict) else {}  # in their order
            if not isinstance(topic, dict):
                topics.append(topic)
    outcomes: list[UUID | ConfigError | DirectoryError] = [UUID(int=0)] * len(topics)
    if not message["validate_only"]:
        outcomes = await broker.changes.create_topics(topics)
    for topic, outcome in zip(topics, outcomes, strict=True):
        await broker.turns.take()
        answers[topic[0]] = _created(broker, topic, outcome, validate_only=message["validate_only"])
    return {"topics": [*answers.values()]}


def _refused(name: str, code: ErrorCode, reason: str) -> Message:
    return {"name": name, "error_code": code, "error_message": reason}


async def _checked(broker: Broker, entry: dict[str, Any], ahead: int) -> NewTopic | Message:
    """The topic to create, or the answer that refuses it."""
    name = entry["name"]
    assignment = {config["partition_index"]: config["broker_ids"] for config in entry["assignments"]} or None
    partitions = _partitions(broker, entry)
    settings = {config["name"]: config["value"] or "" for config in entry["configs"]}
    try:
        check_topic_name(name)
    except ConfigError as error:
        return _refused(name, ErrorCode.INVALID_TOPIC_EXCEPTION, str(error))
    if await broker.partitions.topic(name) is not None:
        return _refused(name, ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name} exists")
    if entry["replication_factor"] not in (_DEFAULT, 1):
        reason = f"replication factor {entry['replication_factor']}: there is no replication, it must be 1"
        return _refused(name, ErrorCode.INVALID_REPLICATION_FACTOR, reason)
    live = broker.registry.brokers
    if assignment and not (
        sorted(assignment) == list(range(partitions))
        and all(len(replicas) == 1 and replicas[0] in live for replicas in assignment.values())
    ):
        reason = "partitions must be numbered from 0 on, each with one live broker"
        return _refused(name, ErrorCode.INVALID_REPLICA_ASSIGNMENT, reason)
    try:
        check_of_client(settings)
        return broker.changes.new_topic(name, partitions, settings, assignment, ahead)
    except ConfigError as error:
        return {"name": name} | refusal(error)


def _partitions(broker: Broker, entry: dict[str, Any]) -> int:
    if entry["assignments"]:
        return len(entry["assignments"])
    count: int = entry["num_partitions"]
    return broker.config.default_partitions(entry["name"]) if count == _DEFAULT else count


def _created(
    broker: Broker, topic: NewTopic, outcome: UUID | ConfigError | DirectoryError, *, validate_only: bool
) -> Message:
    name, assignment, _ = topic
    if not isinstance(outcome, UUID):
        return {"name": name} | refusal(outcome)
    return {
        "name": name,
        "topic_id": outcome,
        "error_code": ErrorCode.NONE,
        "num_partitions": len(assignment),
        "replication_factor": 1,
        "configs": [] if validate_only else _settings(broker, name),
    }


def _settings(broker: Broker, name: str) -> list[Message]:
    """The topic's settings as in DescribeConfigs, with only the fields of CreateTopics."""
    topic = broker.registry.topics.get(name)
    if topic is None:  # the topic was deleted meanwhile
        return []
    shown = ("name", "value", "read_only", "config_source", "is_sensitive")
    return [{name: entry[name] for name in shown} for entry in topic_entries(broker.config, topic)]


async def create_partitions(broker: Broker, request: Request, message: Message) -> Message:
    """CreatePartitions v0-3 (KIP-195): add partitions to existing topics."""
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
    chosen = None if assignments is None else [replica["broker_ids"] for replica in assignments]
    try:
        await broker.changes.create_partitions(name, entry["count"], chosen, validate_only=validate_only)
    except (ConfigError, DirectoryError) as error:
        return {"name": name} | refusal(error)
    return {"name": name, "error_code": ErrorCode.NONE}


async def delete_topics(broker: Broker, request: Request, message: Message) -> Message:
    """DeleteTopics v0-6: delete topics by name or (v6) by topic id.

    Their logs are removed here at once. The answer waits until all live brokers have dropped theirs, or for
    `timeout_ms`.
    """
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
    topics = [await _known(broker, *asked) for asked in requested if asked not in twice]
    known = {topic[0]: topic[1] for topic in topics if isinstance(topic, tuple)}
    outcomes = await broker.changes.delete_topics(known)
    responses += [
        topic if isinstance(topic, dict) else _deleted(topic[0], topic[2], outcomes.get(topic[0])) for topic in topics
    ]
    return {"responses": [await _finish(broker, response, deadline) for response in responses]}


async def _finish(broker: Broker, response: Message, deadline: float) -> Message:
    """The answer to a deletion that has begun."""
    name = response["name"]
    if response["error_code"] or name is None:
        return response
    try:
        brokers = await broker.changes.deletion(name, deadline)
    except DirectoryError as error:
        return response | refusal(error)
    if brokers is None:
        return response
    why = f"broker {', '.join(map(str, brokers))} may still know it" if brokers else "the controller has not ended that"
    reason = f"topic {name} is being deleted, but {why}"
    return response | {"error_code": ErrorCode.REQUEST_TIMED_OUT, "error_message": reason}


async def _known(broker: Broker, name: str | None, topic_id: UUID) -> tuple[str, UUID | None, UUID] | Message:
    """Name of a topic to delete, the id that the request gives, and its id; or the answer if nothing is to be done."""
    await broker.turns.take()
    by_id, deletions = name is None, broker.registry.deletions
    if by_id:
        named = await broker.partitions.topic_by_id(topic_id)
        being_deleted = (other for other, pending in deletions.pending.items() if pending == topic_id)
        name = next(being_deleted, None) if named is None else named.name
    topic = None if name is None else await broker.partitions.topic(name)
    if name is not None and topic is None and (pending := deletions.pending.get(name)) is not None:
        return {"name": name, "topic_id": pending, "error_code": ErrorCode.NONE}  # an earlier request has begun it
    if topic is None or name is None:
        code = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": "no such topic"}
    return name, topic_id if by_id else None, topic.topic_id


def _deleted(name: str, topic_id: UUID, outcome: Asked) -> Message:
    if isinstance(outcome, UnknownTopic):
        return {"name": None, "topic_id": topic_id} | refusal(outcome) | {"error_code": ErrorCode.UNKNOWN_TOPIC_ID}
    answer = {"name": name, "topic_id": topic_id, "error_code": ErrorCode.NONE}
    return answer | refusal(outcome) if isinstance(outcome, DirectoryError) else answer
