"""ListConfigResources v0-1 (KIP-1142): resources that DescribeConfigs supports; version 0 lists client metrics only.

Client metrics (KIP-714) and groups (KIP-848) have no settings here, so none are listed.
"""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP, TOPIC

_FIRST_WITH_TYPES = 1


def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "config_resources": []}
    if request.version < _FIRST_WITH_TYPES:
        return {"error_code": ErrorCode.NONE, "config_resources": []}
    brokers = [str(node) for node in broker.registry.addresses(request.session.listener)]
    names: dict[int, list[str]] = {
        TOPIC: sorted(broker.registry.topics),
        BROKER: brokers,
        BROKER_LOGGER: brokers,
        CLIENT_METRICS: [],
        GROUP: [],
    }
    types = list(dict.fromkeys(message["resource_types"])) or list(names)
    if not set(types) <= names.keys():
        return {"error_code": ErrorCode.UNSUPPORTED_VERSION, "config_resources": []}
    found = [{"resource_name": name, "resource_type": kind} for kind in types for name in names[kind]]
    return {"error_code": ErrorCode.NONE, "config_resources": found}
