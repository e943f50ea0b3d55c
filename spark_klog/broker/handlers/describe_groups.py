"""DescribeGroups v0-6: the state of groups, their members, and the members' assignments."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.group import Group
from spark_klog.broker.groups.member import Member
from spark_klog.broker.groups.state import State
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_FIRST_NOT_FOUND = 6


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    groups = [await _describe(broker, request, group_id) for group_id in dict.fromkeys(message["groups"])]
    if message["include_authorized_operations"]:
        operations = broker.authorizer.group_operations(request.session)
        for group in groups:
            if group["error_code"] == ErrorCode.NONE:
                group["authorized_operations"] = operations
    return {"groups": groups}


async def _describe(broker: Broker, request: Request, group_id: str) -> Message:
    described: Message = {"group_id": group_id, "group_state": "", "protocol_type": "", "protocol_data": ""}
    # not `code`, which rejects the empty group id: it may have offsets
    log = await broker.coordinator.log_of(group_id, for_reading=True)
    if isinstance(log, ErrorCode):
        return described | {"error_code": log}
    group = broker.groups.get(group_id)
    if group is not None:
        return described | _of(group)
    if broker.offsets.has(group_id):
        return described | {"error_code": ErrorCode.NONE, "group_state": State.EMPTY.value}
    if request.version >= _FIRST_NOT_FOUND:
        reason = f"group {group_id} does not exist"
        return described | {
            "error_code": ErrorCode.GROUP_ID_NOT_FOUND,
            "error_message": reason,
            "group_state": State.DEAD.value,
        }
    return described | {"error_code": ErrorCode.NONE, "group_state": State.DEAD.value}


def _of(group: Group) -> Message:
    is_stable = group.state is State.STABLE
    return {
        "error_code": ErrorCode.NONE,
        "group_state": group.state.value,
        "protocol_type": group.protocol_type or "",
        "protocol_data": (group.protocol or "") if is_stable else "",
        "members": [_member(group, member, is_stable) for member in group.members.values()],
    }


def _member(group: Group, member: Member, is_stable: bool) -> Message:
    return {
        "member_id": member.member_id,
        "group_instance_id": member.instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "member_metadata": member.metadata(group.protocol) if is_stable else b"",
        "member_assignment": member.assignment if is_stable else b"",
    }
