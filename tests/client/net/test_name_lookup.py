"""Look-ups of host names also work at the interpreter's exit, when no thread can start."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spark_klog.base.in_a_thread import addresses_of
from spark_klog.client.net.dial import Dial
from spark_klog.errors import ConnectionFailed
from tests.support.packages import pythons
from tests.support.packages.registries import RegistryUnreachable

ROOT = Path(__file__).parents[3]
#: From 3.12 on, threads can no longer start when Python calls the functions of atexit.
AT_EXIT = """
import atexit, time
from spark_klog.base.in_a_thread import addresses_of
atexit.register(lambda: print(len(addresses_of("localhost", 9092, time.monotonic() + 30)) > 0))
"""


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    found = addresses_of("localhost", 9092, time.monotonic() + 30)
    assert found == socket.getaddrinfo("localhost", 9092, type=socket.SOCK_STREAM)
    with pytest.raises(OSError, match=r"\[Errno -"):
        addresses_of("no-such-host.invalid", 9092, time.monotonic() + 30)


def test_an_interrupt_leaves_no_look_up_that_nobody_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            addresses_of("localhost", 9092, time.monotonic() + 30)
    assert addresses_of("localhost", 9092, time.monotonic() + 30)


def test_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", pair)
    with pytest.raises(ConnectionFailed, match="Too many open files"):
        Dial("localhost", 1, time.monotonic() + 30)


@pytest.mark.parametrize("version", [None, "3.12", "3.13"])
def test_at_exit(version: str | None) -> None:
    python = pythons.find(version) if version else sys.executable
    if python is None:
        raise RegistryUnreachable(f"Python {version} is neither on this machine nor to be had of Debian")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-c", AT_EXIT], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
