"""AlterConfigs v0-2 (all of a topic's own settings) and IncrementalAlterConfigs v0-1 (KIP-339: some of them).

Settings of brokers change by a restart alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.log_settings import is_list, setting_texts
from spark_klog.broker.registry import UnknownTopic
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import APPEND, DELETE, SET, SUBTRACT, TOPIC

Changed = Callable[[Mapping[str, str], list[dict[str, Any]]], dict[str, str]]


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    return await _alter_all(broker, message, _replaced)


async def handle_incremental(broker: Broker, request: Request, message: Message) -> Message:
    inherited = {name: text for name, (text, _) in setting_texts(broker.config.log).items()}
    return await _alter_all(broker, message, lambda before, configs: _changed(inherited, before, configs))


async def _alter_all(broker: Broker, message: Message, changed: Changed) -> Message:
    validate_only = message["validate_only"]
    return {
        "responses": [
            {"resource_type": resource["resource_type"], "resource_name": resource["resource_name"]}
            | await _alter(broker, resource, changed, validate_only=validate_only)
            for resource in message["resources"]
        ]
    }


async def _alter(broker: Broker, resource: dict[str, Any], changed: Changed, *, validate_only: bool) -> Message:
    if resource["resource_type"] != TOPIC:
        reason = "only topics can be altered; a broker's settings change by a restart"
        return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    names = [entry["name"] for entry in resource["configs"]]
    if len(set(names)) < len(names):
        return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": "a setting is named twice"}
    for entry in resource["configs"]:
        if entry["value"] is None and entry.get("config_operation", SET) != DELETE:
            return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": f"setting {entry['name']} has no value"}
    name = resource["resource_name"]
    topic = await broker.topic(name)
    try:
        if topic is None:
            raise UnknownTopic(f"there is no topic {name}")
        settings = changed(topic.settings, resource["configs"])
        await broker.alter_topic_settings(name, settings, validate_only=validate_only)
    except UnknownTopic as error:
        return {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "error_message": str(error)}
    except ConfigError as error:
        return {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    except DirectoryError as error:
        return {"error_code": ErrorCode.UNKNOWN_SERVER_ERROR, "error_message": str(error)}
    return {"error_code": ErrorCode.NONE}


def _replaced(before: Mapping[str, str], configs: list[dict[str, Any]]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in configs}


def _changed(inherited: Mapping[str, str], before: Mapping[str, str], configs: list[dict[str, Any]]) -> dict[str, str]:
    """`ConfigError` for an operation that the setting does not have."""
    settings = dict(before)
    for entry in configs:
        name, operation, value = entry["name"], entry["config_operation"], entry["value"]
        if operation == DELETE:
            settings.pop(name, None)
        elif operation not in (SET, APPEND, SUBTRACT):
            raise ConfigError(f"setting {name}: there is no operation {operation}")
        elif operation == SET:
            settings[name] = value
        elif not is_list(name):
            raise ConfigError(f"setting {name} is no list: nothing can be appended or subtracted")
        else:
            now = [item for item in settings.get(name, inherited.get(name, "")).split(",") if item]
            items = value.split(",")
            kept = now + [item for item in items if item not in now] if operation == APPEND else _without(now, items)
            settings[name] = ",".join(kept)
    return settings


def _without(now: list[str], items: list[str]) -> list[str]:
    return [item for item in now if item not in items]
