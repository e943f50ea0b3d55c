"""klog and `no_op_source.py`: Spark's own part of a read or a write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.data import PARTITIONS, RECORD_SIZE
from benchmarks.figures import Result, Side
from benchmarks.sides import SparkSide, alternate, klog_side, project_environment
from benchmarks.work import Bench

NAME = "no-op Python data source"


def beside_no_op(
    bench: Bench,
    work: str,
    unit: str,
    folder: Path,
    options: dict[str, str],
    run: Callable[[SparkSide, dict[str, str]], float],
    *,
    records: int,
    size: int = RECORD_SIZE,
    trigger: int = 0,
) -> Result:
    """Run the same work by klog, with `options`, and by the source that does nothing, with `records` records of `size`
    bytes.

    A stream of that source has `trigger` records per micro-batch.
    """
    numbers = {"records": records, "partitions": PARTITIONS, "size": size, "trigger": trigger}
    given = {"klog": options, NAME: {name: str(value) for name, value in numbers.items()}}
    name = f"{work} beside a source that does nothing"
    result = Result(name, unit, Side("klog"), peer := Side(NAME), bench.command)
    makers = [(result.klog, lambda: klog_side(folder)), (peer, lambda: no_op_side(folder))]
    alternate(makers, bench.repeat, lambda side: run(side, given[side.name]))
    return result


def no_op_side(folder: Path, confs: Mapping[str, str] | None = None) -> SparkSide:
    """The source and writer that do nothing."""
    # workers find no_op_source.py in this folder, too
    environment = project_environment()
    path = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
    return SparkSide(NAME, "no-op", folder, confs=confs, environment={"PYTHONPATH": ":".join(path)})
