"""Checks of arguments: `TypeError` for a wrong type, `ConfigError` for a wrong value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spark_klog.errors import ConfigError

_MAX_INT32, _MAX_INT64 = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF


def name_of(what: str, value: object) -> str:
    """The value, which must be text that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if not value:
        raise ConfigError(f"{what} is empty")
    return value


def items_of(what: str, values: object) -> list[Any]:
    """The values, which must be an iterable, but neither text nor a mapping."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{what} must be a list, not one {type(values).__name__}: write [{values!r}]")
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a list, not {type(values).__name__}")
    return list(values)


def names_of(what: str, values: object) -> list[str]:
    """The values as a list of names, each once."""
    return [name_of(f"each of {what}", value) for value in dict.fromkeys(items_of(what, values))]


def one_of(what: str, value: object, known: Iterable[str]) -> str:
    """The known name that the value is, in any case of its letters."""
    names = {name.lower(): name for name in known}
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if value.lower() not in names:
        raise ConfigError(f"{what} is {value!r}: set one of {', '.join(names.values())}")
    return names[value.lower()]


def mapping_of(what: str, value: object) -> dict[Any, Any]:
    """The value, which must be a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a dict, not {type(value).__name__}")
    return dict(value)


def number_of(what: str, value: object, least: int = 0, most: int = _MAX_INT64) -> int:
    """The value, which must be an int within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if not least <= value <= most:
        raise ConfigError(f"{what} is {value}: set {least} to {most}")
    return value


def partition_of(what: str, value: object) -> tuple[str, int]:
    """The value, which must be a (topic, partition) pair."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{what} must be (topic, partition) pairs, not {value!r}")
    return name_of("the topic of a partition", value[0]), number_of("a partition", value[1], 0, _MAX_INT32)


def partitions_of(what: str, values: object) -> list[tuple[str, int]]:
    """The values as a list of (topic, partition) pairs, each once."""
    return [partition_of(what, value) for value in dict.fromkeys(items_of(what, values))]


def configs_of(what: str, value: object) -> dict[str, str]:
    """The value as settings: text by name."""
    found = mapping_of(what, value)
    for name, text in found.items():
        name_of(f"each name in {what}", name)
        if not isinstance(text, str):
            raise TypeError(f"{name} in {what} must be a str, not {type(text).__name__}: write {str(text)!r}")
    return found
