"""Spark session of the streaming programs that tests kill."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession


def main(run: Callable[[SparkSession, dict[str, Any]], None]) -> None:
    """Run a program with the settings in the command line's first argument, a JSON object.

    The session uses "master" (default local[2,4]) and "confs".
    """
    given = json.loads(sys.argv[1])
    builder = (
        SparkSession.builder.master(given.get("master", "local[2,4]"))  # 4: a task may fail three times
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.showConsoleProgress", "false")
    )
    for name, value in given.get("confs", {}).items():
        builder = builder.config(name, value)
    run(builder.getOrCreate(), given)
