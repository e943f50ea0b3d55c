"""The connector's options: those of Spark's Kafka connector by name, and what is refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_klog.client.config import client_config
from spark_klog.errors import ConfigError
from spark_klog.spark.offsets import OffsetSpec, parse_assign, parse_offsets

_PREFIX = "kafka."
_SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")
_SOURCE = (*_SUBSCRIPTIONS, "startingOffsets", "endingOffsets", "failOnDataLoss", "maxOffsetsPerTrigger")
_KNOWN = (*_SOURCE, "includeHeaders", "topic", "offsetsPath")
#: Spark's Kafka connector has them; refused by name rather than without effect.
_NOT_YET = (
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "groupIdPrefix",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
)
#: Settings that the connector decides itself, as Spark's does.
_PROTECTED = {
    "key.deserializer": "keys are binary: cast the column instead",
    "value.deserializer": "values are binary: cast the column instead",
    "key.serializer": "keys are binary or strings",
    "value.serializer": "values are binary or strings",
    "auto.offset.reset": "use startingOffsets and failOnDataLoss",
    "enable.auto.commit": "Spark's checkpoint is the truth of a query",
    "interceptor.classes": "there are none",
}
#: Options of Spark's own for a streaming write, which it hands to the sink, too.
_SPARKS = frozenset({"checkpointlocation", "queryname"})
_TRUTH = {"true": True, "false": False}


def _canonical(name: str) -> str:
    return name.lower()


_KNOWN_BY_KEY = {_canonical(name): name for name in _KNOWN}
_NOT_YET_BY_KEY = {_canonical(name): name for name in _NOT_YET}


@dataclass(frozen=True)
class Subscription:
    """What to read: exactly one of the three. `assign` is {topic: [partitions]}."""

    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assign: dict[str, list[int]] | None = None


@dataclass(frozen=True)
class GroupOffsetsOptions:
    """Where a query's progress is shown: the group, and a tree of directories (see `directories.tree.open_tree`)."""

    group: str
    tree: str


@dataclass(frozen=True)
class SourceOptions:
    """Options of a read, checked."""

    client: dict[str, str]
    subscription: Subscription
    starting: OffsetSpec
    ending: OffsetSpec
    fail_on_data_loss: bool
    max_offsets_per_trigger: int | None
    group_offsets: GroupOffsetsOptions | None


@dataclass(frozen=True)
class SinkOptions:
    """Options of a write, checked."""

    client: dict[str, str]
    topic: str | None


def _split(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(client settings without their prefix, connector options by lower-case name), all names known."""
    settings: dict[str, str] = {}
    own: dict[str, str] = {}
    for name, value in options.items():
        key = _canonical(name)
        if key.startswith(_PREFIX):
            setting = key[len(_PREFIX) :]
            if setting in _PROTECTED:
                raise ConfigError(f"option {name} can't be set: {_PROTECTED[setting]}")
            settings[setting] = value
        elif key in _KNOWN_BY_KEY:
            own[key] = value
        elif key in _NOT_YET_BY_KEY:
            raise ConfigError(f"option {_NOT_YET_BY_KEY[key]} is not supported yet")
        elif key != "path" or value:
            close = difflib.get_close_matches(key, [*_KNOWN_BY_KEY, "kafka.bootstrap.servers"], 1)
            hint = f"; did you mean {_KNOWN_BY_KEY.get(close[0], close[0])}?" if close else ""
            raise ConfigError(f"unknown option {name!r}{hint}")
    if "bootstrap.servers" not in settings:
        raise ConfigError("option kafka.bootstrap.servers is not set: HOST:PORT[,HOST:PORT...] of a broker is wanted")
    client_config(settings)
    return settings, own


def _boolean(own: dict[str, str], name: str, default: bool) -> bool:
    text = own.get(_canonical(name), str(default)).lower()
    if text not in _TRUTH:
        raise ConfigError(f"option {name}={text}: true or false is wanted")
    return _TRUTH[text]


def _count(own: dict[str, str], name: str) -> int | None:
    text = own.get(_canonical(name))
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) <= 0:
        raise ConfigError(f"option {name}={text}: a number above 0 is wanted")
    return int(text)


def _subscription(own: dict[str, str]) -> Subscription:
    given = [name for name in _SUBSCRIPTIONS if _canonical(name) in own]
    if len(given) != 1:
        what = f"{' and '.join(given)} exclude each other" if given else "none is set"
        raise ConfigError(f"exactly one of the options {', '.join(_SUBSCRIPTIONS)} is wanted: {what}")
    name, text = given[0], own[_canonical(given[0])]
    if name == "assign":
        return Subscription(assign=parse_assign(text))
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"option subscribePattern={text!r} is no regular expression: {error}") from None
        return Subscription(pattern=text)
    topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise ConfigError(f"option subscribe={text!r} names no topic")
    return Subscription(topics=topics)


def _group_offsets(settings: dict[str, str], own: dict[str, str]) -> GroupOffsetsOptions | None:
    group, connect, path = settings.get("group.id"), settings.get("zookeeper.connect"), own.get("offsetspath")
    if path is not None and group is None:
        raise ConfigError("option offsetsPath needs kafka.group.id: offsets are kept by group")
    if path is not None and connect is not None:
        raise ConfigError("options offsetsPath and kafka.zookeeper.connect exclude each other")
    if group is None or (path is None and connect is None):
        return None
    return GroupOffsetsOptions(group, path if path is not None else f"zookeeper://{connect}")


def source_options(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """The options of a read; `ConfigError` names what is unknown, in conflict, or wrong in such a query."""
    settings, own = _split(options)
    if "topic" in own:
        raise ConfigError("option topic is for writing; use subscribe, subscribePattern or assign")
    starting = parse_offsets("startingOffsets", own.get("startingoffsets", "latest" if streaming else "earliest"))
    ending = parse_offsets("endingOffsets", own.get("endingoffsets", "latest"))
    if streaming and "endingoffsets" in own:
        raise ConfigError("option endingOffsets is for batch queries; a stream has no end")
    if not streaming and starting.holds_latest:
        raise ConfigError(
            "option startingOffsets can't be latest (-1) in a batch query: there would be nothing to read"
        )
    if ending.holds_earliest:
        raise ConfigError("option endingOffsets can't be earliest (-2): there would be nothing to read")
    return SourceOptions(
        settings,
        _subscription(own),
        starting,
        ending,
        _boolean(own, "failOnDataLoss", True),
        _count(own, "maxOffsetsPerTrigger"),
        _group_offsets(settings, own),
    )


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """The options of a write; `ConfigError` names what is unknown or for reading only."""
    settings, own = _split({name: value for name, value in options.items() if _canonical(name) not in _SPARKS})
    for name in _SOURCE:
        if _canonical(name) in own:
            raise ConfigError(f"option {name} is for reading")
    topic = own.get("topic", "").strip() or None
    return SinkOptions(settings, topic)


def include_headers(options: Mapping[str, Any]) -> bool:
    """The option includeHeaders."""
    return _boolean({_canonical(name): value for name, value in options.items()}, "includeHeaders", False)
