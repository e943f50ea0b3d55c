"""Settings of topics, brokers and other resources: describe and alter them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from spark_klog.client.admin.calls import AdminCalls, Outcomes, mapped, no_broker, without_results
from spark_klog.client.arguments import items_of, mapping_of, name_of, number_of
from spark_klog.errors import ConfigError, KlogError
from spark_klog.protocol.apis import DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables import configs

ResourceKind = Literal["topic", "broker", "broker-logger", "client-metrics", "group"]
_KINDS: dict[ResourceKind, int] = {
    "topic": configs.TOPIC,
    "broker": configs.BROKER,
    "broker-logger": configs.BROKER_LOGGER,
    "client-metrics": configs.CLIENT_METRICS,
    "group": configs.GROUP,
}
_KIND_NAMES = {number: kind for kind, number in _KINDS.items()}
#: Kinds whose name is a node id: only that broker answers for them.
_OF_ONE_BROKER = ("broker", "broker-logger")
_SOURCES = {
    configs.TOPIC_SOURCE: "topic",
    2: "dynamic broker",
    3: "dynamic default broker",
    configs.BROKER_SOURCE: "static broker",
    configs.DEFAULT_SOURCE: "default",
    configs.LOGGER_SOURCE: "broker logger",
    7: "client metrics",
    8: "group",
}


class ConfigResource(NamedTuple):
    """What has settings: ("topic", NAME), ("broker", NODE ID as text), or ("broker", "") for the default of brokers.

    Other kinds are broker-logger (a node id), client-metrics and group.
    """

    kind: ResourceKind
    name: str


@dataclass(frozen=True)
class ConfigEntry:
    """A setting; `value` is None if it is sensitive or has none.

    `source` says where the value comes from: topic, dynamic broker, dynamic default broker, static broker, default,
    broker logger, client metrics, group; or "" if the broker does not say.
    """

    name: str
    value: str | None
    source: str
    is_default: bool
    is_read_only: bool
    is_sensitive: bool


@dataclass(frozen=True)
class Append:
    """Add a value to a setting that is a list."""

    value: str

    def __post_init__(self) -> None:
        _check_text(self)


@dataclass(frozen=True)
class Subtract:
    """Remove a value from a setting that is a list."""

    value: str

    def __post_init__(self) -> None:
        _check_text(self)


def _check_text(change: Append | Subtract) -> None:
    if not isinstance(change.value, str):
        found = type(change.value).__name__
        raise TypeError(f"the value of {type(change).__name__} must be a str, not {found}: separate several by commas")


ConfigChange = str | Append | Subtract | None


class ConfigCalls(AdminCalls):
    """Calls about settings."""

    def describe_configs(
        self, resources: Iterable[ConfigResource | tuple[ResourceKind, str]]
    ) -> Outcomes[ConfigResource, dict[str, ConfigEntry]]:
        """The settings of each resource, by name. DescribeConfigs (Kafka 0.11), at the broker that it is about."""
        wanted = [_resource(value) for value in items_of("resources", resources)]

        def request(keys: Collection[ConfigResource]) -> Message:
            entries = [
                {"resource_type": _KINDS[key.kind], "resource_name": key.name, "configuration_keys": None}
                for key in keys
            ]
            return {"resources": entries}

        with self._turn, self._call():
            described = self._each(wanted, self._asker(DESCRIBE_CONFIGS, request, "results"))
        return mapped(described, _described)

    def alter_configs(
        self,
        changes: Mapping[ConfigResource | tuple[ResourceKind, str], Mapping[str, ConfigChange]],
        *,
        validate_only: bool = False,
    ) -> Outcomes[ConfigResource, None]:
        """Change settings, all of a resource or none: text sets one, None resets it to its default.

            admin.alter_configs({("topic", "clicks"): {"retention.ms": "1000", "segment.ms": None}}).check()

        `Append` and `Subtract` change lists; other settings stay. IncrementalAlterConfigs (Kafka 2.3), at the
        controller, or the broker that it is about. With `validate_only` the broker only checks the changes.
        """
        wanted: dict[ConfigResource, dict[str, ConfigChange]] = {}
        for value, of_resource in mapping_of("changes", changes).items():
            key = _resource(value)
            wanted[key] = mapping_of(f"changes of {_what(key)}", of_resource)
            for name, change in wanted[key].items():
                name_of(f"each name in changes of {_what(key)}", name)
                if not isinstance(change, str | Append | Subtract | None):
                    raise TypeError(f"{name} must be a str, Append, Subtract or None, not {type(change).__name__}")

        def request(keys: Collection[ConfigResource]) -> Message:
            entries = [
                {
                    "resource_type": _KINDS[key.kind],
                    "resource_name": key.name,
                    "configs": [_operation(name, change) for name, change in wanted[key].items()],
                }
                for key in keys
            ]
            return {"resources": entries, "validate_only": validate_only}

        with self._turn, self._call():
            altered = self._each(wanted, self._asker(INCREMENTAL_ALTER_CONFIGS, request, "responses"))
        return without_results(altered)

    def _asker(
        self, api: Api, request: Callable[[Collection[ConfigResource]], Message], results: str
    ) -> Callable[[list[ConfigResource]], dict[ConfigResource, Message | KlogError]]:
        """A function for `_each` that asks the broker that each resource is about, or else the controller."""

        def ask(rest: list[ConfigResource]) -> dict[ConfigResource, Message | KlogError]:
            by_node: dict[int, list[ConfigResource]] = {}
            failures: dict[ConfigResource, Message | KlogError] = {}
            for key in rest:
                node = int(key.name) if key.kind in _OF_ONE_BROKER and key.name else self.cluster.controller()
                if self._knows(node):
                    by_node.setdefault(node, []).append(key)
                else:
                    failures[key] = no_broker(node)
            return failures | self._ask_brokers(api, by_node, request, _entries(results), _what)

        return ask


def _resource(value: object) -> ConfigResource:
    """Check a resource."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"a resource must be (kind, name), for example ('topic', 'clicks'), not {value!r}")
    kind, name = value
    if kind not in get_args(ResourceKind):
        raise ConfigError(f"resource {value!r}: the kind must be one of {', '.join(_KINDS)}")
    if kind in _OF_ONE_BROKER and isinstance(name, int):
        raise TypeError(f"resource {value!r}: write the node id as text, {str(name)!r}")
    if kind in _OF_ONE_BROKER and name != "":
        is_number = isinstance(name, str) and name.isascii() and name.isdecimal()
        number_of(f"the node id of {value!r}", int(name) if is_number else name, 0, 0x7FFFFFFF)
    elif kind != "broker":
        name_of(f"the name of {value!r}", name)
    return ConfigResource(kind, name)


def _operation(name: str, change: ConfigChange) -> Message:
    if isinstance(change, Append):
        return {"name": name, "config_operation": configs.APPEND, "value": change.value}
    if isinstance(change, Subtract):
        return {"name": name, "config_operation": configs.SUBTRACT, "value": change.value}
    return {"name": name, "config_operation": configs.DELETE if change is None else configs.SET, "value": change}


def _entries(results: str) -> Callable[[Message], Iterator[tuple[ConfigResource, Message]]]:
    def entries(answer: Message) -> Iterator[tuple[ConfigResource, Message]]:
        for entry in answer[results]:
            # an unknown kind is not one that was asked for
            yield ConfigResource(_KIND_NAMES.get(entry["resource_type"], "topic"), entry["resource_name"]), entry

    return entries


def _what(resource: ConfigResource) -> str:
    return f"settings of {resource.kind} {resource.name or '(default of all)'}"


def _described(result: Message) -> dict[str, ConfigEntry]:
    return {entry["name"]: _entry(entry) for entry in result["configs"]}


def _entry(entry: Message) -> ConfigEntry:
    source = entry["config_source"]
    # version 0 has no source
    is_default = source == configs.DEFAULT_SOURCE if source >= 0 else entry["is_default"]
    return ConfigEntry(
        entry["name"],
        None if entry["is_sensitive"] else entry["value"],
        _SOURCES.get(source, ""),
        bool(is_default),
        entry["read_only"],
        entry["is_sensitive"],
    )
