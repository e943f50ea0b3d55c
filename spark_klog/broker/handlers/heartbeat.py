"""Heartbeat v0-4: keep a member alive, and let it know if it must rejoin."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group, member_id, instance_id = message["group_id"], message["member_id"], message["group_instance_id"]
    code = await broker.coordinator.code(group, for_reading=True)
    return {"error_code": code or broker.groups.heartbeat(group, member_id, instance_id, message["generation_id"])}
