"""Values of the connector's options. `own` has the options' texts by canonical name; a bad one raises `ConfigError`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from spark_klog.errors import ConfigError

_TRUTH = {"true": True, "false": False}
_COUNT = re.compile(r"\d{1,19}")
_DURATION = re.compile(r"(\d{1,18})\s*(ms|s|m|min|h|d)?")
_UNIT_MS = {None: 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def canonical(name: str) -> str:
    """The form of an option's name in which names are compared: Spark ignores case."""
    return name.lower()


def boolean(own: dict[str, str], name: str, default: bool) -> bool:
    """Parse true or false."""
    text = own.get(canonical(name), str(default)).lower()
    if text not in _TRUTH:
        raise ConfigError(f"option {name}={text} must be true or false")
    return _TRUTH[text]


def count(own: dict[str, str], name: str, smallest: int = 1) -> int | None:
    """Parse an integer of at least `smallest`; None if the option is not set."""
    text = own.get(canonical(name))
    if text is None:
        return None
    if not _COUNT.fullmatch(text.strip()) or int(text) < smallest:
        raise ConfigError(f"option {name}={text} must be an integer of at least {smallest}")
    return int(text)


def milliseconds(own: dict[str, str], name: str, default: int) -> int:
    """Parse a duration as Spark writes it: 15m, 30s, 500ms; a bare number is ms."""
    text = own.get(canonical(name))
    if text is None:
        return default
    match = _DURATION.fullmatch(text.strip().lower())
    if not match:
        raise ConfigError(f"option {name}={text} must be a duration like 15m, 30s or 500ms")
    return int(match[1]) * _UNIT_MS[match[2]]


def choice(own: dict[str, str], name: str, choices: Mapping[str, str]) -> str:
    """The value of the chosen word; the first choice is the default."""
    text = own.get(canonical(name), next(iter(choices))).lower()
    if text not in choices:
        raise ConfigError(f"option {name}={text} must be one of {', '.join(choices)}")
    return choices[text]
