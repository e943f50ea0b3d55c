"""The peer of the Spark work: Spark's own Kafka connector, on the newest pyspark that has it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sides import SparkSide
from tests.support.jvm_connector import PYSPARK, connector_jars, connector_python

NAME = f"JVM connector {PYSPARK}, pyspark {PYSPARK}"


def jvm_side(work_dir: Path) -> SparkSide:
    """The connector in an environment of its own, which the first use installs into the cache."""
    return SparkSide(NAME, "kafka", work_dir, python=connector_python(), confs={"spark.jars": connector_jars()})
