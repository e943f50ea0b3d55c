"""format("klog-impatient"): a stream's missing partition counts as deleted after 1 s instead of 20 s.

For tests that delete topics while the broker keeps running. Spark's processes import this module, so it imports no
other module of the tests.
"""

from __future__ import annotations

from pyspark.sql.types import StructType

from spark_klog.spark.read import stream
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.spark.read.stream import StreamReader


class ImpatientDataSource(KlogDataSource):
    @classmethod
    def name(cls) -> str:
        return "klog-impatient"

    def streamReader(self, schema: StructType) -> StreamReader:
        stream._GONE_SECONDS = 1.0
        return super().streamReader(schema)
