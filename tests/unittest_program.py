"""The test of docs/recipes/testing.md with PySpark's own class: `python -m unittest tests.unittest_program`."""

from __future__ import annotations

from pyspark.testing.sqlutils import ReusedSQLTestCase

from spark_klog.client import Producer
from spark_klog.testing import KlogTestCase


class StreamTest(KlogTestCase, ReusedSQLTestCase):  # type: ignore[misc]  # its class has no types
    """That of docs/recipes/testing.md."""

    def test_counts(self) -> None:
        servers, topic = self.klog_cluster.bootstrap_servers, self.klog_topic()
        with Producer({"bootstrap.servers": servers}) as producer:
            for page in (b"home", b"cart", b"home"):
                producer.send(topic, page)
        source = self.spark.readStream.format("klog").option("kafka.bootstrap.servers", servers)
        rows = source.option("subscribe", topic).option("startingOffsets", "earliest").load()
        counts = rows.selectExpr("cast(value AS string) AS page").groupBy("page").count()
        query = counts.writeStream.format("memory").queryName("counts").outputMode("complete")
        query.trigger(availableNow=True).start().awaitTermination()
        assert {tuple(row) for row in self.spark.table("counts").collect()} == {("home", 2), ("cart", 1)}
