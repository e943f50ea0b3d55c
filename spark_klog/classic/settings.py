"""Settings by the names of Kafka 0.8 to 0.10 and of 0.7: what the connector's and the producer's have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set as AbstractSet
from dataclasses import field
from typing import Any

from spark_klog.client.config import setting_texts
from spark_klog.errors import ConfigError


def setting(name: str, default: Any, kind: str) -> Any:
    """A field of a configuration, by Kafka's name; `kind` says how its text is parsed."""
    return field(default=default, metadata={"name": name, "kind": kind})


def sort_settings(
    settings: Mapping[str, Any],
    config: Any,
    parse: Callable[[str, str, str], Any],
    other_names: Mapping[str, str],
    without_effect: AbstractSet[str],
    refused: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of the fields of the dataclass `config`, by `parse(kind, name, text)`, and the texts of the others.

    `ConfigError` for a wrong value, for two names of one setting, and with the text of a name in `refused`.
    """
    own = {item.metadata["name"]: item for item in config.__dataclass_fields__.values() if item.metadata}
    values: dict[str, Any] = {}
    shared: dict[str, str] = {}
    seen: dict[str, str] = {}
    for written, text in setting_texts(settings).items():
        name = other_names.get(written, written)
        if name in seen:
            raise ConfigError(f"{seen[name]} and {written} are the same setting: set one of them")
        seen[name] = written
        if name in refused:
            raise ConfigError(refused[name])
        if name in own:
            values[own[name].name] = parse(own[name].metadata["kind"], written, text)
        elif name not in without_effect:
            shared[name] = text
    return values, shared
