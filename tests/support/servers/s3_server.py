"""An S3 server, moto's, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.servers.kafka import free_port

_HOST, _SECONDS = "127.0.0.1", 60


@contextmanager
def serving_s3() -> Iterator[str]:
    """The address of a server, HOST:PORT; any key and secret will do."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + _SECONDS
            while not _answers(port):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield f"{_HOST}:{port}"
        finally:
            server.kill()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((_HOST, port)) == 0
