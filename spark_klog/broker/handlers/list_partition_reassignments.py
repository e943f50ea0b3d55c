"""ListPartitionReassignments v0 (KIP-455): always empty; see AlterPartitionReassignments."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        reason = "only admins list reassignments"
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": reason, "topics": []}
    return {"error_code": ErrorCode.NONE, "topics": []}
