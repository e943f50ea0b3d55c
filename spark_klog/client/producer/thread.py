"""The thread that delivers what `Producer.send` has gathered, and the lock that it shares with calls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from spark_klog.base.interrupts import ORDERLY, CallLock, Section
from spark_klog.client.forks import Maker
from spark_klog.client.net.waiting import Waited, Waker, wait_until_ready
from spark_klog.errors import ConcurrentUse, ProducerClosed, RequestTimedOut

_log = logging.getLogger(__name__)
_JOIN_SECONDS = 30.0
#: Seconds before the thread looks again when it could not wait.
_PAUSE = 0.05


class Turns(CallLock):  # type: ignore[misc]  # as `CallLock`
    """A lock that calls take for up to max.block.ms, and that the thread gets although calls follow each other.

    `ProducerClosed` in a process forked since, `ConcurrentUse` within a turn of the same thread: a signal handler or a
    finalizer has interrupted a call halfway. An interrupt in `section` calls `wake`, and the next turn `on_torn` first.
    """

    def __init__(self, timeout_ms: int, limit: str, wake: Callable[[], None], on_torn: Callable[[], None]) -> None:
        self._maker = Maker("producer", ProducerClosed)
        self._on_torn = on_torn
        self.section = Section(*ORDERLY, RuntimeError, on_torn=wake)  # that of `Background.start`
        self._timeout = min(timeout_ms / 1000, threading.TIMEOUT_MAX)
        self._limit = limit
        #: Whether the thread waits for its turn.
        self.is_wanted = False

    @property
    def is_forked(self) -> bool:
        return self._maker.is_forked

    def shorten(self, seconds: float) -> None:
        """Have calls wait no longer than this from now on."""
        self._timeout = min(self._timeout, seconds)

    def check(self) -> None:
        """Raise `ConcurrentUse` within a turn of the same thread."""
        if self.is_held:
            raise ConcurrentUse("this producer is within another call, which a signal handler has interrupted")

    def _begin(self, *, is_nested: bool) -> None:
        self._maker.check()
        if is_nested:
            self.check()
        if self.is_wanted:
            time.sleep(0)  # a lock is not fair: the call that releases it would take it again at once
        if not self.acquire(timeout=self._timeout):
            raise RequestTimedOut(
                f"another thread has used the producer for {self._timeout:g} s ({self._limit}): it waits for brokers"
            )
        if self.section.is_torn:
            self._repair()

    def _repair(self) -> None:
        self._on_torn()
        self.section.mended()

    @contextmanager
    def of_thread(self) -> Iterator[None]:
        """The thread's turn, for which it waits without limit."""
        self.is_wanted = True
        self.acquire()
        try:
            self.is_wanted = False
            if self.section.is_torn:
                self._repair()
            yield
        finally:
            self.release()


class Background:
    """A daemon thread that calls `work` in its turn, again and again.

    `work` returns the seconds until the next call, and the connections of which an event makes it earlier; `after` is
    called after it, without the lock.
    """

    def __init__(
        self,
        turns: Turns,
        work: Callable[[], tuple[float, Collection[Waited]]],
        after: Callable[[], object],
    ) -> None:
        self._turns, self._work, self._after = turns, work, after
        self._waker = Waker()
        self._is_stopped = False
        #: When `work` is called next, a reading of `time.monotonic`.
        self.looks_at = 0.0
        self._thread = threading.Thread(target=self._run, name="spark_klog-producer", daemon=True)

    def start(self) -> None:
        """Start the thread; `RuntimeError` if there can't be another one."""
        try:
            self._thread.start()
        except RuntimeError:
            self._waker.close()
            raise

    def wake(self) -> None:
        self._waker.wake()

    def stop(self) -> None:
        self._is_stopped = True
        self._waker.wake()

    def join(self) -> None:
        """Wait until the thread has ended; do not hold the lock."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                with self._turns.of_thread():
                    self._waker.clear()  # before the look at what it was woken for
                    if self._is_stopped:
                        return
                    pause, connections = self._work()
                    self.looks_at = time.monotonic() + pause
                self._call_after()
                try:
                    wait_until_ready([self._waker, *connections], pause)
                except (OSError, ValueError) as error:  # a call has closed a connection, or descriptors have run out
                    _log.debug("looking again: %s", error)
                    time.sleep(_PAUSE)
        except BaseException:
            _log.exception("the producer's thread has ended")
            raise
        finally:
            self._waker.close()

    def _call_after(self) -> None:
        while True:
            try:
                self._after()
                return
            except BaseException:  # raised by a callback, SystemExit too: this thread has no caller to raise it to
                _log.exception("on_delivery has failed in the producer's thread")
