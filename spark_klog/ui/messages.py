"""Messages of a topic page by page, the newest or the oldest first."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import NO_OFFSET, list_offsets
from spark_klog.errors import ConfigError, RequestTimedOut
from spark_klog.protocol.tables.records import EARLIEST, LATEST

#: Bytes shown of a key, a value or a header.
_MAX_SHOWN = 64 * 1024
_MAX_HEADERS = 100


def rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Each record of an Arrow batch with headers."""
    for row in batch.to_pylist():
        time: datetime | None = row["timestamp"]
        headers = row["headers"] or []
        yield {
            "topic": row["topic"],
            "partition": row["partition"],
            "offset": row["offset"],
            "timestamp": None if time is None else round(time.timestamp() * 1000),
            "timestampType": row["timestampType"],
            "key": shown(row["key"]),
            "value": shown(row["value"]),
            "headers": [{"key": one["key"], "value": shown(one["value"])} for one in headers[:_MAX_HEADERS]],
            "headerCount": len(headers),
        }


def shown(data: bytes | None) -> dict[str, Any] | None:
    """{"size", "text" or "base64"}, of the first 64 KiB; None for null."""
    if data is None:
        return None
    part = data[:_MAX_SHOWN]
    for cut in range(4):  # a character that the limit has cut
        try:
            return {"size": len(data), "text": part[: len(part) - cut].decode()}
        except UnicodeDecodeError:
            if len(part) == len(data):
                break
    return {"size": len(data), "base64": b64encode(part).decode()}


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


class View(NamedTuple):
    """Messages that a reader asked for: of a topic or a partition, from which place on, and in which direction.

    The newest first, they end at the offsets `reached` (by partition), or with the message at `offset`, or with the
    first one of each partition at or after `at_ms`; by default at the end. The oldest first, they begin there; by
    default with the first message.
    """

    topic: str
    partition: int | None = None
    is_oldest_first: bool = False
    offset: int | None = None
    at_ms: int | None = None
    reached: Mapping[int, int] | None = None


class Place(NamedTuple):
    """Where a view begins: the first, the end and the edge's offset of each partition; `note` as `page` returns it."""

    first: dict[TopicPartition, int]
    end: dict[TopicPartition, int]
    edge: dict[TopicPartition, int]
    note: str | None


def place_of(admin: Admin, view: View) -> Place:
    """Look up where a view begins; `ConfigError` if the topic has no such partition."""
    first, end = partition_ranges(admin, view.topic, view.partition)
    edge, note = (first if view.is_oldest_first else end), None
    after = 0 if view.is_oldest_first else 1  # the newest first, the edge is after the message
    if view.reached is not None:
        edge = {key: min(end[key], max(first[key], view.reached.get(key[1], edge[key]))) for key in end}
    elif view.offset is not None:
        edge = {key: min(end[key], max(first[key], view.offset) + after) for key in end}
        note = _no_offset(view.offset, first, end, view.is_oldest_first)
    elif view.at_ms is not None:
        with admin.exclusive() as cluster:
            found = list_offsets(cluster, dict.fromkeys(end, view.at_ms))
        edge = {key: end[key] if found[key] == NO_OFFSET else min(end[key], found[key] + after) for key in end}
        if all(place == NO_OFFSET for place in found.values()):
            note = "no message has this time or a later one" + (
                "" if view.is_oldest_first else ": the newest are shown"
            )
    return Place(first, end, edge, note)


def page(admin: Admin, new_consumer: NewConsumer, view: View, count: int) -> dict[str, Any]:
    """At most `count` messages of a view, in its order.

    `before` of the answer (`after`, if the oldest are first) is where the next page goes on, None if there is nothing
    more; `note` says that what was asked for does not exist, None if it does.
    """
    first, end, edge, note = place_of(admin, view)
    is_newest_first = not view.is_oldest_first
    limit = first if is_newest_first else end
    each = max(10, -(-2 * count // max(1, len(edge))))
    window = min(each, count)
    messages: list[dict[str, Any]] = []
    is_too_large = False
    for _ in range(_ROUNDS):
        if is_newest_first:
            far = {key: max(first[key], edge[key] - window) for key in edge}
        else:
            far = {key: min(end[key], edge[key] + window) for key in edge}
        ranges = {key: (min(far[key], edge[key]), max(far[key], edge[key])) for key in edge if far[key] != edge[key]}
        messages, is_whole = _read(new_consumer, ranges)
        if not is_whole and window > 1:
            window, is_too_large = max(1, window // _GROWTH), True
            continue
        if len(messages) >= count or far == limit or is_too_large:
            break
        window *= _GROWTH
    messages.sort(key=lambda row: (row["timestamp"] or 0, row["offset"], row["partition"]), reverse=is_newest_first)
    # A partition whose window ends early may have unread messages as far as its last one here: stop there.
    last = {row["partition"]: row["timestamp"] or 0 for row in messages}
    bounds = [last[key[1]] for key in edge if key[1] in last and far[key] != limit[key]]
    kept = messages[:count]
    if bounds and is_newest_first:
        kept = [row for row in kept if (row["timestamp"] or 0) >= max(bounds)]
    elif bounds:
        kept = [row for row in kept if (row["timestamp"] or 0) <= min(bounds)]
    # Cut by partition: a partition's messages of one page are consecutive, so that the next page goes on there.
    reached = {key[1]: edge[key] for key in edge}
    for row in kept:
        number, offset = row["partition"], row["offset"]
        reached[number] = min(reached[number], offset) if is_newest_first else max(reached[number], offset + 1)
    kept = [row for row in messages if (row["offset"] >= reached[row["partition"]]) == is_newest_first]
    read = {row["partition"] for row in messages}
    for key in edge:  # a window without any record: go on beyond it
        if key[1] not in read:
            reached[key[1]] = far[key]
    is_more = any(reached[number] != limit[view.topic, number] for _, number in edge)
    onward = {str(number): place for number, place in reached.items()} if is_more else None
    return {
        "topic": view.topic,
        "note": note,
        "messages": kept,
        "before": onward if is_newest_first else None,
        "after": None if is_newest_first else onward,
        "first": {str(key[1]): place for key, place in first.items()},
        "end": {str(key[1]): place for key, place in end.items()},
    }


def _no_offset(
    offset: int, first: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], is_oldest_first: bool
) -> str | None:
    """Which partitions do not reach to the offset, and what is shown of them."""
    there = {key: (first[key], end[key]) for key in sorted(end) if first[key] < end[key]}
    beyond = [number for (_, number), (_, stop) in there.items() if offset >= stop]
    earlier = [number for (_, number), (start, _) in there.items() if offset < start]
    if not there and offset > 0:
        following = max(end.values(), default=0)
        has = (
            "has no messages: its next offset is" if len(end) == 1 else "have no messages: their next offset is at most"
        )
        return f"{_named([number for _, number in end])} {has} {following}"
    said = []
    if beyond:
        last = max(stop for _, stop in there.values() if offset >= stop) - 1
        most = "" if len(beyond) == 1 else "at most "
        shown = "there are no messages from there on" if is_oldest_first else "the newest messages are shown"
        said.append(
            f"offset {offset} is beyond the end of {_named(beyond)}, whose last offset is {most}{last}: {shown}"
        )
    if earlier:
        begin = min(start for start, _ in there.values() if offset < start)
        least = "" if len(earlier) == 1 else "at least "
        shown = "there are no messages before that" if is_oldest_first else "the oldest message is shown"
        said.append(
            f"offset {offset} is before the start of {_named(earlier)}, whose first offset is {least}{begin}: {shown}"
        )
    return "; ".join(said) or None


def _named(partitions: list[int]) -> str:
    return f"partition {partitions[0]}" if len(partitions) == 1 else f"{len(partitions)} partitions"


def _read(
    new_consumer: NewConsumer, ranges: Mapping[TopicPartition, tuple[int, int]]
) -> tuple[list[dict[str, Any]], bool]:
    """The records of ranges [start, stop); and False if they were more bytes than the limit, where it stopped."""
    found: list[dict[str, Any]] = []
    size = 0
    for batch in batches_of(new_consumer, ranges, _SECONDS):
        size += batch.nbytes
        found += rows(batch)
        if size > _MAX_BYTES:
            return found, False
    return found, True


def batches_of(
    new_consumer: NewConsumer, ranges: Mapping[TopicPartition, tuple[int, int]], seconds: float
) -> Iterator[pa.RecordBatch]:
    """Read ranges [start, stop), each batch of one partition; `RequestTimedOut` if that takes more than `seconds`."""
    if not ranges:
        return
    stops = {key: stop for key, (_, stop) in ranges.items()}
    deadline = time.monotonic() + seconds
    with new_consumer() as consumer:
        consumer.assign([(*key, start) for key, (start, _) in ranges.items()])
        while stops and time.monotonic() < deadline:
            batch = consumer.poll_arrow(0.1)
            if batch is not None:
                stop = ranges[batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()][1]
                yield batch.slice(0, int(batch.column("offset").to_numpy().searchsorted(stop)))
            done = [key for key, stop in stops.items() if consumer.position(*key) >= stop]
            consumer.pause(done)
            for key in done:
                del stops[key]
        for (topic, number), stop in stops.items():
            left = f"{stop - consumer.position(topic, number)} offsets of {topic}-{number}"
            raise RequestTimedOut(f"{left} could not be read within {seconds:.0f} s; choose fewer, or one partition")
