"""The peer of the Spark work: Spark's own Kafka connector, on the newest pyspark that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.figures import Result, Side
from benchmarks.sides import SparkSide, alternate, klog_side
from benchmarks.work import Bench
from tests.support.jvm_connector import connector_jars
from tests.support.pyspark_versions import WITH_CONNECTOR, with_connector

NAME = f"JVM connector {WITH_CONNECTOR}, pyspark {WITH_CONNECTOR}"


def jvm_side(work_dir: Path) -> SparkSide:
    """The connector in its own environment, which the first use installs into the cache."""
    return SparkSide(NAME, "kafka", work_dir, python=with_connector(), confs={"spark.jars": connector_jars()})


def beside_jvm(
    bench: Bench,
    work: str,
    unit: str,
    folder: Path,
    run: Callable[[SparkSide], float],
    repeat: int | None = None,
    *,
    higher_is_better: bool = True,
    confs: Mapping[str, str] | None = None,
) -> Result:
    """Run the same work by klog and by the connector, in two sessions that take turns; `confs` apply to klog's."""
    result = Result(work, unit, Side("klog"), peer := Side(NAME), bench.command, higher_is_better)
    makers = [(result.klog, lambda: klog_side(folder, confs)), (peer, lambda: jvm_side(folder))]
    alternate(makers, bench.repeat if repeat is None else repeat, run)
    return result
