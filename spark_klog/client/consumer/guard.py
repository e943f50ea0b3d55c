"""Which thread may call a consumer, and what interrupts its waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spark_klog.client.forks import Maker
from spark_klog.client.network.wakeup import Waker
from spark_klog.errors import ConcurrentUse, ConsumerClosed, WokenUp


class Guard:
    """Admits one thread at a time to a consumer. Any thread may call `wakeup` and `closing`."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self.maker = Maker("consumer", ConsumerClosed)
        self._lock = threading.RLock()
        #: The thread that is in a call, by its id: a listener's calls come from within one.
        self._user: int | None = None
        self._is_woken = False
        self._is_closing = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Raise `ConcurrentUse` if another thread is in a call, `ConsumerClosed` after `closing` or a fork.

        A listener may call (for example commit) until its own call ends, even if that is `close`.
        """
        self.maker.check()
        user = threading.get_ident()
        is_nested = self._user == user
        if self._is_closing and not is_nested:
            raise ConsumerClosed("the consumer is closed")
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUse("another thread is using this consumer: give each thread its own")
        self._user = user
        try:
            yield
        finally:
            if not is_nested:
                self._user = None
            self._lock.release()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """End the call of another thread, then admit this one alone and for good."""
        self._is_closing = True
        self._waker.wake()
        with self._lock:
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = None

    def wakeup(self) -> None:
        """Make `check` raise `WokenUp` in the call that waits, or else in the next one."""
        self.maker.check()
        self._is_woken = True
        self._waker.wake()

    def check(self) -> None:
        """Raise `ConsumerClosed` or `WokenUp` if another thread has called `closing` or `wakeup`."""
        if self._is_closing:
            raise ConsumerClosed("the consumer is closed")
        if self._is_woken:
            self._is_woken = False
            raise WokenUp("the consumer was woken up")
