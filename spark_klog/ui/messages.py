"""Messages of a topic, the newest first, page by page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import NO_OFFSET, list_offsets
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.ui.records import rows

#: Makes a consumer that is in no group.
NewConsumer = Callable[[], Consumer]
MAX_COUNT = 500
#: Windows tried for a page: compaction and transactions' markers leave offsets without records.
_ROUNDS, _GROWTH = 4, 8
_SECONDS = 20.0
#: Bytes of records read for a page.
_MAX_BYTES = 64 * 1024 * 1024


def partition_ranges(
    admin: Admin, topic: str, partition: int | None
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """(first, end) offsets of a topic's partitions, or of one; `ConfigError` if it has no such partition."""
    with admin.exclusive() as cluster:
        numbers = list(cluster.partitions([topic])[topic])
        if partition is not None and partition not in numbers:
            raise ConfigError(f"topic {topic} has no partition {partition}: it has {len(numbers)}, from 0 on")
        keys = [(topic, number) for number in numbers if partition in (None, number)]
        first, end = (list_offsets(cluster, dict.fromkeys(keys, place)) for place in (EARLIEST, LATEST))
    return first, end


def page(
    admin: Admin,
    new_consumer: NewConsumer,
    topic: str,
    partition: int | None,
    count: int,
    before: Mapping[int, int] | None = None,
    offset: int | None = None,
    at_ms: int | None = None,
) -> dict[str, Any]:
    """At most `count` messages, the newest first.

    They end at the offsets `before` (by partition), or with the message at `offset` or the nearest one, or with the
    first one of each partition at or after `at_ms`; by default at the end. `before` of the answer is where the next
    page ends, None if there is nothing older; `note` says that what was asked for does not exist, None if it does.
    """
    first, end = partition_ranges(admin, topic, partition)
    stop = dict(end)
    note = None
    if before is not None:
        stop = {key: min(end[key], max(first[key], before.get(key[1], end[key]))) for key in end}
    elif offset is not None:
        stop = {key: min(end[key], max(first[key], offset) + 1) for key in end}
        note = _no_offset(offset, first, end)
    elif at_ms is not None:
        with admin.exclusive() as cluster:
            found = list_offsets(cluster, dict.fromkeys(end, at_ms))
        stop = {key: end[key] if found[key] == NO_OFFSET else min(end[key], found[key] + 1) for key in end}
        if all(place == NO_OFFSET for place in found.values()):
            note = "no message has this time or a later one: the newest are shown"
    each = max(10, -(-2 * count // max(1, len(stop))))
    window = min(each, count)
    messages: list[dict[str, Any]] = []
    for _ in range(_ROUNDS):
        start = {key: max(first[key], stop[key] - window) for key in stop}
        messages = _read(new_consumer, {key: (start[key], stop[key]) for key in stop if start[key] < stop[key]})
        if len(messages) >= count or start == first:
            break
        window *= _GROWTH
    messages.sort(key=lambda row: (row["timestamp"] or 0, row["offset"], row["partition"]), reverse=True)
    # A partition whose window ends early may have unread messages as old as its oldest one here: stop there.
    oldest = {row["partition"]: row["timestamp"] or 0 for row in messages}
    floor = max((oldest[key[1]] for key in stop if key[1] in oldest and start[key] > first[key]), default=0)
    kept = [row for row in messages[:count] if (row["timestamp"] or 0) >= floor]
    # Cut by partition: a partition's messages of one page are consecutive, so that the next page goes on there.
    lowest = {key[1]: stop[key] for key in stop}
    for row in kept:
        lowest[row["partition"]] = min(lowest[row["partition"]], row["offset"])
    kept = [row for row in messages if row["offset"] >= lowest[row["partition"]]]
    seen = {row["partition"] for row in kept}
    for key in stop:  # a window without any record: go on before it
        if key[1] not in seen and not any(row["partition"] == key[1] for row in messages):
            lowest[key[1]] = start[key]
    is_more = any(lowest[number] > first[topic, number] for _, number in stop)
    return {
        "topic": topic,
        "note": note,
        "messages": kept,
        "before": {str(number): place for number, place in lowest.items()} if is_more else None,
        "first": {str(key[1]): place for key, place in first.items()},
        "end": {str(key[1]): place for key, place in end.items()},
    }


def _no_offset(offset: int, first: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> str | None:
    """Which partitions do not reach to the offset, and what is shown of them."""
    there = {key: (first[key], end[key]) for key in sorted(end) if first[key] < end[key]}
    beyond = [number for (_, number), (_, stop) in there.items() if offset >= stop]
    earlier = [number for (_, number), (start, _) in there.items() if offset < start]
    said = []
    if beyond:
        last = max(stop for _, stop in there.values() if offset >= stop) - 1
        most = "" if len(beyond) == 1 else "at most "
        said.append(
            f"offset {offset} is beyond the end of {_named(beyond)}, whose last offset is {most}{last}: the newest "
            "messages are shown"
        )
    if earlier:
        begin = min(start for start, _ in there.values() if offset < start)
        least = "" if len(earlier) == 1 else "at least "
        said.append(
            f"offset {offset} is before the start of {_named(earlier)}, whose first offset is {least}{begin}: the "
            "oldest message is shown"
        )
    return "; ".join(said) or None


def _named(partitions: list[int]) -> str:
    return f"partition {partitions[0]}" if len(partitions) == 1 else f"{len(partitions)} partitions"


def _read(new_consumer: NewConsumer, ranges: Mapping[TopicPartition, tuple[int, int]]) -> list[dict[str, Any]]:
    """The records of ranges [start, stop), within limits of time and bytes."""
    if not ranges:
        return []
    found: list[dict[str, Any]] = []
    stops = {key: stop for key, (_, stop) in ranges.items()}
    size, deadline = 0, time.monotonic() + _SECONDS
    with new_consumer() as consumer:
        consumer.assign([(*key, start) for key, (start, _) in ranges.items()])
        while stops and size < _MAX_BYTES and time.monotonic() < deadline:
            batch = consumer.poll_arrow(0.1)
            if batch is not None:
                size += batch.nbytes
                stop = ranges[batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()][1]
                found += rows(batch.slice(0, _rows_before(batch, stop)))
            done = [key for key, stop in stops.items() if consumer.position(*key) >= stop]
            consumer.pause(done)
            for key in done:
                del stops[key]
    return found


def _rows_before(batch: Any, stop: int) -> int:
    """How many of a batch's first records are before an offset."""
    offsets = batch.column("offset").to_numpy()
    return int(offsets.searchsorted(stop))
