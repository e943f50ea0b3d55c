"""One Spark session for all tests of this folder, and the standard error of its processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The JVM reads these when it starts Python workers.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
_ROOT = Path(__file__).parent.parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))

from pyspark.sql import SparkSession  # noqa: E402 - after the environment

from spark_klog.embedded import EmbeddedCluster  # noqa: E402


class SparkLog:
    """Standard error of the JVM and of its Python workers, which log to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = 0

    def begin(self) -> None:
        """Make `text` skip everything written so far."""
        self._seen = self.path.stat().st_size

    def text(self) -> str:
        with self.path.open("rb") as file:
            file.seek(self._seen)
            return file.read().decode(errors="replace")


@pytest.fixture(scope="session")
def _spark_and_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SparkSession, SparkLog]]:
    folder = tmp_path_factory.mktemp("spark")
    path = folder / "stderr.log"
    path.touch()
    # The JVM's Python processes look for named clusters in this file, which tests write.
    os.environ["KLOG_CONFIG"] = str(folder / "clusters.toml")
    builder = (
        SparkSession.builder.master("local[2,4]")  # 4: a task may fail three times
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.ui.showConsoleProgress", "false")
    )
    # The JVM inherits standard error when it starts.
    saved = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            session = builder.getOrCreate()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    yield session, SparkLog(path)
    session.stop()


@pytest.fixture(scope="session")
def spark(_spark_and_log: tuple[SparkSession, SparkLog]) -> SparkSession:
    """Spark with two cores."""
    return _spark_and_log[0]


@pytest.fixture
def spark_log(_spark_and_log: tuple[SparkSession, SparkLog]) -> SparkLog:
    """Spark's standard error from the start of the test on."""
    log = _spark_and_log[1]
    log.begin()
    return log


@pytest.fixture(scope="module")
def servers(cluster: EmbeddedCluster) -> str:
    """The address of the broker that a module's tests share."""
    return cluster.bootstrap_servers


@pytest.fixture
def one_attempt(spark: SparkSession) -> Iterator[None]:
    """A task that fails is not run again: each attempt takes a new Python process, which is most of such a test's time.

    Spark has no setting of this for a session, only for its start.
    """
    scheduler = spark.sparkContext._jsc.sc().taskScheduler()
    attempts = scheduler.getClass().getDeclaredField("maxTaskFailures")
    attempts.setAccessible(True)
    before = attempts.getInt(scheduler)
    attempts.setInt(scheduler, 1)
    yield
    attempts.setInt(scheduler, before)
