"""Interrupts: Ctrl-C, and whatever else a signal handler raises, between any two steps of a call.

Python runs signal handlers in the main thread, after any call of a function and at the beginning of each one, also of
`__enter__` and `__exit__`. So no code of ours can undo everything: a `CallLock` is released by C code, which a handler
can't interrupt, and a `Section` that was left halfway stays marked, for the next call to see.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from spark_klog.errors import KlogError


class _Closable(Protocol):
    def close(self) -> None: ...


_Self = TypeVar("_Self", bound=_Closable)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
#: Seconds after which a thread that waits for a `Latch` looks again: an interrupt may keep another from waking it.
_LONGEST_WAIT = 1.0
#: The attribute of an exception that was raised between two steps.
_MARK = "_klog_is_between_steps"


def between_steps(error: BaseException) -> None:
    """Note that an exception has interrupted nothing but a wait, or a connection that is closed since."""
    setattr(error, _MARK, True)


class _Wait:
    """A block in which a call only waits: an interrupt in it leaves nothing half done."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            between_steps(error)


WAIT = _Wait()
#: What our own code raises, after it has put everything in order; interrupts may raise any other exception.
ORDERLY = (KlogError, TypeError, ValueError)


class CallLock(RLock):  # type: ignore[misc]  # final for typeshed only
    """The base of locks that calls hold. No interrupt leaves one locked, as `__exit__` is that of the C lock.

    A subclass says how a block begins: `_begin` acquires the lock once, or raises.
    """

    def __new__(cls, *_: object, **__: object) -> Any:
        return super().__new__(cls)

    @property
    def is_held(self) -> bool:
        """Whether this thread is within the lock's block."""
        return self._is_owned()  # type: ignore[attr-defined,no-any-return]

    @property
    def _count(self) -> int:
        """How often this thread has acquired it; only the text of a lock says so in all versions of Python."""
        return int(repr(self).partition("count=")[2].split()[0]) if self.is_held else 0

    def _begin(self, *, is_nested: bool) -> None:
        raise NotImplementedError

    def __enter__(self) -> bool:  # type: ignore[override]  # typeshed: the arguments of `acquire`
        count = self._count if self._is_owned() else 0  # type: ignore[attr-defined]
        try:
            self._begin(is_nested=count > 0)
            return True  # nothing is called from here to the block
        except BaseException:
            while self._count > count:
                self.release()
            raise


class Latch:
    """A `threading.Event` that an interrupt of a thread that waits can't lock: its thread may be the one to set it."""

    __slots__ = ("_closed", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Let all go on that wait. Not for two threads at once."""
        if not self._is_set:
            self._is_set = True
            self._closed.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds, None without limit; return whether it is set."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = _LONGEST_WAIT if until is None else min(_LONGEST_WAIT, until - time.monotonic())
            if left <= 0:
                return False
            if self._closed.acquire(timeout=left):
                self._closed.release()
        return True


class Section:
    """A block that changes several things that belong together; blocks within it count as part of it.

    `is_torn` after it if an exception has left it: neither one of `whole`, nor one in a `WAIT` or of a method that is
    `closing_if_interrupted`. `on_torn` is called then, unless another interrupt comes.
    """

    def __init__(self, *whole: type[BaseException], on_torn: Callable[[], None] | None = None) -> None:
        self._whole, self._on_torn = whole, on_torn
        self.is_torn = False
        self._depth = 0

    def __enter__(self) -> None:
        self.is_torn = True
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._depth -= 1
        if error is None or isinstance(error, self._whole) or hasattr(error, _MARK):
            self.is_torn = self._depth > 0
        elif self._on_torn is not None:
            self._on_torn()

    def mended(self) -> None:
        """Note that nothing is halfway any more."""
        self._depth = 0
        self.is_torn = False


def closing_if_interrupted(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Close the object if an interrupt ends the method: a request or an answer may be half sent or half read."""

    @functools.wraps(method)
    def wrapped(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except ORDERLY:
            raise  # the method has decided what it means for the object
        except BaseException as error:
            self.close()
            between_steps(error)
            raise

    return wrapped


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Have SIGINT and SIGTERM call `handler` for the duration of the block."""
    former = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)
