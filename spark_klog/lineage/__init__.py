"""OpenLineage events: which topics a job read and wrote, with offsets. See docs/recipes/lineage.md.

`spark_klog.spark.lineage.LineageListener` sends those of Spark's streams, `jobs/batch_load.py --lineage` those of a
load.
"""

from spark_klog.base.extras import require

require("Lineage", "openlineage")
