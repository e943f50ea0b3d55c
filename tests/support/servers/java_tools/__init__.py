"""Kafka's command line tools, all in one JVM."""

from __future__ import annotations

import base64
import select
import subprocess
from pathlib import Path

from tests.support.clients.build import built, compile_program
from tests.support.servers.kafka import Version, kafka_libs

_SOURCE = Path(__file__).parent / "Tools.java"
_LOG4J = Path(__file__).parents[2] / "clients" / "java" / "log4j.properties"
_SECONDS = 60


class JavaTools:
    """The tools of one version of Kafka; a context manager."""

    def __init__(self, version: Version) -> None:
        libs = kafka_libs(version)

        def build(classes: Path) -> None:
            compile_program(["javac", "-cp", f"{libs}/*", "-d", str(classes), str(_SOURCE)], _SOURCE.parent, {})

        classes = built(f"java-tools-{version}", [_SOURCE], build)
        quick = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        quiet = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=error", f"-Dlog4j.configuration={_LOG4J.as_uri()}"]
        self._process = subprocess.Popen(
            ["java", *quick, *quiet, "-cp", f"{classes}:{libs}/*", "Tools"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, name: str, *arguments: str) -> tuple[int, str]:
        """Run a tool by its class name; return the exit code and the output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join((name, *arguments)).encode() + b"\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], _SECONDS)
        assert readable, f"{name} took more than {_SECONDS} s"
        code, _, output = self._process.stdout.readline().decode().partition(" ")
        return int(code), base64.b64decode(output).decode()

    def __enter__(self) -> JavaTools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
