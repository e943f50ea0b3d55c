"""Parse the options that say where a query starts and ends; read and write the offsets of a checkpoint.

"earliest", "latest"                         for all partitions
{"topic":{"0":23,"1":-2}}                    one offset per partition; -2 is earliest, -1 latest
"1700000000000", {"topic":{"0":170...}}      a timestamp (ms) for all partitions or one each (timestamp options only)
"-10m", "2026-11-21T10:00:00Z"               a time: relative (ms, s, m, h, d, w) or ISO 8601 with its zone
"-1000"                                      so many offsets before the end of each partition
"group"                                      the committed offsets of the group kafka.group.id

A checkpoint stores {"topic":{"0":42}}: the end of a micro-batch. It adds the start of the micro-batch if that is not
the end of the one before, nor offset 0 of a new partition, as the text of a name:

{"topic":{"0":42},"start of query {\\"topic\\":{\\"0\\":23}}":{}}
                                 the query's first micro-batch: Spark asks for the initial offset again after a
                                 restart, and "latest" would then differ. Counts only if no micro-batch came before
{"topic":{"0":42},"start of micro-batch {\\"topic\\":{\\"0\\":23}}":{}}
                                 topics that were created again, and partitions that come back

No topic can have such a name, and without partitions it means nothing to Spark's own Kafka connector, which can go on
from the same checkpoint. Checkpoints written before say {"start of topic":{"0":23}}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.trees.checkpoint import START_OF, from_json as from_json, to_json as to_json

TopicPartition = tuple[str, int]
Offsets = dict[TopicPartition, int]
Each = tuple[tuple[TopicPartition, int], ...]

#: How the names begin that hold a start as JSON.
_QUERY, _MICRO_BATCH = START_OF + "query ", START_OF + "micro-batch "
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_RELATIVE_TIME = re.compile(r"-(\d{1,18})\s*(ms|s|m|h|d|w)")
_RECORDS_BEFORE_END = re.compile(r"-(\d{1,18})")
#: Since Python 3.11 `datetime.fromisoformat` accepts more forms, even bare numbers.
_ISO_TIME = re.compile(r"\d{4}-\d{2}-\d{2}(T| |$).*", re.IGNORECASE)
_INT64_MAX = (1 << 63) - 1
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}


@dataclass(frozen=True)
class _PartitionValues:
    everywhere: int | None = None
    each: Each = ()

    def values(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The value of each partition: an offset, EARLIEST, LATEST, or a timestamp in ms."""
        each = dict(self.each)
        return {key: each[key] if self.everywhere is None else self.everywhere for key in partitions}


class OffsetSpec(_PartitionValues):
    """Either EARLIEST or LATEST for all partitions (`everywhere`), or one offset per partition (`each`)."""

    @property
    def holds_latest(self) -> bool:
        return LATEST in (self.everywhere, *(offset for _, offset in self.each))

    @property
    def holds_earliest(self) -> bool:
        return EARLIEST in (self.everywhere, *(offset for _, offset in self.each))


@dataclass(frozen=True)
class TimeSpec(_PartitionValues):
    """The first record at or after a timestamp (ms), one for all partitions or one per partition.

    If a partition has no record that late: its end, or an error if `strict`.
    """

    strict: bool = False


@dataclass(frozen=True)
class BeforeEndSpec:
    """So many offsets before the end of each partition, but not before its first record.

    Some may have no record, by transactions and compaction. `klog consume` counts records instead.
    """

    count: int


@dataclass(frozen=True)
class GroupSpec:
    """The offsets that a group has committed; partitions without one start at their first record."""

    group: str


Spec = OffsetSpec | TimeSpec | BeforeEndSpec | GroupSpec


def _json(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"option {option}={text!r} is not JSON: {error}") from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"option {option}={text!r} must be a JSON object with one entry per topic")
    return value


def _by_partition(option: str, text: str, smallest: int, what: str) -> Each:
    """Parse {"topic":{"0":NUMBER}} with numbers from `smallest` to the largest INT64."""
    each: Offsets = {}
    for topic, partitions in _json(option, text).items():
        if not isinstance(partitions, dict):
            raise ConfigError(f"option {option}: topic {topic} must have a JSON object with one entry per partition")
        for partition, number in partitions.items():
            is_number = type(number) is int and smallest <= number <= _INT64_MAX
            if not partition.isdecimal() or not is_number:
                raise ConfigError(f"option {option}: {topic}-{partition}: {number!r} is not a valid {what}")
            each[topic, int(partition)] = number
    return tuple(sorted(each.items()))


def parse_offsets(
    option: str, text: str, now: Callable[[], int], group: str | None = None, zone: tzinfo | None = None
) -> Spec:
    """Parse every form but timestamps; `now` returns the time in ms. `ConfigError` for anything else.

    `zone` is that of an ISO time that names none. Without it such a time is refused: Spark does not tell a Python
    source the session's zone, which filters use.
    """
    word = text.strip().lower()
    if word in _WORDS:
        return OffsetSpec(_WORDS[word])
    if word == "group":
        if group is None:
            raise ConfigError(f"option {option}=group needs kafka.group.id, the group whose offsets to use")
        return GroupSpec(group)
    if word.startswith("{"):
        return OffsetSpec(each=_by_partition(option, text, EARLIEST, "offset"))
    if relative := _RELATIVE_TIME.fullmatch(word):
        return TimeSpec(max(0, now() - int(relative[1]) * _UNIT_MS[relative[2]]))
    if (before := _RECORDS_BEFORE_END.fullmatch(word)) and int(before[1]):
        return BeforeEndSpec(int(before[1]))
    try:
        if not _ISO_TIME.fullmatch(word):
            raise ValueError
        time = datetime.fromisoformat(re.sub(r"(?<=\d)[zZ]$", "+00:00", text.strip()))
    except ValueError:
        raise ConfigError(
            f'option {option}={text!r} must be earliest, latest, {{"topic":{{"0":23}}}}, a time before now (-10m), '
            "offsets before the end (-1000), an ISO time with its zone, or group"
        ) from None
    if time.tzinfo is None:
        if zone is None:
            raise ConfigError(
                f"option {option}={text!r} names no time zone: append Z for UTC or an offset like +01:00; "
                "spark.sql.session.timeZone does not reach a source in Python"
            )
        time = time.replace(tzinfo=zone)
    # At least 0: negative times have special meanings in ListOffsets.
    return TimeSpec(max(0, round(time.timestamp() * 1000)))


def parse_timestamp(option: str, text: str, strict: bool) -> TimeSpec:
    """Parse one timestamp (ms) for all partitions; `ConfigError` for anything else."""
    if not re.fullmatch(r"\d{1,19}", text.strip()) or int(text) > _INT64_MAX:
        raise ConfigError(f"option {option}={text!r} must be a timestamp in ms since the epoch")
    return TimeSpec(int(text), strict=strict)


def parse_timestamps(option: str, text: str, strict: bool) -> TimeSpec:
    """Parse {"topic":{"0":1700000000000}}; `ConfigError` for anything else."""
    return TimeSpec(each=_by_partition(option, text, 0, "timestamp"), strict=strict)


def parse_assign(text: str) -> dict[str, list[int]]:
    """Parse {"topic":[0,1]}; `ConfigError` for anything else."""
    result = {}
    for topic, partitions in _json("assign", text).items():
        if (
            not isinstance(partitions, list)
            or not partitions
            or not all(type(partition) is int and partition >= 0 for partition in partitions)
        ):
            raise ConfigError(f"option assign: topic {topic} must have a list of partitions")
        result[topic] = sorted(set(partitions))
    return result


def with_start(
    end: Mapping[TopicPartition, int],
    start: Mapping[TopicPartition, int],
    before: Mapping[TopicPartition, int],
    *,
    is_first: bool,
) -> dict[str, dict[str, int]]:
    """The checkpoint's entry for a micro-batch from `start` to `end`, after one that ended at `before`.

    It is never empty: an empty entry means that the query has no micro-batch yet.
    """
    begun = to_json({key: offset for key, offset in start.items() if key in end and offset != before.get(key, 0)})
    value = to_json(end)
    if begun:
        value[(_QUERY if is_first else _MICRO_BATCH) + json.dumps(begun, separators=(",", ":"))] = {}
    return value or {START_OF: {}}


def start_in(
    value: Mapping[str, Mapping[str, int]], before: Mapping[TopicPartition, int], *, is_first: bool
) -> Offsets:
    """The start of a micro-batch, from its entry and the end of the one before; missing partitions start at 0.

    `DecodeError` if the entry's start is malformed.
    """
    start = dict(before)
    for name, partitions in value.items():
        if name.startswith(_MICRO_BATCH) or (is_first and name.startswith(_QUERY)):
            start |= _decoded(name)
        elif name.startswith(START_OF) and not name.startswith(_QUERY):
            start |= from_json({name.removeprefix(START_OF): partitions})
    return start


def _decoded(name: str) -> Offsets:
    try:
        return from_json(json.loads(name.split(" ", 3)[3]))
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise DecodeError(f"the checkpoint's entry {name[:200]!r} is not JSON with offsets by topic") from None
