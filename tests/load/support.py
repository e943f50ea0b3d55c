"""Helpers for load tests: runs in this process without Spark, readers independent of the loader, kills."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset as ds
import pytest

from spark_klog.errors import ConnectionFailed, LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import LocalFolder
from spark_klog.load.journal.model import Range
from spark_klog.load.run import Loaded, LoadOptions, load
from spark_klog.load.tasks import task
from spark_klog.load.tasks.task import Job, Work, run_task
from spark_klog.spark.read import tasks as tasks_module
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient

#: The methods of a store that change it.
CHANGES = ("write", "create", "put", "settle", "move", "remove")
_SECONDS = 60
_TIME = 1_700_000_000_000
#: The version of Produce.
_VERSION = 7


class InProcess:
    """Runs the tasks one after the other, as one core of Spark would."""

    def __init__(self, cores: int = 2) -> None:
        self._cores = cores
        self.ran: list[int] = []

    def cores(self) -> int:
        return self._cores

    def run_all(self, works: Sequence[Work]) -> list[Exception | None]:
        return [self._outcome(work) for work in works]

    def _outcome(self, work: Work) -> Exception | None:
        try:
            self.run(work.tasks, work.job)
        except Exception as error:
            each: BaseException | None = error
            while each is not None:  # closes the task's files; Spark's tasks have a process of their own
                traceback.clear_frames(each.__traceback__)
                each = each.__context__
            return error
        return None

    def run(self, tasks: dict[int, list[Range]], job: Job) -> None:
        for number, ranges in tasks.items():
            self.ran.append(number)
            run_task(number, ranges, job)


class InTurns(InProcess):
    """Threads share the client of their process's tasks; Spark's tasks have a process each."""

    _turn = threading.Lock()

    def run(self, tasks: dict[int, list[Range]], job: Job) -> None:
        with self._turn:
            super().run(tasks, job)


class Unlocked:
    """Instead of `locked`: nothing keeps two runs apart."""

    def __init__(self, _store: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def race(options: LoadOptions, count: int = 2) -> list[str]:
    """Run a load several times at once, and return why some have failed."""
    lost: list[str] = []

    def work() -> None:
        try:
            load(options, InTurns())
        except LoadError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
        assert not thread.is_alive()
    return lost


def run(servers: str, output: Path | str, *topics: str, **options: Any) -> Loaded:
    """Run a load in this process."""
    asked = LoadOptions({"bootstrap.servers": servers}, list(topics), str(output), **options)
    return load(asked, InProcess())


def kills() -> int:
    """How many kills `make soak` asks for; 0 for the slice of `make test`."""
    return int(os.environ.get("SPARK_KLOG_KILLS", "0"))


def send_batch(servers: str, topic: str, count: int, start: int) -> None:
    """Send records to partition 0 as one batch, however slow the machine is."""
    numbers = range(start, start + count)
    batch = make_batch([(None, b"%d" % number) for number in numbers], [_TIME] * count)
    with RawClient(int(servers.rpartition(":")[2])) as client:
        code, base = client.produce(topic, bytes(batch), _VERSION)
    assert (code, base) == (0, start)


Place = tuple[str, int, int]


def by_duckdb(output: Path, pattern: str = "**/*.parquet") -> list[Place]:
    """(topic, partition, offset) of all records that DuckDB finds, sorted."""
    if not list(output.glob(pattern)):
        return []
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT topic, partition, \"offset\" FROM read_parquet('{output}/{pattern}', hive_partitioning=false) "
            "ORDER BY ALL"
        )
        return [(topic, partition, offset) for topic, partition, offset in found.fetchall()]


def by_pyarrow(output: Path | list[str], format_name: str = "parquet") -> list[Place]:
    """The same, with a plain pyarrow reader of a folder or of a list of files."""
    if isinstance(output, Path) and not output.exists():
        return []
    table = ds.dataset(output, format=format_name).to_table()
    if not table.num_rows:
        return []
    return sorted(zip(*(table[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True))


def expected(topic: str, counts: dict[int, int]) -> list[Place]:
    """(topic, partition, offset) of all records of a topic without gaps; `counts` has the records per partition."""
    return [(topic, partition, offset) for partition, count in sorted(counts.items()) for offset in range(count)]


def in_child(action: Callable[[], object]) -> int:
    """Run an action in a forked process and return its exit code: 0 if the action returns."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + _SECONDS
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child has not ended within {_SECONDS} s")
        time.sleep(0.002)


class Killed(BaseException):
    """Stands for SIGKILL where the process must live on."""


def die() -> None:
    raise Killed


@contextmanager
def failing(store: type[LocalFolder | ArrowFolder], number: int, end: Callable[[], None]) -> Iterator[list[int]]:
    """Call `end` before change `number` (from 1) of the stores of this class, or after change -`number` if negative.

    Yields a list whose only item is the number of changes so far.
    """
    count = [0]
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(store, name, _counted(getattr(store, name), number, end, count))
        yield count


def is_renewal() -> bool:
    """Whether a lease's own thread has called: it renews the lease as time passes, so its changes do not count."""
    return threading.current_thread().name == "klog-lease"


def _counted(method: Any, number: int, end: Callable[[], None], count: list[int]) -> Any:
    def call(*arguments: Any) -> Any:
        if is_renewal():
            return method(*arguments)
        count[0] += 1
        mine = count[0]
        if mine == number:
            end()
        answer = method(*arguments)
        if mine == -number:
            end()
        return answer

    return call


class Frozen(InProcess):
    """Runs each task twice: the first attempt stops before the store's method `at`, the second one runs to its end.

    `thaw` lets the first attempts go on, and waits for their end.
    """

    def __init__(self, store: type[LocalFolder | ArrowFolder], at: str) -> None:
        super().__init__()
        self._store, self._at = store, at
        self._is_thawed = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self, tasks: Any, job: Any) -> None:
        for number, ranges in tasks.items():
            stopped = threading.Event()
            real = getattr(self._store, self._at)

            def wait(*arguments: Any, stopped: threading.Event = stopped, real: Any = real) -> Any:
                if threading.current_thread() in self._threads:
                    stopped.set()
                    assert self._is_thawed.wait(_SECONDS)
                return real(*arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self._store, self._at, wait)
                self._threads.append(threading.Thread(target=self._attempt, args=(number, ranges, job)))
                self._threads[-1].start()
                assert stopped.wait(_SECONDS)
            task.run_task(number, ranges, job)

    def _attempt(self, *arguments: Any) -> None:
        with suppress(LoadError):  # its scratch folder may be gone
            task.run_task(*arguments)

    def thaw(self) -> None:
        self._is_thawed.set()
        for thread in self._threads:
            thread.join(_SECONDS)
            assert not thread.is_alive()


class DiesLate(Frozen):
    """As `Frozen`, before `put`: the first attempts go on with their uploads, and are killed then."""

    def __init__(self, store: type[LocalFolder | ArrowFolder]) -> None:
        super().__init__(store, "put")

    def _attempt(self, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(task._Attempt, "remove_files", lambda _: die())
            patch.setattr(task._Attempt, "is_late", lambda _: False)
            with pytest.raises(Killed):
                task.run_task(*arguments)


class TwinFails(InProcess):
    """Runs each task twice, as Spark's speculation does: when the first attempt has read everything, the second one
    runs to its end, and then the first one fails.
    """

    def run(self, tasks: Any, job: Any) -> None:
        for number, ranges in tasks.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(task, "read_ranges", failing_after(lambda n=number, r=ranges: task.run_task(n, r, job)))
                task.run_task(number, ranges, job)


def failing_after(twin: Any) -> Any:
    """Return a `read_ranges` whose first call reads everything, then runs `twin` undisturbed, and then fails."""
    real, calls = tasks_module.read_ranges, [0]

    def read(*arguments: Any) -> Any:
        calls[0] += 1
        is_first = calls[0] == 1
        yield from real(*arguments)
        if is_first:
            twin()
            raise ConnectionFailed("the broker is gone")

    return read
