"""Places in partitions: what people write for where a query, a command or a load starts and ends.

"earliest", "latest"                         for all partitions
{"topic":{"0":23,"1":-2}}                    one offset per partition; -2 is earliest, -1 latest
{"topic":"earliest","other":{"0":23}}        or one of the words (or -2, -1) for a topic as a whole (SPARK-58774)
"1700000000000", {"topic":{"0":170...}}      a timestamp (ms) for all partitions or one each (timestamp options only)
"-10m", "2026-11-21T10:00:00Z"               a time: relative (ms, s, m, h, d, w) or ISO 8601 with its zone
"-1000"                                      so many offsets before the end of each partition
"group"                                      the committed offsets of the group kafka.group.id
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import INT64_MAX, distinct, some_of
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import NO_OFFSET, list_offsets
from spark_klog.errors import ConfigError, PartitionsMismatch
from spark_klog.protocol.tables.records import EARLIEST, LATEST

Offsets = dict[TopicPartition, int]
Each = tuple[tuple[TopicPartition, int], ...]

#: Of `spark_klog.read`, which has no group; other names are those of options of Spark's source, and of the command.
_ARGUMENTS = ("start", "end")
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_RELATIVE_TIME = re.compile(r"-(\d{1,18})\s*(ms|s|m|h|d|w)")
_RECORDS_BEFORE_END = re.compile(r"-(\d{1,18})")
#: Since Python 3.11 `datetime.fromisoformat` accepts more forms, even bare numbers.
_ISO_TIME = re.compile(r"\d{4}-\d{2}-\d{2}(T| |$).*", re.IGNORECASE)
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}


@dataclass(frozen=True)
class _PartitionValues:
    everywhere: int | None = None
    each: Each = ()

    def values(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The value of each partition: an offset, EARLIEST, LATEST, or a timestamp in ms."""
        each = dict(self.each)
        return {key: each[key] if self.everywhere is None else self.everywhere for key in partitions}


@dataclass(frozen=True)
class OffsetSpec(_PartitionValues):
    """EARLIEST or LATEST for all partitions (`everywhere`); or one offset per partition (`each`), and for `topics`, as
    far as they are not there, EARLIEST or LATEST for all partitions of each.
    """

    topics: tuple[tuple[str, int], ...] = ()

    def values(self, partitions: Collection[TopicPartition]) -> Offsets:
        if not self.topics:
            return super().values(partitions)
        each, topics = dict(self.each), dict(self.topics)
        return {key: each[key] if key in each else topics[key[0]] for key in partitions}

    def holders(self, offset: int) -> list[str]:
        """What has this offset, for messages: "all partitions", or names of partitions and topics."""
        if self.everywhere is not None:
            return ["all partitions"] if self.everywhere == offset else []
        holders = [f"{topic}-{partition}" for (topic, partition), value in self.each if value == offset]
        return holders + [f"topic {topic}" for topic, value in self.topics if value == offset]


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


def check_covers(option: str, spec: Spec, partitions: Collection[TopicPartition]) -> None:
    """`PartitionsMismatch` unless a map of offsets or timestamps names exactly the partitions that are read."""
    if not isinstance(spec, OffsetSpec | TimeSpec) or spec.everywhere is not None:
        return
    topics = [topic for topic, _ in spec.topics] if isinstance(spec, OffsetSpec) else []
    named = {key for key, _ in spec.each}
    missing = sorted(key for key in set(partitions) - named if key[0] not in topics)
    there = {topic for topic, _ in partitions}
    extra = [f"{topic}-{partition}" for topic, partition in sorted(named - set(partitions))]
    extra += [f"topic {topic}" for topic in topics if topic not in there]
    if missing or extra:
        words = [
            f"{what}: {some_of(names)}"
            for what, names in (
                ("missing", [f"{topic}-{partition}" for topic, partition in missing]),
                ("not read", extra),
            )
            if names
        ]
        raise PartitionsMismatch(f"{_named(option)} must name exactly the partitions that are read: {'; '.join(words)}")


def offsets_at(cluster: Cluster, place: OffsetSpec | TimeSpec | int, end: Offsets) -> Offsets:
    """The offset that a place means in each partition, given the partitions' ends; an offset is taken as it is."""
    if isinstance(place, int):
        return dict.fromkeys(end, place)
    offsets = list_offsets(cluster, place.values(end))
    return {key: end[key] if offsets[key] == NO_OFFSET else min(offsets[key], end[key]) for key in end}


def warning_of_future(option: str, place: Spec | int, start: Offsets, end: Offsets) -> str | None:
    """What to warn of where a read starts at a time to come, and no record is as late; None elsewhere."""
    if not isinstance(place, TimeSpec) or any(start[key] < last for key, last in end.items()):
        return None
    if min(place.values(end).values(), default=0) <= system_ms():
        return None
    return f"{option} is in the future, and no record is as late: reading begins at the end of each partition"


def _json(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=distinct)
    except ConfigError as error:
        raise ConfigError(f"{_named(option)}={text!r} {error}") from None
    except ValueError as error:
        raise ConfigError(f"{_named(option)}={text!r} is not JSON: {error}") from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{_named(option)}={text!r} must be a JSON object with one entry per topic")
    return value


def _by_partition(option: str, topics: Mapping[str, Any], smallest: int, what: str) -> Each:
    """Parse {"topic":{"0":NUMBER}} with numbers from `smallest` to the largest INT64."""
    each: Offsets = {}
    for topic, partitions in topics.items():
        if not isinstance(partitions, dict):
            raise ConfigError(f"{_named(option)}: topic {topic} must have a JSON object with one entry per partition")
        for partition, number in partitions.items():
            is_number = type(number) is int and smallest <= number <= INT64_MAX
            if not partition.isdecimal() or not is_number:
                raise ConfigError(f"{_named(option)}: {topic}-{partition}: {number!r} is not a valid {what}")
            each[topic, int(partition)] = number
    return tuple(sorted(each.items()))


def parse_place(
    text: str, zone: tzinfo | None = timezone.utc, now: Callable[[], int] = system_ms
) -> OffsetSpec | TimeSpec | BeforeEndSpec | None:
    """Parse earliest, latest, a number of offsets before the end, or a time; None for anything else.

    `zone` is that of an ISO time that names none: None for such a time, if `zone` is None. `now` returns ms.
    """
    word = text.strip().lower()
    if word in _WORDS:
        return OffsetSpec(_WORDS[word])
    if relative := _RELATIVE_TIME.fullmatch(word):
        return TimeSpec(max(0, now() - int(relative[1]) * _UNIT_MS[relative[2]]))
    if (before := _RECORDS_BEFORE_END.fullmatch(word)) and int(before[1]):
        return BeforeEndSpec(int(before[1]))
    if not _ISO_TIME.fullmatch(word):
        return None
    try:
        time = datetime.fromisoformat(re.sub(r"(?<=\d)[zZ]$", "+00:00", text.strip()))
    except ValueError:
        return None
    if time.tzinfo is None:
        if zone is None:
            return None
        time = time.replace(tzinfo=zone)
    # At least 0: negative times have special meanings in ListOffsets.
    return TimeSpec(max(0, round(time.timestamp() * 1000)))


def parse_time(option: str, text: str, zone: tzinfo = timezone.utc) -> int:
    """Parse an ISO time, in `zone` unless it names its own, ms since the epoch, or a time before now, to ms.

    `ConfigError` for anything else.
    """
    if re.fullmatch(r"\d{1,19}", text.strip()) and int(text) <= INT64_MAX:
        return int(text)
    place = parse_place(text, zone)
    if not isinstance(place, TimeSpec) or place.everywhere is None:
        raise ConfigError(
            f"{option} {text} must be an ISO time (2026-11-21T10:00:00Z), ms since the epoch, or a time before now "
            "(-10m; ms, s, m, h, d, w)"
        )
    return place.everywhere


def parse_offsets(option: str, text: str, now: Callable[[], int], group: str | None = None) -> Spec:
    """Parse every form but timestamps, for an option of Spark; `now` returns ms. `ConfigError` for anything else.

    An ISO time without a zone is refused: Spark does not tell a Python source the session's zone, which filters use.
    """
    word = text.strip().lower()
    if word == "group":
        if group is None:
            raise ConfigError(f"{_named(option)}=group needs kafka.group.id, the group whose offsets to use")
        return GroupSpec(group)
    if word.startswith("{"):
        return _offsets_by_topic(option, text)
    place = parse_place(text, None, now)
    if place is None and parse_place(text) is not None:
        raise ConfigError(
            f"{_named(option)}={text!r} names no time zone: append Z for UTC or an offset like +01:00"
            + ("" if option in _ARGUMENTS else "; spark.sql.session.timeZone does not reach a source in Python")
        )
    if place is None:
        raise ConfigError(
            f'{_named(option)}={text!r} must be earliest, latest, {{"topic":{{"0":23}},"other":"earliest"}}, a time'
            " before now (-10m), offsets before the end (-1000), "
            + ("or an ISO time with its zone" if option in _ARGUMENTS else "an ISO time with its zone, or group")
        )
    return place


def _named(option: str) -> str:
    """An option as its user knows it: one of Spark's source, an argument of `spark_klog.read`, or the command's."""
    return option if option in _ARGUMENTS or option.startswith("-") else f"option {option}"


def offsets_by_partition(option: str, text: str) -> OffsetSpec:
    """Parse {"topic":{"0":23}}; `ConfigError` for anything else."""
    return OffsetSpec(each=_by_partition(option, _json(option, text), EARLIEST, "offset"))


def _offsets_by_topic(option: str, text: str) -> OffsetSpec:
    """Parse {"topic":{"0":23},"other":"earliest"}, as Spark 4.4 (SPARK-58774); `ConfigError` for anything else."""
    topics: dict[str, int] = {}
    others: dict[str, Any] = {}
    for topic, value in _json(option, text).items():
        if isinstance(value, dict):
            others[topic] = value
            continue
        offset = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
        if type(offset) is not int or offset not in _WORDS.values():
            raise ConfigError(
                f"{_named(option)}: topic {topic} has {json.dumps(value)}: give an offset for each partition "
                '({"0":23,"1":-2}), or "earliest" or "latest" for all of them'
            )
        topics[topic] = offset
    return OffsetSpec(each=_by_partition(option, others, EARLIEST, "offset"), topics=tuple(sorted(topics.items())))


def parse_timestamp(option: str, text: str, strict: bool) -> TimeSpec:
    """Parse one timestamp (ms) for all partitions; `ConfigError` for anything else."""
    if not re.fullmatch(r"\d{1,19}", text.strip()) or int(text) > INT64_MAX:
        dated = option.replace("Timestamp", "Offsets")
        raise ConfigError(
            f"{_named(option)}={text!r} must be a timestamp in ms since the epoch; {dated} takes ISO times"
        )
    return TimeSpec(int(text), strict=strict)


def parse_timestamps(option: str, text: str, strict: bool) -> TimeSpec:
    """Parse {"topic":{"0":1700000000000}}; `ConfigError` for anything else."""
    return TimeSpec(each=_by_partition(option, _json(option, text), 0, "timestamp"), strict=strict)


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
