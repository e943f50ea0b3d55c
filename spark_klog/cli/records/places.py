"""Where to begin and to stop reading: the words of --from and --until."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.offsets import NO_OFFSET, high_watermarks, list_offsets
from spark_klog.clock import system_ms
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.spark.offsets import BeforeEndSpec, OffsetSpec, TimeSpec, parse_offsets

Place = OffsetSpec | TimeSpec | BeforeEndSpec | int
Offsets = Mapping[TopicPartition, int]

_OTHER_NAMES = {"beginning": "earliest", "end": "latest"}
#: s@MS and e@MS, where kcat starts and ends.
_TIMES_OF_KCAT = re.compile(r"[se]@([0-9]{1,14})")
_LARGEST_OFFSET = (1 << 63) - 1


def parse_place(option: str, text: str) -> Place:
    """Parse an offset, earliest, latest, -10 (records before the end), -1h or an ISO time; `ConfigError`."""
    word = text.strip().lower()
    if word.isdecimal() and int(word) <= _LARGEST_OFFSET:
        return int(word)
    try:
        spec = parse_offsets(option, _OTHER_NAMES.get(word, text), system_ms)
    except ConfigError:
        spec = None
    if isinstance(spec, TimeSpec | BeforeEndSpec) or (isinstance(spec, OffsetSpec) and not spec.each):
        return spec
    if found := _TIMES_OF_KCAT.fullmatch(word):
        time = datetime.fromtimestamp(int(found[1]) / 1000, timezone.utc).isoformat(timespec="milliseconds")
        raise ConfigError(f"{option} {text}: klog takes times as {time.replace('+00:00', 'Z')}, or -1h")
    raise ConfigError(
        f"{option} {text} must be earliest, latest, an offset, records before the end (-10), a time before now "
        "(-1h; ms, s, m, h, d, w) or an ISO time (2026-11-21T10:00:00Z)"
    )


def offsets_of(cluster: Cluster, place: Place, first: Offsets, end: Offsets) -> dict[TopicPartition, int]:
    """The offset that a place means in each partition; `first` and `end` are the partitions' ranges."""
    if isinstance(place, int):
        return dict.fromkeys(end, place)
    if isinstance(place, BeforeEndSpec):
        return {key: max(first[key], end[key] - place.records) for key in end}
    if isinstance(place, OffsetSpec):
        return dict(first if place.everywhere == EARLIEST else end)
    found = list_offsets(cluster, place.values(end))
    return {key: end[key] if found[key] == NO_OFFSET else min(found[key], end[key]) for key in end}


def check_until(place: Place) -> None:
    """`ConfigError` for a time to come: what will be written until then is not known."""
    if isinstance(place, TimeSpec) and place.everywhere is not None and place.everywhere > system_ms():
        raise ConfigError("--until must not be in the future: use --follow, and end it with Ctrl-C")


def _check_starts(cluster: Cluster, starts: Offsets) -> None:
    """`ConfigError` for a start beyond the end: with read_committed it may be in an open transaction."""
    end = high_watermarks(cluster, starts)
    for (topic, partition), start in starts.items():
        if start > end[topic, partition]:
            raise ConfigError(
                f"--from {start} is beyond the end of {topic}-{partition}, which is {end[topic, partition]}"
            )


def ranges(
    cluster: Cluster, keys: list[TopicPartition], begin: Place, until: Place
) -> tuple[dict[TopicPartition, tuple[int, int]], list[str]]:
    """The offsets to read of each partition, [start, stop), and what to warn of.

    `ConfigError` if a start is beyond a partition's end: a typing error, or the offset of another topic.
    """
    first = list_offsets(cluster, dict.fromkeys(keys, EARLIEST))
    end = list_offsets(cluster, dict.fromkeys(keys, LATEST))
    starts, stops = offsets_of(cluster, begin, first, end), offsets_of(cluster, until, first, end)
    _check_starts(cluster, {key: start for key, start in starts.items() if start > end[key]})
    warnings = []
    for topic, partition in keys:
        key = topic, partition
        if starts[key] < first[key]:
            if isinstance(begin, int):
                warnings.append(f"{topic}-{partition} begins at offset {first[key]}: the records before it are deleted")
            starts[key] = first[key]
        if isinstance(until, int) and stops[key] > end[key]:
            warnings.append(f"{topic}-{partition} ends at offset {end[key]}, before --until {until}")
        stops[key] = min(stops[key], end[key])
    return {key: (starts[key], stops[key]) for key in keys}, warnings
