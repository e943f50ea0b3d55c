"""The only file that chooses a kernel: the native one where it was built, else the reference.

`SPARK_KLOG_KERNEL=reference` forces the reference, `native` insists on the native one.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache

from spark_klog.errors import ConfigError
from spark_klog.records.contract import Kernel

_log = logging.getLogger(__name__)
_MODULES = {"native": "spark_klog.records._kernel", "reference": "spark_klog.records.reference"}


def load(choice: str | None = None) -> Kernel:
    """The kernel named by `choice` (None: by the environment, else the best there is).

    `ConfigError` for an unknown name, or for "native" where it was not built.
    """
    choice = choice or os.environ.get("SPARK_KLOG_KERNEL") or "auto"
    if choice not in (*_MODULES, "auto"):
        raise ConfigError(f"SPARK_KLOG_KERNEL={choice}: known are {', '.join(_MODULES)}")
    try:
        kernel: Kernel = importlib.import_module(_MODULES.get(choice, _MODULES["native"]))
    except ImportError:
        if choice == "native":
            raise ConfigError("the native kernel was not built; install again with a C compiler") from None
        kernel = importlib.import_module(_MODULES["reference"])
    return kernel


@cache
def warn_if_slow() -> None:
    """Log, once in a process, that records are decoded in Python although nobody chose that."""
    if not os.environ.get("SPARK_KLOG_KERNEL") and load() is importlib.import_module(_MODULES["reference"]):
        _log.warning(
            "the native kernel is missing, records are read and written in Python, some forty times slower; "
            "install spark_klog again with a C compiler (to keep it so: SPARK_KLOG_KERNEL=reference)"
        )
