"""Processes in which a registry does what may take long or much memory (`work`), and which it can end.

    request    bytes: a pickled function of `work` and its arguments
    answer     bytes: what it returned or the refusal, pickled

There are two lanes. What is small starts in the first one, and is stopped there if it does not end soon; it starts
again in the second one, with all that is large. So small requests never wait for large ones. A process of the second
lane is for one call.
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
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from spark_klog.schemas.registry.server import errors
from spark_klog.schemas.registry.server.errors import RegistryRefusal

_T = TypeVar("_T")
#: Bytes of a request that is small, and of any.
_SMALL: Final = 128 << 10
_MOST_BYTES: Final = 16 << 20
#: Processes of a lane, seconds of a call there, bytes of memory, and calls that may wait.
_FIRST: Final = (3, 0.25, 256 << 20, 256)
_SECOND: Final = (1, 10.0, 512 << 20, 16)
#: Seconds after which a process ends itself: the one that would have ended it is gone.
_ALARM_SECONDS: Final = ceil(_SECOND[1]) + 2


class Processes:
    """A `work.Run` in processes, which start when they are needed. Thread-safe; call `close`."""

    def __init__(self) -> None:
        self._first, self._second = _Lane(*_FIRST), _Lane(*_SECOND)

    def __call__(self, function: Callable[..., _T], *arguments: Any, deadline: float) -> _T:
        """`RegistryRefusal` is what the function raises, or that it needs too much memory or time."""
        data = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        if len(data) > _MOST_BYTES:
            raise errors.schema_too_large(f"the schemas have more than {_MOST_BYTES >> 20} MiB")
        try:
            if len(data) <= _SMALL:
                with suppress(_Unfinished):
                    return self._first.call(data, deadline)  # type: ignore[no-any-return]
            return self._second.call(data, deadline)  # type: ignore[no-any-return]
        except _Died:
            raise errors.schema_too_large(f"the schemas need more than {_SECOND[2] >> 20} MiB of memory") from None
        except _Unfinished:
            raise errors.timed_out(f"the schemas took more than {_SECOND[1]:g} s, or others before them did") from None

    def close(self) -> None:
        """End the processes. Calls that run are refused. May be called twice."""
        self._first.close()
        self._second.close()


class _Unfinished(Exception):
    """A call that was not done in its time."""


class _Died(_Unfinished):
    """A call whose process has ended, which is what it does when it needs more memory."""


class _Lane:
    """At most `count` processes, each of which does one call at a time."""

    def __init__(self, count: int, seconds: float, memory: int, most_waiting: int) -> None:
        self._seconds, self._memory = seconds, memory
        self._free = threading.Semaphore(count)
        self._places = threading.Semaphore(count + most_waiting)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._is_closed = False

    def call(self, data: bytes, deadline: float) -> Any:
        if not self._places.acquire(blocking=False):
            raise errors.timed_out("too many large schemas are being parsed or compared: try again later")
        try:
            if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise _Unfinished
            try:
                return self._call(data, deadline)
            finally:
                self._free.release()
        finally:
            self._places.release()

    def _call(self, data: bytes, deadline: float) -> Any:
        with self._lock:
            if self._is_closed:
                raise errors.timed_out("the registry is closing")
            child = self._idle.pop() if self._idle else _Child(self._memory)
            self._busy.add(child)
        is_usable = False
        try:
            made = child.call(data, min(self._seconds, deadline - time.monotonic()))
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

    def __init__(self, memory: int) -> None:
        own, theirs = socket.socketpair()
        #: For files of protoc, which nobody removes if it is ended.
        self._folder = tempfile.mkdtemp(prefix="klog-schemas-")
        search_path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            command = f"from {__name__} import serve; serve({theirs.fileno()}, {memory}, {self._folder!r})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": search_path, "TMPDIR": self._folder},
                start_new_session=True,  # so it is ended with what it has started, and not by Ctrl-C
            )
        self._connection = Connection(own.detach())
        self._is_ready = False

    def call(self, data: bytes, seconds: float) -> Any:
        """What a call returned, or the refusal. `_Unfinished`: `end` the process."""
        try:
            if not self._is_ready:  # its start does not count
                self._receive(_ALARM_SECONDS)
                self._is_ready = True
            self._connection.send_bytes(data)
            return pickle.loads(self._receive(seconds))  # noqa: S301 - of a process of our own
        except (OSError, EOFError):
            raise _Died from None

    def _receive(self, seconds: float) -> bytes:
        if not self._connection.poll(max(0.0, seconds)):
            raise _Unfinished
        return self._connection.recv_bytes()

    def kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(fd: int, memory: int, folder: str) -> None:
    """Do calls until the other end of a socket is closed, then remove `folder`; `memory`: bytes that this may take."""
    connection = Connection(fd)
    with suppress(OSError, ValueError):  # a smaller bound is there already
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    connection.send_bytes(b"")
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
            made = function(*arguments)
        except RegistryRefusal as refused:
            made = refused
        except MemoryError:
            return
        except Exception as error:
            made = errors.store_failed(f"{type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps(made, pickle.HIGHEST_PROTOCOL))
        signal.alarm(0)
