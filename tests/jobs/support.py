"""What the job tests share: jobs as a user runs them, what they have written by pyarrow, and their processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.dataset as ds

ROOT = Path(__file__).parent.parent.parent
BATCH_LOAD = ROOT / "jobs" / "batch_load.py"
_RUN_SECONDS = 240.0


def environment(folder: Path) -> dict[str, str]:
    """This interpreter and this checkout for all that a job starts; Spark's temporary files in `folder`."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "spark-local"),
    }


def spark_submit() -> str:
    """The spark-submit of the pyspark that is installed for this interpreter."""
    found = shutil.which("spark-submit", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, "spark-submit comes with pyspark"
    return found


class Ran(NamedTuple):
    """A job that has ended."""

    code: int
    stdout: str
    stderr: str

    def report(self) -> list[dict[str, Any]]:
        """The partitions of --json's last line."""
        found: list[dict[str, Any]] = json.loads(self.stdout.splitlines()[-1])["partitions"]
        return found

    def complaint(self) -> str:
        """The one line with which a job says why it can't go on; only what it waited for may stand before it.

        spark-submit gives both streams of Python as its standard output; its standard error is the JVM's.
        """
        assert self.code != 0
        *waits, last = self.stdout.splitlines()
        assert all(line.startswith("trying again for ") for line in waits), self.stdout
        assert last.startswith("batch_load: ")
        return last


def named(processes: list[psutil.Process], word: str) -> list[psutil.Process]:
    """Those with the word in their command lines."""
    found = []
    for process in processes:
        try:
            if any(word in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(processes: list[psutil.Process]) -> int:
    """SIGKILL; how many processes were hit."""
    hit = 0
    for process in processes:
        try:
            process.kill()
            hit += 1
        except psutil.NoSuchProcess:
            continue
    return hit


class Running:
    """A job under way, its output in files."""

    def __init__(self, command: list[str], folder: Path, number: int) -> None:
        self._out, self._err = folder / f"run-{number}.stdout", folder / f"run-{number}.stderr"
        with self._out.open("wb") as stdout, self._err.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=folder, env=environment(folder)
            )
        self._seen: set[psutil.Process] = set()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def tree(self) -> list[psutil.Process]:
        """spark-submit's JVM, then the processes below it."""
        try:
            top = psutil.Process(self._process.pid)
            found = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self._seen.update(found)
        return found

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def result(self, seconds: float = _RUN_SECONDS) -> Ran:
        """Wait for the end, also of the processes that it has left behind."""
        if not self.ends_within(seconds):
            self.kill()
            raise AssertionError(f"no end within {seconds:g} s: {self._err.read_text(errors='replace')[-4000:]}")
        _, alive = psutil.wait_procs(self._seen, timeout=60)
        self.kill()
        assert not alive, f"outlived their JVM: {alive}"
        return Ran(self._process.returncode, self._out.read_text(), self._err.read_text(errors="replace"))

    def kill(self) -> None:
        """End all that is left of it."""
        for process in {*self.tree(), *self._seen}:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self._process.wait()


class Load:
    """One load: its output, its checkpoint, and the runs of batch_load.py on them."""

    def __init__(self, servers: str, topics: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._servers = servers
        self._topics = topics
        self._folder = folder.resolve()
        #: Settings of Spark's that every run has.
        self.settings: list[str] = []
        self._runs: list[Running] = []
        self.output = self._folder / "out"
        self.staging = self._folder / "out.staging"
        self.checkpoint = self._folder / "checkpoint"

    def start(self, *options: str, **replaced: str) -> Running:
        """Start a run; `replaced` gives other values to the options that every run has."""
        given = {
            "bootstrap-servers": self._servers,
            "topics": self._topics,
            "output": str(self.output),
            "checkpoint": str(self.checkpoint),
        }
        given |= {name.replace("_", "-"): value for name, value in replaced.items()}
        command = [spark_submit(), "--master", "local[2]", "--driver-memory", "1g"]
        for setting in (
            "spark.ui.enabled=false",
            "spark.driver.bindAddress=127.0.0.1",
            "spark.sql.shuffle.partitions=1",
            "spark.log.level=ERROR",
            *self.settings,
        ):
            command += ["--conf", setting]
        command.append(str(BATCH_LOAD))
        for name, value in given.items():
            command += [f"--{name}", value]
        running = Running([*command, *options], self._folder, len(self._runs))
        self._runs.append(running)
        return running

    def run(self, *options: str, **replaced: str) -> Ran:
        return self.start(*options, **replaced).result()

    def report(self, *options: str, **replaced: str) -> list[dict[str, Any]]:
        """A run with --json that does not fail: its partitions."""
        ran = self.run("--json", *options, **replaced)
        assert ran.code == 0, ran.stderr
        return ran.report()

    def stop(self) -> None:
        for running in self._runs:
            running.kill()

    def batches(self) -> list[int]:
        """The batches of the output, sorted."""
        return sorted(int(path.name.removeprefix("batch=")) for path in self.output.glob("batch=*"))

    def committed(self) -> list[int]:
        """The batches that the checkpoint says are done, sorted."""
        return sorted(int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*"))

    def planned(self) -> list[int]:
        """The batches that the checkpoint has offsets of, sorted."""
        return sorted(int(path.name) for path in (self.checkpoint / "offsets").glob("[0-9]*"))

    def uncommit(self, batch: int) -> None:
        """As if the last run had been killed just before it noted the batch as done."""
        (self.checkpoint / "commits" / f"{batch}").unlink()
        (self.checkpoint / "commits" / f".{batch}.crc").unlink(missing_ok=True)

    def files(self) -> dict[str, tuple[int, int]]:
        """Inode and time of change of every file of the output."""
        found = {path: path.stat() for path in self.output.rglob("*") if path.is_file()}
        return {str(path.relative_to(self.output)): (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


def rows_of(output: Path) -> list[tuple[Any, ...]]:
    """(key, value, topic, partition, offset, timestamp in ms, headers) by topic, partition, offset; by pyarrow."""
    if not output.exists():
        return []
    table = ds.dataset(output, format="parquet", partitioning="hive").to_table()
    times = table["timestamp"].cast(pa.timestamp("ms")).cast(pa.int64()).to_pylist()
    columns = [table[name].to_pylist() for name in ("key", "value", "topic", "partition", "offset")]
    headers = [
        None if item is None else [(header["key"], header["value"]) for header in item]
        for item in table["headers"].to_pylist()
    ]
    return sorted(zip(*columns, times, headers, strict=True), key=lambda row: row[2:5])


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
