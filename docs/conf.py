"""Sphinx's settings; `make docs` builds by publish.py, which puts each version into a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from spark_klog.base.names import VERSION

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

from generate import generate  # noqa: E402
from publish import is_released  # noqa: E402

generate(_HERE / "reference" / "generated")

project = "spark_klog"
author = "the authors of spark_klog"
copyright = "the authors of spark_klog; Apache License 2.0"
version = release = VERSION
extensions = ["myst_parser", "named_rows"]
myst_enable_extensions = ["attrs_inline", "deflist", "fieldlist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "spark_klog"
if not is_released():
    html_theme_options = {
        "announcement": f"Version {VERSION} is not released. Install a checkout: in its folder write <code>.</code> "
        "for <code>spark-klog</code>, as in <code>pip install '.[spark]'</code>."
    }
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = [("pages.js", {"defer": "defer"})]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",  # ours
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
# Nothing declares an entry of an index.
html_use_index = False
html_copy_source = False
html_search_scorer = str(_HERE / "scorer.js")
# Commands are in fences without a language; they are no Python.
highlight_language = "none"
nitpicky = True
# Two hyphens begin an option: a dash in their place could not be copied.
smartquotes = False
# `make links` asks other servers.
linkcheck_anchors = False
linkcheck_timeout = 20
