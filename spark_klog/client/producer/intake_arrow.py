"""Arrow rows to a producer's records. The only module of the producer that imports Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pyarrow as pa

from spark_klog.columns.encode import PartitionEncoder
from spark_klog.columns.rows import SLICE_ROWS, check_columns, check_rows, check_sizes, record_rows, topic_names
from spark_klog.records.contract import RecordColumns
from spark_klog.records.partitioning import Partitioning


def topics_of(rows: pa.Table | pa.RecordBatch, topic: str | None) -> list[str]:
    """The topics of the rows; raises `InvalidRecords` and `TypeError` as `arrow_records` does."""
    _check_columns(rows, topic)
    if topic is not None:
        return [topic] if rows.num_rows else []
    names = (topic_names(batch.column("topic"), first) for first, batch in record_rows(rows.select(["topic"])))
    return list(dict.fromkeys(chain.from_iterable(names)))


def _check_columns(rows: pa.Table | pa.RecordBatch, topic: str | None) -> None:
    if not isinstance(rows, pa.Table | pa.RecordBatch):
        raise TypeError(f"rows must be a pyarrow Table or RecordBatch, not {type(rows).__name__}")
    check_columns(rows.schema, topic)


def arrow_records(
    rows: pa.Table | pa.RecordBatch,
    topic: str | None,
    partitions_of: Callable[[str], int],
    choose: Callable[[str], int],
    batch_bytes: int,
    partitioning: Partitioning,
    size_limit: tuple[int, str],
    *,
    is_any_time: bool = False,
) -> Iterator[tuple[str, int, RecordColumns]]:
    """Yield (topic, partition, records); parameters as of `PartitionEncoder`, `size_limit` as of `gathering`,
    `is_any_time` as of `check_rows`.

    Raises `InvalidRecords` or `RecordTooLargeToSend` before it yields anything, `TypeError` if `rows` is not of Arrow.
    """
    _check_columns(rows, topic)
    # a few rows are cast once; of many only a slice is in memory, so they are cast again
    few = list(record_rows(rows)) if rows.num_rows <= SLICE_ROWS else None
    for first, batch in few or record_rows(rows):
        check_rows(batch, first, topic, partitions_of, is_any_time=is_any_time)
        check_sizes(batch, first, topic, *size_limit)
    encoder = PartitionEncoder(topic, partitions_of, choose, batch_bytes, partitioning)
    for _, batch in few or record_rows(rows):
        yield from encoder.split(batch)
