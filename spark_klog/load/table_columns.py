"""The columns of a table of records: those of the topics' files, as one schema, and batches by the table's own."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from spark_klog.load.rows import fitted, merged
from spark_klog.load.settings import WriteSettings


def table_columns(settings: WriteSettings, topics: Sequence[str]) -> pa.Schema:
    """The columns of all topics' records; `LoadError` if two topics have a field of two types."""
    made: dict[str, pa.DataType] = {}
    for topic in topics:
        for one in settings.columns(topic):
            made[one.name] = merged(made.get(one.name, one.type), one.type, one.name)
    return pa.schema([pa.field(name, kind) for name, kind in made.items()])


def time_column(settings: WriteSettings) -> str:
    """The path of the column that decides on the partitions."""
    return f"value.{settings.event_time}" if settings.event_time else "timestamp"


def as_columns(batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    """A batch with the columns of a table: those that it has not are null, narrow numbers become wide."""
    arrays = []
    for one in columns:
        number = batch.schema.get_field_index(one.name)
        if number < 0:
            arrays.append(pa.nulls(len(batch), one.type))
        else:
            arrays.append(fitted(batch.column(number), one.type))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
