"""Run Kafka's TransactionalMessageCopier: it copies a topic and commits the input offsets, in transactions.

It prints its progress as lines of JSON, and stops at the end offset that its input had when it started.
"""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

from tests.support.servers.kafka import Kafka

_MAIN = "org.apache.kafka.tools.TransactionalMessageCopier"


class Copier:
    """One copier, which may be killed and restarted with the same transactional id and group."""

    def __init__(self, kafka: Kafka, log: Path, *arguments: str) -> None:
        self._kafka, self._arguments = kafka, arguments
        self._log = log.open("ab")
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._before = self._now = 0
        #: The exit codes of its earlier processes.
        self.ends: list[int] = []

    @property
    def copied(self) -> int:
        """The number of records that its processes, killed ones included, have reported as committed."""
        return self._before + self._now

    def start_if_ended(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._reap()
        process = self._process = self._kafka.start_tool(_MAIN, *self._arguments, errors=self._log)
        self._reader = threading.Thread(target=self._read, args=(process,))
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):  # otherwise it was killed while writing the line
                self._now = json.loads(line)["totalProcessed"]

    def _reap(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert self._reader is not None
        self.ends.append(process.wait(30))
        self._reader.join(30)
        assert process.stdout is not None
        process.stdout.close()
        self._before, self._now = self.copied, 0

    @property
    def is_done(self) -> bool:
        """Whether it reached the end of its input."""
        return self._process is not None and self._process.poll() == 0

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def close(self) -> None:
        self.kill()
        self._log.close()
