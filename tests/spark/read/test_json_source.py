"""`valueFormat=json`: values as rows by a DDL, or by what a sample of them has, beside Spark's own inference."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession, types as t

from spark_klog.errors import ConfigError
from spark_klog.schemas.json_schema.ddl import schema_text
from spark_klog.schemas.json_schema.inference import Seen, grown_schema
from spark_klog.spark.read.row_columns import JSON
from tests.spark.support import Sent, create_topic, produce

_ROWS = [
    {"user": "Ada", "at": {"lat": 1.5, "lon": 2}, "tags": ["a"], "n": 1},
    {"user": "Bob", "tags": [], "n": 2.5, "mixed": "x"},
    {"user": None, "at": None, "mixed": {"y": 1}},
]


def _source(spark: SparkSession, servers: str, topic: str, schema: str, **options: str) -> Any:
    source = spark.read.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    return source.option("valueFormat", "json").option("valueSchema", schema).options(**options)


@pytest.fixture
def sent(servers: str, topic: str) -> str:
    create_topic(servers, topic, partitions=2)
    produce(servers, topic, [Sent(json.dumps(row).encode(), partition=number % 2) for number, row in enumerate(_ROWS)])
    return topic


def test_by_ddl(spark: SparkSession, servers: str, sent: str) -> None:
    frame = _source(spark, servers, sent, "user string, at struct<lat: double>, mixed json").load()
    rows = frame.selectExpr("value.user", "value.at.lat", "value.mixed").collect()
    assert sorted(map(tuple, rows), key=repr) == [("Ada", 1.5, None), ("Bob", None, '"x"'), (None, None, '{"y":1}')]
    strict = _source(spark, servers, sent, "n bigint")
    with pytest.raises(Exception, match="field n must be an integer of 64 bits, not a number"):
        strict.load().collect()
    assert {row.n for row in strict.option("mode", "permissive").load().selectExpr("value.n").collect()} == {1, None}
    assert strict.option("badRecords", "skip").option("mode", "failfast").load().count() == 2


def test_inferred(spark: SparkSession, servers: str, sent: str, tmp_path: Path) -> None:
    frame = _source(spark, servers, sent, "infer").load()
    assert frame.schema["value"].metadata[JSON] == (
        "at struct<lat: double, lon: bigint>, mixed json, n double, tags array<string>, user string"
    )
    rows = frame.selectExpr("value.user", "value.at.lon", "size(value.tags) s", "value.n", "value.mixed").collect()
    assert sorted(map(tuple, rows), key=repr) == [
        ("Ada", 2, 1, 1.0, None),
        ("Bob", None, 0, 2.5, '"x"'),
        (None, None, None, None, '{"y":1}'),
    ]

    produce(servers, sent, [Sent(b'{"user": "Eve", "new": 1}', partition=0)])
    stream = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", sent)
    stream = stream.option("valueFormat", "json").option("valueSchema", "infer").option("startingOffsets", "earliest")
    output, names = str(tmp_path / "rows"), ("value.user", "value.new")
    for _ in range(2):
        query = stream.load().select(*names).writeStream.format("parquet").option("path", output)
        query = query.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start()
        assert query.awaitTermination(60)
    assert sorted(map(tuple, spark.read.parquet(output).collect()), key=repr) == [
        ("Ada", None),
        ("Bob", None),
        ("Eve", 1),
        (None, None),
    ]


def test_nothing_to_infer_of(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    with pytest.raises(Exception, match="option valueSchema=infer: no record is a JSON object"):
        _source(spark, servers, topic, "infer").load()
    with pytest.raises(Exception, match="unknown type 'strin'"):
        _source(spark, servers, topic, "user strin").load()
    write = spark.range(1).selectExpr("to_json(struct(id)) AS value").write.format("klog").mode("append")
    write = write.option("kafka.bootstrap.servers", servers).option("topic", topic)
    with pytest.raises(Exception, match="option valueFormat=json is for reading") as caught:
        write.option("valueFormat", "json").option("valueSchema", "id int").save()
    assert ConfigError.__name__ in str(caught.value)


_CHANCE = random.Random(58)
_LEAVES: tuple[Any, ...] = (True, 0, 7, -(1 << 40), 1.5, -2e30, "text", "2024-01-01", None, 1 << 63, 10**30)


def _value(depth: int) -> Any:
    kind = _CHANCE.random()
    if depth and kind < 0.2:
        return {name: _value(depth - 1) for name in _CHANCE.sample("abcd", _CHANCE.randint(1, 3))}
    if depth and kind < 0.35:
        return [_value(depth - 1) for _ in range(_CHANCE.randint(1, 3))]
    return _CHANCE.choice(_LEAVES)


def _by_spark(kind: t.DataType) -> str:
    """As a schema's text; Spark has no type for JSON of several kinds: it is a string, too."""
    if isinstance(kind, t.StructType):
        return f"struct<{', '.join(f'{field.name}: {_by_spark(field.dataType)}' for field in kind)}>"
    return f"array<{_by_spark(kind.elementType)}>" if isinstance(kind, t.ArrayType) else kind.simpleString()


@pytest.mark.test_all("long")  # schemas/json_schema/test_inference.py has its types
def test_types_are_those_of_spark(spark: SparkSession) -> None:
    """But for what Spark guesses: that a field of nulls is a string, and doubles for integers that they round."""
    compared = 0
    for _ in range(60):
        name, depth = "f", _CHANCE.randint(0, 3)
        kinds = [_value(depth) for _ in range(_CHANCE.randint(1, 3))]
        texts = [json.dumps({name: value}) for value in kinds]
        seen = Seen()
        for text in texts:
            seen.add_row(text.encode())
        ours = schema_text(grown_schema(None, seen))
        frame = spark.read.json(
            spark.createDataFrame([(text,) for text in texts], "v string").rdd.map(lambda row: row.v)
        )
        theirs = ", ".join(f"{field.name} {_by_spark(field.dataType)}" for field in frame.schema)
        nulls = "null" in "".join(texts)
        if ours.replace("json", "string") != theirs:
            has_wide = any(len(part) > 15 for part in "".join(texts).replace(",", " ").replace("}", " ").split())
            assert nulls or (has_wide and "json" in ours), (texts, ours, theirs)
        else:
            compared += 1
    assert compared > 30
