"""LeaveGroup v0-5: remove members; from version 3 on several at once, static ones by instance id."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.protocol.codec import Message

_FIRST_WITH_MEMBERS = 3


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group = message["group_id"]
    code = await broker.coordinator.code(group)
    if request.version < _FIRST_WITH_MEMBERS:
        code = code or broker.groups.leave(group, message["member_id"], None)
        return {"error_code": code or await broker.coordinator.flushed(group)}
    if code:
        return {"error_code": code}
    members = []
    for member in message["members"]:
        member_id, instance_id = member["member_id"], member["group_instance_id"]
        await broker.turns.take()
        left = broker.groups.leave(group, member_id, instance_id)
        members.append({"member_id": member_id, "group_instance_id": instance_id, "error_code": left})
    return {"error_code": await broker.coordinator.flushed(group), "members": members}
