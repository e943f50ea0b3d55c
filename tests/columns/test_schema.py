"""The Arrow schema equals pyspark's own conversion of the columns of Spark's Kafka connector."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark_klog.columns.schema import FULL, WITHOUT_HEADERS, subset
from spark_klog.errors import ConfigError
from spark_klog.spark.versions import arrow_schema
from tests.spark.support import KAFKA_SCHEMA, KAFKA_SCHEMA_WITH_HEADERS


@pytest.mark.parametrize(
    ("ours", "kafkas"), [(WITHOUT_HEADERS, KAFKA_SCHEMA), (FULL, KAFKA_SCHEMA_WITH_HEADERS)], ids=["plain", "headers"]
)
def test_arrow_schema_is_sparks(ours: pa.Schema, kafkas: StructType) -> None:
    sparks = arrow_schema(kafkas)
    assert ours.equals(sparks, check_metadata=True)
    assert [(field.name, field.type, field.nullable) for field in ours] == [
        (field.name, field.type, field.nullable) for field in sparks
    ]
    assert from_arrow_schema(ours) == kafkas


def test_subset_keeps_the_order_asked_for() -> None:
    assert subset(["value", "headers", "key"]).names == ["value", "headers", "key"]
    assert subset(["value"]).field("value").type == pa.binary()
    assert subset([]).names == []


def test_subset_names_what_is_unknown_and_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"no such columns: vlaue; the known ones are key, value, topic, .*headers"):
        subset(["key", "vlaue"])
