"""An application of Kafka Streams that counts words, in a process of its own."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Final

from tests.support.clients.build import built, compile_program
from tests.support.packages.maven import resolve
from tests.support.servers.kafka import NEWEST

_SOURCE = Path(__file__).with_name("WordCount.java")
_ARTIFACTS = (f"org.apache.kafka:kafka-streams:{NEWEST}", "org.slf4j:slf4j-simple:1.7.36")
#: Internal topics of an application begin with its id.
APPLICATION: Final = "word-count"


class WordCount:
    """The application; it may be killed and started again with its state."""

    def __init__(self, servers: str, folder: Path, log: Path, **settings: object) -> None:
        libs = resolve(f"kafka-streams-{NEWEST}", _ARTIFACTS)

        def build(classes: Path) -> None:
            compile_program(["javac", "-cp", f"{libs}/*", "-d", str(classes), str(_SOURCE)], _SOURCE.parent, {})

        classes = built(f"word-count-{NEWEST}", [_SOURCE], build)
        quick = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        given = {"bootstrap.servers": servers, "application.id": APPLICATION, "state.dir": folder}
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        words = [f"{name}={value}" for name, value in given.items()]
        self._command = ["java", *quick, quiet, "-cp", f"{classes}:{libs}/*", "WordCount", *words]
        self._log = log.open("ab")
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        #: Its states, in order, and "FAILED" with the reason.
        self.states: list[str] = []

    def start(self) -> None:
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(process,))
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.states.append(line.strip())

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._end()

    def close(self) -> None:
        """Stop it in order, if it runs."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._end()
        self._log.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert self._reader is not None
        process.wait(30)
        self._reader.join(30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
