"""Run Spark's own Kafka connector in a separate environment: it needs another pyspark than the project."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.packages.maven import resolve
from tests.support.spark.pyspark_versions import WITH_CONNECTOR, child_environment, with_connector

#: The connector's jars that Spark does not include. (Not every mirror has the token provider's 4.1.1.)
_ARTIFACTS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.commons:commons-pool2:2.12.0",
    "org.apache.kafka:kafka-clients:3.9.1",
)
_READ_SECONDS = 900
_STOP_SECONDS = 30


def connector_jars() -> str:
    """The connector's jars in the syntax of `spark.jars`; Spark includes their dependencies, at its own versions."""
    folder = resolve(f"spark-sql-kafka-alone-{WITH_CONNECTOR}", _ARTIFACTS, dependencies=False)
    return ",".join(str(jar) for jar in sorted(folder.glob("*.jar")))


def spark_artifact(name: str) -> Path:
    """The jar of one of Spark's modules that pyspark does not include, at the connector's version."""
    artifact = f"org.apache.spark:{name}_2.13:{WITH_CONNECTOR}"
    (jar,) = resolve(f"{name}-alone-{WITH_CONNECTOR}", (artifact,), dependencies=False).glob("*.jar")
    return jar


class JvmReaderFailed(Exception):
    """The `jvm_reader.py` process did not answer; the text ends with the tail of its log."""


class JvmReader:
    """A `jvm_reader.py` process, which starts its session at once; its log is `WORK_DIR/jvm_reader.log`."""

    def __init__(self, work_dir: Path) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self._log = work_dir / "jvm_reader.log"
        python = with_connector()
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).with_name("jvm_reader.py")), connector_jars()],
                cwd=work_dir,
                env={**child_environment(python), "SPARK_LOCAL_IP": "127.0.0.1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def read(self, reads: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Do all reads, then end the process; see `jvm_reader.py` for the reads and their answers."""
        try:
            output, _ = self._process.communicate(json.dumps(reads), _READ_SECONDS)
        except subprocess.TimeoutExpired:
            raise JvmReaderFailed(f"no answer in {_READ_SECONDS} s; {self._log_tail()}") from None
        if self._process.returncode or not output:
            raise JvmReaderFailed(f"ended with {self._process.returncode}; {self._log_tail()}")
        answers: dict[str, dict[str, Any]] = json.loads(output)
        return answers

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:].strip() or "no output"

    def __enter__(self) -> JvmReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()  # its JVM ends too, since the pipe between them closes
            self._process.wait(_STOP_SECONDS)
