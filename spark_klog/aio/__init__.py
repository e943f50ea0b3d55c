"""The client on asyncio: `Admin`, `Consumer`, `Producer`, with names, settings and errors of `spark_klog.client`.

The requests, codecs and accounting are those of the client; only connections, waiting and turns are the loop's. Public
names are imported at first use, so that importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_klog.base.names import imported_at_first_use

if TYPE_CHECKING:
    from spark_klog.aio.admin import Admin
    from spark_klog.aio.consumer import Consumer
    from spark_klog.aio.producer import Producer

__all__ = ["Admin", "Consumer", "Producer"]

__getattr__ = imported_at_first_use(__name__, {"admin": "Admin", "consumer": "Consumer", "producer": "Producer"})
