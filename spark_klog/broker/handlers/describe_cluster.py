"""DescribeCluster v0-2 (KIP-700): the live brokers."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_BROKERS = 1


def handle(broker: Broker, request: Request, message: Message) -> Message:
    if message["endpoint_type"] != _BROKERS:
        reason = "controllers have no endpoints of their own"
        return {"error_code": ErrorCode.MISMATCHED_ENDPOINT_TYPE, "error_message": reason, "brokers": []}
    answer: Message = {
        "error_code": ErrorCode.NONE,
        "cluster_id": broker.cluster_id,
        "controller_id": broker.registry.controller_id,
        "brokers": [
            {"broker_id": node, "host": host, "port": port}
            for node, (host, port) in broker.registry.addresses(request.session.listener).items()
        ],
    }
    if message["include_cluster_authorized_operations"]:
        answer["cluster_authorized_operations"] = broker.authorizer.cluster_operations(request.session)
    return answer
