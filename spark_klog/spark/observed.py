"""Counts of what a query writes, by topic, in Spark's progress records: rows are counted just before the sink.

    rows = observed(frame, "clicks", "orders")  # the topics of the column topic
    query = rows.writeStream.format("klog")...

Spark takes no figures from a Python sink into a query's progress. It does take those of `DataFrame.observe`, so
`observed` counts the rows just before the sink, and `ProgressListener.written` has the figures of each micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pyspark.sql import Column, DataFrame, Row, functions as F
from pyspark.sql.types import LongType

from spark_klog.errors import ConfigError

#: The name of the observation. A query may have one.
_NAME = "spark_klog written"
_RECORDS, _BYTES = "records of ", "bytes of "


@dataclass(frozen=True)
class SinkProgress:
    """The counts of one micro-batch, by topic: records written, and bytes of their keys, values and headers.

    A micro-batch that a restart repeats is counted again, also if an exactly-once sink does not write it again.
    """

    query: str
    batch_id: int
    records: dict[str, int]
    bytes: dict[str, int]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def observed(rows: DataFrame, *topics: str) -> DataFrame:
    """Rows for the sink, counted for `ProgressListener.written` by their column topic.

    Name the topics to count. Without a column topic, name the one of the sink's option topic. The rows stay as they
    are; call it last, directly before `writeStream`. `ConfigError` without a topic, or for several without the column.
    """
    names = list(dict.fromkeys(topics))
    has_column = "topic" in rows.columns
    if not names or (len(names) > 1 and not has_column):
        raise ConfigError(
            "observed counts rows by topic: name the topics of the column topic, or the one of the option topic if "
            "there is no such column"
        )
    size = _size(rows)
    figures = []
    for name in names:
        is_its = F.col("topic") == F.lit(name) if has_column else F.lit(True)
        figures.append(F.count(F.when(is_its, 1)).alias(_RECORDS + name))
        figures.append(F.coalesce(F.sum(F.when(is_its, size)), F.lit(0)).alias(_BYTES + name))
    return rows.observe(_NAME, *figures)


def _size(rows: DataFrame) -> Column:
    """The bytes of a row's key, value and headers."""
    parts = [F.octet_length(name) for name in ("key", "value") if name in rows.columns]
    if "headers" in rows.columns:

        def add(total: Column, header: Column) -> Column:
            key, value = F.octet_length(header["key"]), F.octet_length(header["value"])
            return total + F.coalesce(key, F.lit(0)) + F.coalesce(value, F.lit(0))

        parts.append(F.aggregate("headers", F.lit(0).cast(LongType()), add))
    total = F.lit(0).cast(LongType())
    for part in parts:
        total = total + F.coalesce(part, F.lit(0))
    return total


def sink_progress(query: str, batch_id: int, metrics: Mapping[str, Row]) -> SinkProgress | None:
    """The figures of `observed` in a progress record's observedMetrics; None if there are none."""
    if _NAME not in metrics:
        return None
    figures = metrics[_NAME].asDict()
    records = {name.removeprefix(_RECORDS): count for name, count in figures.items() if name.startswith(_RECORDS)}
    return SinkProgress(query, batch_id, records, {name: figures[_BYTES + name] or 0 for name in records})
