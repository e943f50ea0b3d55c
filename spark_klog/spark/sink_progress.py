"""Counts of written records, by topic: made in the tasks, logged by the step that ends the write or micro-batch.

Spark shows no figures of a Python sink in progress records and listeners. It keeps the logs of its Python processes, as
rows of `spark.tvf.python_worker_logs()`, if spark.sql.pyspark.worker.logging.enabled is true.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

_log = logging.getLogger(__name__)
# Spark's processes log warnings only, and users can't change that in them. Without a handler nobody sees these lines.
_log.setLevel(logging.INFO)

#: (records, bytes of their keys, values and headers) by topic.
Counts: TypeAlias = Mapping[str, tuple[int, int]]


def count_rows(rows: pa.RecordBatch, topic: str | None) -> Counts:
    """Count rows that are records, see `Producer.send_arrow`; `topic` replaces the column."""
    if rows.num_rows == 0:
        return {}
    if topic is not None:
        return {topic: (rows.num_rows, _bytes(rows))}
    topics = rows.column("topic")
    names = pc.unique(topics)
    if len(names) == 1:
        return {names[0].as_py(): (rows.num_rows, _bytes(rows))}
    parts = {name.as_py(): rows.filter(pc.equal(topics, name)) for name in names}
    return {name: (part.num_rows, _bytes(part)) for name, part in parts.items()}


def total(counts: Iterable[Counts]) -> Counts:
    """Add up by topic."""
    found: dict[str, tuple[int, int]] = {}
    for one in counts:
        for topic, (records, size) in one.items():
            before = found.get(topic, (0, 0))
            found[topic] = before[0] + records, before[1] + size
    return found


def log_written(counts: Counts, batch: int | None) -> None:
    """Log a line for each topic; `batch` is the micro-batch of a stream."""
    of_batch = "" if batch is None else f"micro-batch {batch}: "
    for topic, (records, size) in sorted(counts.items()):
        context = {"topic": topic, "records": str(records), "bytes": str(size)}
        if batch is not None:
            context["batch_id"] = str(batch)
        # Spark shows the context as a column, a map of strings
        _log.info("%swrote %d records of %d bytes to %s", of_batch, records, size, topic, extra={"context": context})


def _bytes(rows: pa.RecordBatch) -> int:
    names = rows.schema.names
    columns = [rows.column(name) for name in ("key", "value") if name in names]
    if "headers" in names:
        entries = pc.list_flatten(rows.column("headers"))
        columns += [pc.struct_field(entries, name) for name in ("key", "value")]
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)
