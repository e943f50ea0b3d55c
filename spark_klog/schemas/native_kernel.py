"""Extension modules that decode and encode rows, and that need not be there."""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from types import ModuleType
from typing import Any

from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)


def native_kernel(module: str, version: int, form: str, without: str) -> Any:
    """The module of a format's native kernel; None if it was not built or is not to be used.

    The module's `VERSION` must be `version`. `SPARK_KLOG_KERNEL` is that of records/kernels: `ConfigError` if it is
    "native", and the kernel is not there. A warning says once what a kernel that is missing costs: `without`.
    """
    choice = os.environ.get("SPARK_KLOG_KERNEL")
    if choice == "reference":
        return None
    kernel = _imported(module, version, form, without)
    if kernel is None and choice == "native":
        raise ConfigError(f"{form}'s native kernel is missing or was built from other sources: 'pip install' again")
    return kernel


@cache
def _imported(module: str, version: int, form: str, without: str) -> ModuleType | None:
    try:
        kernel = importlib.import_module(module)
    except ImportError:
        kernel = None
    if kernel is None or getattr(kernel, "VERSION", 0) != version:
        what = "is missing" if kernel is None else "was built from other sources"
        advice = "install spark_klog again with a C compiler"
        _log.warning("%s's native kernel %s: %s; %s", form, what, advice, without)
        return None
    return kernel
