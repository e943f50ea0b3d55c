"""What keeps a task of Spark's waiting before and after it reads, and what a Python worker can do about it.

pyspark forks workers of `pyspark.daemon` that do task after task over one TCP connection to the JVM. Between two tasks

    gc.collect()       the daemon collects garbage: 20 ms for the objects of imported modules. They are frozen here
    a task's command   the JVM writes it in two pieces, with Nagle's algorithm on: the second one waits 40 ms for our
                       delayed acknowledgement of the first. TCP_QUICKACK sends it at once
    our answer         one of more than 64 KB leaves in several pieces, too: TCP_NODELAY

With `spark.python.unix.domain.socket.enabled` the connection is a Unix socket, which waits for nothing.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import sys

_OPEN_FILES = "/dev/fd"
_LOOPBACK = ("127.0.0.1", "::1")
_DAEMON = "pyspark.daemon"
#: Linux has it; elsewhere acknowledgements are not delayed so long, or can't be asked for.
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
_OLDEST_GENERATION = 2

_is_prepared = False


def prepare_worker() -> None:
    """Do the above in a worker that `pyspark.daemon` has forked, at its first task; nothing in any other process."""
    global _is_prepared
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is None or main.name != _DAEMON or _is_prepared:
        return
    _is_prepared = True
    set_on_connections(socket.TCP_NODELAY)
    gc.freeze()
    if _QUICKACK is not None:
        gc.callbacks.append(_acknowledge_at_once)


def _acknowledge_at_once(phase: str, info: dict[str, int]) -> None:
    """As the daemon's collection begins, which is between two tasks: the kernel forgets the option with each answer."""
    if _QUICKACK is not None and phase == "start" and info["generation"] == _OLDEST_GENERATION:
        set_on_connections(_QUICKACK)


def set_on_connections(option: int) -> None:
    """Set an option of TCP on the process's connections over loopback: one of them goes to the JVM.

    pyspark keeps the socket in local variables, so it is looked for among the open files. What can't be set is left as
    it is, everything where the system does not tell which files are open (Windows).
    """
    try:
        files = os.listdir(_OPEN_FILES)
    except OSError:
        return
    for name in files:
        try:
            _set_option(int(name), option)
        except OSError:  # no connection, or closed since: the listing's own file is
            pass


def _set_option(file: int, option: int) -> None:
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        return
    blocking = os.get_blocking(file)
    found = socket.socket(fileno=file)
    try:
        is_tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and found.getpeername()[0] in _LOOPBACK:
            found.setsockopt(socket.IPPROTO_TCP, option, 1)
    finally:
        found.detach()
        os.set_blocking(file, blocking)  # a default timeout, if one is set, has made it non-blocking
