"""The available kernels: the reference, and the native one if it was built."""

from __future__ import annotations

from spark_klog.errors import ConfigError
from spark_klog.records import kernels
from spark_klog.records.contract import Kernel


def _available() -> list[Kernel]:
    try:
        return [kernels.load("reference"), kernels.load("native")]
    except ConfigError:
        return [kernels.load("reference")]


KERNELS = _available()
