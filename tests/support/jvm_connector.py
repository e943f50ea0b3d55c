"""Run Spark's own Kafka connector in a separate environment: it needs another pyspark than the project."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .maven import RegistryUnreachable, cache_root, resolve

log = logging.getLogger(__name__)

#: The newest version that has connector jars.
PYSPARK = "4.1.1"
#: The connector's jars that Spark does not include. (Not every mirror has its token provider at 4.1.1.)
_ARTIFACTS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.commons:commons-pool2:2.12.0",
    "org.apache.kafka:kafka-clients:3.9.1",
)
_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 2.0
_INSTALL_SECONDS = 900
_READ_SECONDS = 300
_STOP_SECONDS = 30


def connector_jars() -> str:
    """The connector's jars in the syntax of `spark.jars`; Spark includes their dependencies, at its own versions."""
    folder = resolve(f"spark-sql-kafka-alone-{PYSPARK}", _ARTIFACTS, dependencies=False)
    return ",".join(str(jar) for jar in sorted(folder.glob("*.jar")))


def connector_python() -> Path:
    """The Python with this pyspark; the first call installs it, `RegistryUnreachable` if that fails."""
    root = cache_root()
    folder = root / f"pyspark-{PYSPARK}"
    python, complete = folder / "bin" / "python", folder / ".complete"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".pyspark.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (complete.exists() and python.exists()):
            log.info("installing pyspark %s into %s", PYSPARK, folder)
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=_INSTALL_SECONDS)
            _pip_install(python, f"pyspark=={PYSPARK}")
            complete.touch()
    return python


def _pip_install(python: Path, package: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    output = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            done = subprocess.run(
                command,
                env=child_environment(python),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_INSTALL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            output = f"pip did not end in {_INSTALL_SECONDS} s"
            continue
        if done.returncode == 0:
            return
        output = done.stdout[-4000:]
    raise RegistryUnreachable(f"pip could not install {package} in {_ATTEMPTS} attempts; its last output:\n{output}")


def child_environment(python: Path | str) -> dict[str, str]:
    """This process's environment without variables that point `python` to another Spark or other modules."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK_", "PYSPARK_")) and name != "PYTHONPATH"
    }
    return {**kept, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}


class JvmReaderFailed(Exception):
    """The `jvm_reader.py` process did not answer; the text ends with the tail of its log."""


class JvmReader:
    """A `jvm_reader.py` process, which starts its session at once; its log is `WORK_DIR/jvm_reader.log`."""

    def __init__(self, work_dir: Path) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self._log = work_dir / "jvm_reader.log"
        python = connector_python()
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
            self._process.kill()  # its JVM ends too, as the pipe between them closes
            self._process.wait(_STOP_SECONDS)
