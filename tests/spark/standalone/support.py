"""Rows by Avro in topics, and the progress of the program's query."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fastavro

from tests.jobs.support import Running
from tests.spark.support import Sent, committed_offsets, consume, produce
from tests.support.waiting import wait_until

from .program import SCHEMA

SECONDS = 600.0
_SCHEMA = fastavro.parse_schema(json.loads(SCHEMA))


def _encoded(number: int) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, _SCHEMA, {"id": number, "text": f"text {number}"})
    return out.getvalue()


def fill(servers: str, topic: str, first: int, end: int, partitions: int) -> None:
    produce(servers, topic, [Sent(_encoded(n), partition=n % partitions) for n in range(first, end)])


def copied(servers: str, topic: str) -> Counter[int]:
    rows = Counter[int]()
    for record in consume(servers, topic, isolation_level="read_committed"):
        row = fastavro.schemaless_reader(io.BytesIO(record.value or b""), _SCHEMA, None)
        assert row["text"] == f"text {row['id']}"
        rows[row["id"]] += 1
    return rows


def wait_for(running: Running, condition: Callable[[], object], what: str) -> None:
    """Wait for what comes while the program runs."""

    def is_there() -> bool:
        assert not running.ended, running.result().stdout[-6000:]
        return bool(condition())

    wait_until(is_there, what, SECONDS)


class Copy:
    """The program's query, as its checkpoint shows it."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def committed(self) -> int:
        """The number of records that its committed micro-batches have."""
        return sum(committed_offsets(self.checkpoint).values())

    def wait_for(self, running: Running, records: int) -> None:
        """Wait until so many more records are committed."""
        goal = self.committed() + records
        wait_for(running, lambda: self.committed() >= goal, f"{records} more records are committed")
