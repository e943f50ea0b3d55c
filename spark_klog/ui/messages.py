"""Messages of a topic: page by page, by a search for text, or as a file.

A file has lines of JSON, as `klog consume --json` prints them, or CSV:

    topic,partition,offset,timestamp,keyEncoding,key,valueEncoding,value,headers

A key or value of CSV is text (encoding utf-8) or base64; its encoding is empty if it is null. The headers are JSON. The
records of a partition are in the order of their offsets, partitions are mixed as they are read.
"""

from __future__ import annotations

import csv
import io
import json
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin, Consumer
from spark_klog.client.consumer.consumer import read_ranges
from spark_klog.client.offsets import NO_OFFSET, first_and_end, list_offsets
from spark_klog.errors import ConfigError, KlogError, RequestTimedOut
from spark_klog.records.contract import json_value

if TYPE_CHECKING:
    from spark_klog.ui.schemas import MessageSchemas

#: Bytes shown of a key, a value or a header.
_MAX_SHOWN = 64 * 1024
_MAX_HEADERS = 100
MAX_COUNT = 500
#: Windows tried for a page: compaction and transactions' markers leave offsets without records.
_ROUNDS, _GROWTH = 4, 8
_PAGE_SECONDS, _SEARCH_SECONDS, _EXPORT_SECONDS = 20.0, 120.0, 600.0
_PROGRESS_SECONDS = 0.25
#: Bytes of records read for a page.
_MAX_BYTES = 64 * 1024 * 1024
#: What a search looks into.
FIELDS = ("key", "value", "headers")
MAX_SEARCHED, MAX_MATCHES, MAX_EXPORTED = 10_000_000, 1000, 1_000_000
_COLUMNS = (
    "topic", "partition", "offset", "timestamp", "keyEncoding", "key", "valueEncoding", "value", "headers",
)  # fmt: skip
#: Media types of exports by the name of the form.
FORMS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
#: Makes a consumer that is in no group.
NewConsumer = Callable[[], Consumer]
_Offsets = dict[TopicPartition, int]
#: Renders a batch of records.
Render = Callable[[pa.RecordBatch], bytes | memoryview]


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Each record of an Arrow batch with headers; `_finished` takes its bytes, `raw`, away."""
    for row in _listed(batch):
        headers = row["headers"] or []
        yield {
            "topic": row["topic"],
            "partition": row["partition"],
            "offset": row["offset"],
            "timestamp": row["timestamp"],
            "timestampType": row["timestampType"],
            "key": _shown(row["key"]),
            "value": _shown(row["value"]),
            "headers": [{"key": header["key"], "value": _shown(header["value"])} for header in headers[:_MAX_HEADERS]],
            "headerCount": len(headers),
            "raw": (row["key"], row["value"], row["headers"]),
        }


def _listed(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows of a batch, with timestamps as ms: Python has no times before the year 1 or after 9999."""
    index = batch.schema.get_field_index("timestamp")
    times = batch.column(index).cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    rows: list[dict[str, Any]] = batch.set_column(index, "timestamp", times).to_pylist()
    return rows


def _finished(topic: str, rows: list[dict[str, Any]], schemas: MessageSchemas | None) -> list[dict[str, Any]]:
    """Rows of `_rows` with `keySchema` and `valueSchema`, as of `MessageSchemas.columns` (null if they name no schema).

    Their JSON is as of `_shown`.
    """
    raw = [row.pop("raw") for row in rows]
    named: Sequence[Mapping[Any, dict[str, Any]]] = [{}] * len(rows)
    if schemas is not None and rows:
        from spark_klog.ui.schemas import Raw

        named = schemas.columns(topic, [Raw(*of_row) for of_row in raw])
    for row, columns in zip(rows, named, strict=True):
        for column in ("key", "value"):
            schema = columns.get(column)
            if schema is not None:
                schema = {**schema, "json": None if schema["json"] is None else _shown(schema["json"].encode())}
            row[f"{column}Schema"] = schema
    return rows


def _shown(data: bytes | None) -> dict[str, Any] | None:
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


def _bounds(admin: Admin, topic: str, partition: int | None) -> tuple[_Offsets, _Offsets]:
    """(first, end) offsets of a topic's partitions, or of one; `ConfigError` if it has no such partition."""
    with admin.exclusive() as cluster:
        numbers = list(cluster.partitions([topic])[topic])
        if partition is not None and partition not in numbers:
            raise ConfigError(f"topic {topic} has no partition {partition}: it has {len(numbers)}, from 0 on")
        keys = [(topic, number) for number in numbers if partition in (None, number)]
        return first_and_end(cluster, keys)


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


def _place_of(admin: Admin, view: View) -> tuple[_Offsets, _Offsets, _Offsets, str | None]:
    """Look up where a view begins; `ConfigError` if the topic has no such partition.

    (first, end, edge, note): the first, the end and the edge's offset of each partition; the note as `page` returns it.
    """
    first, end = _bounds(admin, view.topic, view.partition)
    edge, note = (first if view.is_oldest_first else end), None
    after = 0 if view.is_oldest_first else 1  # the newest first, the edge is after the message
    if view.reached is not None:
        edge = {key: min(end[key], max(first[key], view.reached.get(key[1], edge[key]))) for key in end}
    elif view.offset is not None:
        edge = {key: min(end[key], max(first[key], view.offset) + after) for key in end}
        note = _no_offset(view.offset, first, end, view.is_oldest_first)
    elif view.at_ms is not None:
        with admin.exclusive() as cluster:
            offsets = list_offsets(cluster, dict.fromkeys(end, view.at_ms))
        edge = {key: end[key] if offsets[key] == NO_OFFSET else min(end[key], offsets[key] + after) for key in end}
        if all(place == NO_OFFSET for place in offsets.values()):
            note = "no message has this time or a later one" + (
                "" if view.is_oldest_first else ": the newest are shown"
            )
    return first, end, edge, note


def page(
    admin: Admin, new_consumer: NewConsumer, view: View, count: int, schemas: MessageSchemas | None = None
) -> dict[str, Any]:
    """At most `count` messages of a view, in its order.

    `before` of the answer (`after`, if the oldest are first) is where the next page goes on, None if there is nothing
    more; `note` says that what was asked for does not exist, None if it does.
    """
    first, end, edge, note = _place_of(admin, view)
    limit = end if view.is_oldest_first else first
    messages, far = _read_onward(new_consumer, edge, limit, count)
    direction = 1 if view.is_oldest_first else -1
    messages.sort(key=lambda row: (row["timestamp"] or 0, row["offset"], row["partition"]), reverse=direction < 0)
    reached = _reached(messages, edge, far, limit, count, direction)
    # A partition's messages of one page are consecutive, so that the next page goes on behind them.
    shown = [row for row in messages if (row["offset"] < reached[view.topic, row["partition"]]) == (direction > 0)]
    onward = None if reached == limit else _by_number(reached)
    return {
        "topic": view.topic,
        "note": note,
        "messages": _finished(view.topic, shown, schemas),
        "before": None if view.is_oldest_first else onward,
        "after": onward if view.is_oldest_first else None,
        "first": _by_number(first),
        "end": _by_number(end),
    }


def _by_number(offsets: _Offsets) -> dict[str, int]:
    return {str(number): offset for (_, number), offset in offsets.items()}


def _read_onward(
    new_consumer: NewConsumer, edge: _Offsets, limit: _Offsets, count: int
) -> tuple[list[dict[str, Any]], _Offsets]:
    """Read from the edge toward the limit, which is before or behind it, until there are `count` messages.

    Messages in no order, and how far each partition is read: windows grow while they hold too few messages, and shrink
    if the first has too many bytes.
    """
    window = min(count, max(10, -(-2 * count // max(1, len(edge)))))
    messages: list[dict[str, Any]] = []
    far, has_shrunk = edge, False
    for _ in range(_ROUNDS):
        wider = {key: edge[key] + max(-window, min(window, limit[key] - edge[key])) for key in edge}
        ranges = {
            key: (min(edge[key], wider[key]), max(edge[key], wider[key])) for key in edge if edge[key] != wider[key]
        }
        rows, is_whole = _read(new_consumer, ranges)
        if is_whole:
            messages, far = rows, wider
            if len(messages) >= count or far == limit or has_shrunk:
                break
            window *= _GROWTH
        elif far != edge:  # the window before, which was smaller, was read to its end
            break
        elif window == 1:  # partitions without a message may be unread: the next page begins there
            read = {row["partition"] for row in rows}
            return rows, {key: wider[key] if key[1] in read else edge[key] for key in edge}
        else:
            window, has_shrunk = max(1, window // _GROWTH), True
    return messages, far


def _reached(
    messages: list[dict[str, Any]], edge: _Offsets, far: _Offsets, limit: _Offsets, count: int, direction: int
) -> _Offsets:
    """Where a page of about `count` of the messages ends in each partition; `direction` is 1 if the oldest are first.

    Partitions are mixed by time. One that is not read as far as its limit may have unread messages that belong right
    behind its last one here, so the page ends there at the latest.
    """
    last = {row["partition"]: row["timestamp"] or 0 for row in messages}
    stops = [direction * last[key[1]] for key in edge if key[1] in last and far[key] != limit[key]]
    shown = [row for row in messages[:count] if not stops or direction * (row["timestamp"] or 0) <= min(stops)]
    # A window without any message is passed by; one with messages as far as they are shown.
    reached = {key: edge[key] if key[1] in last else far[key] for key in edge}
    for row in shown:
        key = row["topic"], row["partition"]
        after = row["offset"] + 1 if direction > 0 else row["offset"]
        reached[key] = max(reached[key], after) if direction > 0 else min(reached[key], after)
    return reached


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
    rows: list[dict[str, Any]] = []
    size = 0
    for batch in batches_of(new_consumer, ranges, _PAGE_SECONDS):
        size += batch.nbytes
        rows += _rows(batch)
        if size > _MAX_BYTES:
            return rows, False
    return rows, True


def batches_of(
    new_consumer: NewConsumer, ranges: Mapping[TopicPartition, tuple[int, int]], seconds: float
) -> Iterator[pa.RecordBatch]:
    """Read ranges [start, stop), each batch of one partition; `RequestTimedOut` if that takes more than `seconds`."""
    deadline = time.monotonic() + seconds
    for batch, left in _polled(new_consumer, ranges):
        if batch is not None:
            yield batch
        if left and time.monotonic() >= deadline:
            (topic, number), count = next(iter(left.items()))
            raise RequestTimedOut(
                f"{count} offsets of {topic}-{number} could not be read within {seconds:.0f} s; choose fewer, or one "
                "partition"
            )


def _polled(
    new_consumer: NewConsumer, ranges: Mapping[TopicPartition, tuple[int, int]]
) -> Iterator[tuple[pa.RecordBatch | None, dict[TopicPartition, int]]]:
    """Read ranges [start, stop): what each poll brings, and the offsets left by partition, before the first one too."""
    if not ranges:
        return
    yield None, {key: stop - start for key, (start, stop) in ranges.items()}
    with new_consumer() as consumer:
        yield from read_ranges(consumer, ranges)


class Search(NamedTuple):
    """What to look for: the newest `records` of a topic or partition, at most `matches` of them are found."""

    topic: str
    text: str
    fields: Collection[str]
    partition: int | None = None
    ignores_case: bool = False
    records: int = 1_000_000
    matches: int = 100


def search(
    admin: Admin, new_consumer: NewConsumer, wanted: Search, schemas: MessageSchemas | None = None
) -> Iterator[dict[str, Any]]:
    """Yield {"progress": ...} several times a second, {"match": RECORD} as they are found, at last {"done": ...}.

    `ConfigError` for an empty text or unknown fields.
    """
    if not wanted.text or not wanted.fields or set(wanted.fields) - set(FIELDS):
        raise ConfigError(f"a search needs a text and fields of {', '.join(FIELDS)}")
    first, end = _bounds(admin, wanted.topic, wanted.partition)
    start = _newest(first, end, wanted.records)
    ranges = {key: (start[key], end[key]) for key in end if start[key] < end[key]}
    counts = {"scanned": 0, "total": sum(stop - begin for begin, stop in ranges.values()), "found": 0}
    reason = "end"
    began = last = time.monotonic()
    yield {"progress": dict(counts)}
    for batch, left in _polled(new_consumer, ranges):
        now = time.monotonic()
        if batch is not None:
            counts["scanned"] += len(batch)
            rows = list(_rows(_matching(batch, wanted).slice(0, wanted.matches - counts["found"])))
            for row in _finished(wanted.topic, rows, schemas):
                counts["found"] += 1
                yield {"match": row}
        if counts["found"] >= wanted.matches or now > began + _SEARCH_SECONDS:
            reason = "matches" if counts["found"] >= wanted.matches else "time"
            break
        if left and now > last + _PROGRESS_SECONDS:
            last = now
            yield {"progress": dict(counts)}
    yield {"done": {**counts, "reason": reason, "ms": round((time.monotonic() - began) * 1000)}}


def _newest(
    first: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], records: int
) -> dict[TopicPartition, int]:
    """Where to start in each partition to read at most `records`, which the partitions share."""
    start, left = {}, records
    sizes = sorted((end[key] - first[key], key) for key in end)
    for number, (size, key) in enumerate(sizes):
        share = min(size, left // (len(sizes) - number))
        start[key] = end[key] - share
        left -= share
    return start


def _matching(batch: pa.RecordBatch, wanted: Search) -> pa.RecordBatch:
    pattern, ignores_case = wanted.text.encode(), wanted.ignores_case
    mask = None
    for field in wanted.fields:
        column = batch.column(field)
        if field == "headers":
            matched = _headers_match(column, pattern, ignores_case)
        else:
            matched = pc.fill_null(pc.match_substring(column, pattern, ignore_case=ignores_case), False)
        mask = matched if mask is None else pc.or_(mask, matched)
    return batch.filter(mask)


def _headers_match(headers: pa.ListArray, pattern: bytes, ignores_case: bool) -> pa.BooleanArray:
    """Which records have a header with the text in its key or value."""
    entries = headers.flatten()
    hit = pc.or_(
        *(
            pc.fill_null(pc.match_substring(pc.struct_field(entries, name), pattern, ignore_case=ignores_case), False)
            for name in ("key", "value")
        )
    )
    parents = pc.unique(pc.list_parent_indices(headers).filter(hit))
    return pc.is_in(pa.array(range(len(headers)), pa.int64()), value_set=parents.cast(pa.int64()))


def export(
    admin: Admin, new_consumer: NewConsumer, view: View, form: str, records: int, json_lines: Render
) -> Iterator[bytes]:
    """The pieces of a file with at most `records` messages; an error that ends it early is its last line.

    `ConfigError` for an unknown form, and what `_place_of` raises, before the first piece.
    """
    if form not in FORMS:
        raise ConfigError(f"format={form[:50]!r} must be {' or '.join(FORMS)}")
    first, end, edge, _ = _place_of(admin, view)
    if view.is_oldest_first:
        shares = {key: end[key] - start for key, start in _newest(edge, end, records).items()}
        ranges = {key: (edge[key], edge[key] + share) for key, share in shares.items()}
    else:
        ranges = {key: (start, edge[key]) for key, start in _newest(first, edge, records).items()}
    ranges = {key: (start, stop) for key, (start, stop) in ranges.items() if start < stop}
    return _pieces(new_consumer, ranges, form, json_lines)


def _pieces(
    new_consumer: NewConsumer, ranges: dict[TopicPartition, tuple[int, int]], form: str, json_lines: Render
) -> Iterator[bytes]:
    if form == "csv":
        yield _csv_lines([_COLUMNS])
    try:
        for batch in batches_of(new_consumer, ranges, _EXPORT_SECONDS):
            if len(batch):
                yield _csv_lines(map(_csv_cells, _listed(batch))) if form == "csv" else bytes(json_lines(batch))
    except (KlogError, OSError) as error:
        text = f"the export ended early: {error}"
        yield _csv_lines([[text]]) if form == "csv" else json.dumps({"error": text}).encode() + b"\n"


def _csv_cells(row: dict[str, Any]) -> list[Any]:
    headers = [[header["key"], json_value(header["value"])] for header in row["headers"] or ()]
    return [
        row["topic"],
        row["partition"],
        row["offset"],
        "" if row["timestamp"] is None else row["timestamp"],
        *_encoded(row["key"]),
        *_encoded(row["value"]),
        json.dumps(headers, ensure_ascii=False),
    ]


def _encoded(data: bytes | None) -> tuple[str, str]:
    """(encoding, text)"""
    shown = json_value(data)
    if isinstance(shown, dict):
        return "base64", shown["base64"]
    return ("", "") if shown is None else ("utf-8", str(shown))


def _csv_lines(rows: Any) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue().encode()
