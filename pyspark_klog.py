"""Lets pyspark find `format("klog")`: it looks for `DefaultSource` in modules named pyspark_*, once a session."""

from spark_klog.base.extras import require

require("The Spark connector", "pyarrow", "pyspark")

from spark_klog.spark.read.source import KlogDataSource as DefaultSource
from spark_klog.spark.versions import warn_of_untested

__all__ = ["DefaultSource"]

warn_of_untested()
