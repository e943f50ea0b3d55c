"""Upper bounds of time are pushed down only if that leaves no record out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest
from pyspark.sql import SparkSession, functions as f

from tests.spark.support import Sent, consume, create_topic, produce, read, set_topic

LONG_AGO, FAR = 1_600_000_000_000, 4_000_000_000_000


@pytest.fixture(autouse=True)
def _pushdown(spark: SparkSession) -> Iterator[None]:
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, "true")
    yield
    spark.conf.unset(name)


@pytest.mark.parametrize(
    "kinds",
    [
        ["CreateTime", "LogAppendTime"],
        pytest.param(["CreateTime", "CreateTime"], marks=pytest.mark.test_all("long")),
    ],
    ids="-".join,
)
def test_a_topic_that_is_switched(spark: SparkSession, servers: str, topic: str, kinds: list[str]) -> None:
    """Records with create time have timestamps of the far future first, then of the distant past."""
    create_topic(servers, topic)
    for number, kind in enumerate(kinds):
        set_topic(servers, topic, "message.timestamp.type", kind)
        for timestamp in (FAR, LONG_AGO):
            produce(servers, topic, [Sent(b"%d" % number, timestamp=timestamp)])
        time.sleep(0.01)
    seen = consume(servers, topic)
    bounds = {record.timestamp for record in seen} | {LONG_AGO + 1}
    if len(kinds) == 3:  # docs/reference/reading.md: create times between log append times may be left out
        bounds = {FAR, FAR + 1}
    for bound in sorted(bounds):
        moment = datetime.fromtimestamp(bound / 1000, timezone.utc)
        found = read(spark, servers, subscribe=topic).where(f.col("timestamp") < moment).select("offset").collect()
        assert sorted(row.offset for row in found) == [item.offset for item in seen if item.timestamp < bound]
