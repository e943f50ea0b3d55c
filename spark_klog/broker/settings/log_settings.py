"""Settings of logs under Kafka's names, for a broker and for a topic."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spark_klog.broker.metadata.internal_topics import with_internal_settings
from spark_klog.broker.settings.kafka_names import advice
from spark_klog.errors import ConfigError
from spark_klog.log.config import COMPACT, CREATE_TIME, DELETE, LOG_APPEND_TIME, LogConfig

_log = logging.getLogger(__name__)
_HOUR_MS, _MINUTE_MS = 3_600_000, 60_000
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


def _number(least: int, factor: int = 1, most: int = _MAX_INT64) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError("must be an integer")
        value = int(text)
        if not least <= value <= most:
            raise ValueError(f"must be from {least} to {most}")
        return value * factor if value >= 0 else value

    return parse


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("must be from 0 to 1")
    return value


def _policy(text: str) -> str:
    policies = [word.strip() for word in text.split(",")]
    if not set(policies) <= {DELETE, COMPACT}:
        raise ValueError(f"must be {DELETE}, {COMPACT} or both")
    return ",".join(policies)


def _timestamp_type(text: str) -> str:
    if text not in (CREATE_TIME, LOG_APPEND_TIME):
        raise ValueError(f"must be {CREATE_TIME} or {LOG_APPEND_TIME}")
    return text


class _Setting(NamedTuple):
    """A log setting: `LogConfig` attribute, the topic's and the broker's name of it, and the parser of its text."""

    attribute: str
    topic: str
    broker: str
    parse: Callable[[str], Any]


_SETTINGS = (
    _Setting("segment_bytes", "segment.bytes", "log.segment.bytes", _number(1, most=_MAX_INT32)),
    _Setting("segment_ms", "segment.ms", "log.roll.ms", _number(1)),
    _Setting("segment_index_bytes", "segment.index.bytes", "log.index.size.max.bytes", _number(24, most=_MAX_INT32)),
    _Setting("index_interval_bytes", "index.interval.bytes", "log.index.interval.bytes", _number(0, most=_MAX_INT32)),
    _Setting("max_message_bytes", "max.message.bytes", "message.max.bytes", _number(1, most=_MAX_INT32)),
    _Setting("flush_messages", "flush.messages", "log.flush.interval.messages", _number(1)),
    _Setting("flush_ms", "flush.ms", "log.flush.interval.ms", _number(0)),
    _Setting("retention_ms", "retention.ms", "log.retention.ms", _number(-1)),
    _Setting("retention_bytes", "retention.bytes", "log.retention.bytes", _number(-1)),
    _Setting("file_delete_delay_ms", "file.delete.delay.ms", "log.segment.delete.delay.ms", _number(0)),
    _Setting("cleanup_policy", "cleanup.policy", "log.cleanup.policy", _policy),
    _Setting("min_cleanable_dirty_ratio", "min.cleanable.dirty.ratio", "log.cleaner.min.cleanable.ratio", _ratio),
    _Setting("min_compaction_lag_ms", "min.compaction.lag.ms", "log.cleaner.min.compaction.lag.ms", _number(0)),
    _Setting("max_compaction_lag_ms", "max.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms", _number(1)),
    _Setting("delete_retention_ms", "delete.retention.ms", "log.cleaner.delete.retention.ms", _number(0)),
    _Setting("message_timestamp_type", "message.timestamp.type", "log.message.timestamp.type", _timestamp_type),
    _Setting(
        "message_timestamp_after_max_ms",
        "message.timestamp.after.max.ms",
        "log.message.timestamp.after.max.ms",
        _number(0),
    ),
)
_LONGER_UNITS = (
    _Setting("retention_ms", "", "log.retention.minutes", _number(-1, _MINUTE_MS)),
    _Setting("retention_ms", "", "log.retention.hours", _number(-1, _HOUR_MS)),
    _Setting("segment_ms", "", "log.roll.hours", _number(1, _HOUR_MS)),
)
_TOPIC = {item.topic: item for item in _SETTINGS}
#: Topic settings of Kafka that have no effect without replication, with the values to show.
_WITHOUT_EFFECT = {
    "compression.type": "producer",
    "follower.replication.throttled.replicas": "",
    "leader.replication.throttled.replicas": "",
    "message.downconversion.enable": "true",
    "message.format.version": "3.0-IV1",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "segment.jitter.ms": "0",
    "unclean.leader.election.enable": "false",
}
#: The broker's names of these settings.
_BROKER_NAMES = {
    "compression.type": "compression.type",
    "message.downconversion.enable": "log.message.downconversion.enable",
    "message.format.version": "log.message.format.version",
    "min.insync.replicas": "min.insync.replicas",
    "preallocate": "log.preallocate",
    "segment.jitter.ms": "log.roll.jitter.ms",
    "unclean.leader.election.enable": "unclean.leader.election.enable",
}
#: Settings without effect that reject other values, since users would expect those to have an effect.
_FIXED = ("compression.type", "message.downconversion.enable", "preallocate")
#: If a value is set in several units, the last one in this order wins: the smallest, as in Kafka.
BROKER_LOG_SETTINGS = {item.broker: item for item in (*reversed(_LONGER_UNITS), *_SETTINGS)}


def _value(name: str, setting: _Setting, text: str) -> Any:
    try:
        return setting.parse(text.strip())
    except ValueError as error:
        raise ConfigError(f"setting {name}={text}: {error}") from None


def broker_log_settings(settings: Mapping[str, str]) -> dict[str, Any]:
    """`LogConfig` arguments from a broker's settings in `BROKER_LOG_SETTINGS`; `ConfigError` for a bad value."""
    values = {name: _value(name, BROKER_LOG_SETTINGS[name], text) for name, text in settings.items()}
    return {item.attribute: values[name] for name, item in BROKER_LOG_SETTINGS.items() if name in values}


def topic_settings(settings: Mapping[str, str]) -> dict[str, Any]:
    """`LogConfig` arguments from a topic's settings; `ConfigError` for an unknown name or a bad value."""
    result = {}
    for name, text in settings.items():
        if name in _WITHOUT_EFFECT:
            if name in _FIXED and text != _WITHOUT_EFFECT[name]:
                raise ConfigError(f"setting {name}={text}: only {_WITHOUT_EFFECT[name]} is supported")
            continue
        if name not in _TOPIC:
            raise ConfigError(f"unknown topic setting {name!r}; {advice(name, _TOPIC, _WITHOUT_EFFECT)}")
        result[_TOPIC[name].attribute] = _value(name, _TOPIC[name], text)
    return result


def known_topic_settings(topic: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """`LogConfig` arguments from registered settings, with an internal topic's defaults.

    Foreign tools may have registered unknown settings or bad values; these are logged and ignored.
    """
    result: dict[str, Any] = {}
    for name, text in with_internal_settings(topic, settings).items():
        try:
            result |= topic_settings({name: text})
        except ConfigError as error:
            _log.warning("topic %s: %s; it is ignored", topic, error)
    return result


def topic_settings_of(overrides: Mapping[str, Any]) -> dict[str, str]:
    """Topic settings from `LogConfig` arguments: the inverse of `topic_settings`."""
    return {item.topic: str(overrides[item.attribute]) for item in _SETTINGS if item.attribute in overrides}


def is_list(name: str) -> bool:
    """Whether a setting's value is a list, to which entries can be appended and subtracted."""
    return name in ("cleanup.policy", "log.cleanup.policy") or name.endswith(".throttled.replicas")


def broker_name(name: str) -> str | None:
    """The broker setting from which a topic setting inherits; None if it has none."""
    return _TOPIC[name].broker if name in _TOPIC else _BROKER_NAMES.get(name)


def setting_texts(config: LogConfig) -> dict[str, tuple[str, Any]]:
    """All topic settings of a `LogConfig`: name to (text, value)."""
    values = {item.topic: getattr(config, item.attribute) for item in _SETTINGS}
    return {name: (str(value), value) for name, value in sorted((_WITHOUT_EFFECT | values).items())}
