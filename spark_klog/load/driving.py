"""Several loads side by side: their tasks share Spark's jobs, and each commits as soon as its own tasks are done.

A load is a generator of steps: it yields the tasks that it needs, and goes on when Spark has done them. So one thread
has Spark run what all loads are waiting for, while the others read journals, plan and commit in a few threads. What a
load raises ends that load alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spark_klog.load.tasks.task import Work

if TYPE_CHECKING:
    from spark_klog.load.tasks.task import SparkRunner
    from spark_klog.load.tasks.time_limit import TimeLimit

_T = TypeVar("_T")
#: Loads whose own steps are under way at once: what they read, plan and commit.
STEPS_AT_ONCE = 16
#: Loads that have begun and not ended. Each has a lock, or a lease that it renews, and its plan in memory.
_MOST_OPEN = 64
#: Tasks for each core with which a job begins although more loads are on their way to it.
_ENOUGH_TASKS = 8


#: A load. It yields `Work` to wait for, or None to get the number of Spark's cores, and returns what it has done.
Steps = Generator[Work | None, int, _T]
#: Shows the progress of tasks: a context in which they run, of the offsets to load and what counts those that are.
Follow = Callable[[int, Callable[[], int]], AbstractContextManager[None]]


def drive(
    loads: Sequence[Steps[_T]],
    runner: SparkRunner,
    time: TimeLimit,
    follow: Follow,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[_T | Exception]:
    """Bring loads to their ends; returns what each has returned or raised, in their order.

    If it `is_stopping`, those that have begun come to their ends, at least one, and the others are left out.

    What is no `Exception`, such as an interrupt, is raised, after all loads have let their locks go.
    """
    return _Drive(loads, runner, time, follow, is_stopping).outcomes()


class _Drive(Generic[_T]):
    def __init__(
        self,
        loads: Sequence[Steps[_T]],
        runner: SparkRunner,
        time: TimeLimit,
        follow: Follow,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._loads, self._runner, self._time, self._follow = loads, runner, time, follow
        self._is_stopping = is_stopping
        # a single load's steps are the caller's: an interrupt ends them at once
        self._threads: Executor = ThreadPoolExecutor(STEPS_AT_ONCE, "klog-load") if len(loads) > 1 else _Inline()
        self._begun = 0
        self._steps: dict[Future[tuple[bool, Any]], int] = {}
        self._works: dict[int, Work] = {}
        self._outcomes: dict[int, _T | Exception] = {}
        self._cores: int | Exception | None = None

    def outcomes(self) -> list[_T | Exception]:
        try:
            while self._begins_more() or len(self._outcomes) < self._begun:
                while self._begun < len(self._outcomes) + _MOST_OPEN and self._begins_more():
                    self._step(self._begun, partial(next, self._loads[self._begun]))
                    self._begun += 1
                if self._works and (not self._steps or self._has_enough()):
                    self._run_works()
                else:
                    self._end_steps()
        finally:
            self._threads.shutdown(cancel_futures=True)
            for load in self._loads:
                load.close()
        return [self._outcomes[number] for number in range(self._begun)]

    def _begins_more(self) -> bool:
        return self._begun < len(self._loads) and not (self._begun and self._is_stopping())

    def _step(self, number: int, resume: Callable[[], Work | None]) -> None:
        self._steps[self._threads.submit(self._advanced, self._loads[number], resume)] = number

    def _advanced(self, load: Steps[_T], resume: Callable[[], Work | None]) -> tuple[bool, Any]:
        """Whether a load has ended, and what it has returned; else what it needs."""
        try:
            needed = resume()
            while needed is None and isinstance(self._cores, int):  # it does not wait for a job's end to hear that
                needed = load.send(self._cores)
        except StopIteration as end:
            return True, end.value
        return False, needed

    def _end_steps(self) -> None:
        """Wait for the end of some steps, and see what their loads need."""
        for ended in wait(self._steps, return_when=FIRST_COMPLETED).done:
            number = self._steps.pop(ended)
            try:
                has_ended, value = ended.result()
            except Exception as error:
                self._outcomes[number] = error
                continue
            if has_ended:
                self._outcomes[number] = value
            elif value is None:
                self._resume(number, self._known_cores())
            else:
                self._works[number] = value

    def _known_cores(self) -> int | Exception:
        """The cores of Spark, whose session begins in this thread, or why there is none."""
        if self._cores is None:
            try:
                self._cores = self._runner.cores()
            except Exception as error:
                self._cores = error
        return self._cores

    def _resume(self, number: int, answer: int | Exception) -> None:
        load = self._loads[number]
        resume = partial(load.throw, answer) if isinstance(answer, Exception) else partial(load.send, answer)
        self._step(number, resume)

    def _has_enough(self) -> bool:
        cores = self._known_cores()
        return isinstance(cores, int) and sum(len(work.tasks) for work in self._works.values()) >= cores * _ENOUGH_TASKS

    def _run_works(self) -> None:
        numbers, works = list(self._works), list(self._works.values())
        self._works.clear()
        errors: Sequence[Exception | None]
        with (
            self._follow(sum(work.total for work in works), lambda: sum(work.done() for work in works)),
            self._time.watched([(work.store, work.job.run) for work in works]),
        ):
            try:
                errors = self._runner.run_all(works)
            except Exception as error:
                errors = [error] * len(works)
        for number, failure in zip(numbers, errors, strict=True):
            self._resume(number, 0 if failure is None else failure)


class _Inline(Executor):
    """Does each step when it is submitted, in the thread that submits it."""

    def submit(self, step: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(step(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future
