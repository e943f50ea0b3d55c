"""Apache Kafka's Java clients of four versions: one program; its class `Features` has the differences."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.support.clients.build import built, compile_program
from tests.support.clients.process import ProcessClient, sources
from tests.support.servers.kafka import Version, kafka_libs


class _Java(ProcessClient):
    version: ClassVar[Version]
    features: ClassVar[str] = "modern"

    def command(self) -> tuple[list[str], Mapping[str, str]]:
        libs = kafka_libs(self.version)
        folder = sources("java")
        files = [folder / "Driver.java", folder / self.features / "Features.java"]

        def build(classes: Path) -> None:
            command = ["javac", "-cp", f"{libs}/*", "-d", str(classes), *(str(file) for file in files)]
            compile_program(command, folder, {})

        classes = built(f"java-{self.version}", files, build)
        quick = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        quiet = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=error", f"-Dlog4j.configuration={_LOG4J.as_uri()}"]
        return ["java", *quick, *quiet, "-cp", f"{classes}:{libs}/*", "Driver"], os.environ


_LOG4J = sources("java") / "log4j.properties"


class Java0102(_Java):
    name = "Java 0.10.2.2"
    version = "0.10.2.2"
    features = "old"
    codecs = ("none", "gzip", "snappy", "lz4")
    magic = 1
    has_admin = False


class Java39(_Java):
    name = "Java 3.9.1"
    version = "3.9.1"


class Java41(_Java):
    name = "Java 4.1.0"
    version = "4.1.0"
    has_consumer_protocol = True


class Java44(_Java):
    name = "Java 4.4.0"
    version = "4.4.0"
    has_consumer_protocol = True
