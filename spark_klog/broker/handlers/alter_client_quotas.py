"""AlterClientQuotas v0-1 (KIP-546): refused, since the broker has no quotas.

Removing a quota succeeds, as in Kafka for a quota that does not exist.
"""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


def handle(broker: Broker, request: Request, message: Message) -> Message:
    is_admin = broker.authorizer.is_admin(request.session)
    return {"entries": [{"entity": entry["entity"]} | _alter(entry, is_admin) for entry in message["entries"]]}


def _alter(entry: dict[str, Any], is_admin: bool) -> Message:
    if not is_admin:
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": "only admins alter quotas"}
    set_quotas = [op["key"] for op in entry["ops"] if not op["remove"]]
    if set_quotas or not entry["entity"]:
        reason = f"quota {set_quotas[0][:100]!r}: this broker has no quotas" if set_quotas else "the entity has no name"
        return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    return {"error_code": ErrorCode.NONE}
