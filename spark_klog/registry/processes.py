"""Processes in which a registry does what may take long or much memory (`work`), and which it can end.

    request    bytes: a pickled function of `work` and its arguments
    answer     bytes: what it returned or the refusal, pickled

There are two lanes. What is small starts in the first one, and is ended there if it takes more than a moment of the
processor; it starts again in the second one, with all that is large. So small requests never wait for large ones. The
kernel counts the time of a call's process: how long it waits for others counts for the request's deadline only.
"""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from spark_klog.base.cache import Newest
from spark_klog.registry import errors
from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.formats import json_differences
from spark_klog.registry.log import WRITE_SECONDS
from spark_klog.registry.work import Source, prepare
from spark_klog.schemas.protoc.files import stay_in_this_process

_T = TypeVar("_T")
#: Bytes of a request that is small, and of any.
_SMALL: Final = 128 << 10
_MOST_BYTES: Final = 16 << 20
#: Processes of a lane, seconds of the processor for a call there, and bytes of memory.
_FIRST: Final = (min(3, os.cpu_count() or 1), 0.25, 256 << 20)
_SECOND: Final = (1, 10.0, 512 << 20)
#: Seconds after which a process ends itself: the one that would have ended it is gone.
_ALARM_SECONDS: Final = ceil(WRITE_SECONDS) + 2
_MOST_LONG: Final = 1000
#: Seconds until the end of a process that has closed its socket.
_END_SECONDS: Final = 5.0
_SHORTEST: Final = 0.001
#: How often a call is begun anew if its process was ended from outside.
_TRIES: Final = 2


class Processes:
    """A `work.Run` in processes, which start when they are needed. Thread-safe; call `close`."""

    def __init__(self) -> None:
        self._first, self._second = _Lane(*_FIRST), _Lane(*_SECOND)
        #: Hashes of small calls that took too long for the first lane.
        self._long: Newest[int, None] = Newest(_MOST_LONG)

    def __call__(self, function: Callable[..., _T], *arguments: Any, deadline: float) -> _T:
        """`RegistryRefusal` is what the function raises, or that it needs too much memory or time."""
        data = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        if len(data) > _MOST_BYTES:
            raise errors.schema_too_large(f"the schemas have more than {_MOST_BYTES >> 20} MiB")
        if len(data) <= _SMALL and hash(data) not in self._long:
            try:
                return self._first.call(data, deadline)  # type: ignore[no-any-return]
            except _Died:
                pass
            except _Unfinished:
                self._long[hash(data)] = None
        for _ in range(_TRIES):
            try:
                return self._second.call(data, deadline)  # type: ignore[no-any-return]
            except _Died:
                pass
            except _Unfinished:
                why = f"the schemas took more than {_SECOND[1]:g} s, or others before them did"
                raise errors.timed_out(why) from None
        raise errors.schema_too_large(f"the schemas need more than {_SECOND[2] >> 20} MiB of memory")

    def close(self) -> None:
        """End the processes. Calls that run are refused. May be called twice."""
        self._first.close()
        self._second.close()


class _Unfinished(Exception):
    """A call that was not done in its time."""


class _Died(_Unfinished):
    """A call whose process has ended, which is what it does when it needs more memory, or another one has ended it."""


class _Lane:
    """At most `count` processes, each of which does one call at a time."""

    def __init__(self, count: int, seconds: float, memory: int) -> None:
        self._seconds, self._memory = seconds, memory
        self._free = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._is_closed = False

    def call(self, data: bytes, deadline: float) -> Any:
        left = deadline - time.monotonic()
        if left <= 0 or not self._free.acquire(timeout=left):
            raise _Unfinished
        try:
            return self._call(data, deadline)
        finally:
            self._free.release()

    def _call(self, data: bytes, deadline: float) -> Any:
        with self._lock:
            if self._is_closed:
                raise errors.timed_out("the registry is closing")
            while self._idle and not self._idle[-1].is_alive():
                self._idle.pop().end()
            child = self._idle.pop() if self._idle else _Child(self._memory, self._seconds)
            self._busy.add(child)
        is_usable = False
        try:
            made = child.call(data, deadline)
            is_usable = len(data) <= _SMALL
        finally:
            with self._lock:
                self._busy.discard(child)
                is_usable = is_usable and not self._is_closed
                if is_usable:
                    self._idle.append(child)
            if not is_usable:
                child.end()
        if isinstance(made, RegistryRefusal):
            raise made
        return made

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for child in self._busy:
                child.kill()  # the thread that waits for it ends it
        for child in idle:
            child.end()


class _Child:
    """A process that runs `serve`."""

    def __init__(self, memory: int, seconds: float) -> None:
        own, theirs = socket.socketpair()
        #: For files of protoc, which nobody removes if it is ended.
        self._folder = tempfile.mkdtemp(prefix="klog-schemas-")
        search_path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            arguments = f"{theirs.fileno()}, {memory}, {seconds}, {self._folder!r}"
            command = f"from {__name__} import serve; serve({arguments})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": search_path, "TMPDIR": self._folder},
                start_new_session=True,  # so it is ended with what it has started, and not by Ctrl-C
            )
        self._connection = Connection(own.detach())

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, data: bytes, deadline: float) -> Any:
        """What a call returned, or the refusal. `_Unfinished`: `end` the process."""
        try:
            self._connection.send_bytes(data)
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise _Unfinished
            return pickle.loads(self._connection.recv_bytes())  # noqa: S301 - of a process of our own
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):
                if self._process.wait(_END_SECONDS) in (-signal.SIGPROF, -signal.SIGALRM):
                    raise _Unfinished from None
            raise _Died from None

    def kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(fd: int, memory: int, seconds: float, folder: str) -> None:
    """Do calls until the other end of a socket is closed, then remove `folder`.

    `memory`: bytes that this may take; `seconds`: time of the processor after which a call ends the process.
    """
    connection = Connection(fd)
    stay_in_this_process()
    json_differences.around_search = _charged
    with suppress(OSError, ValueError):  # a smaller bound is there already
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    while True:
        try:
            data = connection.recv_bytes()
        except (OSError, EOFError):  # nobody is there who would remove it
            shutil.rmtree(folder, ignore_errors=True)
            return
        signal.alarm(_ALARM_SECONDS)
        made: Any
        try:
            function, arguments = pickle.loads(data)  # noqa: S301 - of the process that started this one
            for schema_type in {argument.schema_type for argument in arguments if isinstance(argument, Source)}:
                prepare(schema_type)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            made = function(*arguments)
        except RegistryRefusal as refused:
            made = refused
        except MemoryError:
            return
        except Exception as error:
            made = errors.store_failed(f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(pickle.dumps(made, pickle.HIGHEST_PROTOCOL))
        signal.alarm(0)


@contextmanager
def _charged() -> Iterator[None]:
    """Count the wait for a process of this call as time of its own."""
    left, began = signal.getitimer(signal.ITIMER_PROF)[0], time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.alarm(_ALARM_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, max(_SHORTEST, left - (time.monotonic() - began)))
