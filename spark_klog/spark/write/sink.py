"""The writers of batch queries and streams: DataFrames to compressed record batches.

Delivery is at least once, as with Spark's own Kafka sink: a task that Spark repeats writes its rows again. Within a
task the producer writes each row once. Streams may write exactly once: `exactly_once_driver.py`.

The tasks count the records by topic, and the step that ends the write or micro-batch logs the counts: Spark shows no
figures of a Python sink in progress records and listeners. It keeps the logs of its Python processes, as
rows of `spark.tvf.python_worker_logs()`, if spark.sql.pyspark.worker.logging.enabled is true.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
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

from spark_klog.columns.encode import by_topic
from spark_klog.errors import ConfigError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.versions import StreamArrowWriter, arrow_schema
from spark_klog.spark.worker_process import prepare_worker
from spark_klog.spark.write.producers import PRODUCERS, SinkProducer
from spark_klog.spark.write.sink_options import SinkOptions

_log = logging.getLogger(__name__)
# Spark's processes log warnings only, and users can't change that in them. Without a handler nobody sees these lines.
_log.setLevel(logging.INFO)

#: (records, bytes of their keys, values and headers) by topic.
Counts: TypeAlias = Mapping[str, tuple[int, int]]
_HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
#: The columns that are written, and the types that they may have; others are ignored, as by Spark's Kafka sink.
_COLUMNS: dict[str, tuple[type[DataType], ...]] = {
    "key": (StringType, BinaryType),
    "value": (StringType, BinaryType),
    "topic": (StringType,),
    "partition": (IntegerType,),
    "timestamp": (TimestampType,),
    "headers": (),  # those of `_HEADERS`
}


def count_rows(rows: pa.RecordBatch, topic: str | None) -> Counts:
    """Count rows that are records, see `Producer.send_arrow`; `topic` replaces the column."""
    return {name: (part.num_rows, _bytes(part)) for name, part in by_topic(rows, topic) if part.num_rows}


def total(counts: Iterable[Counts]) -> Counts:
    sums: dict[str, tuple[int, int]] = {}
    for count in counts:
        for topic, (records, size) in count.items():
            before = sums.get(topic, (0, 0))
            sums[topic] = before[0] + records, before[1] + size
    return sums


def log_progress(messages: Sequence[WriterCommitMessage | None], batch: int | None = None) -> None:
    """Log what tasks wrote, a line for each topic; `batch` is the micro-batch of a stream."""
    counts = total(message.counts for message in messages if isinstance(message, Written))
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


@dataclass
class Written(WriterCommitMessage):
    """What a task wrote, acknowledged as `kafka.acks` says."""

    counts: Counts


def _check_schema(schema: StructType, topic: str | None, rows: Collection[str]) -> None:
    """Raise `ConfigError` for a schema that can't be written as records; `rows` are columns that may have any type."""
    names = schema.fieldNames()
    if "value" not in names:
        raise ConfigError(f"no column 'value': the columns are {', '.join(names)}")
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise ConfigError(f"there are {names.count(name)} columns '{name}': rename or drop all but one")
    if topic is None and "topic" not in names:
        raise ConfigError("no topic to write to: set the option 'topic' or add a column 'topic'")
    for name in [name for name in _COLUMNS if name in names and name not in rows]:
        own, allowed = schema[name].dataType, _COLUMNS[name]
        if not isinstance(own, allowed) and (allowed or own.simpleString() != _HEADERS.simpleString()):
            wanted = " or ".join(kind.typeName() for kind in allowed) or _HEADERS.simpleString()
            raise ConfigError(f"column '{name}' must be {wanted}, not {own.simpleString()}: cast it")


def send_all(producer: SinkProducer, options: SinkOptions, arrow_batches: Iterator[pa.RecordBatch]) -> Counts:
    """Send a task's rows, without the flush, and count them.

    Without rows the first task looks for the topic: a stream's first micro-batch is often empty, and a name that is
    wrong should not wait for the first record.
    """
    first = 0
    counts: Counts = {}
    encoders = [writer.encoder() for writer in options.writers]
    if encoders:
        from spark_klog.schemas.row_serializing import with_new_ids
    for arrow_batch in arrow_batches:
        names = [name for name in arrow_batch.schema.names if name in _COLUMNS]
        rows = arrow_batch.select(names)
        for encoder in encoders:
            place = names.index(encoder.column)
            rows = rows.set_column(place, encoder.column, encoder.encode(rows.column(place), first))
            rows = with_new_ids(rows, encoder.column)
        producer.send_arrow(rows, options.topic, options.create_topics, first)
        first += rows.num_rows
        counts = total([counts, count_rows(rows, options.topic)])
    context = TaskContext.get()
    if not first and options.topic is not None and context is not None and context.partitionId() == 0:
        producer.require([options.topic], options.create_topics)
    return counts


class _Writer:
    def __init__(self, options: SinkOptions, schema: StructType, *, is_for_tasks: bool = True) -> None:
        """Schemas of columns that are rows are looked up, and registered, only if the writer `is_for_tasks`."""
        columns = [form.source.column for form in options.formats]
        _check_schema(schema, options.topic, columns)
        for name in columns:
            if name not in schema.fieldNames():
                raise ConfigError(f"no column '{name}', which option {name}Format is for")
        if columns and is_for_tasks:
            types = [arrow_schema(StructType([schema[name]])).field(name).type for name in columns]
            from spark_klog.schemas.column_format import PLANNING_MS

            pairs = zip(options.formats, types, strict=True)
            writers = [form.writer(kind, longest_ms=PLANNING_MS) for form, kind in pairs]
            options = replace(options, writers=tuple(writers))
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
