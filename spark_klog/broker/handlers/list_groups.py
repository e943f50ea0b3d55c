"""ListGroups v0-5: the groups that this broker coordinates, including those that have only offsets."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.state import State
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_CLASSIC = "classic"
_FIRST_WITH_STATE, _FIRST_WITH_TYPE = 4, 5


def handle(broker: Broker, request: Request, message: Message) -> Message:
    if broker.coordinator.is_loading:
        return {"error_code": ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "groups": []}
    groups = dict.fromkeys(broker.offsets.groups, ("", State.EMPTY.value))
    groups |= {group.group_id: (group.protocol_type or "", group.state.value) for group in broker.groups}
    states = {state.lower() for state in message["states_filter"]}
    types = {kind.lower() for kind in message["types_filter"]}
    listed = []
    for group_id, (protocol_type, state) in sorted(groups.items()):
        if (states and state.lower() not in states) or (types and _CLASSIC not in types):
            continue
        entry = {"group_id": group_id, "protocol_type": protocol_type}
        if request.version >= _FIRST_WITH_STATE:
            entry["group_state"] = state
        if request.version >= _FIRST_WITH_TYPE:
            entry["group_type"] = _CLASSIC
        listed.append(entry)
    return {"error_code": ErrorCode.NONE, "groups": listed}
