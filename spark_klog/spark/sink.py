"""The writers of batch queries and streams: DataFrames to compressed record batches.

Delivery is at least once, as with Spark's own Kafka sink: a task that Spark repeats writes its rows again. Within a
task the producer writes each row once. Streams may write exactly once: `exactly_once/writer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_klog.errors import ConfigError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.options.writes import SinkOptions
from spark_klog.spark.producer_cache import PRODUCERS
from spark_klog.spark.sink_producer import SinkProducer
from spark_klog.spark.sink_progress import Counts, count_rows, log_written, total
from spark_klog.spark.tasks.worker_process import prepare_worker
from spark_klog.spark.versions import StreamArrowWriter

_HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_BYTES = (StringType, BinaryType)
#: The columns that are written; others are ignored, as by Spark's Kafka sink.
_COLUMNS = ("key", "value", "topic", "partition", "timestamp", "headers")


@dataclass
class Written(WriterCommitMessage):
    """What a task wrote, acknowledged as `kafka.acks` says."""

    counts: Counts


def _check_column(schema: StructType, name: str, allowed: tuple[type[DataType], ...]) -> None:
    if name in schema.fieldNames() and not isinstance(schema[name].dataType, allowed):
        names = " or ".join(kind.typeName() for kind in allowed)
        raise ConfigError(f"column '{name}' must be {names}, not {schema[name].dataType.simpleString()}: cast it")


def _check_schema(schema: StructType, topic: str | None) -> None:
    """Raise `ConfigError` for a schema that can't be written as records."""
    names = schema.fieldNames()
    if "value" not in names:
        raise ConfigError(f"no column 'value': the columns are {', '.join(names)}")
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise ConfigError(f"there are {names.count(name)} columns '{name}': rename or drop all but one")
    if topic is None and "topic" not in names:
        raise ConfigError("no topic to write to: set the option 'topic' or add a column 'topic'")
    _check_column(schema, "value", _BYTES)
    _check_column(schema, "key", _BYTES)
    _check_column(schema, "topic", (StringType,))
    _check_column(schema, "partition", (IntegerType,))
    _check_column(schema, "timestamp", (TimestampType,))
    if "headers" in names and not _is_headers(schema["headers"].dataType):
        found = schema["headers"].dataType.simpleString()
        raise ConfigError(f"column 'headers' must be {_HEADERS.simpleString()}, not {found}: cast it")


def _is_headers(kind: DataType) -> bool:
    return bool(kind.simpleString() == _HEADERS.simpleString())


def send_all(producer: SinkProducer, options: SinkOptions, arrow_batches: Iterator[pa.RecordBatch]) -> Counts:
    """Send a task's rows, without the flush, and count them.

    Without rows the first task looks for the topic: a stream's first micro-batch is often empty, and a name that is
    wrong should not wait for the first record.
    """
    first = 0
    counts: Counts = {}
    for arrow_batch in arrow_batches:
        names = [name for name in arrow_batch.schema.names if name in _COLUMNS]
        rows = arrow_batch.select(names)
        producer.send_arrow(rows, options.topic, options.create_topics, first)
        first += rows.num_rows
        counts = total([counts, count_rows(rows, options.topic)])
    context = TaskContext.get()
    if not first and options.topic is not None and context is not None and context.partitionId() == 0:
        producer.require([options.topic], options.create_topics)
    return counts


def log_progress(messages: Sequence[WriterCommitMessage | None], batch: int | None = None) -> None:
    """Log what tasks wrote, by topic; `batch` is the micro-batch of a stream."""
    log_written(total(message.counts for message in messages if isinstance(message, Written)), batch)


class _Writer:
    """What both kinds of writers do in Spark's tasks."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        _check_schema(schema, options.topic)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        prepare_worker()
        warn_if_slow()
        with PRODUCERS.borrow(self._options.client) as producer:
            return Written(send_all(producer, self._options, iterator))


class BatchQueryWriter(_Writer, DataSourceArrowWriter):
    """`df.write.format("klog").mode("append").save()`."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Only log what was written: each task has flushed its records."""
        log_progress(messages)


class StreamWriter(_Writer, StreamArrowWriter):
    """`df.writeStream.format("klog")`."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Only log what was written: each task has flushed its records."""
        log_progress(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: written records stay, and the query writes the micro-batch again when it continues."""
