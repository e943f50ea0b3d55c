"""Choice of the kernel, made here only: the native one if it was built, else the reference.

In a checkout Python imports the sources there, which hide an installed package. Its native kernel is used then, if both
have the same contract.

`SPARK_KLOG_KERNEL=reference` forces the reference; with `native` a missing native kernel is an error.
"""

from __future__ import annotations

import filecmp
import importlib
import logging
import os
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from spark_klog.base.extras import BUILD_KERNELS
from spark_klog.errors import ConfigError
from spark_klog.records.contract import Kernel

_log = logging.getLogger(__name__)
#: Of what the kernels offer, also in `_kernel.pyx`: raise both whenever a function of the contract changes.
VERSION = 6
_MISSING = f"is missing: {BUILD_KERNELS}"
_OLDER = "was built from other sources than these: build it again with 'pip install -e .'"
_MODULES = {"native": "spark_klog.records.kernels._kernel", "reference": "spark_klog.records.kernels.reference"}
#: By choice, and the native kernel that is imported: looking for it takes as long as a fetch of few records.
_loaded: dict[tuple[str, ModuleType | None], Kernel] = {}


def load(choice: str | None = None) -> Kernel:
    """The kernel named by `choice` (None: by the environment, else the fastest available).

    `ConfigError` for an unknown name, or for "native" if it was not built, or from older sources.
    """
    choice = choice or os.environ.get("SPARK_KLOG_KERNEL") or "auto"
    loaded = _loaded.get((choice, sys.modules.get(_MODULES["native"])))
    if loaded is not None:
        return loaded
    if choice not in (*_MODULES, "auto"):
        raise ConfigError(f"SPARK_KLOG_KERNEL={choice} is unknown: set it to {' or '.join(_MODULES)}")
    trouble = None if choice == "reference" else native_trouble()
    if trouble is not None and choice == "native":
        raise ConfigError(f"the native kernel {trouble}")
    is_native = trouble is None and choice != "reference"
    kernel: Kernel = importlib.import_module(_MODULES["native" if is_native else "reference"])
    _loaded[choice, sys.modules.get(_MODULES["native"])] = kernel
    return kernel


def native_trouble() -> str | None:
    """Why the native kernel can't be used, and what to do; None if it can be."""
    try:
        native = importlib.import_module(_MODULES["native"])
    except ImportError:
        hidden = _hidden_folder()
        if hidden is None:
            return _MISSING
        here = Path(__file__).parent
        if not _have_one_contract(here, hidden):
            return (
                f"is not in {here.parents[1]}, whose sources hide the installed package {hidden.parents[1]} and differ "
                "from it: run in another folder, or 'pip install -e .' in that of the sources"
            )
        __path__.append(str(hidden))
        try:
            native = importlib.import_module(_MODULES["native"])
        except ImportError:  # it is there, and can't be loaded
            return _MISSING
    return None if _is_of_these_sources(native) else _OLDER


@cache
def _hidden_folder() -> Path | None:
    """This folder in an installed package that has a native kernel, if sources earlier on the path hide it."""
    here = Path(__file__).parent
    if not here.is_dir():  # in an archive
        return None
    folders = (Path(entry, *__name__.split(".")) for entry in sys.path)
    others = (folder.absolute() for folder in folders if folder.is_dir() and not folder.samefile(here))
    return next((folder for folder in others if PathFinder.find_spec(_MODULES["native"], [str(folder)])), None)


def _have_one_contract(here: Path, there: Path) -> bool:
    names = [*(path.name for path in here.glob("*.py")), "../contract.py"]
    pairs = [(here / name, there / name) for name in names]
    return all(other.is_file() and filecmp.cmp(own, other, shallow=False) for own, other in pairs)


@cache
def _is_of_these_sources(native: ModuleType) -> bool:
    is_whole = all(hasattr(native, name) for name in vars(Kernel) if not name.startswith("_"))
    return is_whole and getattr(native, "VERSION", 0) == VERSION


@cache
def warn_if_slow() -> None:
    """Log once per process if the reference kernel is in use but was not chosen."""
    if not os.environ.get("SPARK_KLOG_KERNEL") and load() is importlib.import_module(_MODULES["reference"]):
        _log.warning(
            "the native kernel %s, or set SPARK_KLOG_KERNEL=reference to silence this; records are decoded and encoded "
            "in Python, some hundred times slower",
            native_trouble(),
        )
