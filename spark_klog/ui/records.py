"""Records as JSON for the page: UTF-8 as text, all other bytes as base64, cut where they are long."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa

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
