"""In a fresh clone all workers of a run would compile all modules and rewrite all tests: each does its share."""

from __future__ import annotations

import importlib.util
import py_compile
import sys
from pathlib import Path

import pytest

try:
    from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir
except ImportError:  # another pytest
    PYC_TAIL = ""

_ROOT = Path(__file__).parents[3]


def compile_share(config: pytest.Config, worker: int, workers: int) -> None:
    """Write what the modules of this worker's share lack in __pycache__; the others do theirs at the same time."""
    if sys.dont_write_bytecode or not PYC_TAIL:
        return
    modules = sorted(path for folder in ("spark_klog", "tests") for path in (_ROOT / folder).rglob("*.py"))
    for path in modules[worker::workers]:
        is_test = path.name.startswith("test_") or path.name == "conftest.py"
        compiled = (
            get_cache_dir(path) / (path.stem + PYC_TAIL) if is_test else Path(importlib.util.cache_from_source(path))
        )
        if compiled.exists() and compiled.stat().st_mtime >= path.stat().st_mtime:
            continue
        try:
            if is_test:
                compiled.parent.mkdir(parents=True, exist_ok=True)
                stat, code = _rewrite_test(path, config)
                _write_pyc(config.stash[assertstate_key], code, stat, compiled)
            else:
                py_compile.compile(str(path), quiet=1)
        except Exception:
            continue  # its import tells
