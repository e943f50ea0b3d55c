"""FindCoordinator v0-6 ("GroupCoordinator" in the guide): the broker that coordinates a group or transactional id."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.coordinator import GROUP, TRANSACTION


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if request.version >= 4:
        keys = dict.fromkeys(message["coordinator_keys"])
        return {"coordinators": [await _find(broker, request, key, message["key_type"]) for key in keys]}
    found = await _find(broker, request, message["key"], message["key_type"])
    del found["key"]
    return found


async def _find(broker: Broker, request: Request, key: str, key_type: int) -> Message:
    none = {"key": key, "node_id": -1, "host": "", "port": -1}
    if key_type not in (GROUP, TRANSACTION):
        reason = f"key type {key_type} is neither {GROUP} (group) nor {TRANSACTION} (transaction)"
        return none | {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    try:
        node, _ = await (broker.coordinator.find(key) if key_type == GROUP else broker.transactions.find(key))
    except DirectoryError as error:
        return none | {"error_code": ErrorCode.COORDINATOR_NOT_AVAILABLE, "error_message": str(error)}
    addresses = broker.registry.addresses(request.session.listener)
    if node not in addresses:
        return none | {"error_code": ErrorCode.COORDINATOR_NOT_AVAILABLE, "error_message": None}
    host, port = addresses[node]
    return {"key": key, "node_id": node, "host": host, "port": port, "error_code": 0, "error_message": None}
