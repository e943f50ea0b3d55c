"""`format("klog")`: the data source, which Spark finds by `pyspark_klog.DefaultSource`, and its batch query reader.

Spark starts Python processes for the steps of a query and for its tasks, and each imports this module. Modules that
only some of them need are therefore imported late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark_klog.client.places import OffsetSpec
from spark_klog.columns.schema import FULL, WITHOUT_HEADERS, subset
from spark_klog.errors import ConfigError, KlogError
from spark_klog.protocol.tables.records import LATEST
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.options import SourceOptions, has_formats, include_headers, source_formats, source_options
from spark_klog.spark.read.batch_query import plan_batch_query
from spark_klog.spark.read.broker_source import open_source
from spark_klog.spark.read.pushdown import Pushed, spark_pushes_filters
from spark_klog.spark.read.stream import RangePartition, RefusedStreamReader, StreamReader
from spark_klog.spark.read.tasks import Plan, read_ranges
from spark_klog.spark.versions import Filter, adapted, arrow_schema
from spark_klog.spark.write.sink_options import sink_options

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import ReaderSchema
    from spark_klog.spark.write.sink import BatchQueryWriter, StreamWriter


class KlogDataSource(DataSource):
    """Reads and writes topics. docs/reference lists the options."""

    #: Spark makes the source itself where it makes a stream's writer for the tasks of a micro-batch; where it makes one
    #: for `commit` or `abort`, the source was pickled.
    _was_pickled = False
    #: The schemas of columns that are rows, by analysis.
    _readers: tuple[ReaderSchema, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _was_pickled=True)

    @classmethod
    def name(cls) -> str:
        return "klog"

    def schema(self) -> StructType:
        schema = from_arrow_schema(FULL if include_headers(self.options) else WITHOUT_HEADERS)
        if has_formats(self.options):
            from spark_klog.spark.read.row_columns import analysed_readers, with_rows

            formats = source_formats(self.options)
            if any(form.format == "json" for form in formats):
                from spark_klog.spark.read.sampling import inferred_formats

                formats = inferred_formats(self.options, formats)
            self._readers = analysed_readers(formats)
            return with_rows(schema, self._readers)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        warn_if_slow()
        reader = FilteringBatchQueryReader if spark_pushes_filters() else BatchQueryReader
        return reader(*self._of_schema(source_options(self.options, streaming=False), schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        warn_if_slow()
        try:
            options = source_options(self.options, streaming=True)
            reader = StreamReader(*self._of_schema(options, schema))
        except KlogError as error:
            return adapted(RefusedStreamReader(error), is_limited=False)
        limits = options.trigger
        return adapted(reader, is_limited=limits.any, ignores_limits=limits.are_ignored)

    def writer(self, schema: StructType, overwrite: bool) -> BatchQueryWriter:
        if overwrite:
            raise ConfigError('a topic can\'t be overwritten: use mode("append")')
        options = sink_options(self.options)
        if options.named is not None:
            from spark_klog.spark.write.exactly_once_batch import ExactlyOnceBatchWriter

            writer = ExactlyOnceBatchWriter(options, options.named, schema)
            writer.claim()
            return writer
        from spark_klog.spark.write.sink import BatchQueryWriter

        return BatchQueryWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        options = sink_options(self.options, streaming=True)
        if options.checkpoint is not None:
            from spark_klog.spark.write.exactly_once_driver import ExactlyOnceWriter

            writer = ExactlyOnceWriter(options, schema, is_for_tasks=not self._was_pickled)
            if not self._was_pickled:
                writer.claim()
            return writer
        from spark_klog.spark.write.sink import StreamWriter

        return StreamWriter(options, schema, is_for_tasks=not self._was_pickled)

    def _of_schema(self, options: SourceOptions, schema: StructType) -> tuple[SourceOptions, pa.Schema]:
        """The options with the schemas of columns that are rows, and the Arrow schema; see `_arrow_schema`."""
        if not options.formats:
            return options, _arrow_schema(schema, {})
        from spark_klog.spark.read.row_columns import readers_of

        readers, types = readers_of(options.formats, schema, self._readers)
        return dataclasses.replace(options, readers=readers), _arrow_schema(schema, types)


def _arrow_schema(schema: StructType, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema as an Arrow schema; `types` are those of columns that are rows.

    `ConfigError` if another column of a user's schema differs from ours.
    """
    names = schema.fieldNames()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"the schema has column {', '.join(twice)} more than once")
    ours = subset(names)
    given = arrow_schema(schema)
    for number, name in enumerate(names):
        if name in types:
            given = given.set(number, pa.field(name, types[name]))
        elif given.field(name).type != ours.field(name).type:
            raise ConfigError(
                f"column {name} is {ours.field(name).type}, but the schema says {given.field(name).type}: "
                "read it as it is, then cast it"
            )
    return given


class BatchQueryReader(DataSourceReader):
    """Reads from starting to ending offsets, which it resolves when Spark plans the query."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        with closing(open_source(self._options)) as source:
            tasks, ends = plan_batch_query(source, self._options, self._pushed)
            is_open = not self._options.paths and self._options.ending == OffsetSpec(LATEST)
            # One task looks for newer records, so only the first one has the ends.
            first = Plan(ends if is_open else {})
            others = dataclasses.replace(first, ends={})
            # Spark replaces an empty list by one partition of value None.
            return [
                RangePartition(ranges, source.topic_ids, source.leader_of, others if number else first)
                for number, ranges in enumerate(tasks or [()])
            ]

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        topic_ids, leaders, plan = partition.topic_ids, partition.leaders, partition.plan
        return read_ranges(self._options, partition.ranges, self._schema, topic_ids, plan=plan, leaders=leaders)


class FilteringBatchQueryReader(BatchQueryReader):
    """The reader if `spark.sql.python.filterPushdown.enabled` is on; Spark rejects `pushFilters` if it is off."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        return self._pushed.push(filters)
