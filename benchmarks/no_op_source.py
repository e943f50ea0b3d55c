"""The bound: a Python data source that does nothing, so that what it takes is Spark's own Arrow path.

Each of `partitions` tasks yields one prebuilt Arrow batch again and again, until there were `records` in all: the
columns of klog, 65,536 rows of values of 100 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

_ROWS = 65_536
_VALUE = b"v" * 100


class NoOp(DataSource):
    @classmethod
    def name(cls) -> str:
        return "no-op"

    def schema(self) -> str:
        return (
            "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
            "timestampType INT"
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(int(self.options["records"]), int(self.options["partitions"]))


class _Reader(DataSourceReader):
    def __init__(self, records: int, partitions: int) -> None:
        self._records, self._partitions = records, partitions

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = _batch()
        left = self._records // self._partitions + (partition.value < self._records % self._partitions)
        while left:
            rows = min(left, _ROWS)
            yield batch if rows == _ROWS else batch.slice(0, rows)
            left -= rows


def _batch() -> pa.RecordBatch:
    columns = {
        "key": pa.nulls(_ROWS, pa.binary()),
        "value": pa.array([_VALUE] * _ROWS, pa.binary()),
        "topic": pa.array(["bench"] * _ROWS, pa.string()),
        "partition": pa.array([0] * _ROWS, pa.int32()),
        "offset": pa.array(range(_ROWS), pa.int64()),
        "timestamp": pa.array([1_700_000_000_000_000] * _ROWS, pa.timestamp("us", "UTC")),
        "timestampType": pa.array([0] * _ROWS, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)
