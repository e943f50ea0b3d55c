"""A SPARK_HOME, in the virtual environment, with fast starts of Python processes and JVMs.

Spark puts python/lib/pyspark.zip first on the path of each Python process that it starts. The archive has only sources,
so each process compiles them again, which takes 1.9 s of CPU instead of 0.5 s; and Spark waits only 10 s for the
process of a streaming source. Here this path is a link to the installed pyspark: the same modules, compiled.

A JVM parses and verifies each class that it loads. `python -m tests.support.spark.spark_home` runs a few queries and
stores the classes that they load in an archive of the JVM (class data sharing), which halves the CPU of a start and of
the first queries, from 10 s to 5 s. `make test` does so once for each environment. A JVM of another version, or with
other jars or a SPARK_CONF_DIR, ignores the archive without a word; `rm .venv/spark-home.made` makes the next run renew
it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

HOME = Path(sys.prefix) / "spark-home"
_CLASSES = HOME / "classes.jsa"
#: Many short sessions: starting fast and leaving the cores to others matters more than peak speed.
_QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: The JVM would warn, on standard output, of classes that it can't archive, and of an archive that it can't use.
_SILENT = "-Xlog:disable -Xlog:all=error:stderr"
_SECONDS = 300


def spark_variables() -> dict[str, str]:
    """Make the SPARK_HOME, unless it is there, and return the environment variables of Spark's processes."""
    if "SPARK_HOME" in os.environ:
        return {"SPARK_SUBMIT_OPTS": _QUICK_START}
    _make_home()
    options = f"{_QUICK_START} {_SILENT} -XX:SharedArchiveFile={_CLASSES}" if _CLASSES.exists() else _QUICK_START
    return {"SPARK_HOME": str(HOME), "SPARK_SUBMIT_OPTS": options}


def _make_home() -> None:
    spec = importlib.util.find_spec("pyspark")  # finds a package without importing it
    assert spec is not None
    assert spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0])
    libraries = {
        library.name: library if library.name != "pyspark.zip" else installed.parent
        for library in (installed / "python" / "lib").iterdir()
    }
    _link(HOME, {name: installed / name for name in ("bin", "jars", "sbin")})
    _link(HOME / "python" / "lib", libraries)


def _link(folder: Path, targets: Mapping[str, Path]) -> None:
    """Make links with these names to the targets, and remove links with other names."""
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        if link.is_symlink() and (link.name not in targets or link.readlink() != targets[link.name]):
            link.unlink(missing_ok=True)
    for name, target in targets.items():
        try:
            (folder / name).symlink_to(target)
        except FileExistsError:  # from an earlier run, or made by one at the same time
            continue


def _archive_classes() -> None:
    """Run queries in a JVM that stores the classes it has loaded, when it ends."""
    _make_home()
    folder = HOME / "making"
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
    folder.mkdir()
    archive = folder / _CLASSES.name
    os.environ |= {
        "SPARK_HOME": str(HOME),
        "SPARK_SUBMIT_OPTS": f"{_QUICK_START} {_SILENT} -XX:ArchiveClassesAtExit={archive}",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    try:
        code = _run_queries(folder)
        if code != 0:
            raise OSError(f"java ended with {code}")
        archive.replace(_CLASSES)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_queries(folder: Path) -> int:
    """Read and write Kafka topics and Parquet files; return the exit code of the JVM."""
    from pyspark.sql import SparkSession

    from spark_klog.embedded import EmbeddedCluster

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "1")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    try:
        with EmbeddedCluster(data_dir=folder / "cluster") as cluster:
            servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
            writes = servers | {"createTopics": "1"}
            reads = servers | {"subscribe": "from", "startingOffsets": "earliest"}
            rows = spark.range(10).selectExpr("cast(id as string) as value")
            rows.write.format("klog").mode("append").options(**writes, topic="from").save()
            frame = spark.read.format("klog").options(**reads).load()
            frame.groupBy("partition").count().toArrow()
            stream = spark.readStream.format("klog").options(**reads).load().select("value")
            for sink, options in (("klog", writes | {"topic": "to"}), ("parquet", {"path": str(folder / "output")})):
                writer = stream.writeStream.format(sink).options(**options, checkpointLocation=str(folder / sink))
                writer.trigger(availableNow=True).start().awaitTermination(_SECONDS)
            spark.read.parquet(str(folder / "output")).collect()
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        code: int = gateway.proc.wait(_SECONDS)
        return code
    finally:
        gateway.proc.kill()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.warning("making an archive of Spark's classes, once for this environment: half a minute")
    try:
        _archive_classes()
    except Exception as error:  # the tests will say what is wrong
        log.warning("there is no archive, and tests with Spark take longer: %s", error)
