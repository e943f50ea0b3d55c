"""`klog ui`: a page about a cluster, served on loopback. Needs the extra `ui` (Starlette, Uvicorn)."""

from spark_klog.base.extras import require

require("klog ui", "starlette", "uvicorn", "pyarrow")
