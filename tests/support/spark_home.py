"""A SPARK_HOME, in the virtual environment, with fast starts of Python processes and JVMs.

Spark puts python/lib/pyspark.zip first on the path of each Python process that it starts. The archive has only sources,
so each process compiles them again, which takes 1.9 s of CPU instead of 0.5 s; and Spark waits only 10 s for the
process of a streaming source. Here this path is a link to the installed pyspark: the same modules, compiled.

A JVM parses and verifies each class that it loads. `python -m tests.support.spark_home` runs a few queries and stores
the classes that they load in an archive of the JVM (class data sharing), which halves the CPU of a start and of the
first queries, from 11 s to 5 s. A JVM with other jars or of another version ignores the archive.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

log = logging.getLogger(__name__)

HOME = Path(sys.prefix) / "spark-home"
_CLASSES = HOME / "classes.jsa"
#: Many short sessions: starting fast and leaving the cores to others matters more than peak speed.
_QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: The JVM would warn, on standard output, of classes that it can't archive, and of an archive that it can't use.
_SILENT = "-Xlog:disable -Xlog:all=error:stderr"
_EXIT_SECONDS = 300


def spark_variables() -> dict[str, str]:
    """Make the SPARK_HOME, unless it is there, and return the environment variables of Spark's processes."""
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
    with TemporaryDirectory(dir=HOME) as name:
        folder = Path(name)
        archive = folder / _CLASSES.name
        os.environ |= {
            "SPARK_HOME": str(HOME),
            "SPARK_SUBMIT_OPTS": f"{_QUICK_START} {_SILENT} -XX:ArchiveClassesAtExit={archive}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        _run_queries(folder)
        try:
            archive.replace(_CLASSES)
        except FileNotFoundError:
            log.warning("java has stored no archive of classes: tests with Spark take longer")


def _run_queries(folder: Path) -> None:
    from pyspark.sql import SparkSession

    from spark_klog.embedded import EmbeddedCluster

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    with EmbeddedCluster(data_dir=folder / "cluster") as cluster:
        servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
        writes = servers | {"createTopics": "1"}
        reads = servers | {"subscribe": "from", "startingOffsets": "earliest"}
        rows = spark.range(10).selectExpr("cast(id as string) as value")
        rows.write.format("klog").mode("append").options(**writes, topic="from").save()
        frame = spark.read.format("klog").options(**reads).load()
        assert frame.groupBy("partition").count().toArrow().num_rows == 1
        stream = spark.readStream.format("klog").options(**reads).load().select("value")
        for sink, options in (("klog", writes | {"topic": "to"}), ("parquet", {"path": str(folder / "output")})):
            writer = stream.writeStream.format(sink).options(**options, checkpointLocation=str(folder / sink))
            writer.trigger(availableNow=True).start().awaitTermination()
        assert len(spark.read.parquet(str(folder / "output")).collect()) == 10
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(_EXIT_SECONDS)


if __name__ == "__main__":
    _archive_classes()
