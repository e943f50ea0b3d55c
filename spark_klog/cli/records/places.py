"""Where to begin and to stop reading: the words of --from and --until."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.client import Consumer, places as client_places
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.consumer import read_ranges
from spark_klog.client.offsets import first_and_end, high_watermarks
from spark_klog.client.places import BeforeEndSpec, OffsetSpec, TimeSpec, offsets_at, warning_of_future
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.records import EARLIEST

Place = OffsetSpec | TimeSpec | BeforeEndSpec | int
Offsets = Mapping[TopicPartition, int]

_OTHER_NAMES = {"beginning": "earliest", "end": "latest"}
#: s@MS and e@MS, where kcat starts and ends.
_TIMES_OF_KCAT = re.compile(r"[se]@([0-9]{1,14})")
_LARGEST_OFFSET = (1 << 63) - 1
#: The most offsets before the end in which so many records are looked for, unless more are asked for.
_FARTHEST = 1_000_000
_GROWTH = 4


def parse_place(option: str, text: str) -> Place:
    """Parse an offset, earliest, latest, -10 (records before the end), -1h or an ISO time, UTC if it names no zone.

    `ConfigError` for anything else.
    """
    word = text.strip().lower()
    if word.isdecimal() and int(word) <= _LARGEST_OFFSET:
        return int(word)
    if (place := client_places.parse_place(_OTHER_NAMES.get(word, text))) is not None:
        return place
    if match := _TIMES_OF_KCAT.fullmatch(word):
        time = datetime.fromtimestamp(int(match[1]) / 1000, timezone.utc).isoformat(timespec="milliseconds")
        raise ConfigError(f"{option} {text}: klog takes times as {time.replace('+00:00', 'Z')}, or -1h")
    raise ConfigError(
        f"{option} {text} must be earliest, latest, an offset, records before the end (-10), a time before now "
        "(-1h; ms, s, m, h, d, w) or an ISO time (2026-11-21T10:00:00Z)"
    )


def _before_end(
    settings: Mapping[str, Any], count: int, first: Offsets, end: Offsets
) -> tuple[dict[TopicPartition, int], list[str]]:
    """The offset of the last record but `count` - 1 in each partition, and what to warn of.

    Markers of transactions, aborted records and gaps of compaction are offsets without a record, so that records are
    counted: backwards, in ranges that grow up to `_FARTHEST` offsets from the end.
    """
    distance, farthest = count, max(_FARTHEST, count)
    # where the ranges that are read begin, and the offsets of the records in them
    starts, tails = dict(end), {key: array("q") for key in end}
    while begins := {
        key: max(first[key], end[key] - distance)
        for key, start in starts.items()
        if len(tails[key]) < count and start > first[key] and end[key] - start < farthest
    }:
        offsets = {key: array("q") for key in begins}
        with Consumer(settings) as consumer:
            counted = {key: (start, starts[key]) for key, start in begins.items()}
            for records, _ in read_ranges(consumer, counted, as_arrow=False):
                for record in records:
                    offsets[record.topic, record.partition].append(record.offset)
        for key, start in begins.items():
            tails[key] = offsets[key] + tails[key]
            starts[key] = start
        distance = min(_GROWTH * distance, farthest)
    warnings = [
        f"{topic}-{partition} has {len(tail)} records in its last {_FARTHEST:,} offsets"
        for (topic, partition), tail in tails.items()
        if len(tail) < count and starts[topic, partition] > first[topic, partition]
    ]
    return {key: tail[-count] if len(tail) >= count else starts[key] for key, tail in tails.items()}, warnings


def check_until(place: Place) -> None:
    """`ConfigError` for a time to come: what will be written until then is not known."""
    if isinstance(place, TimeSpec) and place.everywhere is not None and place.everywhere > system_ms():
        raise ConfigError("--until must not be in the future: use --follow, and end it with Ctrl-C")


def ranges(
    cluster: Cluster, settings: Mapping[str, Any], keys: list[TopicPartition], begin: Place, until: Place
) -> tuple[dict[TopicPartition, tuple[int, int]], list[str]]:
    """The offsets to read of each partition, [start, stop), and what to warn of.

    `settings` are those of a consumer, which counts records if a place is a number of them.

    `ConfigError` if a start is beyond a partition's end: a typing error, or the offset of another topic.
    """
    first, end = first_and_end(cluster, keys)
    warnings: list[str] = []
    bounds = []
    for place in (begin, until):
        if isinstance(place, BeforeEndSpec):
            offsets, few = _before_end(settings, place.count, first, end)
            warnings += few
        else:
            offsets = dict(first) if place == OffsetSpec(EARLIEST) else offsets_at(cluster, place, end)
        bounds.append(offsets)
    starts, stops = bounds
    if warning := warning_of_future("--from", begin, starts, end):
        warnings.append(warning)
    beyond = {key: start for key, start in starts.items() if start > end[key]}
    log_end = high_watermarks(cluster, beyond)  # with read_committed a start may be in an open transaction
    for (topic, partition), start in beyond.items():
        if start > (last := log_end[topic, partition]):
            raise ConfigError(f"--from {start} is beyond the end of {topic}-{partition}, which is {last}")
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
