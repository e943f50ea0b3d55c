"""Run batch_load.py repeatedly in one process, so that one Spark session serves many loads.

    python driver.py

Each line of standard input is a JSON list with the arguments of a run. Each line of standard output is the result:
{"code": exit code, "output": what the run wrote to standard output and standard error, merged as by spark-submit}.
PYSPARK_SUBMIT_ARGS configures the session.
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
    # Keep standard output for the results: Spark's processes, which inherit it, write to standard error instead.
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
