"""Which thread may call a consumer, and what interrupts its waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_klog.client.forks import Maker
from spark_klog.client.interrupts import CallLock
from spark_klog.client.network.wakeup import Waker
from spark_klog.errors import ConcurrentUse, ConsumerClosed, WokenUp


class Guard(CallLock):  # type: ignore[misc]  # as `CallLock`
    """Admits one thread at a time to a consumer. Any thread may call `wakeup` and `closing`.

    Each call begins with `mend`, which undoes what an interrupt of the one before has left halfway.
    """

    def __init__(self, waker: Waker, mend: Callable[[], None]) -> None:
        self._waker, self._mend = waker, mend
        self.maker = Maker("consumer", ConsumerClosed)
        #: The threads that close the consumer, by their ids: one may begin to while another one's `close` waits.
        self._closers: set[int] = set()
        self._is_woken = False
        self._is_closing = False

    def used(self) -> Guard:
        """A block for a call: `ConcurrentUse` if another thread is in one, `ConsumerClosed` after `closing` or a fork.

        A listener may call (for example commit) until its own call ends, even if that is `close`.
        """
        self.maker.check()
        if self._is_closing and not self.is_held:
            raise ConsumerClosed("the consumer is closed")
        return self

    def closing(self) -> Guard:
        """A block that ends the call of another thread, then admits this one alone and for good."""
        self._closers.add(threading.get_ident())
        self._is_closing = True
        self._waker.wake()
        return self

    def _begin(self, *, is_nested: bool) -> None:
        is_closer = threading.get_ident() in self._closers
        if not self.acquire(blocking=is_closer):
            raise ConcurrentUse("another thread is using this consumer: give each thread its own")
        if not is_nested:
            if self._is_closing and not is_closer:
                raise ConsumerClosed("the consumer is closed")
            self._mend()

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
