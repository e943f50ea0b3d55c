"""Metadata v0-13: the brokers, and the leaders of the requested topics.

Topics that do not exist are created if both the broker (auto.create.topics.enable) and the request allow it.
"""

from __future__ import annotations

import logging
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop.large_requests import distinct
from spark_klog.broker.metadata.described_topics import missing_topic, topic_message
from spark_klog.broker.metadata.errors import TopicExists
from spark_klog.broker.security.authorizer import SEE, WRITE
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
#: Versions 10 and 11 return topic ids, but can't request topics by id (KIP-516).
_FIRST_BY_ID = 12


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    requested = message["topics"]
    if requested is None or (request.version == 0 and not requested):
        topics = []
        for name, known in sorted(broker.registry.topics.items()):
            await broker.turns.take()
            if broker.authorizer.allows(request.session, SEE, name):
                topics.append(topic_message(broker.registry, broker.logs, known, request.session.listener))
    else:
        once = distinct(requested, lambda entry: (entry["name"], entry["topic_id"]))
        topics = [await _one_topic(broker, request, entry, message["allow_auto_topic_creation"]) for entry in once]
    authorizer = broker.authorizer
    if message["include_topic_authorized_operations"]:
        for topic in topics:
            await broker.turns.take()
            if topic["name"] and topic["error_code"] != ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                topic["topic_authorized_operations"] = authorizer.topic_operations(request.session, topic["name"])
    answer: Message = {
        "brokers": [
            {"node_id": node, "host": host, "port": port}
            for node, (host, port) in broker.registry.addresses(request.session.listener).items()
        ],
        "cluster_id": broker.cluster_id,
        "controller_id": broker.registry.controller_id,
        "topics": topics,
    }
    if message["include_cluster_authorized_operations"]:
        answer["cluster_authorized_operations"] = authorizer.cluster_operations(request.session)
    return answer


async def _one_topic(broker: Broker, request: Request, entry: dict[str, Any], may_create: bool) -> Message:
    name, topic_id = entry["name"], entry["topic_id"]
    if name is None and request.version < _FIRST_BY_ID:
        return missing_topic("", topic_id, ErrorCode.INVALID_REQUEST)
    if name is None:
        topic = await broker.topic_by_id(topic_id)
        if topic is None or not broker.authorizer.allows(request.session, SEE, topic.name):
            return missing_topic(None, topic_id, ErrorCode.UNKNOWN_TOPIC_ID)
        return topic_message(broker.registry, broker.logs, topic, request.session.listener)
    if refusal := broker.authorizer.refusal(request.session, SEE, name):
        return missing_topic(name, None, refusal)
    if await broker.topic(name) is None:
        if not (may_create and broker.config.auto_create_topics):
            return missing_topic(name, None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if refusal := broker.authorizer.refusal(request.session, WRITE, name):
            return missing_topic(name, None, refusal)
        try:
            await broker.create_topic(name, broker.config.default_partitions(name))
        except TopicExists:
            await broker.follower.refresh()
        except ConfigError:
            return missing_topic(name, None, ErrorCode.INVALID_TOPIC_EXCEPTION)
        except DirectoryError as error:
            _log.error("topic %s can't be created: %s", name, error)
    topic = broker.registry.topics.get(name)
    if topic is None:  # the directories are unavailable, or the controller has not completed a tool's topic yet
        return missing_topic(name, None, ErrorCode.LEADER_NOT_AVAILABLE)
    return topic_message(broker.registry, broker.logs, topic, request.session.listener)
