"""DescribeConfigs v0-4: the settings of topics and of this broker. Synonyms and documentation are left out."""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.described_settings import broker_entries, topic_entries
from spark_klog.broker.security.authorizer import SEE
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import BROKER, DEFAULT_SOURCE, TOPIC


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    return {"results": [await _describe(broker, request, resource) for resource in message["resources"]]}


async def _describe(broker: Broker, request: Request, resource: dict[str, Any]) -> Message:
    kind, name, wanted = resource["resource_type"], resource["resource_name"], resource["configuration_keys"]
    result: dict[str, Any] = {"resource_type": kind, "resource_name": name, "configs": []}
    if kind == TOPIC:
        if refusal := broker.authorizer.refusal(request.session, SEE, name):
            return result | {"error_code": refusal, "error_message": f"topic {name} may not be seen"}
        topic = await broker.topic(name)
        if topic is None:
            return result | {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "error_message": f"no topic {name}"}
        entries = topic_entries(broker, topic)
    elif kind == BROKER and name == str(broker.config.broker_id):
        entries = broker_entries(broker.config)
    elif kind == BROKER and not name:
        entries = []  # what holds for all brokers unless they say otherwise: nothing, there are no such settings
    else:
        reason = f"only topics and broker {broker.config.broker_id} can be described here"
        return result | {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    chosen = [entry for entry in entries if wanted is None or entry["name"] in wanted]
    if request.version == 0:
        for entry in chosen:
            entry["is_default"] = entry.pop("config_source") == DEFAULT_SOURCE
    return result | {"error_code": ErrorCode.NONE, "configs": chosen}
