"""DescribeClientQuotas v0-1 (KIP-546): the broker has no quotas, so the result is always empty."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_USER, _CLIENT_ID, _IP = "user", "client-id", "ip"


def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        return _refused(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins describe quotas")
    kinds = [component["entity_type"] for component in message["components"]]
    if unknown := set(kinds) - {_USER, _CLIENT_ID, _IP}:
        code = ErrorCode.INVALID_REQUEST if "" in unknown else ErrorCode.UNSUPPORTED_VERSION
        return _refused(code, f"quotas apply to {_USER}, {_CLIENT_ID} or {_IP}, not to {min(unknown)[:100]!r}")
    if len(set(kinds)) < len(kinds) or (_IP in kinds and len(kinds) > 1):
        return _refused(ErrorCode.INVALID_REQUEST, f"a filter names each entity once, and {_IP} alone")
    return {"error_code": ErrorCode.NONE, "entries": []}


def _refused(code: ErrorCode, reason: str) -> Message:
    return {"error_code": code, "error_message": reason, "entries": None}
