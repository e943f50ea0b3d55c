"""Arrow batches to finished record batches, as Spark's writers make them, without Spark and sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from kafka.record.default_records import DefaultRecordBatchBuilder

from benchmarks.figures import Result, Side
from benchmarks.record_batches import TIME, kernel, speed, take_turns, value
from benchmarks.work import Bench, Work
from spark_klog.client.settings import ClientConfig
from spark_klog.columns.encode import Placement
from spark_klog.records import kernels
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.wire.codecs import Codec, codec_by_name

_ROWS = 65_536
_TARGET = ClientConfig.__dataclass_fields__["batch_size"].default


def _encode(bench: Bench) -> Iterator[Result]:
    values = [value(index // 600, index % 600) for index in range(_ROWS)]
    batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], names=["value"])
    for codec in map(codec_by_name, ("none", "lz4")):
        native, reference = Side("native kernel"), Side("reference kernel")
        kafka_python = Side("kafka-python's DefaultRecordBatchBuilder")
        sides: list[tuple[Side, Callable[[], float]]] = [
            (native, lambda codec=codec: _columns("native", batch, codec)),
            (reference, lambda codec=codec: _columns("reference", batch, codec)),
            (kafka_python, lambda codec=codec: speed(lambda: _kafka_python(values, codec))),
        ]
        take_turns(sides, bench.repeat)
        for peer in (reference, kafka_python):
            work = f"encode Arrow batches of {_ROWS:,} rows, values of 100 B, {codec.name}"
            yield Result(work, "M records/s", native, peer, bench.command)


def _columns(name: str, batch: pa.RecordBatch, codec: Codec) -> float:
    with kernel(name):
        chosen = kernels.load()

    def once() -> int:
        records = 0
        placement = Placement(batch, 4, _TARGET)
        for _, columns in placement.records([0] * placement.turns):
            row = 0
            while row < columns.count:
                body, following, base, maximum = chosen.encode(columns, row, _TARGET)
                build_batch(body, following - row, base_timestamp=base, max_timestamp=maximum, codec=codec)
                row = following
            records += row
        assert records == batch.num_rows
        return records

    return speed(once)


def _kafka_python(values: list[bytes], codec: Codec) -> int:
    def new_builder() -> DefaultRecordBatchBuilder:
        return DefaultRecordBatchBuilder(2, codec.id, False, -1, -1, -1, _TARGET)

    builder = new_builder()
    count = 0
    for content in values:
        if builder.append(count, TIME, None, content, []) is None:
            builder.build()
            builder, count = new_builder(), 0
            builder.append(count, TIME, None, content, [])
        count += 1
    builder.build()
    return len(values)


ENCODE = Work(
    "encode",
    _encode,
    (
        f"Encode: one process, one core; Arrow batches without keys to finished record batches of {_TARGET:,} bytes: "
        "split by partition, records, compression, CRC. kafka-python is given the same values as Python's bytes.",
    ),
)
