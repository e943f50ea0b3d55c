"""Blocking calls with a deadline, in a thread of their own: any work, and the look-up of a host's addresses.

getaddrinfo has no timeout, and takes half a minute if no name server answers.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from spark_klog.base.interrupts import WAIT, Latch

_T = TypeVar("_T")


def within(deadline: float, work: Callable[[], _T], name: str) -> _T:
    """The result of `work`, which runs in a thread of its own; what it raises is raised here.

    TimeoutError at `deadline`, a reading of `time.monotonic`. The thread then ends by itself, and its result is
    dropped.
    """
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised to the caller
            failures.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError
    return results[0]


Addresses = list[tuple[Any, ...]]
NO_ANSWER = "no name server has answered in time"


class LookUp:
    """A look-up in a thread of its own. Callers with the same host and port share it."""

    def __init__(self, host: str, port: int) -> None:
        self.is_done = Latch()
        self.addresses: Addresses = []
        self.failure: Exception | None = None
        self._listeners: list[Callable[[], None]] = []
        self._key = host, port
        _under_way[self._key] = self  # before the thread starts, which removes it
        try:
            threading.Thread(target=self._run, name=f"look-up of {host}", daemon=True).start()
        except RuntimeError:  # from Python 3.12 on the interpreter's exit starts none: without a deadline, then
            self._run()
        except BaseException:  # an interrupt: callers to come would wait for a thread that has not begun
            _under_way.pop(self._key, None)
            raise

    def _run(self) -> None:
        host, port = self._key
        try:
            self.addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:  # raised to the callers that wait
            self.failure = error
        finally:
            _under_way.pop(self._key, None)
            self.is_done.set()
            for listener in list(self._listeners):
                listener()

    def tell(self, listener: Callable[[], None]) -> None:
        """Call `listener` in any thread once the look-up is done."""
        self._listeners.append(listener)
        if self.is_done.is_set():
            listener()

    def result(self) -> Addresses:
        """The addresses, once it is done; OSError and UnicodeError from getaddrinfo."""
        if self.failure is not None:
            raise self.failure
        return self.addresses


_under_way: dict[tuple[str, int], LookUp] = {}
# a forked child does not have these threads
os.register_at_fork(after_in_child=_under_way.clear)


#: Where this process itself listens, by the host and port that it tells others. Behind a port mapping, or in a
#: container whose name only others know, it can't reach itself there.
own_addresses: dict[tuple[str, int], tuple[str, int]] = {}


def look_up(host: str, port: int) -> LookUp | Addresses:
    """Begin a look-up, or join one that is under way; the addresses if `host` is one, or OSError."""
    key = own_addresses.get((host, port), (host, port))
    try:
        ipaddress.ip_address(key[0])
    except ValueError:
        return _under_way.get(key) or LookUp(*key)
    return list(socket.getaddrinfo(*key, type=socket.SOCK_STREAM))


def addresses_of(host: str, port: int, deadline: float) -> Addresses:
    """The result of getaddrinfo for TCP; `deadline` is a reading of `time.monotonic`.

    TimeoutError if the deadline has passed; OSError and UnicodeError from getaddrinfo.
    """
    begun = look_up(host, port)
    if not isinstance(begun, LookUp):
        return begun
    with WAIT:
        is_done = begun.is_done.wait(max(0.0, deadline - time.monotonic()))
    if not is_done:
        raise TimeoutError(NO_ANSWER)
    return begun.result()
