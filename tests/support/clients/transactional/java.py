"""The Java client's producers, by name, in one process that takes commands.

open NAME SETTING=VALUE...                    init NAME, begin NAME, commit NAME, abort NAME, close NAME
send NAME TOPIC PARTITION VALUE...            ok OFFSET...
offsets NAME GROUP TOPIC PARTITION OFFSET     commit the offset within the transaction
read TOPIC PARTITION SETTING=VALUE...         ok VALUE..., up to the current end

An answer is "ok WORD..." or "error CLASS: TEXT".
"""

from __future__ import annotations

import select
import subprocess
from pathlib import Path
from types import TracebackType

from tests.support.clients.build import built, compile_program
from tests.support.clients.process import sources
from tests.support.servers.kafka import Version, kafka_libs

_SECONDS = 90
_SOURCE = Path(__file__).with_name("Transactions.java")


class JavaError(Exception):
    """A Java exception; the text begins with the name of its class."""


class JavaClient:
    """A process with producers and readers of one Kafka version; a context manager."""

    def __init__(self, version: Version, servers: str, log: Path) -> None:
        libs = kafka_libs(version)

        def build(classes: Path) -> None:
            compile_program(["javac", "-cp", f"{libs}/*", "-d", str(classes), str(_SOURCE)], _SOURCE.parent, {})

        classes = built(f"transactions-{version}", [_SOURCE], build)
        quick = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        logging = sources("java") / "log4j.properties"
        quiet = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", f"-Dlog4j.configuration={logging.as_uri()}"]
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            ["java", *quick, *quiet, "-cp", f"{classes}:{libs}/*", "Transactions", servers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def ask(self, *words: str) -> list[str]:
        """Run a command; return the words of the answer, or raise `JavaError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write((" ".join(words) + "\n").encode())
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], _SECONDS)
        if not readable:
            raise TimeoutError(f"no answer to {words[:3]} in {_SECONDS} s; see {self._log.name}")
        kind, *rest = self._process.stdout.readline().decode().split()
        if kind == "error":
            raise JavaError(" ".join(rest))
        return rest

    def __enter__(self) -> JavaClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()
