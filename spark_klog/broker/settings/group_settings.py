"""Settings of groups of KIP-848: configurations of Kafka's resource type GROUP.

A group's own values are those of its coordinator's clients, which can't set them themselves. They apply from the next
heartbeats on, and stay until they are deleted, whether the group exists or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from spark_klog.base.settings import number
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.errors import ConfigError

_HEARTBEAT, _SESSION = "consumer.heartbeat.interval.ms", "consumer.session.timeout.ms"
_MILLISECONDS = number("int", 1, 0x7FFFFFFF)
#: The names of the settings, each with that of the broker's default.
GROUP_SETTINGS = {name: f"group.{name}" for name in (_HEARTBEAT, _SESSION)}


class GroupTimes(NamedTuple):
    """How often the members of a group send heartbeats, and when one without any is removed (ms)."""

    heartbeat_ms: int
    session_ms: int


def group_times(config: BrokerConfig, own: Mapping[str, str]) -> GroupTimes:
    """The times of a group with these settings of its own."""

    def own_or(name: str, default_ms: int) -> int:
        try:
            value: int = _MILLISECONDS.parse(own[name])
            return value
        except (KeyError, ValueError):  # another tool may have written the value
            return default_ms

    return GroupTimes(own_or(_HEARTBEAT, config.consumer_heartbeat_ms), own_or(_SESSION, config.consumer_session_ms))


def check_group_settings(config: BrokerConfig, own: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an unknown setting, a bad value, or a session that ends before the next heartbeat."""
    for name, text in own.items():
        if name not in GROUP_SETTINGS:
            raise ConfigError(f"unknown setting {name[:100]!r} of a group: set {' or '.join(GROUP_SETTINGS)}")
        try:
            _MILLISECONDS.parse(text)
        except ValueError as error:
            raise ConfigError(f"setting {name}={text[:100]} must be {error}") from None
    times = group_times(config, own)
    if times.session_ms <= times.heartbeat_ms:
        raise ConfigError(
            f"{_SESSION}={times.session_ms} must be greater than {_HEARTBEAT}={times.heartbeat_ms}: "
            "members would be removed between heartbeats"
        )
