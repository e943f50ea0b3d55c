"""The exactly-once stream of the rolling upgrade: `python -m tests.golden.copy_program SERVERS CHECKPOINTS`.

It copies `NUMBERS` to the topic "exact", and says "done" each time when it has all, until it is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.golden.streams import start_copy


def main(servers: str, checkpoints: str) -> None:
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    while True:
        start_copy(spark, servers, Path(checkpoints), "exact", 100_000).awaitTermination()
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
