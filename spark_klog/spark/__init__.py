"""The Spark connector: options, offsets, ranges, readers and writers."""

from spark_klog.base.extras import require

require("The Spark connector", "pyarrow")
