"""Run the suites of source, sink and streams with each other pyspark: `python -m tests.spark.matrix [ARGUMENTS]`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import pyspark_versions

_ROOT = Path(__file__).parent.parent.parent
_SUITES = ("test_source_batch", "test_source_stream", "test_sink", "test_first_batch", "test_options", "test_offsets")
#: What the suites need beside the project's dependencies.
_TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "chispa",
    "confluent-kafka",
    "psutil",
    "cryptography",
)


def main() -> int:
    environments: list[Callable[[], Path]] = [pyspark_versions.oldest, pyspark_versions.with_connector]
    codes = [_run(make()) for make in environments]
    return max(codes)


def _run(python: Path) -> int:
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *_TOOLS], check=True)
    files = [f"tests/spark/{name}.py" for name in _SUITES]
    environment = {**pyspark_versions.child_environment(python), "PYTHONPATH": str(_ROOT)}
    print(f"== {python}", flush=True)  # noqa: T201 - a command
    return subprocess.run(
        [python, "-m", "pytest", *files, *sys.argv[1:]], cwd=_ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
