"""Settings of the admin client, with Kafka's names and defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_klog.client.config import ClientConfig, client_config, parse_value, setting_texts
from spark_klog.client.security.settings import parse as security_settings
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)
_API_TIMEOUT = "default.api.timeout.ms"
_DEFAULT_API_TIMEOUT_MS = 60_000
_WITH_EFFECT = frozenset(
    [
        "bootstrap.servers",
        "client.id",
        "isolation.level",
        "request.timeout.ms",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "socket.connection.setup.timeout.ms",
        _API_TIMEOUT,
    ]
).union(security_settings.NAMES)


@dataclass(frozen=True)
class AdminConfig:
    """Parsed settings; `api_timeout_ms` bounds a call, `client.request_timeout_ms` a request."""

    client: ClientConfig
    api_timeout_ms: int


def admin_config(settings: Mapping[str, Any]) -> AdminConfig:
    """Parse settings by Kafka's names; values and `ConfigError` as in `client_config`.

    Logs the names of settings of Kafka's clients that have no effect here.
    """
    client = client_config(settings)
    timeout = max(_DEFAULT_API_TIMEOUT_MS, client.request_timeout_ms)
    if _API_TIMEOUT in settings:
        text = setting_texts({_API_TIMEOUT: settings[_API_TIMEOUT]})[_API_TIMEOUT]
        timeout = parse_value("positive int", _API_TIMEOUT, text)
        if timeout < client.request_timeout_ms:
            raise ConfigError(
                f"{_API_TIMEOUT}={timeout} must be at least request.timeout.ms={client.request_timeout_ms}"
            )
    if ignored := sorted(set(settings) - _WITH_EFFECT):
        _log.warning("settings without effect on an admin client: %s", ", ".join(ignored))
    return AdminConfig(client, timeout)
