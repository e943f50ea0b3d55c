"""The sides of the work with Spark: processes of klog, the JVM connector, and a source that does nothing."""

from __future__ import annotations

import json
import logging
import pkgutil
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.data import PARTITIONS, RECORD_SIZE
from benchmarks.figures import Bench, Result, Side
from benchmarks.machine import ROOT
from tests.support.spark.jvm_connector import connector_jars
from tests.support.spark.pyspark_versions import WITH_CONNECTOR, child_environment, with_connector

log = logging.getLogger(__name__)

_START_SECONDS = 180.0
_RUN_SECONDS = 1800.0
_STOP_SECONDS = 30.0


class SideFailed(Exception):
    """A side could not start, ended, took too long, or gave a wrong answer."""


class Lines:
    """The lines of a process's output with their time of arrival, read by a thread and kept in `copy`."""

    def __init__(self, stream: IO[str], copy: Path | None = None) -> None:
        self._stream, self._copy = stream, copy
        self._lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def get(self, timeout: float) -> tuple[float, str] | None:
        """The next line and its `time.perf_counter()`, None at the end; `TimeoutError` after `timeout`."""
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def _read(self) -> None:
        with ExitStack() as files:
            copy = files.enter_context(self._copy.open("a")) if self._copy else None
            for line in self._stream:
                self._lines.put((time.perf_counter(), line))
                if copy:
                    copy.write(line)
                    copy.flush()
        self._lines.put(None)


class SparkSide:
    """A `spark_side.py` process; its log is `WORK_DIR/NAME.log`."""

    def __init__(
        self,
        name: str,
        source: str,
        work_dir: Path,
        python: Path | str = sys.executable,
        confs: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._work_dir = work_dir / source
        self._log = self._work_dir / "side.log"
        self._environment = {**child_environment(python), **(environment or {})}
        self._command = [str(python), str(ROOT / "benchmarks" / "spark_side.py"), "--format", source]
        for item in (confs or {}).items():
            self._command += ["--conf", "=".join(item)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._work_dir.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as errors:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._work_dir,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only the parent, which ends the side
            )
        assert self._process.stdout is not None
        self._lines = Lines(self._process.stdout)
        ready = self.next(_START_SECONDS)
        log.info("%s: session of pyspark %s up in %.1f s", self.name, ready["pyspark"], ready["seconds"])

    @property
    def pid(self) -> int | None:
        """The process id, None if it does not run."""
        return self._process.pid if self._process is not None else None

    def ask(self, work: str, options: Mapping[str, str], **more: str | Mapping[str, str]) -> dict[str, Any]:
        """Run a piece of work; return its answer."""
        if self._process is None or self._process.stdin is None:
            raise SideFailed("not started")
        try:
            self._process.stdin.write(json.dumps({"work": work, "options": dict(options), **more}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideFailed(f"gone: {error}; {self._log_tail()}") from error
        return self.next(_RUN_SECONDS)

    def next(self, timeout: float) -> dict[str, Any]:
        """The next line of its standard output."""
        try:
            line = self._lines.get(timeout)
        except TimeoutError:
            raise SideFailed(f"no answer in {timeout:.0f} s; {self._log_tail()}") from None
        if line is None:
            raise SideFailed(f"the process ended; {self._log_tail()}")
        answer: dict[str, Any] = json.loads(line[1])
        if "error" in answer:
            raise SideFailed(answer["error"])
        return answer

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-1500:].strip() or "no output"

    def __enter__(self) -> SparkSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the process ends at the end of its input
            self._process.wait(_STOP_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()  # its JVM ends too, as their pipe closes
            self._process.wait()


def klog_side(work_dir: Path, confs: Mapping[str, str] | None = None) -> SparkSide:
    """The project's own connector, in the environment that runs the benchmark."""
    return SparkSide("klog", "klog", work_dir, confs=confs, environment=project_environment())


def project_environment() -> dict[str, str]:
    """The variables with which a process in another folder finds the project; empty if it is installed."""
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    installed = any(module.name == "pyspark_klog" for module in pkgutil.iter_modules(elsewhere))
    return {} if installed else {"PYTHONPATH": str(ROOT)}


def topic_options(bootstrap_servers: str, topic: str) -> dict[str, str]:
    """Options that read a whole topic."""
    return {"kafka.bootstrap.servers": bootstrap_servers, "subscribe": topic, "startingOffsets": "earliest"}


def read_all(side: SparkSide, options: Mapping[str, str], records: int, size: int = RECORD_SIZE, **more: str) -> float:
    """The seconds to read `records` values of `size` bytes; `more` has the parameters of another `work`."""
    answer = side.ask(more.pop("work", "count_sum"), options, **more)
    if (answer["rows"], answer["bytes"]) != (records, records * size):
        raise SideFailed(f"read {answer['rows']} rows, {answer['bytes']} bytes; there are {records} records")
    return float(answer["seconds"])


def alternate(
    makers: Sequence[tuple[Side, Callable[[], SparkSide]]],
    repeat: int,
    run: Callable[[SparkSide], float],
) -> None:
    """Run each side in turn, a warm-up and then `repeat` runs; skip sides that have failed."""
    with ExitStack() as stack:
        sides: list[tuple[Side, SparkSide]] = []
        for figures, make in makers:
            with recorded(figures):
                side = stack.enter_context(make())
                side.start()
                sides.append((figures, side))
        for number in range(repeat + 1):
            for figures, side in sides:
                if figures.failed is not None:
                    continue
                with recorded(figures):
                    value = run(side)
                    log.info("%s: run %d of %d: %.3f", figures.name, number, repeat, value)
                    figures.add(value)


@contextmanager
def recorded(*figures: Side) -> Iterator[None]:
    """Record an exception in the block as the failure of these sides; other sides go on."""
    try:
        yield
    except Exception as error:
        log.error("%s failed: %s", figures[0].name, error)
        for side in figures:
            side.failed = str(error) if isinstance(error, SideFailed) else f"{type(error).__name__}: {error}"


JVM = f"JVM connector {WITH_CONNECTOR}, pyspark {WITH_CONNECTOR}"


def jvm_side(work_dir: Path) -> SparkSide:
    """The connector in its own environment, which the first use installs into the cache."""
    return SparkSide(JVM, "kafka", work_dir, python=with_connector(), confs={"spark.jars": connector_jars()})


def beside_jvm(
    bench: Bench,
    work: str,
    unit: str,
    folder: Path,
    run: Callable[[SparkSide], float],
    repeat: int | None = None,
    *,
    higher_is_better: bool = True,
    confs: Mapping[str, str] | None = None,
) -> Result:
    """Run the same work by klog and by the connector, in two sessions that take turns; `confs` apply to klog's."""
    result = Result(work, unit, Side("klog"), peer := Side(JVM), bench.command, higher_is_better)
    makers = [(result.klog, lambda: klog_side(folder, confs)), (peer, lambda: jvm_side(folder))]
    alternate(makers, bench.repeat if repeat is None else repeat, run)
    return result


NO_OP = "no-op Python data source"


def beside_no_op(
    bench: Bench,
    work: str,
    unit: str,
    folder: Path,
    options: dict[str, str],
    run: Callable[[SparkSide, dict[str, str]], float],
    *,
    records: int,
    size: int = RECORD_SIZE,
    trigger: int = 0,
) -> Result:
    """Run the same work by klog, with `options`, and by the source that does nothing, with `records` records of `size`
    bytes.

    A stream of that source has `trigger` records per micro-batch.
    """
    numbers = {"records": records, "partitions": PARTITIONS, "size": size, "trigger": trigger}
    given = {"klog": options, NO_OP: {name: str(value) for name, value in numbers.items()}}
    name = f"{work} beside a source that does nothing"
    result = Result(name, unit, Side("klog"), peer := Side(NO_OP), bench.command)
    makers = [(result.klog, lambda: klog_side(folder)), (peer, lambda: no_op_side(folder))]
    alternate(makers, bench.repeat, lambda side: run(side, given[side.name]))
    return result


def no_op_side(folder: Path, confs: Mapping[str, str] | None = None) -> SparkSide:
    """The source and writer that do nothing."""
    # workers find no_op_source.py in this folder, too
    environment = project_environment()
    path = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
    return SparkSide(NO_OP, "no-op", folder, confs=confs, environment={"PYTHONPATH": ":".join(path)})


def compile_c(source: Path, program: Path) -> None:
    """Compile a C file to a program; `SideFailed` has the compiler's message."""
    _run(["cc", "-O2", "-Wall", "-o", str(program), str(source)])


def compile_java(libs: Path, source: Path, folder: Path) -> str:
    """Compile a Java file with these jars; return the class path to run it. `SideFailed` has javac's message."""
    _run(["javac", "-cp", f"{libs}/*", "-d", str(folder), str(source)])
    return f"{libs}/*:{folder}"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SideFailed(f"{command[0]}: {done.stderr[-500:]}")
