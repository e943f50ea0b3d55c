"""`format("klog")`: the data source that Spark finds by `pyspark_klog.DefaultSource`, and its batch reader."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from spark_klog.client.cluster import Cluster
from spark_klog.columns.schema import FULL, WITHOUT_HEADERS, subset
from spark_klog.errors import ConfigError
from spark_klog.spark import discovery
from spark_klog.spark.group_offsets import GroupProgress
from spark_klog.spark.loss import LossReporter
from spark_klog.spark.options import SourceOptions, include_headers, sink_options, source_options
from spark_klog.spark.planning import OffsetRange, beyond, check_covers, check_order, clip, ranges
from spark_klog.spark.pushdown import Pushed, spark_pushes_filters
from spark_klog.spark.reading import read_range
from spark_klog.spark.sink import BatchWriter, StreamWriter
from spark_klog.spark.stream import RangePartition, StreamReader


class KlogDataSource(DataSource):
    """Reads and writes topics; see README for the options."""

    @classmethod
    def name(cls) -> str:
        return "klog"

    def schema(self) -> StructType:
        return from_arrow_schema(FULL if include_headers(self.options) else WITHOUT_HEADERS)

    def reader(self, schema: StructType) -> DataSourceReader:
        reader = FilteringBatchReader if spark_pushes_filters() else BatchReader
        return reader(source_options(self.options, streaming=False), _arrow_schema(schema))

    def streamReader(self, schema: StructType) -> StreamReader:
        return StreamReader(source_options(self.options, streaming=True), _arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise ConfigError('a log can only be appended to: use mode("append")')
        return BatchWriter(sink_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return StreamWriter(sink_options(self.options), schema)


def _arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema of a schema that the user may have given; `ConfigError` where a column differs from ours."""
    names = schema.fieldNames()
    ours = subset(names)
    given = to_arrow_schema(schema, timezone="UTC")
    for name in names:
        if given.field(name).type != ours.field(name).type:
            raise ConfigError(
                f"column {name} is {ours.field(name).type}, the schema given says {given.field(name).type}: "
                "read it as it is, then cast"
            )
    return given


class BatchReader(DataSourceReader):
    """Reads from starting to ending offsets, as they are when the query is planned."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        planned = [RangePartition(item) for item in self._plan()]
        # Spark reads one partition of value None where a list is empty.
        return [*planned] if planned else [RangePartition(OffsetRange("", 0, 0, 0))]

    def _plan(self) -> list[OffsetRange]:
        options = self._options
        with Cluster.connect(options.client) as cluster:
            partitions = discovery.partitions_of(cluster, options.subscription)
            check_covers(options.starting_option, options.starting, partitions)
            check_covers(options.ending_option, options.ending, partitions)
            check_order(options.starting, options.ending, partitions, options.starting_option, options.ending_option)
            partitions = [key for key in partitions if self._pushed.keeps(key)]
            # In this order what is written or deleted meanwhile does not look like a loss.
            earliest = discovery.earliest(cluster, partitions)
            group = options.group_offsets
            progress = GroupProgress(group, lambda: cluster) if group else None
            try:
                start = discovery.resolve(cluster, options.starting, partitions, options.starting_option, progress)
                end = discovery.resolve(cluster, options.ending, partitions, options.ending_option, progress)
            finally:
                if progress is not None:
                    progress.close()
            latest = discovery.latest(cluster, partitions)
            kept, lost = clip(ranges(start, end), earliest, latest)
            LossReporter(options.on_data_loss).report(lost + beyond(start, end, earliest, latest))
            kept = [self._pushed.clip(item) for item in kept]
            kept = discovery.clip_times(cluster, kept, self._pushed.first_time, self._pushed.end_time)
            return discovery.split_ranges(cluster, kept, options.split)

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, partition.range, self._schema)


class FilteringBatchReader(BatchReader):
    """The reader where Spark pushes filters (`spark.sql.python.filterPushdown.enabled`); elsewhere Spark refuses it."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        return self._pushed.push(filters)
