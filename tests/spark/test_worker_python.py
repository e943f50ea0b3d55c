"""The Python of a job's tasks, and what a job says when one of them fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from spark_klog.cli.jobs.running import spark_session
from spark_klog.load.tasks.task import cause_of


@pytest.fixture
def python(spark: SparkSession) -> Iterator[None]:
    """The session's Python is set back at the end."""
    context = spark.sparkContext
    before = context.pythonExec
    yield
    context.pythonExec = before
    context._conf._jconf.remove("spark.pyspark.python")


@pytest.mark.usefixtures("python")
def test_a_job_takes_the_running_python(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m` of an environment that is not activated: Spark itself takes python3 of the PATH."""
    context = spark.sparkContext
    context.pythonExec = "python3"
    spark_session("job")  # PYSPARK_PYTHON is set in tests
    assert context.pythonExec == "python3"
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.setenv("PATH", "/elsewhere")
    spark_session("job")
    spark_session("job")
    assert context.pythonExec == sys.executable
    # what a JVM would look up data sources with
    assert os.environ["PATH"] == f"{os.path.dirname(sys.executable)}:/elsewhere"
    context._conf.set("spark.pyspark.python", "/opt/python")
    spark_session("job")
    assert context.pythonExec == "/opt/python"


def _lacks_a_module(rows: Any) -> Iterator[Any]:
    import no_such_module  # noqa: F401

    yield from rows


def _fails(rows: Any) -> Iterator[Any]:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("the second") from error
    yield from rows


def _dies(rows: Any) -> Iterator[Any]:
    os._exit(3)
    yield from rows


@pytest.mark.usefixtures("python", "one_attempt")
@pytest.mark.parametrize(
    ("work", "program", "told"),
    [
        (_lacks_a_module, sys.executable, "ModuleNotFoundError: No module named 'no_such_module'; klog doctor checks"),
        (_fails, sys.executable, "ValueError: the second"),
        (_dies, sys.executable, "Python worker exited unexpectedly (crashed)"),
        (_fails, "no-such-python", 'Cannot run program "no-such-python"'),
    ],
    ids=["module", "cause", "death", "start"],
)
def test_what_a_worker_failed_of(
    spark: SparkSession, work: Callable[[Any], Iterator[Any]], program: str, told: str
) -> None:
    spark.sparkContext.pythonExec = program
    with pytest.raises((PythonException, Py4JJavaError)) as failed:
        spark.range(1).mapInArrow(work, "id long").collect()
    assert cause_of(failed.value).startswith(told)
