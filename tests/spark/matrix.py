"""Run the suites of source, sink, streams and exactly once with each pyspark: `python -m tests.spark.matrix`.

Each pair of Python and pyspark has an environment in the cache, and its Python builds a wheel with the native kernel.
The tests run from a copy without the package's sources, on the installed wheel. Further arguments go to pytest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.packages.wheel import build_wheel
from tests.support.spark import pyspark_versions

_ROOT = Path(__file__).parent.parent.parent
_SUITES = (
    *("read/test_source_batch", "read/test_source_stream", "read/test_first_batch", "read/test_offsets"),
    *("read/test_limits", "read/test_loss", "read/test_available_now", "write/test_sink"),
    *("test_options", "test_round_trip", "test_sql"),
    *("exactly_once/test_streams", "exactly_once/test_write_updates", "exactly_once/test_decision_place"),
    *("exactly_once/test_micro_batches", "exactly_once/test_batch_steps"),
)
#: Packages that the suites need in addition to the project's dependencies.
TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "chispa",
    "confluent-kafka",
    "aiokafka",
    "kafka-python>=3",
    "psutil",
    "cryptography",
)


def main() -> int:
    newer, left_out = pyspark_versions.newer()
    pythons = [pyspark_versions.oldest(), pyspark_versions.with_connector(), *newer]
    codes = {python: _run(python) for python in pythons}
    for python, code in codes.items():
        print(f"{'passed' if code == 0 else 'FAILED'}  {python.parent.parent.name}")  # noqa: T201 - a command
    for name in left_out:
        print(f"skipped {name}: this Python is neither on this machine nor in Debian")  # noqa: T201 - a command
    return max(codes.values())


def _run(python: Path) -> int:
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"== {python.parent.parent.name}", flush=True)  # noqa: T201 - a command
    subprocess.run([*pip, *TOOLS], check=True)
    with TemporaryDirectory(prefix="klog-matrix-") as name:
        folder = Path(name)
        installed, tree = folder / "installed", folder / "tree"
        wheel = build_wheel(folder / "wheel", python)
        subprocess.run([*pip, "--no-deps", "--target", installed, wheel], check=True)
        for part in ("tests", "jobs", "notebooks"):
            shutil.copytree(_ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(_ROOT / "pyproject.toml", tree)
        environment = pyspark_versions.child_environment(python)
        environment |= {"PYTHONPATH": str(installed), "SPARK_KLOG_KERNEL": "native"}
        files = [f"tests/spark/{suite}.py" for suite in _SUITES]
        beside = "tests/spark/read/test_available_now.py::test_beside_the_connector"  # it takes a pyspark of its own
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", *files, "--deselect", beside, *sys.argv[1:]]
        return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
