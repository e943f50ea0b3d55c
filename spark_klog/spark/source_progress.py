"""Figures of a klog source's micro-batch, computed from the offsets in Spark's progress record."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_klog.directories.checkpoint import START_OF
from spark_klog.spark.offsets import Offsets, from_json, start_in
from spark_klog.spark.stream import LOST, RECORD_BYTES


@dataclass(frozen=True)
class SourceProgress:
    """One micro-batch of one klog source.

    `source` is the index among the query's sources. `records` has the offsets that each "topic-partition" advanced, if
    its start is known; `bytes` estimates their compressed size in the log (option estimateRecordBytes). Minimum,
    maximum and average of the offsets behind latest are over the partitions. `lost` lists the ranges that could not be
    read (failOnDataLoss=report), see `ranges.Lost`. `end` has the offset that each "topic-partition" has reached,
    `behind` how many offsets that is behind the latest one.
    """

    query: str
    batch_id: int
    rows: int
    rows_per_second: float
    records: dict[str, int]
    bytes: dict[str, int]
    min_offsets_behind_latest: int
    max_offsets_behind_latest: int
    avg_offsets_behind_latest: float
    lost: list[dict[str, Any]]
    source: int = 0
    end: dict[str, int] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)

    @property
    def topics(self) -> list[str]:
        return sorted({name.rpartition("-")[0] for name in self.records})

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        behind = (
            f"{self.max_offsets_behind_latest:,} behind at most" if self.max_offsets_behind_latest else "up to date"
        )
        lost = f", {len(self.lost)} ranges lost" if self.lost else ""
        speed = f"{self.rows:,} rows, {self.rows_per_second:,.0f} rows/s"
        source = f"source {self.source} ({', '.join(self.topics)})"
        return f"{self.query} micro-batch {self.batch_id}, {source}: {speed}, {behind}{lost}"


def source_progress(
    query: str,
    batch_id: int,
    rows: int,
    rows_per_second: float,
    start: str | None,
    end: str | None,
    latest: str | None,
    number: int = 0,
) -> SourceProgress | None:
    """The figures of a source, from its offsets in Spark's progress record; None if it is not a klog source."""
    reached = _offsets(end)
    if reached is None:
        if START_OF not in _object(end):
            return None
        reached = {}  # all partitions were deleted
    known = _object(latest)
    lost = known.pop(LOST, [])
    sizes = {(entry["topic"], entry["partition"]): float(entry["bytes"]) for entry in known.pop(RECORD_BYTES, [])}
    before = dict.fromkeys(reached, 0) | (_offsets(start) or {})
    begun = start_in(_object(end), before, is_first=not _object(start))
    newest = from_json(known)
    behind = {key: max(0, newest.get(key, offset) - offset) for key, offset in reached.items()}
    moved = {key: offset - begun[key] for key, offset in reached.items() if key in begun}
    return SourceProgress(
        query=query,
        batch_id=batch_id,
        rows=rows,
        rows_per_second=rows_per_second,
        records={f"{topic}-{partition}": count for (topic, partition), count in moved.items()},
        bytes={
            f"{topic}-{partition}": round(moved[topic, partition] * size)
            for (topic, partition), size in sizes.items()
            if (topic, partition) in moved
        },
        min_offsets_behind_latest=min(behind.values(), default=0),
        max_offsets_behind_latest=max(behind.values(), default=0),
        avg_offsets_behind_latest=sum(behind.values()) / max(1, len(behind)),
        lost=lost,
        source=number,
        end={f"{topic}-{partition}": offset for (topic, partition), offset in reached.items()},
        behind={f"{topic}-{partition}": count for (topic, partition), count in behind.items()},
    )


def _object(text: str | None) -> dict[str, Any]:
    """Parse a JSON object; empty if there is none: a micro-batch that a restart repeats has no latest offset."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _offsets(text: str | None) -> Offsets | None:
    """Parse the offsets of a klog source; None if they are not a klog source's."""
    try:
        value = json.loads(text or "")
        return from_json(value) or None
    except (ValueError, AttributeError, TypeError):
        return None
