"""SyncGroup v0-5: the leader sends the assignment, and each member gets its part."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.replies import refused_sync
from spark_klog.protocol.codec import Message

_FIRST_WITH_PROTOCOL = 5


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group = message["group_id"]
    if code := await broker.coordinator.code(group):
        return {"error_code": code}
    answer = await broker.groups.sync(
        group,
        message["member_id"],
        message["group_instance_id"],
        message["generation_id"],
        (message["protocol_type"], message["protocol_name"]),
        {entry["member_id"]: bytes(entry["assignment"]) for entry in message["assignments"]},
    )
    if (code := await broker.coordinator.flushed(group)) and not answer["error_code"]:
        answer = refused_sync(code)
    if request.version < _FIRST_WITH_PROTOCOL:
        answer = {"error_code": answer["error_code"], "assignment": answer["assignment"]}
    return answer
