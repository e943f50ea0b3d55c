"""JoinGroup v0-9: answered when the rebalance that it starts or joins has reached its next generation."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop.large_requests import MAX_ID_LENGTH
from spark_klog.broker.groups.member import Join
from spark_klog.broker.groups.replies import refused_join
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

#: Far more than there are assignors; each join of a member compares its protocols with those of all others.
_MAX_PROTOCOLS = 100
_FIRST_WITH_REBALANCE_TIMEOUT, _FIRST_WITH_IDS, _FIRST_NULL_PROTOCOL, _FIRST_SKIPPING = 1, 4, 7, 9


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    answer = await _join(broker, request, message)
    if request.version < _FIRST_NULL_PROTOCOL:
        answer.pop("protocol_type", None)
        answer["protocol_name"] = answer["protocol_name"] or ""
    if request.version < _FIRST_SKIPPING:
        answer.pop("skip_assignment", None)
    return answer


async def _join(broker: Broker, request: Request, message: Message) -> Message:
    group, config, timeout = message["group_id"], broker.config, message["session_timeout_ms"]
    code = await broker.coordinator.code(group)
    if not code and not config.group_min_session_ms <= timeout <= config.group_max_session_ms:
        code = ErrorCode.INVALID_SESSION_TIMEOUT
    code = code or _size_code(broker, message)
    if code:
        return refused_join(code, message["member_id"])
    has_rebalance_timeout = request.version >= _FIRST_WITH_REBALANCE_TIMEOUT
    join = Join(
        member_id=message["member_id"],
        instance_id=message["group_instance_id"],
        client_id=request.client_id or "",
        client_host=f"/{request.session.host}",
        session_timeout_ms=timeout,
        rebalance_timeout_ms=message["rebalance_timeout_ms"] if has_rebalance_timeout else timeout,
        protocol_type=message["protocol_type"],
        protocols=tuple((entry["name"], bytes(entry["metadata"])) for entry in message["protocols"]),
        requires_id=request.version >= _FIRST_WITH_IDS,
        can_skip=request.version >= _FIRST_SKIPPING,
    )
    answer = await broker.groups.join(group, join)
    code = await broker.coordinator.flushed(group)
    return refused_join(code, message["member_id"]) if code and not answer["error_code"] else answer


def _size_code(broker: Broker, message: Message) -> ErrorCode:
    """NONE if what the group would keep of this member is not too large, else the error."""
    if len(message["protocols"]) > _MAX_PROTOCOLS:
        return ErrorCode.INVALID_REQUEST
    names = [message["group_instance_id"] or "", message["protocol_type"]]
    if any(len(name) > MAX_ID_LENGTH for name in [*names, *(entry["name"] for entry in message["protocols"])]):
        return ErrorCode.INVALID_REQUEST
    log = broker.coordinator.local_log(message["group_id"])
    size = sum(len(entry["metadata"]) for entry in message["protocols"])
    if log is not None and size > log.config.max_message_bytes:  # the group's record would be refused with this error
        return ErrorCode.UNKNOWN_SERVER_ERROR
    return ErrorCode.NONE
