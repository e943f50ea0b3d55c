"""Spark takes the Arrow columns that Avro records are decoded to."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import SparkSession

from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.schema import parse_schema
from tests.schemas.avro.spark_types import every_type, plain, spark_type
from tests.support.spark import spark_avro


def test_every_type(spark: SparkSession) -> None:
    """All types, and rows that do not decode or are null."""
    case = every_type()
    schema = parse_schema(case["reader"])
    decoder = AvroDecoder(schema)
    rows = [*map(bytes.fromhex, case["rows"]), b"cut off", None]
    decoded = decoder.decode(pa.array(rows, pa.binary()), [decoder.program(schema)])
    assert [row for row, _ in decoded.bad] == [1]
    frame = spark.createDataFrame(pa.table({"v": decoded.values}), f"v {spark_type(decoder.type)}")
    first, *others = (row.v for row in frame.collect())
    assert spark_avro.plain(first) == plain(decoded.values[0].as_py(), decoder.type)
    assert others == [None, None]
