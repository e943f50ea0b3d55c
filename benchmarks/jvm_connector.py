"""The peer of the Spark work: Spark's own Kafka connector, on the newest pyspark that has it."""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.sides import SideFailed, SparkSide
from tests.support.maven import cache_root

log = logging.getLogger(__name__)

PYSPARK = "4.1.1"
NAME = f"JVM connector {PYSPARK}, pyspark {PYSPARK}"

#: All that the connector needs beyond Spark's own jars. (Its token provider is not in every mirror at 4.1.1.)
_JARS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.commons:commons-pool2:2.12.0",
    "org.apache.kafka:kafka-clients:3.9.1",
)
_ATTEMPTS = 4


def jvm_side(work_dir: Path) -> SparkSide:
    """The connector in an environment of its own, which the first use installs into the cache."""
    jars = ",".join(map(str, _jars()))
    return SparkSide(NAME, "kafka", work_dir, python=_python(), confs={"spark.jars": jars})


def _python() -> Path:
    folder = cache_root() / f"bench-pyspark-{PYSPARK}"
    python, complete = folder / "bin" / "python", folder / ".complete"
    if not (complete.exists() and python.exists()):
        log.info("installing pyspark %s into %s", PYSPARK, folder)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", f"pyspark=={PYSPARK}"])
        complete.touch()
    return python


def _jars() -> list[Path]:
    """The jar files by name, without what they depend on: those are Spark's own jars, at Spark's versions.

    (`tests.support.maven.resolve` follows the dependencies, and fails at the missing token provider.)
    """
    root = cache_root() / "maven"
    folder = root / f"spark-sql-kafka-{PYSPARK}"
    folder.mkdir(parents=True, exist_ok=True)
    jars = {artifact: folder / f"{'-'.join(artifact.split(':')[1:])}.jar" for artifact in _JARS}
    with (root / ".lock").open("w") as lock:  # the one of `resolve`: Maven's repository is not safe to share
        fcntl.flock(lock, fcntl.LOCK_EX)
        for artifact, path in jars.items():
            if not path.exists():
                log.info("fetching %s", artifact)
                _fetch(artifact, folder)
    return list(jars.values())


def _fetch(artifact: str, folder: Path) -> None:
    copy = ["dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _run(["mvn", "-U", "-B", "-q", *copy])
            return
        except SideFailed:
            if attempt == _ATTEMPTS:
                raise
            time.sleep(2.0**attempt)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "output", "") or "")[-1500:]
        raise SideFailed(f"{' '.join(command)}: {error} {output}".strip()) from error
