"""Give a run's tasks to Spark, as a DataFrame: no record goes through the JVM, and Spark Connect does as well.

Row N of `spark.range` is task N, in a partition of its own; what a task answers is one row, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from spark_klog.errors import LoadError
from spark_klog.load.journal.model import Range
from spark_klog.load.tasks.task import Job, run_task

_ANSWER = pa.schema([pa.field("task", pa.int64())])


#: The cores that a session is taken to have if it does not tell (Spark Connect).
_CORES = 8


class SparkRunner:
    """Runs tasks by a Spark session, which `make_session` makes when the first task is there."""

    def __init__(self, make_session: Callable[[], Any]) -> None:
        self._make_session = make_session
        self._made: Any = None

    @property
    def _spark(self) -> Any:
        if self._made is None:
            self._made = self._make_session()
        return self._made

    def cores(self) -> int:
        from pyspark.sql.utils import is_remote

        spark = self._spark
        return _CORES if is_remote() else int(spark.sparkContext.defaultParallelism)

    def run(self, tasks: dict[int, list[Range]], job: Job) -> None:
        """Run each task in a Spark task; the results are in the run's files. `LoadError` if Spark gives a task up."""
        numbers = sorted(tasks)
        work = partial(_work, [(number, tasks[number]) for number in numbers], job)
        try:
            self._spark.range(0, len(numbers), 1, len(numbers)).mapInArrow(work, "task long").collect()
        except Exception as error:
            raise LoadError(cause_of(error)) from error

    def stop(self) -> None:
        if self._made is not None:
            self._made.stop()


def cause_of(error: Exception) -> str:
    """The package's error inside Spark's message, else Java's last cause, else the first line."""
    for pattern in (r"^spark_klog\.errors\.(\w+: .+)$", r"^(?:Caused by)?: (.+)$"):
        found = re.findall(pattern, str(error), re.MULTILINE)
        if found:
            return str(found[-1]).removeprefix("LoadError: ")
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _work(tasks: list[tuple[int, list[Range]]], job: Job, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        for index in batch.column(0).to_pylist():
            number, ranges = tasks[index]
            run_task(number, ranges, job)
            yield pa.RecordBatch.from_arrays([pa.array([number], pa.int64())], schema=_ANSWER)
