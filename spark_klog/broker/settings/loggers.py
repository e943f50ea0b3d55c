"""The broker's loggers, with Kafka's level names (KIP-412): levels can be read, and changed until the next start."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spark_klog.errors import ConfigError

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
