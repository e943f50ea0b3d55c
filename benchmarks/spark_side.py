"""One side of a Spark benchmark: a process with one session that does what it is told, again and again.

    python spark_side.py --format klog|kafka [--master local[2]] [--conf name=value ...]

A line of JSON on standard input is one run, {"work": "count_sum", "options": {...}}; the answer is a line of
JSON on standard output, {"seconds": 1.2, ...} or {"error": "..."}. The first line says that the session is
up. The end of standard input ends the process. It runs on any pyspark and imports nothing of the project.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


def count_sum(frame: DataFrame) -> dict[str, int]:
    """Count the records and add up the lengths of their values."""
    row = frame.agg(F.count("*"), F.sum(F.length("value"))).collect()[0]
    return {"rows": row[0], "bytes": row[1] or 0}


#: What a line of input may ask for.
WORK: dict[str, Callable[[DataFrame], dict[str, int]]] = {"count_sum": count_sum}


def main() -> None:
    answers = _own_standard_output()
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", required=True)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--conf", action="append", default=[])
    arguments = parser.parse_args()
    started = time.perf_counter()
    try:
        spark = _session(arguments.master, [conf.split("=", 1) for conf in arguments.conf])
    except Exception as error:
        _answer(answers, {"error": _reason(error)})
        sys.exit(1)
    _answer(
        answers,
        {
            "seconds": time.perf_counter() - started,
            "pyspark": pyspark.__version__,
            "python": platform.python_version(),
        },
    )
    for line in sys.stdin:
        _answer(answers, _run(spark, arguments.format, json.loads(line)))
    spark.stop()


def _run(spark: SparkSession, source: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        started = time.perf_counter()
        frame = spark.read.format(source).options(**request["options"]).load()
        figures = WORK[request["work"]](frame)
        return {"seconds": time.perf_counter() - started, **figures}
    except Exception as error:
        return {"error": _reason(error)}


def _session(master: str, confs: list[list[str]]) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("benchmark").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    for name, value in confs:
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _own_standard_output() -> TextIO:
    """Standard output for the answers alone: what Spark's processes write there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _reason(error: Exception) -> str:
    """The error's text, without the frames of Java's stack and the middle of what is still too long."""
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if not line.startswith("\tat ")]
    text = "\n".join(lines).strip()
    return text if len(text) < 2000 else f"{text[:800]} ... {text[-1000:]}"


if __name__ == "__main__":
    main()
