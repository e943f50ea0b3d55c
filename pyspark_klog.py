"""Lets pyspark find `format("klog")`: it looks for `DefaultSource` in modules named pyspark_*."""

from spark_klog.spark.read.source import KlogDataSource as DefaultSource

__all__ = ["DefaultSource"]
