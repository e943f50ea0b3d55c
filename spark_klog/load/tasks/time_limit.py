"""The limit of `--max-time`: it begins when the first task reads, and the driver's clock alone measures it.

Tasks compare no times, as the clocks of hosts differ, and a task may begin late. In the folder `time` of a run the
first task creates `begun`, for which the driver looks. When the time is over, the driver creates `over`, for which the
tasks look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spark_klog.errors import LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.store import Store

_log = logging.getLogger(__name__)
_BEGUN, _OVER = "time/begun", "time/over"
#: Seconds between two looks at a file.
_INTERVAL_S = 0.2
#: Runs at which the driver looks in that time.
_LOOKS_AT_ONCE = 8


@contextmanager
def beside(look: Callable[[], float | None], pause: float) -> Iterator[None]:
    """Call `look` in a thread for the duration of the block, after `pause` seconds.

    It returns the seconds until the next call, None to end.
    """
    ended = threading.Event()

    def work() -> None:
        seconds: float | None = pause
        while seconds is not None and not ended.wait(seconds):
            seconds = look()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _has_begun(of_run: tuple[Store, int]) -> bool:
    """Whether a task of a run has begun; False if that is not known now."""
    store, run = of_run
    try:
        return store.size(paths.in_run(run, _BEGUN)) is not None
    except LoadError as error:
        _log.warning("it is not known whether the time of --max-time has begun, trying again: %s", error)
        return False


def _is_told(store: Store, run: int) -> bool:
    """Tell the tasks of a run that the time is over; False if that is not possible now."""
    try:
        store.write(paths.in_run(run, _OVER), b"")
    except LoadError as error:
        _log.warning("the tasks can't be told that --max-time is over, trying again: %s", error)
        return False
    return True


class TimeLimit:
    """The driver's side: the seconds that the runs of a call may read, None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._left = seconds

    @property
    def is_set(self) -> bool:
        return self._left is not None

    @property
    def is_over(self) -> bool:
        return self._left is not None and self._left <= 0

    @contextmanager
    def watched(self, runs: Sequence[tuple[Store, int]]) -> Iterator[None]:
        """Tell the tasks of runs, which are in these stores and run inside the block, when the time is over."""
        if self._left is None:
            yield
            return
        self._remove(runs)
        #: When the time is over, a reading of `time.monotonic`; None before a task has begun.
        end: float | None = None
        seconds = self._left
        interval = _INTERVAL_S * -(-len(runs) // _LOOKS_AT_ONCE)

        untold = list(runs)

        def look() -> float | None:
            nonlocal end
            if end is None and any(map(_has_begun, runs)):
                end = time.monotonic() + seconds
            if end is None:
                return interval
            self._left = end - time.monotonic()
            if self._left <= 0:
                untold[:] = [each for each in untold if not _is_told(*each)]
                return interval if untold else None
            return max(_INTERVAL_S / 10, min(_INTERVAL_S, self._left))

        try:
            with beside(look, _INTERVAL_S):
                yield
        finally:
            if end is not None:
                self._left = end - time.monotonic()
            self._remove(runs)

    @staticmethod
    def _remove(runs: Sequence[tuple[Store, int]]) -> None:
        for store, run in runs:
            try:
                store.remove(paths.in_run(run, "time"))
            except LoadError as error:  # of one of several loads: the others go on
                _log.warning("what is left there of --max-time may end the next run early: %s", error)


class TaskTime:
    """The side of an attempt of a task, which begins to read now."""

    def __init__(self, store: Store, run: int, *, is_limited: bool) -> None:
        self._store, self._run, self._is_limited = store, run, is_limited
        self._is_over = False
        self._next_look = 0.0
        # The first one reads something, however short the time is.
        if is_limited and store.create(paths.in_run(run, _BEGUN), b""):
            self._next_look = time.monotonic() + _INTERVAL_S

    def is_over(self) -> bool:
        """Whether to stop reading; looks for the file at intervals."""
        now = time.monotonic()
        if self._is_limited and not self._is_over and now >= self._next_look:
            self._is_over = self._store.size(paths.in_run(self._run, _OVER)) is not None
            self._next_look = now + _INTERVAL_S
        return self._is_over
