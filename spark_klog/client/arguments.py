"""Checks of the arguments of the admin client's and the consumer's methods: a wrong type is a `TypeError`.

`what` names the argument in errors, `call` the method.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from spark_klog.base.names import TopicPartition, check_topic_name, topic_pattern
from spark_klog.base.settings import INT32_MAX, INT64_MAX
from spark_klog.client.offsets import Committed, check_committable
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.records import EARLIEST


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
    names = list(dict.fromkeys(items_of(what, values)))
    if "" in names:
        raise ConfigError(f"one of the {what.replace('_', ' ')} is empty: give a name, or leave it out")
    return [name_of(f"each of {what}", name) for name in names]


def one_of(what: str, value: object, known: Iterable[str]) -> str:
    """The known name that the value is, in any case of its letters."""
    names = {name.lower(): name for name in known}
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if value.lower() not in names:
        raise ConfigError(f"{what} is {value!r}: set one of {', '.join(names.values())}")
    return names[value.lower()]


def mapping_of(what: str, value: object) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a dict, not {type(value).__name__}")
    return dict(value)


def number_of(what: str, value: object, least: int = 0, most: int = INT64_MAX) -> int:
    """The value, which must be an int within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if not least <= value <= most:
        raise ConfigError(f"{what} is {value}: set {least} to {most}")
    return value


def configs_of(what: str, value: object) -> dict[str, str]:
    """The value as settings: text by name."""
    configs = mapping_of(what, value)
    for name, text in configs.items():
        name_of(f"each name in {what}", name)
        if not isinstance(text, str):
            raise TypeError(f"{name} in {what} must be a str, not {type(text).__name__}: write {str(text)!r}")
    return configs


def partition_of(call: str, given: Any) -> TopicPartition:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"{call}: {given!r} must be (topic, partition)")
    number = _integer(call, "partition", given[1])
    if not 0 <= number <= INT32_MAX:
        raise ConfigError(f"{call}: partition {number} must be from 0 to 2^31 - 1")
    return _topic(call, given[0]), number


def partitions_of(call: str, items: Any) -> list[TopicPartition]:
    """Check an iterable of (topic, partition); the result has each once."""
    return list(dict.fromkeys(partition_of(call, given) for given in _iterable(call, items, "(topic, partition)")))


def starts_of(call: str, items: Any) -> list[tuple[str, int, int | None]]:
    """Check an iterable of (topic, partition) and (topic, partition, offset), each partition once."""
    starts: list[tuple[str, int, int | None]] = []
    for given in _iterable(call, items, "(topic, partition) or (topic, partition, offset)"):
        if not isinstance(given, tuple | list) or len(given) not in (2, 3):
            raise TypeError(f"{call}: {given!r} must be (topic, partition) or (topic, partition, offset)")
        offset = None if len(given) == 2 or given[2] is None else offset_of(call, given[2])
        starts.append((*partition_of(call, given[:2]), offset))
    if len({given[:2] for given in starts}) < len(starts):
        raise ConfigError("a partition is assigned twice")
    return starts


def offset_of(call: str, offset: Any) -> int:
    """Check an offset to begin at: 0 or more, or -2 or -1."""
    number = _integer(call, "offset", offset)
    if not EARLIEST <= number <= INT64_MAX:
        raise ConfigError(f"{call}: offset {number}: set -2 (the first one), -1 (the end), or 0 or more")
    return number


def offsets_of(call: str, offsets: Any) -> dict[TopicPartition, Committed]:
    """Check and convert offsets to commit; `ConfigError` for negative ones."""
    if not isinstance(offsets, Mapping):
        raise TypeError(f"{call}: offsets must be a dict of (topic, partition) to offset, not {type(offsets).__name__}")
    result = {}
    for key, given in offsets.items():
        topic, partition = partition_of(call, key)
        committed = given if isinstance(given, Committed) else Committed(_integer(call, "offset", given))
        check_committable((topic, partition), _integer(call, "offset", committed.offset))
        result[topic, partition] = committed
    return result


def topics_of(topics: Any, *, is_text_kept: bool) -> tuple[Collection[str], re.Pattern[str] | str | None]:
    """The names and the pattern of a subscription; text that begins with ^ is a pattern, as in librdkafka.

    Such a pattern selects topics whose names begin with a match; a compiled pattern has to match all of it. With
    `is_text_kept` the result is not compiled, but text that matches whole names, for a broker that resolves it.
    """
    if isinstance(topics, re.Pattern):
        if not isinstance(topics.pattern, str):
            raise TypeError("subscribe: the pattern must be compiled from str, not from bytes")
        return (), topics
    if isinstance(topics, str) and topics.startswith("^"):
        topics = [topics]
    if isinstance(topics, str | bytes) or not isinstance(topics, Iterable):
        raise TypeError(
            f"subscribe takes a list of topics or a pattern, not {type(topics).__name__}: subscribe([{topics!r}])"
        )
    wanted = list(topics)
    if not wanted:
        raise ConfigError("subscribe: the list of topics is empty; call unsubscribe to leave the group")
    patterns = [topic for topic in wanted if isinstance(topic, str) and topic.startswith("^")]
    names = [_topic("subscribe", topic) for topic in wanted if topic not in patterns]
    whole = "|".join(f"(?:{text}).*" for text in patterns)
    if not patterns:
        return names, None
    if is_text_kept:
        return names, whole
    for text in patterns:
        topic_pattern(f"subscribe: {text!r}", text)
    return names, re.compile(whole)


def _topic(call: str, topic: Any) -> str:
    if not isinstance(topic, str):
        raise TypeError(f"{call}: topic {topic!r} must be str, not {type(topic).__name__}")
    if not topic:
        raise ConfigError(f"{call}: the name of a topic is empty")
    try:
        check_topic_name(topic)
    except ConfigError as error:
        raise ConfigError(f"{call}: {error}") from None
    return topic


def _integer(call: str, name: str, number: Any) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{call}: {name} {number!r} must be int, not {type(number).__name__}") from None


def _iterable(call: str, items: Any, of: str) -> Iterable[Any]:
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise TypeError(f"{call} takes a list of {of}, not {type(items).__name__}")
    return items
