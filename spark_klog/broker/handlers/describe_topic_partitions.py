"""DescribeTopicPartitions v0 (KIP-966): metadata in pages; the cursor names the first partition of the next page."""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.described_topics import missing_topic, topic_message
from spark_klog.broker.security.authorizer import SEE
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_MAX_PARTITIONS = 2000
#: There are none without replication; the schema allows null, but Java's admin client fails on it.
_NO_ELIGIBLE: Message = {"eligible_leader_replicas": [], "last_known_elr": []}


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    limit = min(max(1, message["response_partition_limit"]), _MAX_PARTITIONS)
    cursor = message["cursor"]
    start = (cursor["topic_name"], max(0, cursor["partition_index"])) if cursor else ("", 0)
    names = sorted({topic["name"] for topic in message["topics"]} or broker.registry.topics)
    topics: list[dict[str, Any]] = []
    for name in names:
        if name < start[0]:
            continue
        refusal = broker.authorizer.refusal(request.session, SEE, name)
        if refusal and not message["topics"]:
            continue
        if not limit:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
        if refusal:
            topics.append(missing_topic(name, None, refusal))
            continue
        topic = await broker.topic(name)
        if topic is None:
            topics.append(missing_topic(name, None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
            continue
        described = topic_message(broker.registry, broker.logs, topic, request.session.listener)
        described["topic_authorized_operations"] = broker.authorizer.topic_operations(request.session, name)
        first = start[1] if name == start[0] else 0
        partitions = [entry | _NO_ELIGIBLE for entry in described["partitions"] if entry["partition_index"] >= first]
        topics.append(described | {"partitions": partitions[:limit]})
        if len(partitions) > limit:
            next_index = partitions[limit]["partition_index"]
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": next_index}}
        limit -= len(partitions)
    return {"topics": topics}
