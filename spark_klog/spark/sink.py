"""The writers: DataFrames to compressed record batches.

At least once: a task that Spark runs again writes its rows again, as with Spark's own Kafka sink. Within a task the
producer writes each row once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructField,
    StructType,
)

from spark_klog.columns.encode import PartitionEncoder
from spark_klog.errors import ConfigError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.options import SinkOptions
from spark_klog.spark.producer_cache import PRODUCERS

_HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_BYTES = (StringType, BinaryType)


@dataclass
class Written(WriterCommitMessage):
    """What a task has written, acknowledged as `kafka.acks` asks."""

    records: int


def _check_column(schema: StructType, name: str, allowed: tuple[type[DataType], ...]) -> None:
    if name in schema.fieldNames() and not isinstance(schema[name].dataType, allowed):
        names = " or ".join(kind.typeName() for kind in allowed)
        raise ConfigError(f"column {name} is {schema[name].dataType.simpleString()}; {names} is wanted: cast it")


def _check_schema(schema: StructType, topic: str | None) -> None:
    """`ConfigError` for a schema that can't be written as records."""
    if "value" not in schema.fieldNames():
        raise ConfigError(f"column value is wanted; there are {', '.join(schema.fieldNames())}")
    if topic is None and "topic" not in schema.fieldNames():
        raise ConfigError("where to write to: set the option topic, or give a column topic")
    _check_column(schema, "value", _BYTES)
    _check_column(schema, "key", _BYTES)
    _check_column(schema, "topic", (StringType,))
    _check_column(schema, "partition", (IntegerType,))
    if "headers" in schema.fieldNames() and not _is_headers(schema["headers"].dataType):
        raise ConfigError(f"column headers is not {_HEADERS.simpleString()}")


def _is_headers(kind: DataType) -> bool:
    return bool(kind.simpleString() == _HEADERS.simpleString())


def _write(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    warn_if_slow()
    written = 0
    with PRODUCERS.borrow(options.client) as producer:
        encoder = PartitionEncoder(options.topic, producer.partitions, producer.choose_partition, producer.batch_size)
        for batch in batches:
            for topic, partition, records in encoder.split(batch):
                producer.send_columns(topic, partition, records)
            written += batch.num_rows
    return Written(written)


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("klog").mode("append").save()`."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        _check_schema(schema, options.topic)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("klog")`."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        _check_schema(schema, options.topic)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do: the records are there when the tasks have ended."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What was written stays; the batch is written again when the query goes on."""
