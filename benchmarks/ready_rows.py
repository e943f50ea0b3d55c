"""The bound of rows by a schema: klog's read of a topic, whose values are replaced by ready rows.

It plans, fetches and walks the records as `format("klog")` does, and hands the same columns to Spark; only decoding the
values costs nothing: `value` is a slice of the Arrow `file`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from no_op_source import stored
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark_klog.spark.options import source_options
from spark_klog.spark.read.source import BatchQueryReader, KlogDataSource
from spark_klog.spark.versions import arrow_schema


class ReadyRows(KlogDataSource):
    @classmethod
    def name(cls) -> str:
        return "ready-rows"

    def schema(self) -> StructType:
        bytes_schema, rows = super().schema(), from_arrow_schema(stored(self.options["file"]).schema)
        return StructType([rows[field.name] if field.name in rows.names else field for field in bytes_schema])

    def reader(self, schema: StructType) -> DataSourceReader:
        options = {name: value for name, value in self.options.items() if name != "file"}
        return _Reader(source_options(options, streaming=False), arrow_schema(super().schema()), self.options["file"])


class _Reader(BatchQueryReader):
    def __init__(self, options: object, schema: pa.Schema, file: str) -> None:
        super().__init__(options, schema)
        self._file = file

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        file = stored(self._file)
        value, place = file.schema.field("value"), self._schema.get_field_index("value")
        ready = pa.concat_arrays([file.column("value")] * 2)  # an Arrow batch may have more rows than the file's
        for batch in super().read(partition):
            yield batch.set_column(place, value, ready.slice(0, batch.num_rows))
