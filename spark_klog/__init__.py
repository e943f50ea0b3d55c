"""The Kafka commit log for PySpark: `spark.read.format("klog")`, a client, and a broker to embed.

The functions are imported at first use, as they need pyarrow and pyspark; where they can't be, the call says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_klog.base.names import VERSION, imported_at_first_use

if TYPE_CHECKING:
    from spark_klog.spark.available_now import run_available_now
    from spark_klog.spark.write.updates import write_updates
    from spark_klog.topic_reader import read

__all__ = ["read", "run_available_now", "write_updates"]
__version__ = VERSION

_imported = imported_at_first_use(
    __name__,
    {
        "topic_reader": "read",
        "spark.available_now": "run_available_now",
        "spark.write.updates": "write_updates",
    },
)


def __getattr__(name: str) -> Any:
    try:
        return _imported(name)
    except ImportError:  # hasattr and `import *` go well nevertheless
        return lambda *arguments, **named: _imported(name)(*arguments, **named)
