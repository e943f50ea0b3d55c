"""Messages as a file: lines of JSON, as `klog consume --json` prints them, or CSV.

    topic,partition,offset,timestamp,keyEncoding,key,valueEncoding,value,headers

A key or value of CSV is text (encoding utf-8) or base64; its encoding is empty if it is null. The headers are JSON. The
records of a partition are in the order of their offsets, partitions are mixed as they are read.
"""

from __future__ import annotations

import csv
import io
import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from spark_klog.client import Admin
from spark_klog.client.cluster import TopicPartition
from spark_klog.errors import ConfigError, KlogError
from spark_klog.ui.messages import NewConsumer, Place, View, batches_of, place_of
from spark_klog.ui.search import newest

MAX_RECORDS = 1_000_000
_SECONDS = 600.0
_COLUMNS = (
    "topic", "partition", "offset", "timestamp", "keyEncoding", "key", "valueEncoding", "value", "headers",
)  # fmt: skip
#: Media types by the name of the form.
FORMS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
#: Renders a batch of records.
Render = Callable[[pa.RecordBatch], bytes | memoryview]


def export(
    admin: Admin, new_consumer: NewConsumer, view: View, form: str, records: int, json_lines: Render
) -> Iterator[bytes]:
    """The pieces of a file with at most `records` messages; an error that ends it early is its last line.

    `ConfigError` for an unknown form, and what `place_of` raises, before the first piece.
    """
    if form not in FORMS:
        raise ConfigError(f"format={form[:50]!r} must be {' or '.join(FORMS)}")
    return _pieces(new_consumer, _ranges(place_of(admin, view), view.is_oldest_first, records), form, json_lines)


def _ranges(place: Place, is_oldest_first: bool, records: int) -> dict[TopicPartition, tuple[int, int]]:
    """[start, stop) of each partition at the view's edge: at most `records` offsets, which the partitions share."""
    if is_oldest_first:
        shares = {key: place.end[key] - start for key, start in newest(place.edge, place.end, records).items()}
        ranges = {key: (place.edge[key], place.edge[key] + share) for key, share in shares.items()}
    else:
        ranges = {key: (start, place.edge[key]) for key, start in newest(place.first, place.edge, records).items()}
    return {key: (start, stop) for key, (start, stop) in ranges.items() if start < stop}


def _pieces(
    new_consumer: NewConsumer, ranges: dict[TopicPartition, tuple[int, int]], form: str, json_lines: Render
) -> Iterator[bytes]:
    render = json_lines if form == "jsonl" else _csv
    if form == "csv":
        yield _csv_lines([_COLUMNS])
    try:
        for batch in batches_of(new_consumer, ranges, _SECONDS):
            if len(batch):
                yield bytes(render(batch))
    except (KlogError, OSError) as error:
        text = f"the export ended early: {error}"
        yield _csv_lines([[text]]) if form == "csv" else json.dumps({"error": text}).encode() + b"\n"


def _csv(batch: pa.RecordBatch) -> bytes:
    return _csv_lines(_cells(row) for row in batch.to_pylist())


def _cells(row: dict[str, Any]) -> list[Any]:
    time = row["timestamp"]
    headers = [[one["key"], _json_value(one["value"])] for one in row["headers"] or ()]
    return [
        row["topic"],
        row["partition"],
        row["offset"],
        "" if time is None else round(time.timestamp() * 1000),
        *_encoded(row["key"]),
        *_encoded(row["value"]),
        json.dumps(headers, ensure_ascii=False),
    ]


def _encoded(data: bytes | None) -> tuple[str, str]:
    """(encoding, text)"""
    if data is None:
        return "", ""
    try:
        return "utf-8", data.decode()
    except UnicodeDecodeError:
        return "base64", b64encode(data).decode()


def _json_value(data: bytes | None) -> object:
    encoding, text = _encoded(data)
    return {"base64": text} if encoding == "base64" else text if encoding else None


def _csv_lines(rows: Any) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue().encode()
