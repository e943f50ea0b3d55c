"""Helpers for job tests: run jobs as a user does, read their output with pyarrow."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.dataset as ds

from spark_klog.tables.opening import open_table
from tests.support.processes import kill, tree_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
BATCH_LOAD = ROOT / "jobs" / "batch_load.py"
#: Exit codes of jobs.
DONE, NOTHING_NEW = 0, 3
_DRIVER = Path(__file__).with_name("driver.py")
_RUN_SECONDS = 480.0  # enough for a busy machine
_SETTINGS = (
    "spark.ui.enabled=false",
    "spark.driver.bindAddress=127.0.0.1",
    "spark.sql.shuffle.partitions=1",
    "spark.log.level=ERROR",
)


def environment(folder: Path) -> dict[str, str]:
    """Environment for a job's processes: this interpreter, this checkout, Spark's temporary files in `folder`."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "spark-local"),
    }


def spark_submit() -> str:
    """The spark-submit of the pyspark that this interpreter uses."""
    found = shutil.which("spark-submit", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, "spark-submit comes with pyspark"
    return found


class Ran(NamedTuple):
    """A finished job."""

    code: int
    stdout: str
    stderr: str

    def report(self) -> list[dict[str, Any]]:
        """The partitions in the last line of --json."""
        found: list[dict[str, Any]] = json.loads(self.stdout.splitlines()[-1])["partitions"]
        return found

    def complaint(self) -> str:
        """The one line with which a failed job says why; only lines about waiting may come before it.

        spark-submit merges both streams of Python into its standard output; its standard error is the JVM's.
        """
        assert self.code != 0
        *waits, last = self.stdout.splitlines()
        assert all(line.startswith("batch_load: still trying after ") for line in waits), self.stdout
        assert last.startswith("batch_load: ")
        return last


class Running:
    """A running job, whose output goes to files."""

    def __init__(
        self, command: list[str], folder: Path, number: int, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are its environment, by default that of `environment`."""
        variables = environment(folder) if variables is None else variables
        self._out, self._err = folder / f"run-{number}.stdout", folder / f"run-{number}.stderr"
        with self._out.open("wb") as stdout, self._err.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=folder, env=dict(variables)
            )
        self._seen: set[psutil.Process] = set()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def tree(self) -> list[psutil.Process]:
        """spark-submit's JVM, then its descendants."""
        found = tree_of(self._process)
        self._seen.update(found)
        return found

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def result(self, seconds: float = _RUN_SECONDS) -> Ran:
        """Wait for the end of the job and of its descendants."""
        if not self.ends_within(seconds):
            self.kill()
            raise AssertionError(f"no end within {seconds:g} s: {self._err.read_text(errors='replace')[-4000:]}")
        _, alive = psutil.wait_procs(self._seen, timeout=60)
        self.kill()
        assert not alive, f"outlived their JVM: {alive}"
        return Ran(self._process.returncode, self._out.read_text(), self._err.read_text(errors="replace"))

    def kill(self) -> None:
        """Kill all its processes that still run."""
        kill({*self.tree(), *self._seen})
        self._process.wait()


def _spark_arguments(settings: Sequence[str], master: str = "local[2]") -> list[str]:
    arguments = ["--master", master, "--driver-memory", "1g"]
    for setting in (*_SETTINGS, *settings):
        arguments += ["--conf", setting]
    return arguments


class Driver:
    """A process that runs batch_load.py repeatedly; its JVM starts with the first run that needs it.

    Tests that kill a run, or look at its processes, use `Load.start`.
    """

    def __init__(self, folder: Path, settings: Sequence[str] = ()) -> None:
        self._folder, self._settings = folder, settings
        self._errors = folder / "driver.stderr"
        self._process: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        given = {"PYSPARK_SUBMIT_ARGS": shlex.join([*_spark_arguments(self._settings), "pyspark-shell"])}
        with self._errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, str(_DRIVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self._folder,
                env=environment(self._folder) | given,
            )

    def run(self, arguments: list[str]) -> Ran:
        """Run batch_load.py with these arguments; `stderr` of the result is what Spark's processes wrote meanwhile."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        seen = self._errors.stat().st_size
        deadline = threading.Timer(_RUN_SECONDS, self.stop)
        deadline.start()
        try:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            deadline.cancel()
        errors = self._errors.read_bytes()[seen:].decode(errors="replace")
        assert line, f"the driver has ended, or gave no answer within {_RUN_SECONDS:g} s: {errors[-4000:]}"
        answer = json.loads(line)
        return Ran(answer["code"], answer["output"], errors)

    def stop(self) -> None:
        """Kill the process, its JVM and its Python workers; the next run starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        tree = tree_of(process)
        kill(tree)
        psutil.wait_procs(tree, timeout=60)
        process.wait()


class Load:
    """A load: its output, and runs of batch_load.py that write it."""

    def __init__(
        self,
        servers: str,
        topics: str,
        folder: Path,
        driver: Driver | None = None,
        settings: Sequence[str] = (),
        master: str = "local[2]",
        table: str = "",
    ) -> None:
        """`driver` runs what needs no process of its own; `settings` and `master` apply to the other runs.

        With the address of a `table` the output is its folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._servers = servers
        self._topics = topics
        self._folder = folder.resolve()
        self._driver = driver
        self._settings, self._master = settings, master
        self._runs: list[Running] = []
        self._table = table
        self.output = self._folder / "out"
        if table:
            self.output = Path(open_table(table).location.removeprefix("file://"))

    def arguments(self, options: Sequence[str], replaced: Mapping[str, str]) -> list[str]:
        """The arguments of batch_load.py; `replaced` overrides the options that every run has."""
        given = {
            "bootstrap-servers": self._servers,
            "topics": self._topics,
            **({"table": self._table} if self._table else {"output": str(self.output)}),
        }
        given |= {name.replace("_", "-"): value for name, value in replaced.items()}
        return [*(word for name, value in given.items() for word in (f"--{name}", value)), *options]

    def start(self, *options: str, **replaced: str) -> Running:
        """Start a run with spark-submit."""
        command = [spark_submit(), *_spark_arguments(self._settings, self._master), str(BATCH_LOAD)]
        running = Running([*command, *self.arguments(options, replaced)], self._folder, len(self._runs))
        self._runs.append(running)
        return running

    def submit(self, *options: str, **replaced: str) -> Ran:
        """Run with spark-submit until it ends."""
        return self.start(*options, **replaced).result()

    def run(self, *options: str, **replaced: str) -> Ran:
        """Run until it ends, in the driver if there is one."""
        if self._driver is None:
            return self.submit(*options, **replaced)
        return self._driver.run(self.arguments(options, replaced))

    def report(self, *options: str, **replaced: str) -> list[dict[str, Any]]:
        """Run with --json, check that it does not fail, and return its partitions."""
        ran = self.run("--json", *options, **replaced)
        assert ran.code in (DONE, NOTHING_NEW), ran.stdout + ran.stderr
        return ran.report()

    @property
    def address(self) -> str:
        """Of the table, or the output."""
        return self._table or str(self.output)

    def stop(self) -> None:
        for running in self._runs:
            running.kill()

    def committed(self) -> list[int]:
        """The numbers of the committed runs, sorted."""
        return self._runs_with("manifest.json")

    def planned(self) -> list[int]:
        """The numbers of the planned runs, sorted."""
        return self._runs_with("plan.json")

    def tasks(self) -> list[Path]:
        """The files with offsets of finished tasks, of all runs."""
        return sorted((self.output / "_klog" / "runs").glob("*/offsets-*.json"))

    def _runs_with(self, name: str) -> list[int]:
        return sorted(int(path.parent.name) for path in (self.output / "_klog" / "runs").glob(f"*/{name}"))

    def files(self) -> dict[str, tuple[int, int]]:
        """Inode and modification time of each file of the output; without the file of runs that had nothing to load."""
        found = {path: path.stat() for path in self.output.rglob("*") if path.is_file() and path.name != "idle.json"}
        return {str(path.relative_to(self.output)): (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


def rows_of(output: Path) -> list[tuple[Any, ...]]:
    """(key, value, topic, partition, offset, timestamp in ms, headers) by topic, partition, offset; from pyarrow."""
    # of a table's folder only those that plain readers see
    files = [path for path in output.rglob("*.parquet") if not path.relative_to(output).as_posix().startswith("_")]
    if not files:
        return []
    table = ds.dataset([str(path) for path in files], format="parquet", partitioning="hive").to_table()
    times = table["timestamp"].cast(pa.timestamp("ms")).cast(pa.int64()).to_pylist()
    columns = [table[name].to_pylist() for name in ("key", "value", "topic", "partition", "offset")]
    headers = [
        None if item is None else [(header["key"], header["value"]) for header in item]
        for item in table["headers"].to_pylist()
    ]
    return sorted(zip(*columns, times, headers, strict=True), key=lambda row: row[2:5])


def wait_for_the_moment(running: Running, load: Load, chance: random.Random) -> None:
    """Wait for a random time after the start, or after some tasks are done; return early if the run ends."""
    if chance.random() < 0.2:
        running.ends_within(chance.uniform(0, 8))
        return
    planned = len(load.planned())
    wait_until(lambda: running.ended or len(load.planned()) > planned or planned > len(load.committed()), "a plan", 480)
    goal = len(load.tasks()) + chance.randint(0, 20)
    wait_until(lambda: running.ended or len(load.tasks()) >= goal, "some tasks are done", 480)
    running.ends_within(chance.uniform(0, 0.2))


def check_demo(out: Path, told: str, count: int) -> None:
    """Check the output of `klog demo`, and what it has told."""
    table = ds.dataset(out / "parquet", format="parquet", partitioning="hive").to_table(columns=["partition", "offset"])
    assert table.num_rows == count
    assert table.group_by(["partition", "offset"]).aggregate([]).num_rows == count
    picture = (out / "flights-by-hour.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.rstrip().endswith(b"IEND\xae\x42\x60\x82")
    for partition in range(4):
        assert f"/consumers/demo/offsets/flights/{partition} -> " in told
