"""AlterReplicaLogDirs v1-2 (KIP-113). A broker has only one data directory, so logs can't be moved."""

from __future__ import annotations

from pathlib import Path

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    results: dict[str, dict[int, ErrorCode]] = {}
    is_admin = broker.authorizer.is_admin(request.session)
    for directory in message["dirs"]:
        for topic in directory["topics"]:
            codes = results.setdefault(topic["name"], {})
            for partition in topic["partitions"]:
                await broker.turns.take()
                code = _move(broker, directory["path"], topic["name"], partition)
                codes[partition] = code if is_admin else ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return {
        "results": [
            {
                "topic_name": name,
                "partitions": [{"partition_index": index, "error_code": code} for index, code in codes.items()],
            }
            for name, codes in results.items()
        ]
    }


def _move(broker: Broker, path: str, topic: str, partition: int) -> ErrorCode:
    if "\0" in path or Path(path) != broker.logs.path.absolute():
        return ErrorCode.LOG_DIR_NOT_FOUND
    if (topic, partition) in broker.logs.offline:
        return ErrorCode.KAFKA_STORAGE_ERROR
    if broker.logs.get(topic, partition) is not None:
        return ErrorCode.NONE
    is_known = topic in broker.registry.topics and partition in broker.registry.topics[topic].assignment
    return ErrorCode.REPLICA_NOT_AVAILABLE if is_known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
