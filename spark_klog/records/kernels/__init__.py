"""Choice of the kernel, made here only: the native one if it was built, else the reference.

`SPARK_KLOG_KERNEL=reference` forces the reference; with `native` a missing native kernel is an error.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache

from spark_klog.errors import ConfigError
from spark_klog.records.contract import Kernel

_log = logging.getLogger(__name__)
_MODULES = {"native": "spark_klog.records.kernels._kernel", "reference": "spark_klog.records.kernels.reference"}


def load(choice: str | None = None) -> Kernel:
    """The kernel named by `choice` (None: by the environment, else the fastest available).

    `ConfigError` for an unknown name, or for "native" if it was not built.
    """
    choice = choice or os.environ.get("SPARK_KLOG_KERNEL") or "auto"
    if choice not in (*_MODULES, "auto"):
        raise ConfigError(f"SPARK_KLOG_KERNEL={choice} is unknown: set it to {' or '.join(_MODULES)}")
    try:
        kernel: Kernel = importlib.import_module(_MODULES.get(choice, _MODULES["native"]))
    except ImportError:
        if choice == "native":
            raise ConfigError("the native kernel was not built; install again with a C compiler") from None
        kernel = importlib.import_module(_MODULES["reference"])
    return kernel


@cache
def warn_if_slow() -> None:
    """Log once per process if the reference kernel is in use but was not chosen."""
    if not os.environ.get("SPARK_KLOG_KERNEL") and load() is importlib.import_module(_MODULES["reference"]):
        _log.warning(
            "the native kernel is missing: records are decoded and encoded in Python, some forty times slower; "
            "install spark_klog again with a C compiler, or set SPARK_KLOG_KERNEL=reference to silence this"
        )
