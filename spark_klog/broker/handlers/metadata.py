"""Metadata v0-12: brokers, and the leaders of the topics asked for.

Topics that do not exist are made where both the broker (auto.create.topics.enable) and the request allow it. Since
there is no replication, replicas and in-sync replicas are the leader.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from spark_klog.broker.broker import Broker, Request, TopicExists
from spark_klog.broker.offset_manager import INTERNAL_TOPICS
from spark_klog.broker.registry import NO_LEADER, Topic
from spark_klog.broker.security.authorizer import SEE, WRITE
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message

_NO_ID = UUID(int=0)


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    wanted = message["topics"]
    if wanted is None or (request.version == 0 and not wanted):
        topics = [
            _topic(broker, request, topic)
            for name, topic in sorted(broker.registry.topics.items())
            if broker.authorizer.allows(request.session, SEE, name)
        ]
    else:
        topics = [await _asked(broker, request, entry, message["allow_auto_topic_creation"]) for entry in wanted]
    return {
        "brokers": [
            {"node_id": node, "host": host, "port": port}
            for node, (host, port) in broker.registry.addresses(request.session.listener).items()
        ],
        "cluster_id": broker.cluster_id,
        "controller_id": broker.registry.controller_id,
        "topics": topics,
    }


async def _asked(broker: Broker, request: Request, entry: dict[str, Any], may_create: bool) -> Message:
    name, topic_id = entry["name"], entry["topic_id"]
    if name is None:
        for topic in broker.registry.topics.values():
            if topic.topic_id == topic_id and broker.authorizer.allows(request.session, SEE, topic.name):
                return _topic(broker, request, topic)
        return _missing(None, topic_id, ErrorCode.UNKNOWN_TOPIC_ID)
    if refusal := broker.authorizer.refusal(request.session, SEE, name):
        return _missing(name, _NO_ID, refusal)
    if name not in broker.registry.topics:
        await broker.refresh()
    if name not in broker.registry.topics:
        if not (may_create and broker.config.auto_create_topics):
            return _missing(name, _NO_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if refusal := broker.authorizer.refusal(request.session, WRITE, name):
            return _missing(name, _NO_ID, refusal)
        try:
            await broker.create_topic(name, broker.config.num_partitions)
        except TopicExists:
            await broker.refresh()
        except ConfigError:
            return _missing(name, _NO_ID, ErrorCode.INVALID_TOPIC_EXCEPTION)
    return _topic(broker, request, broker.registry.topics[name])


def _missing(name: str | None, topic_id: UUID, code: ErrorCode) -> Message:
    return {"error_code": code, "name": name, "topic_id": topic_id}


def _topic(broker: Broker, request: Request, topic: Topic) -> Message:
    partitions = []
    reachable = broker.registry.addresses(request.session.listener)
    for partition, replicas in sorted(topic.assignment.items()):
        leader = broker.registry.leader(topic, partition)
        alive = leader in reachable
        partitions.append(
            {
                "error_code": ErrorCode.NONE if alive else ErrorCode.LEADER_NOT_AVAILABLE,
                "partition_index": partition,
                "leader_id": leader if alive else NO_LEADER,
                "leader_epoch": 0,
                "replica_nodes": replicas,
                "isr_nodes": replicas if alive else [],
                "offline_replicas": [] if alive else replicas,
            }
        )
    return {
        "error_code": ErrorCode.NONE,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.name in INTERNAL_TOPICS,
        "partitions": partitions,
    }
