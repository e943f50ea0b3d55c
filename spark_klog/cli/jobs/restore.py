"""Restore topics from a load: each record once, in the order of each partition, with keys, headers and timestamps.

    spark-submit jobs/restore.py --load /data/parquet --bootstrap-servers HOST:PORT [--topics clicks] [--prefix old.]

That is `python -m spark_klog.cli.jobs.restore ...`, started by Spark. A restore that was killed goes on where it was:
the progress is committed with the records, as offsets of the group klog-restore.NAME.

Exit codes: 0 done, 1 failed (also of single partitions; the others are restored), 2 wrong arguments, 3 nothing new.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from spark_klog.cli.jobs.running import (
    DONE,
    FAILED,
    NOTHING_NEW,
    add_cluster_options,
    check_cluster_options,
    client_settings,
    complain,
    exit_code,
    progress_bar,
    spark_session,
)
from spark_klog.cli.output import say
from spark_klog.restore.restore import (
    Restored,
    RestoreOptions,
    plan_restore,
    restore_partition,
    restored_offsets,
)

_JOB = "restore"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="restore.py", description="Restore topics from a load, each record once.")
    parser.add_argument("--load", required=True, metavar="OUTPUT", help="folder or URI of the load")
    add_cluster_options(parser)
    parser.add_argument("--topics", default="", metavar="TOPIC[,...]", help="of the load; default: all")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="put before the names of topics at the target")
    parser.add_argument("--name", help="of the restore; another name restores once more")
    parser.add_argument("--append", action="store_true", help="also to partitions that have records of others")
    parser.add_argument("--json", action="store_true", help="print a line of JSON, and no progress")
    options = parser.parse_args(argv)
    check_cluster_options(parser, options)
    return options


def _restore(options: argparse.Namespace) -> int:
    client = client_settings(options)
    topics = [topic.strip() for topic in options.topics.split(",") if topic.strip()]
    asked = RestoreOptions(options.load, client, topics, options.prefix, options.name, options.append)
    parts = plan_restore(asked)

    done = partial(restored_offsets, client, parts)
    found: list[Restored] = []
    if done() < (total := sum(part.end for part in parts)):
        partitions = [list(each) for _, each in groupby(parts, key=attrgetter("topic", "partition"))]
        spark = spark_session("klog restore")
        try:
            with progress_bar(options.json, total, done):
                tasks = spark.sparkContext.parallelize(partitions, len(partitions))
                found = tasks.map(partial(restore_partition, client, options.load)).collect()
        finally:
            spark.stop()
    records = sum(item.records for item in found)
    failed = [item for item in found if item.error]
    line = {"records": records, "partitions": [vars(item) for item in found]}
    say(options.json, line, f"restored {records:,} records of {len(found):,} partitions")
    for item in failed:
        complain(_JOB, f"{item.topic}-{item.partition} is not complete: {item.error}")
    if failed:
        return FAILED
    return DONE if records else NOTHING_NEW


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    return exit_code(_JOB, lambda: _restore(options))


if __name__ == "__main__":
    sys.exit(main())
