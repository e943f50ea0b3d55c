"""Lets pyspark find `format("klog")`: it looks for `DefaultSource` in modules named pyspark_*, once a session.

Where pyarrow is missing or can't be imported, the source is there nevertheless: Spark shows the error of a source's
`__init__` to the user, but of an import only a warning, and then says that there is no such source.
"""

from spark_klog.base.extras import is_usable, require

require("The Spark connector", "pyspark")

if is_usable("pyarrow"):
    from spark_klog.spark.read.source import KlogDataSource as DefaultSource
    from spark_klog.spark.versions import warn_of_untested

    warn_of_untested()
else:
    from pyspark.sql.datasource import DataSource

    class DefaultSource(DataSource):  # type: ignore[misc, no-redef]
        """Says what the connector lacks."""

        @classmethod
        def name(cls) -> str:
            return "klog"

        def __init__(self, options: dict[str, str]) -> None:
            require("The Spark connector", "pyarrow")


__all__ = ["DefaultSource"]
