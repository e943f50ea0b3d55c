"""Waiting for several connections at once, and for work in threads besides."""

from __future__ import annotations

import math
import select
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from spark_klog.base.interrupts import between_steps

#: Seconds; `poll` takes no infinity.
_LONGEST_WAIT = 3600.0
#: Seconds that a broker has for an answer at least, if a request is sent late in a call, or after its deadline: the
#: steps of a busy event loop come late, and each attempt would time out at the same step.
LEAST_ANSWER = 0.1
_T = TypeVar("_T")


class Waited(Protocol):
    """A connection, one being made, or a `Waker`."""

    @property
    def awaited_events(self) -> int:
        """The events of `select.poll` to wait for; 0 if there is no need to wait."""

    def fileno(self) -> int: ...


class Waker:
    """A socket to wait for besides connections (see `wait_until_ready`); `wake` ends the wait.

    Any thread may call `wake`; only the waiting thread calls the rest.
    """

    awaited_events: int = select.POLLIN

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    @property
    def closed(self) -> bool:
        return self._receiver.fileno() < 0

    def wake(self) -> None:
        try:
            self._sender.send(b"\0")
        except OSError:  # the buffer is full of wakes, or it is closed
            pass

    def clear(self) -> None:
        try:
            while self._receiver.recv(1024):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class Work(Generic[_T]):
    """A blocking call in a daemon thread of its own, to wait for besides connections; call it done when `step` says so.

    From Python 3.12 on the interpreter's exit starts no thread: the constructor then makes the call itself.
    """

    def __init__(self, work: Callable[[], _T], name: str) -> None:
        self._work = work
        self._results: list[_T] = []
        self._failure: BaseException | None = None
        self._waker = Waker()
        self.fileno, self.awaited_events = self._waker.fileno, self._waker.awaited_events
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            self._run()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # raised to the caller
            self._failure = error
        self._waker.wake()

    def step(self) -> _T | None:
        """The result, None while it is not there; raises what the call has raised."""
        if self._failure is not None:
            self.close()
            raise self._failure
        if not self._results:
            return None
        self.close()
        return self._results[0]

    def close(self) -> None:
        """Wait no more: the thread ends by itself, and its result is dropped."""
        self._waker.close()


def wait_until_ready(waited: Iterable[Waited], timeout: float) -> None:
    """Wait up to `timeout` seconds until `open_step` or `poll` of one of the connections can continue, or for a wake.

    `OSError` or `ValueError` if another thread closes a connection.
    """
    poller = select.poll()
    for connection in waited:
        events = connection.awaited_events
        if not events:
            return
        poller.register(connection.fileno(), events)
    try:
        poller.poll(math.ceil(1000 * max(0.0, min(timeout, _LONGEST_WAIT))))
    except BaseException as error:  # as in a `WAIT`, but without its calls
        between_steps(error)
        raise
