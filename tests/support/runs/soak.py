"""What `make soak` and `make matrix` do whole, and `make test-all` a slice of, or nothing.

The Makefile sets SPARK_KLOG_SOAK and SPARK_KLOG_MATRIX; tests/test_runs.py looks for the files that use these there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

SOAK = "SPARK_KLOG_SOAK" in os.environ
#: Marks of a test or parameter whose family has others in `make test` or `make test-all`.
in_soak = pytest.mark.skipif(not SOAK, reason="part of make soak")
in_matrix = pytest.mark.skipif("SPARK_KLOG_MATRIX" not in os.environ, reason="part of make matrix")


def commands(target: str) -> list[str]:
    """The commands of a target of the Makefile, as they stand there."""
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    [lines] = re.findall(rf"^{target}: \$\(VENV\).*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return [line.strip() for line in lines.splitlines()]
