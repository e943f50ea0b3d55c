"""Sphinx's settings: `make docs` builds into build/docs."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

from generate import generate  # noqa: E402

generate(_HERE / "reference" / "generated")

project = "spark_klog"
author = "the authors of spark_klog"
copyright = "the authors of spark_klog; Apache License 2.0"
extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_inline", "deflist", "fieldlist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "spark_klog"
# Commands are in fences without a language; they are no Python.
highlight_language = "none"
nitpicky = True
