"""OffsetForLeaderEpoch v0-4 (KIP-101, KIP-320): end offset of a leader epoch; consumers detect truncation by it."""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.authorizer import SEE
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    topics = []
    for topic in message["topics"]:
        partitions = [await _find(broker, request, topic["topic"], entry) for entry in topic["partitions"]]
        topics.append({"topic": topic["topic"], "partitions": partitions})
    return {"topics": topics}


async def _find(broker: Broker, request: Request, topic: str, entry: dict[str, Any]) -> Message:
    index = entry["partition"]
    if refusal := broker.authorizer.refusal(request.session, SEE, topic):
        return {"partition": index, "error_code": refusal}
    log = await broker.leader_log(topic, index, entry["current_leader_epoch"], for_reading=True)
    if isinstance(log, ErrorCode):
        return {"partition": index, "error_code": log}
    epoch, end = log.end_of_epoch(entry["leader_epoch"])
    return {"partition": index, "error_code": ErrorCode.NONE, "leader_epoch": epoch, "end_offset": end}
