"""DescribeConfigs v0-4: settings of topics and of this broker, and the levels of its loggers (KIP-412)."""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop.large_requests import distinct
from spark_klog.broker.security.authorizer import SEE
from spark_klog.broker.settings.described_settings import broker_entries, topic_entries
from spark_klog.broker.settings.loggers import levels
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import BROKER, BROKER_LOGGER, DEFAULT_SOURCE, LOGGER_SOURCE, TOPIC


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    resources = distinct(message["resources"], lambda entry: (entry["resource_type"], entry["resource_name"]))
    return {"results": [await _describe(broker, request, message, resource) for resource in resources]}


async def _describe(broker: Broker, request: Request, message: Message, resource: dict[str, Any]) -> Message:
    await broker.turns.take()
    kind, name, names = resource["resource_type"], resource["resource_name"], resource["configuration_keys"]
    result: dict[str, Any] = {"resource_type": kind, "resource_name": name, "configs": []}
    if kind == TOPIC:
        if refusal := broker.authorizer.refusal(request.session, SEE, name):
            return result | {"error_code": refusal, "error_message": f"not authorized to describe topic {name}"}
        topic = await broker.topic(name)
        if topic is None:
            return result | {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "error_message": f"no topic {name}"}
        entries = topic_entries(broker.config, topic)
    elif not broker.authorizer.is_admin(request.session):
        reason = "only admins describe brokers"
        return result | {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": reason}
    elif kind == BROKER and name == str(broker.config.broker_id):
        entries = broker_entries(broker.config)
    elif kind == BROKER and not name:
        entries = []  # cluster-wide defaults of broker settings: there are none
    elif kind == BROKER_LOGGER and name == str(broker.config.broker_id):
        entries = [_logger_entry(*item) for item in levels().items()]
    else:
        reason = f"only topics, broker {broker.config.broker_id} and its loggers can be described here"
        return result | {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    wanted = None if names is None else set(names)
    chosen = [entry for entry in entries if wanted is None or entry["name"] in wanted]
    for entry in chosen:
        if not message["include_synonyms"]:
            entry["synonyms"] = []
        if not message["include_documentation"]:
            entry["documentation"] = None
        if request.version == 0:
            entry["is_default"] = entry.pop("config_source") == DEFAULT_SOURCE
    return result | {"error_code": ErrorCode.NONE, "configs": chosen}


def _logger_entry(name: str, level: str) -> Message:
    return {
        "name": name,
        "value": level,
        "read_only": False,
        "config_source": LOGGER_SOURCE,
        "synonyms": [],
        "documentation": None,
    }
