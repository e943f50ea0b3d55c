"""format("klog-impatient"): a stream's partition counts as deleted after a second, not after twenty.

For tests that delete topics at a broker that does not restart meanwhile. Spark's processes import this module, so it
imports nothing of the tests.
"""

from __future__ import annotations

from pyspark.sql.types import StructType

from spark_klog.spark import stream
from spark_klog.spark.source import KlogDataSource
from spark_klog.spark.stream import StreamReader


class ImpatientDataSource(KlogDataSource):
    @classmethod
    def name(cls) -> str:
        return "klog-impatient"

    def streamReader(self, schema: StructType) -> StreamReader:
        stream._GONE_SECONDS = 1.0
        return super().streamReader(schema)
