"""CreateTopics v0-7. The replication factor is 1 or -1 (the default); -1 partitions means num.partitions.

Settings are those of `broker.settings.log_settings.topic_settings`; others get INVALID_CONFIG, so that no setting is
accepted without effect.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop.large_requests import repeated
from spark_klog.broker.metadata.errors import TopicCollides, TopicExists
from spark_klog.broker.metadata.registry import MAX_PARTITIONS
from spark_klog.broker.settings.described_settings import topic_entries
from spark_klog.broker.settings.log_settings import topic_settings
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.records.topic_names import check_topic_name

_DEFAULT = -1
#: None of the entries counts, as in Kafka: which one is meant?
NAMED_TWICE = "the request names it more than once"


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        code, reason = ErrorCode.TOPIC_AUTHORIZATION_FAILED, "only admins create topics"
        return {"topics": [_refused(entry["name"], code, reason) for entry in message["topics"]]}
    twice = repeated(entry["name"] for entry in message["topics"])
    return {
        "topics": [_refused(name, ErrorCode.INVALID_REQUEST, NAMED_TWICE) for name in twice]
        + [
            await _create(broker, entry, message["validate_only"])
            for entry in message["topics"]
            if entry["name"] not in twice
        ]
    }


def _refused(name: str, code: ErrorCode, reason: str) -> Message:
    return {"name": name, "error_code": code, "error_message": reason}


async def _create(broker: Broker, entry: dict[str, Any], validate_only: bool) -> Message:
    name = entry["name"]
    assignment = {item["partition_index"]: item["broker_ids"] for item in entry["assignments"]} or None
    partitions = len(entry["assignments"]) if assignment else entry["num_partitions"]
    if partitions == _DEFAULT:
        partitions = broker.config.default_partitions(name)
    settings = {item["name"]: item["value"] or "" for item in entry["configs"]}
    try:
        check_topic_name(name)
    except ConfigError as error:
        return _refused(name, ErrorCode.INVALID_TOPIC_EXCEPTION, str(error))
    if await broker.topic(name) is not None:
        return _refused(name, ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name} exists")
    if not 1 <= partitions <= MAX_PARTITIONS:
        reason = f"{partitions} partitions, but 1 to {MAX_PARTITIONS} are allowed"
        return _refused(name, ErrorCode.INVALID_PARTITIONS, reason)
    if entry["replication_factor"] not in (_DEFAULT, 1):
        reason = f"replication factor {entry['replication_factor']}: there is no replication, it must be 1"
        return _refused(name, ErrorCode.INVALID_REPLICATION_FACTOR, reason)
    if assignment is not None and (len(assignment) < partitions or not _is_legal(broker, assignment)):
        reason = "partitions must be numbered from 0 on, each with one live broker"
        return _refused(name, ErrorCode.INVALID_REPLICA_ASSIGNMENT, reason)
    topic_id = UUID(int=0)
    try:
        broker.registry.check_collision(name)
        topic_settings(settings)
        if not validate_only:
            topic_id = await broker.create_topic(name, partitions, settings, assignment)
    except TopicExists as error:
        return _refused(name, ErrorCode.TOPIC_ALREADY_EXISTS, str(error))
    except TopicCollides as error:
        return _refused(name, ErrorCode.INVALID_TOPIC_EXCEPTION, str(error))
    except ConfigError as error:
        return _refused(name, ErrorCode.INVALID_CONFIG, str(error))
    except DirectoryError as error:
        return _refused(name, ErrorCode.UNKNOWN_SERVER_ERROR, str(error))
    return {
        "name": name,
        "topic_id": topic_id,
        "error_code": ErrorCode.NONE,
        "num_partitions": partitions,
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


def _is_legal(broker: Broker, assignment: dict[int, list[int]]) -> bool:
    return sorted(assignment) == list(range(len(assignment))) and all(
        len(replicas) == 1 and replicas[0] in broker.registry.brokers for replicas in assignment.values()
    )
