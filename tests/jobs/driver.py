"""Runs batch_load.py again and again in one process, so that one Spark session serves many loads.

    python driver.py

Each line of standard input is a JSON list, the arguments of a run; each line of standard output is its answer,
{"code": exit code, "output": what the run wrote to standard output and standard error, as spark-submit merges them}.
The session is configured by PYSPARK_SUBMIT_ARGS.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from pyspark.sql import SparkSession

_PROGRAM = str(Path(__file__).parent.parent.parent / "jobs" / "batch_load.py")


def main() -> None:
    # Standard output is for the answers alone: what Spark's processes write there goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    SparkSession.stop = lambda self: None  # type: ignore[method-assign] # a run ends with it: the next one goes on with it
    for line in sys.stdin:
        sys.argv = [_PROGRAM, *json.loads(line)]
        output, code = io.StringIO(), None
        with redirect_stdout(output), redirect_stderr(output):
            try:
                runpy.run_path(_PROGRAM, run_name="__main__")  # it takes its errors' names from tracebacks
            except SystemExit as ended:
                code = ended.code
        print(json.dumps({"code": code, "output": output.getvalue()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
