"""Tables of Delta and Iceberg: what a load appends files to, and what changes are merged into.

    delta:URI                        a Delta table in a folder
    delta:uc://CATALOG.SCHEMA.TABLE  an external one, by its name in Unity Catalog
    iceberg:CATALOG.NAMESPACE.TABLE  an Iceberg table of a catalog, as pyiceberg's configuration has it

A run of a load is one commit of its table: the commit has the files, the run's number and its offsets.
"""

from __future__ import annotations

from spark_klog.base.extras import require

require("A table", "pyarrow")

from spark_klog.tables.stream_upserts import upsert

__all__ = ["upsert"]
