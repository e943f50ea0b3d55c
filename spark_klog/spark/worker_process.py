"""What a Python process of Spark's lacks: TCP_NODELAY on its connection to the JVM.

A worker's answer of more than its buffer (64 KB) leaves in several writes. With Nagle's algorithm, which pyspark leaves
on, the last, small one waits until the JVM's side acknowledges those before, which may delay that by 40 ms: as long as
a small task takes. pyspark keeps the socket in local variables, so it is looked for among the open files.
"""

from __future__ import annotations

import os
import socket
import stat

_OPEN_FILES = "/dev/fd"
_LOOPBACK = ("127.0.0.1", "::1")


def answer_at_once() -> None:
    """Set TCP_NODELAY on the process's TCP connections to this machine's loopback addresses, where the JVM is.

    What cannot be set is left as it is, everything where the system does not tell which files are open (Windows).
    """
    try:
        files = os.listdir(_OPEN_FILES)
    except OSError:
        return
    for name in files:
        try:
            _set_no_delay(int(name))
        except OSError:  # no connection, or closed since: the listing's own file is
            pass


def _set_no_delay(file: int) -> None:
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        return
    blocking = os.get_blocking(file)
    found = socket.socket(fileno=file)
    try:
        is_tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and found.getpeername()[0] in _LOOPBACK:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    finally:
        found.detach()
        os.set_blocking(file, blocking)  # a default timeout, if one is set, has made it non-blocking
