"""franz-go's broker for tests, kfake, in a process; it is built on the first call."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.clients.build import go_program

_SECONDS = 30


@contextmanager
def serving_kfake() -> Iterator[str]:
    """Run a broker that begins empty; yield its bootstrap servers."""
    command = [str(go_program("kfake"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        word, _, servers = process.stdout.readline().strip().partition(" ")
        assert word == "listening", "kfake does not start"
        try:
            yield servers
        finally:
            process.stdin.close()
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
