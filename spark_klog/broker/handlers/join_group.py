"""JoinGroup v0-9: answered when the rebalance that it starts or joins has reached its next generation."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.member import Join
from spark_klog.broker.groups.replies import refused_join
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

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
