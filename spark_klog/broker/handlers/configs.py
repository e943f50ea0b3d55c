"""Settings: DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, ListConfigResources; levels of loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop import MAX_ID_LENGTH, distinct, repeated
from spark_klog.broker.handlers.topics import NAMED_TWICE
from spark_klog.broker.metadata.nodes import UnknownTopic, refusal
from spark_klog.broker.security.authorizer import SEE
from spark_klog.broker.settings.described_settings import broker_entries, group_entries, topic_entries
from spark_klog.broker.settings.log_settings import check_of_client, is_list, setting_texts
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import (
    APPEND,
    BROKER,
    BROKER_LOGGER,
    CLIENT_METRICS,
    DEFAULT_SOURCE,
    DELETE,
    GROUP,
    LOGGER_SOURCE,
    SET,
    SUBTRACT,
    TOPIC,
)

ROOT = "root"
_PACKAGE = "spark_klog"
_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
#: Kafka's names by Python's levels; Python has no TRACE.
_NAMES = {number: name for name, number in _LEVELS.items() if name != "TRACE"}
_FIRST_WITH_TYPES = 1
_REFUSALS = {TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED, GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED}
Changed = Callable[[Mapping[str, str], list[dict[str, Any]]], dict[str, str]]


def levels() -> dict[str, str]:
    """The level of each logger, by its name."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == _PACKAGE]
    return {name: _NAMES.get(_logger(name).getEffectiveLevel(), "INFO") for name in sorted({ROOT, _PACKAGE, *names})}


def set_levels(changes: Mapping[str, str | None], *, validate_only: bool = False) -> None:
    """Set the levels of loggers; None inherits the parent's level. After a `ConfigError` nothing has changed."""
    known = levels()
    for name, level in changes.items():
        if name not in known:
            raise ConfigError(f"there is no logger {name[:255]!r}")
        if level is not None and level not in _LEVELS:
            raise ConfigError(f"logger {name}: level {level[:100]!r} must be one of {', '.join(_LEVELS)}")
        if level is None and name == ROOT:
            raise ConfigError(f"logger {ROOT} is the root: its level can be set, not deleted")
    if not validate_only:
        for name, level in changes.items():
            _logger(name).setLevel(logging.NOTSET if level is None else _LEVELS[level])


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(None if name == ROOT else name)


def list_config_resources(broker: Broker, request: Request, message: Message) -> Message:
    """ListConfigResources v0-1 (KIP-1142): resources that DescribeConfigs supports; version 0 lists client metrics
    only.

    Groups (KIP-848) are those with settings of their own; client metrics (KIP-714) have none here.
    """
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
        GROUP: sorted(broker.registry.group_settings),
    }
    types = list(dict.fromkeys(message["resource_types"])) or list(names)
    if not set(types) <= names.keys():
        return {"error_code": ErrorCode.UNSUPPORTED_VERSION, "config_resources": []}
    resources = [{"resource_name": name, "resource_type": kind} for kind in types for name in names[kind]]
    return {"error_code": ErrorCode.NONE, "config_resources": resources}


async def describe_configs(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeConfigs v0-4: settings of topics, groups and this broker, and the levels of its loggers (KIP-412)."""
    resources = distinct(message["resources"], lambda entry: (entry["resource_type"], entry["resource_name"]))
    return {"results": [await _describe(broker, request, message, resource) for resource in resources]}


async def _describe(broker: Broker, request: Request, message: Message, resource: dict[str, Any]) -> Message:
    await broker.turns.take()
    kind, name, names = resource["resource_type"], resource["resource_name"], resource["configuration_keys"]
    result: dict[str, Any] = {"resource_type": kind, "resource_name": name, "configs": []}
    if kind == TOPIC:
        if refusal := broker.authorizer.refusal(request.session, SEE, name):
            return result | {"error_code": refusal, "error_message": f"not authorized to describe topic {name}"}
        topic = await broker.partitions.topic(name)
        if topic is None:
            return result | {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "error_message": f"no topic {name}"}
        entries = topic_entries(broker.config, topic)
    elif not broker.authorizer.is_admin(request.session):
        code = _REFUSALS.get(kind, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        return result | {"error_code": code, "error_message": "only admins describe brokers and groups"}
    elif kind == GROUP and name:
        entries = group_entries(broker.config, broker.registry.group_settings.get(name, {}))
    elif kind == BROKER and name == str(broker.config.broker_id):
        entries = broker_entries(broker.config)
    elif kind == BROKER and not name:
        entries = []  # cluster-wide defaults of broker settings: there are none
    elif kind == BROKER_LOGGER and name == str(broker.config.broker_id):
        of_all = {"read_only": False, "config_source": LOGGER_SOURCE, "synonyms": [], "documentation": None}
        entries = [{"name": logger, "value": level} | of_all for logger, level in levels().items()]
    else:
        reason = f"only topics, groups, broker {broker.config.broker_id} and its loggers can be described here"
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


async def alter_configs(broker: Broker, request: Request, message: Message) -> Message:
    """AlterConfigs v0-2: replaces all of a topic's or group's settings.

    Settings of brokers can only be changed by a restart; changed levels of its loggers last until the next one
    (KIP-412).
    """
    if not broker.authorizer.is_admin(request.session):
        return _refused(message)
    resources, refused = _named_once(message)
    return {"responses": refused + [await _alter(broker, message, resource, _replaced) for resource in resources]}


async def incremental_alter_configs(broker: Broker, request: Request, message: Message) -> Message:
    """IncrementalAlterConfigs v0-1 (KIP-339): changes some settings; otherwise as `alter_configs`."""
    if not broker.authorizer.is_admin(request.session):
        return _refused(message)
    inherited = setting_texts(broker.config.log)

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
    deletes_only = all(entry.get("config_operation", SET) == DELETE for entry in resource["configs"])
    if resource["resource_type"] == BROKER and deletes_only:
        return result | {"error_code": ErrorCode.NONE}  # Kafka's reassignment tool does so: there is nothing to delete
    name, is_group = resource["resource_name"], resource["resource_type"] == GROUP
    if resource["resource_type"] != TOPIC and not (is_group and 0 < len(name) <= MAX_ID_LENGTH):
        reason = "only settings of topics and groups can be altered; to change a broker's, restart it"
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

    def altered(before: Mapping[str, str]) -> dict[str, str]:
        after = changed(before, resource["configs"])
        check_of_client(after, before)
        return after

    try:
        if not is_group and await broker.partitions.topic(name) is None:
            raise UnknownTopic(f"there is no topic {name}")
        alter = broker.changes.alter_group_settings if is_group else broker.changes.alter_topic_settings
        await alter(name, altered, validate_only=message["validate_only"])
    except (ConfigError, DirectoryError) as error:
        return result | refusal(error)
    return result | {"error_code": ErrorCode.NONE}


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
        return result | refusal(error)
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
            now = [part for part in settings.get(name, inherited.get(name, "")).split(",") if part]
            items = value.split(",")
            if operation == APPEND:
                kept = now + [part for part in items if part not in now]
            else:
                kept = [part for part in now if part not in items]
            settings[name] = ",".join(kept)
    return settings
