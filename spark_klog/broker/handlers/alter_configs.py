"""AlterConfigs v0-2 (replaces all of a topic's own settings) and IncrementalAlterConfigs v0-1 (some, KIP-339).

Settings of brokers can only be changed by a restart; changed levels of its loggers last until the next one (KIP-412).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop.large_requests import repeated
from spark_klog.broker.handlers.create_topics import NAMED_TWICE
from spark_klog.broker.metadata.errors import UnknownTopic
from spark_klog.broker.settings.log_settings import is_list, setting_texts
from spark_klog.broker.settings.loggers import set_levels
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import APPEND, BROKER, BROKER_LOGGER, DELETE, GROUP, SET, SUBTRACT, TOPIC

_REFUSALS = {TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED, GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED}
Changed = Callable[[Mapping[str, str], list[dict[str, Any]]], dict[str, str]]


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        return _refused(message)
    resources, refused = _named_once(message)
    return {"responses": refused + [await _alter(broker, message, resource, _replaced) for resource in resources]}


async def handle_incremental(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        return _refused(message)
    inherited = {name: text for name, (text, _) in setting_texts(broker.config.log).items()}

    def changed(before: Mapping[str, str], configs: list[dict[str, Any]]) -> dict[str, str]:
        return _changed(inherited, before, configs)

    resources, refused = _named_once(message)
    return {
        "responses": refused
        + [
            _alter_loggers(broker, message, resource)
            if resource["resource_type"] == BROKER_LOGGER
            else await _alter(broker, message, resource, changed)
            for resource in resources
        ]
    }


def _named_once(message: Message) -> tuple[list[dict[str, Any]], list[Message]]:
    """The resources that the request names once, and the responses for the others."""
    keys = [(resource["resource_type"], resource["resource_name"]) for resource in message["resources"]]
    twice = repeated(keys)
    refused = {"error_code": ErrorCode.INVALID_REQUEST, "error_message": NAMED_TWICE}
    return (
        [resource for resource, key in zip(message["resources"], keys, strict=True) if key not in twice],
        [{"resource_type": kind, "resource_name": name} | refused for kind, name in twice],
    )


def _refused(message: Message) -> Message:
    """The response to a client that is not an admin."""
    return {
        "responses": [
            {
                "resource_type": resource["resource_type"],
                "resource_name": resource["resource_name"],
                "error_code": _REFUSALS.get(resource["resource_type"], ErrorCode.CLUSTER_AUTHORIZATION_FAILED),
                "error_message": "only admins alter settings",
            }
            for resource in message["resources"]
        ]
    }


async def _alter(broker: Broker, message: Message, resource: dict[str, Any], changed: Changed) -> Message:
    await broker.turns.take()
    result: Message = {"resource_type": resource["resource_type"], "resource_name": resource["resource_name"]}
    if resource["resource_type"] == BROKER and _deletes_only(resource["configs"]):
        return result | {"error_code": ErrorCode.NONE}  # Kafka's reassignment tool does so: there is nothing to delete
    if resource["resource_type"] != TOPIC:
        reason = "only settings of topics can be altered; to change a broker's, restart it"
        return result | {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    names = [entry["name"] for entry in resource["configs"]]
    if len(set(names)) < len(names):
        return result | {"error_code": ErrorCode.INVALID_REQUEST, "error_message": "the request names a setting twice"}
    for entry in resource["configs"]:
        if entry["value"] is None and entry.get("config_operation", SET) != DELETE:
            return result | {
                "error_code": ErrorCode.INVALID_REQUEST,
                "error_message": f"setting {entry['name']} has no value",
            }
    name = resource["resource_name"]
    try:
        if await broker.topic(name) is None:
            raise UnknownTopic(f"there is no topic {name}")
        await broker.alter_topic_settings(
            name, lambda before: changed(before, resource["configs"]), validate_only=message["validate_only"]
        )
    except UnknownTopic as error:
        return result | {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "error_message": str(error)}
    except ConfigError as error:
        return result | {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    except DirectoryError as error:
        return result | {"error_code": ErrorCode.UNKNOWN_SERVER_ERROR, "error_message": str(error)}
    return result | {"error_code": ErrorCode.NONE}


def _deletes_only(configs: list[dict[str, Any]]) -> bool:
    return all(entry.get("config_operation", SET) == DELETE for entry in configs)


def _alter_loggers(broker: Broker, message: Message, resource: dict[str, Any]) -> Message:
    name, configs = resource["resource_name"], resource["configs"]
    result: Message = {"resource_type": BROKER_LOGGER, "resource_name": name, "error_code": ErrorCode.NONE}
    changes = {
        entry["name"]: None if entry["config_operation"] == DELETE else entry["value"] or "" for entry in configs
    }
    is_known = all(entry["config_operation"] in (SET, DELETE) for entry in configs)
    if name != str(broker.config.broker_id) or not is_known or len(changes) < len(configs):
        reason = f"levels of loggers of broker {broker.config.broker_id} can be set or deleted, each once"
        return result | {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    try:
        set_levels(changes, validate_only=message["validate_only"])
    except ConfigError as error:
        return result | {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    return result


def _replaced(before: Mapping[str, str], configs: list[dict[str, Any]]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in configs}


def _changed(inherited: Mapping[str, str], before: Mapping[str, str], configs: list[dict[str, Any]]) -> dict[str, str]:
    """The new settings of a topic; `ConfigError` if a setting does not support the operation."""
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
            raise ConfigError(f"setting {name} is not a list: APPEND and SUBTRACT do not apply")
        else:
            now = [item for item in settings.get(name, inherited.get(name, "")).split(",") if item]
            items = value.split(",")
            kept = now + [item for item in items if item not in now] if operation == APPEND else _without(now, items)
            settings[name] = ",".join(kept)
    return settings


def _without(now: list[str], items: list[str]) -> list[str]:
    return [item for item in now if item not in items]
