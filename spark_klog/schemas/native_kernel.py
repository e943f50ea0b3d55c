"""Extension modules that decode and encode rows."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from spark_klog.base.extras import BUILD_KERNELS
from spark_klog.errors import ConfigError


@cache
def native_kernel(module: str, version: int, form: str) -> Any:
    """The module of a format's native kernel; `ConfigError` if it was not built, or its `VERSION` is not `version`."""
    try:
        kernel = importlib.import_module(module)
    except ImportError:
        kernel = None
    if kernel is None or getattr(kernel, "VERSION", 0) != version:
        what = "is missing" if kernel is None else "was built from other sources"
        raise ConfigError(
            f"{form}'s native kernel, which rows need, {what}: install a wheel of spark-klog, or {BUILD_KERNELS}"
        )
    return kernel
