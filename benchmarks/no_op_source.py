"""The bound: a Python data source that does nothing, so that only Spark's own Arrow path takes time.

Each of `partitions` tasks yields one prebuilt Arrow batch repeatedly, until all tasks together have `records` records:
klog's columns, values of `size` bytes, and 65,536 rows or 8 MiB per batch; or that of the Arrow `file`. A micro-batch
of a stream has `trigger` records. The writer drops the Arrow batches that it gets.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

_ROWS, _BATCH_BYTES = 65_536, 8 * 1024 * 1024


class NoOp(DataSource):
    @classmethod
    def name(cls) -> str:
        return "no-op"

    def schema(self) -> StructType | str:
        if "file" in self.options:
            return from_arrow_schema(stored(self.options["file"]).schema)
        return (
            "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
            "timestampType INT"
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        if "file" in self.options:
            return _Reader(*self._numbers("records", "partitions"), self.options["file"])
        return _Reader(*self._numbers("records", "partitions", "size"))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _StreamReader(*self._numbers("records", "partitions", "size", "trigger"))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer()

    def _numbers(self, *names: str) -> list[int]:
        return [int(self.options[name]) for name in names]


class _Writer(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class _Reader(DataSourceReader):
    def __init__(self, records: int, partitions: int, source: int | str) -> None:
        """`source` is a size of values, or a file."""
        self._records, self._partitions, self._source = records, partitions, source

    def partitions(self) -> list[InputPartition]:
        return _shares(self._records, self._partitions, self._source)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(partition)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, records: int, partitions: int, size: int, trigger: int) -> None:
        self._records, self._partitions, self._size, self._trigger = records, partitions, size, trigger

    def initialOffset(self) -> dict[str, int]:
        return {"offset": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        """The log never grows."""

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"offset": min(start["offset"] + self._trigger, self._records)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return _shares(end["offset"] - start["offset"], self._partitions, self._size)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(partition)


def _shares(records: int, partitions: int, source: int | str) -> list[InputPartition]:
    """The number of records of each task, and the size of their values, or the file that has them."""
    counts = (records // partitions + (number < records % partitions) for number in range(partitions))
    return [InputPartition((count, source)) for count in counts]


def _batches(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    left, source = partition.value
    batch = stored(source) if isinstance(source, str) else _batch(source)
    while left:
        rows = min(left, batch.num_rows)
        yield batch if rows == batch.num_rows else batch.slice(0, rows)
        left -= rows


def stored(file: str) -> pa.RecordBatch:
    with pa.ipc.open_file(file) as reader:
        return reader.get_batch(0)


def _batch(size: int) -> pa.RecordBatch:
    rows = max(1, min(_ROWS, _BATCH_BYTES // size))
    columns = {
        "key": pa.nulls(rows, pa.binary()),
        "value": pa.array([b"v" * size] * rows, pa.binary()),
        "topic": pa.array(["bench"] * rows, pa.string()),
        "partition": pa.array([0] * rows, pa.int32()),
        "offset": pa.array(range(rows), pa.int64()),
        "timestamp": pa.array([1_700_000_000_000_000] * rows, pa.timestamp("us", "UTC")),
        "timestampType": pa.array([0] * rows, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)
