"""Offsets as text: the JSON of Spark's Kafka connector, {"topic":{"0":23,"1":-2}}; -2 is earliest, -1 latest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST

TopicPartition = tuple[str, int]
Offsets = dict[TopicPartition, int]

_WORDS = {"earliest": EARLIEST, "latest": LATEST}


@dataclass(frozen=True)
class OffsetSpec:
    """Either one place for all partitions (`everywhere`: EARLIEST or LATEST), or an offset for each."""

    everywhere: int | None = None
    each: tuple[tuple[TopicPartition, int], ...] = ()

    @property
    def holds_latest(self) -> bool:
        return LATEST in (self.everywhere, *(offset for _, offset in self.each))

    @property
    def holds_earliest(self) -> bool:
        return EARLIEST in (self.everywhere, *(offset for _, offset in self.each))


def _json(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"option {option}={text!r} is no JSON: {error}") from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"option {option}={text!r}: a JSON object by topic is wanted")
    return value


def parse_offsets(option: str, text: str) -> OffsetSpec:
    """ "earliest", "latest" or the JSON; `ConfigError` for anything else."""
    word = text.strip().lower()
    if word in _WORDS:
        return OffsetSpec(_WORDS[word])
    if not word.startswith("{"):
        raise ConfigError(f'option {option}={text!r}: earliest, latest or {{"topic":{{"0":23}}}} is wanted')
    each: Offsets = {}
    for topic, partitions in _json(option, text).items():
        if not isinstance(partitions, dict):
            raise ConfigError(f"option {option}: an object by partition is wanted for topic {topic}")
        for partition, offset in partitions.items():
            if not partition.isdecimal() or type(offset) is not int or offset < EARLIEST:
                raise ConfigError(f"option {option}: {topic}-{partition}: {offset!r} is no offset of a partition")
            each[topic, int(partition)] = offset
    return OffsetSpec(each=tuple(sorted(each.items())))


def parse_assign(text: str) -> dict[str, list[int]]:
    """{"topic":[0,1]}; `ConfigError` for anything else."""
    result = {}
    for topic, partitions in _json("assign", text).items():
        if (
            not isinstance(partitions, list)
            or not partitions
            or not all(type(partition) is int and partition >= 0 for partition in partitions)
        ):
            raise ConfigError(f"option assign: a list of partitions is wanted for topic {topic}")
        result[topic] = sorted(set(partitions))
    return result


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """The nested form that Spark keeps in a checkpoint."""
    result: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        result.setdefault(topic, {})[str(partition)] = offset
    return result


def from_json(value: Mapping[str, Mapping[str, int]]) -> Offsets:
    """The inverse of `to_json`."""
    return {
        (topic, int(partition)): int(offset)
        for topic, partitions in value.items()
        for partition, offset in partitions.items()
    }
