"""The base install: its size, how long imports take, and the time until an embedded broker takes a record."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import take_turns
from tests.support.packages.wheel import build_wheel, fresh_environment, site_packages

_REPEAT = 10
_SECONDS = 120
_NAMES = "Admin, Consumer, Producer"
_TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
#: What the fixtures of the pytest plugin do.
_FIXTURE = """
import time
began = time.perf_counter()
from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
with EmbeddedCluster() as cluster:
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(servers) as admin:
        admin.create_topic("clicks", 1)
    with Producer(servers) as producer:
        producer.send("clicks", b"value").result(10)
        print(time.perf_counter() - began)
"""


def _installs(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("installs")
    repeat = _REPEAT if bench.records >= 1_000_000 else bench.repeat
    python = fresh_environment(folder, str(build_wheel(folder / "wheel")))

    def line(work: str, unit: str, klog: Side, peer: Side | None = None) -> Result:
        return Result(work, unit, klog, peer, bench.command, higher_is_better=False)

    paths = [site_packages(python), *site_packages(python).rglob("*")]
    size = sum(path.lstat().st_blocks * 512 for path in paths) / (1 << 20)
    yield line("the base as installed, with its dependencies and pip's .pyc files (du)", "MiB", Side("klog", [size]))

    def run(program: str) -> float:
        return float(_output(python, "-c", program, folder=folder))

    for what, program in (
        ("import spark_klog.client", _TIMED.format("import spark_klog.client")),
        (f"from spark_klog.client import {_NAMES}", _TIMED.format(f"from spark_klog.client import {_NAMES}")),
        ("embedded cluster: from the import to the first record that is acknowledged", _FIXTURE),
    ):
        side = Side("klog")
        take_turns([(side, partial(run, program))], repeat)
        yield line(what, "s", side)
    fresh_environment(folder, "pytest")
    (folder / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    ours, bare = Side("with the plugin"), Side("-p no:klog")
    take_turns(
        [(ours, partial(_pytest, python, folder)), (bare, partial(_pytest, python, folder, "-p", "no:klog"))], repeat
    )
    yield line("pytest of a single test that uses no fixture", "s", ours, bare)


def _pytest(python: Path, folder: Path, *options: str) -> float:
    """Seconds of processor time: a run takes a quarter of a second, and what else the machine does shows in it."""
    before = os.times()
    _output(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_nothing.py", folder=folder)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _output(*command: str | Path, folder: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(command, cwd=folder, env=kept, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, check=True)
    return ran.stdout


INSTALLS = Work(
    "installs",
    _installs,
    (
        "Installs: `pip install` of the wheel into a new virtual environment without pip. Each figure of an import and "
        "of the embedded cluster is of a new process, from its first line on; the start of Python is not in it. The "
        "embedded cluster is what a test with `klog_cluster` and `klog_topic` waits for. pytest: processor time of a "
        "run, with the start of Python. Wanted: 25 MiB; 0.08 s for the import; 0.5 s for the embedded cluster.",
    ),
)
