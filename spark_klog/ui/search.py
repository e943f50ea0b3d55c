"""Search for text in keys, values and headers, with bounds and progress; Arrow compares whole columns."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.client import Admin
from spark_klog.client.cluster import TopicPartition
from spark_klog.errors import ConfigError
from spark_klog.ui.messages import NewConsumer, partition_ranges, rows

FIELDS = ("key", "value", "headers")
MAX_RECORDS = 10_000_000
MAX_MATCHES = 1000
_SECONDS = 120.0
_PROGRESS_SECONDS = 0.25


class Search(NamedTuple):
    """What to look for: the newest `records` of a topic or partition, at most `matches` of them are found."""

    topic: str
    text: str
    fields: Collection[str]
    partition: int | None = None
    ignores_case: bool = False
    records: int = 1_000_000
    matches: int = 100


def search(admin: Admin, new_consumer: NewConsumer, wanted: Search) -> Iterator[dict[str, Any]]:
    """Yield {"progress": ...} several times a second, {"match": RECORD} as they are found, at last {"done": ...}.

    `ConfigError` for an empty text or unknown fields.
    """
    if not wanted.text or not wanted.fields or set(wanted.fields) - set(FIELDS):
        raise ConfigError(f"a search needs a text and fields of {', '.join(FIELDS)}")
    first, end = partition_ranges(admin, wanted.topic, wanted.partition)
    start = newest(first, end, wanted.records)
    stops = {key: end[key] for key in end if start[key] < end[key]}
    total = sum(end[key] - start[key] for key in stops)
    scanned = found = 0
    reason = "end"
    began = last = time.monotonic()
    yield {"progress": {"scanned": 0, "total": total, "found": 0}}
    if stops:
        with new_consumer() as consumer:
            consumer.assign([(*key, start[key]) for key in stops])
            while stops:
                batch = consumer.poll_arrow(0.1)
                now = time.monotonic()
                if batch is not None:
                    scanned += len(batch)
                    for row in rows(_matching(batch, wanted)):
                        found += 1
                        yield {"match": row}
                        if found >= wanted.matches:
                            reason = "matches"
                            break
                if reason == "matches" or now > began + _SECONDS:
                    reason = reason if reason == "matches" else "time"
                    break
                done = [key for key, stop in stops.items() if consumer.position(*key) >= stop]
                consumer.pause(done)
                for key in done:
                    del stops[key]
                if now > last + _PROGRESS_SECONDS:
                    last = now
                    yield {"progress": {"scanned": scanned, "total": total, "found": found}}
    took = round((time.monotonic() - began) * 1000)
    yield {"done": {"scanned": scanned, "total": total, "found": found, "reason": reason, "ms": took}}


def newest(
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
