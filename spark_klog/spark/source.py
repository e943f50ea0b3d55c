"""`format("klog")`: the data source that Spark finds by `pyspark_klog.DefaultSource`, and its batch reader.

Spark starts a Python process for each step of a query and for its tasks; each of them imports this. So what only some
need is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from spark_klog.columns.schema import FULL, WITHOUT_HEADERS, subset
from spark_klog.errors import ConfigError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.options import SourceOptions, include_headers, sink_options, source_options
from spark_klog.spark.places import BatchLog, plan
from spark_klog.spark.pushdown import Pushed, spark_pushes_filters
from spark_klog.spark.reading import read_ranges
from spark_klog.spark.stream import RangePartition, RefusedStreamReader, StreamReader

if TYPE_CHECKING:
    from spark_klog.spark.sink import BatchWriter, StreamWriter


class KlogDataSource(DataSource):
    """Reads and writes topics; see README for the options."""

    @classmethod
    def name(cls) -> str:
        return "klog"

    def schema(self) -> StructType:
        return from_arrow_schema(FULL if include_headers(self.options) else WITHOUT_HEADERS)

    def reader(self, schema: StructType) -> DataSourceReader:
        warn_if_slow()
        reader = FilteringBatchReader if spark_pushes_filters() else BatchReader
        return reader(source_options(self.options, streaming=False), _arrow_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        warn_if_slow()
        try:
            return StreamReader(source_options(self.options, streaming=True), _arrow_schema(schema))
        except ConfigError as error:
            return RefusedStreamReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise ConfigError('a log can only be appended to: use mode("append")')
        from spark_klog.spark.sink import BatchWriter

        return BatchWriter(sink_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        from spark_klog.spark.sink import StreamWriter

        return StreamWriter(sink_options(self.options), schema)


def _arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema of a schema that the user may have given; `ConfigError` where a column differs from ours."""
    names = schema.fieldNames()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"the schema given has column {', '.join(twice)} more than once")
    ours = subset(names)
    given = to_arrow_schema(schema, timezone="UTC")
    for name in names:
        if given.field(name).type != ours.field(name).type:
            raise ConfigError(
                f"column {name} is {ours.field(name).type}, the schema given says {given.field(name).type}: "
                "read it as it is, then cast"
            )
    return given


def _log_of(options: SourceOptions) -> AbstractContextManager[BatchLog]:
    if options.paths:
        from spark_klog.spark.directory_source import directory_log

        return directory_log(options)
    from spark_klog.spark.discovery import broker_log

    return broker_log(options)


class BatchReader(DataSourceReader):
    """Reads from starting to ending offsets, as they are when the query is planned."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        with _log_of(self._options) as log:
            tasks = plan(log, self._options, self._pushed)
            # Spark reads one partition of value None where a list is empty.
            return [RangePartition(ranges, log.topic_ids) for ranges in tasks or [()]]

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(self._options, partition.ranges, self._schema, partition.topic_ids)


class FilteringBatchReader(BatchReader):
    """The reader where Spark pushes filters (`spark.sql.python.filterPushdown.enabled`); elsewhere Spark refuses it."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        return self._pushed.push(filters)
