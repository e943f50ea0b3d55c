"""Settings of logs under Kafka's names, for a broker and for a topic."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spark_klog.base.settings import INT32_MAX, advice, settings_of, value_of
from spark_klog.broker.metadata.internal_topics import with_internal_settings
from spark_klog.errors import ConfigError
from spark_klog.log.config import LogConfig, log_number

_log = logging.getLogger(__name__)
_HOUR_MS, _MINUTE_MS = 3_600_000, 60_000
TOPIC_SETTINGS = settings_of(LogConfig)
#: Those that a topic inherits from the broker.
_INHERITED = [row for row in TOPIC_SETTINGS.values() if row.metadata["broker"]]
_SEGMENT_BYTES = "segment.bytes"
#: Sets the same, of a topic or of all, with no minimum, and is not described: for tests, as in Kafka 4.1.
INTERNAL_SEGMENT_BYTES = f"internal.{_SEGMENT_BYTES}"
#: The least that a user may set, as in Kafka 4 (KIP-1030): each segment has several files.
_LEAST_SEGMENT_BYTES = 1 << 20
#: (field of `LogConfig`, kind) by the broker's name. If a value is set in several units, the last one in this order
#: wins: the smallest, as in Kafka.
BROKER_LOG_SETTINGS = {
    "log.roll.hours": ("segment_ms", log_number("long", 1, factor=_HOUR_MS)),
    "log.retention.hours": ("retention_ms", log_number("long", -1, factor=_HOUR_MS)),
    "log.retention.minutes": ("retention_ms", log_number("long", -1, factor=_MINUTE_MS)),
    **{row.metadata["broker"]: (row.name, row.metadata["kind"]) for row in _INHERITED},
    f"log.{_SEGMENT_BYTES}": ("segment_bytes", log_number("int", _LEAST_SEGMENT_BYTES, INT32_MAX)),
}
#: Topic settings of Kafka that have no effect without replication: the value to show, and the broker's name.
_WITHOUT_EFFECT = {
    "follower.replication.throttled.replicas": ("", None),
    "leader.replication.throttled.replicas": ("", None),
    "message.downconversion.enable": ("true", "log.message.downconversion.enable"),
    "message.format.version": ("3.0-IV1", "log.message.format.version"),
    "min.insync.replicas": ("1", "min.insync.replicas"),
    "preallocate": ("false", "log.preallocate"),
    "segment.jitter.ms": ("0", "log.roll.jitter.ms"),
    "unclean.leader.election.enable": ("false", "unclean.leader.election.enable"),
}
#: Settings without effect that reject other values, since users would expect those to have an effect.
_FIXED = ("message.downconversion.enable", "preallocate")
WORDING = "setting {}={}: must be {}"


def topic_settings(settings: Mapping[str, str]) -> dict[str, Any]:
    """`LogConfig` arguments from a topic's settings; `ConfigError` for an unknown name or a bad value."""
    result = {}
    for given, text in settings.items():
        name = _SEGMENT_BYTES if given == INTERNAL_SEGMENT_BYTES else given
        if name in _WITHOUT_EFFECT:
            if name in _FIXED and text != _WITHOUT_EFFECT[name][0]:
                raise ConfigError(f"setting {name}={text}: only {_WITHOUT_EFFECT[name][0]} is supported")
            continue
        if name not in TOPIC_SETTINGS:
            raise ConfigError(f"unknown topic setting {name!r}; {advice(name, TOPIC_SETTINGS, _WITHOUT_EFFECT)}")
        row = TOPIC_SETTINGS[name]
        result[row.name] = value_of(row.metadata["kind"], name, text, WORDING)
    return result


def check_of_client(settings: Mapping[str, str], before: Mapping[str, str] | None = None) -> None:
    """Raise `ConfigError` for small segments that a client wants; a topic that had them `before` keeps them."""
    text = settings.get(_SEGMENT_BYTES)
    if text is None or (before is not None and before.get(_SEGMENT_BYTES) == text):
        return
    if topic_settings({_SEGMENT_BYTES: text})["segment_bytes"] < _LEAST_SEGMENT_BYTES:
        raise ConfigError(WORDING.format(_SEGMENT_BYTES, text, f"at least {_LEAST_SEGMENT_BYTES}"))


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
    return {name: _text(overrides[row.name]) for name, row in TOPIC_SETTINGS.items() if row.name in overrides}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_list(name: str) -> bool:
    """Whether a setting's value is a list, to which entries can be appended and subtracted."""
    return name in ("cleanup.policy", "log.cleanup.policy") or name.endswith(".throttled.replicas")


def broker_name(name: str) -> str | None:
    """The broker setting from which a topic setting inherits; None if it has none."""
    if name in TOPIC_SETTINGS:
        return TOPIC_SETTINGS[name].metadata["broker"] or None
    return _WITHOUT_EFFECT.get(name, ("", None))[1]


def setting_texts(config: LogConfig) -> dict[str, str]:
    """The texts of all topic settings of a `LogConfig`, by their names."""
    fixed = {name: text for name, (text, _) in _WITHOUT_EFFECT.items()}
    own = {name: _text(getattr(config, row.name)) for name, row in TOPIC_SETTINGS.items()}
    return dict(sorted((fixed | own).items()))
