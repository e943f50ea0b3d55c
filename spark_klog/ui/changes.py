"""Changes that the page can make with --allow-changes. Each takes a JSON object; `ConfigError` for a wrong one."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.client import Admin, Producer
from spark_klog.client.letter_topics import ALL, Choice, LetterTopic
from spark_klog.client.places import OffsetSpec, TimeSpec
from spark_klog.client.settings import without_ids
from spark_klog.errors import ConfigError
from spark_klog.groups.stores import CoordinatorStore, ShiftBy, Target, plan_changes, target_offsets
from spark_klog.protocol.tables.records import EARLIEST, LATEST

_DELIVERY_SECONDS = 30.0


def create_topic(admin: Admin, body: Mapping[str, Any]) -> dict[str, Any]:
    """{"name", "partitions", "replicationFactor", "settings": {NAME: VALUE}}"""
    name = _text(body, "name")
    admin.create_topic(
        name,
        _number(body, "partitions", 1, least=1),
        replication_factor=_number(body, "replicationFactor", 1, least=1),
        configs={key: str(value) for key, value in _settings(body).items()},
    )
    return {"created": name}


def alter_topic(admin: Admin, body: Mapping[str, Any]) -> dict[str, Any]:
    """{"name", "partitions" (may be left out), "settings": {NAME: VALUE, or null for the default}}"""
    name, settings, count = _text(body, "name"), _settings(body), body.get("partitions")
    if not settings and count is None:
        raise ConfigError("nothing to alter: give settings or partitions")
    admin.describe_topic(name)
    if settings:
        changes = {key: None if value is None else str(value) for key, value in settings.items()}
        admin.alter_configs({("topic", name): changes}).check()
    if count is not None:
        admin.create_partitions({name: _number(body, "partitions", 1, least=1)}).check()
    return {"altered": name}


def delete_topic(admin: Admin, body: Mapping[str, Any]) -> dict[str, Any]:
    """{"name", "confirm": the name once more}"""
    name = _text(body, "name")
    if body.get("confirm") != name:
        raise ConfigError(f"to delete topic {name} with all its records, confirm must be its name")
    admin.delete_topic(name)
    return {"deleted": name}


def produce(admin: Admin, settings: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    """{"topic", "partition", "key", "value", "headers": [{"key", "value"}]}

    Keys and values are {"text"} or {"base64"}, or null. The topic must exist: a broker would create one that was
    deleted since the page was loaded, with other partitions and settings.
    """
    topic, partition = _text(body, "topic"), body.get("partition")
    headers = body.get("headers") or []
    if not isinstance(headers, list) or not all(isinstance(header, dict) for header in headers):
        raise ConfigError("headers must be a list of objects with key and value")
    admin.describe_topic(topic)
    with Producer(without_ids(settings) | {"acks": "all"}) as producer:
        delivery = producer.send(
            topic,
            _bytes(body, "value"),
            _bytes(body, "key"),
            None if partition is None else _number(body, "partition", 0),
            headers=tuple((_text(header, "key"), _bytes(header, "value")) for header in headers),
        )
        written = delivery.result(_DELIVERY_SECONDS)
    return {"topic": topic, "partition": written.partition, "offset": written.offset}


def move_group(admin: Admin, body: Mapping[str, Any]) -> dict[str, Any]:
    """{"group", "topic", "to", "value", "dryRun"}

    "to" is earliest, latest, offset, time or shift; the last three have a number as "value".
    """
    group, topic, target = _text(body, "group"), _text(body, "topic"), _target(body)
    store = CoordinatorStore(admin, group)
    current = store.fetch()
    with admin.exclusive() as cluster:
        partitions = [(topic, number) for number in cluster.partitions([topic])[topic]]
        targets = target_offsets(cluster, target, partitions, current)
        changes = plan_changes(current, targets, cluster)
    is_dry = body.get("dryRun", True)
    if is_dry is not True and is_dry is not False:
        raise ConfigError("dryRun must be true or false")
    if not is_dry:
        if members := store.members():
            raise ConfigError(
                f"group {group} has {len(members)} members, which commit their own offsets: stop them first"
            )
        store.commit({(change.topic, change.partition): change.new for change in changes if change.new is not None})
    return {"group": group, "dryRun": is_dry, "changes": [change._asdict() for change in changes]}


def replay_letters(settings: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    """{"topic", "reason": a regular expression, may be left out}; see `klog dead-letters replay`."""
    topic = _text(body, "topic")
    choice = Choice(_text(body, "reason")) if body.get("reason") else ALL
    done = LetterTopic(settings, topic).replay(choice)
    return {"topic": topic, "records": done.sent, "others": done.others}


def _target(body: Mapping[str, Any]) -> Target:
    kind = body.get("to")
    if kind in ("earliest", "latest"):
        return OffsetSpec(EARLIEST if kind == "earliest" else LATEST)
    if kind == "offset":
        return _number(body, "value", None)
    if kind == "shift":
        return ShiftBy(_number(body, "value", None, least=-(2**62)))
    if kind == "time":
        time = _number(body, "value", None)
        if time > system_ms():
            raise ConfigError("the time must not be in the future")
        return TimeSpec(time)
    raise ConfigError("to must be earliest, latest, offset, time or shift")


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a text")
    return value


def _number(body: Mapping[str, Any], name: str, default: int | None, least: int = 0) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number, {least} or more")
    return value


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    value = body.get("settings") or {}
    if not isinstance(value, dict):
        raise ConfigError("settings must be an object")
    return value


def _bytes(body: Mapping[str, Any], name: str) -> bytes | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return str(value["text"]).encode()
    if isinstance(value, dict) and isinstance(value.get("base64"), str):
        try:
            return b64decode(value["base64"], validate=True)
        except ValueError as error:
            raise ConfigError(f"{name} is not base64: {error}") from None
    raise ConfigError(f'{name} must be null, {{"text": ...}} or {{"base64": ...}}')
