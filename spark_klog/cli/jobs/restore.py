"""Restore topics from a load: each record once, in the order of each partition, with keys, headers and timestamps.

    spark-submit jobs/restore.py --load /data/parquet --bootstrap-servers HOST:PORT [--topics clicks] [--prefix old.]

That is `python -m spark_klog.cli.jobs.restore ...`, started by Spark. A restore that was killed goes on where it was:
the progress is committed with the records, as offsets of the group klog-restore.NAME.

Exit codes: 0 done, 1 failed (also of single partitions; the others are restored), 2 wrong arguments, 3 nothing new.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import click

from spark_klog.cli.clusters import ChosenCluster
from spark_klog.cli.jobs.running import (
    CONTEXT,
    DONE,
    FAILED,
    NOTHING_NEW,
    cluster_options,
    complain,
    exit_code,
    needed_packages,
    progress_bar,
    spark_session,
)
from spark_klog.cli.output import reading_arguments, say
from spark_klog.client.settings import client_config

_JOB = "restore"

with needed_packages(_JOB) if __name__ == "__main__" else nullcontext():
    from spark_klog.restore import (
        Restored,
        RestoreOptions,
        plan_restore,
        restore_partition,
        restored_offsets,
    )


@click.command(context_settings=CONTEXT)
@click.option("--load", "output", required=True, metavar="OUTPUT", help="Folder or URI of the load.")
@click.option("--topics", default="", metavar="TOPIC[,...]", help="Of the load; default: all.")
@click.option("--prefix", default="", metavar="TEXT", help="Put before the names of topics at the target.")
@click.option("--name", help="Of the restore; another name restores once more.")
@click.option("--append", is_flag=True, help="Also to partitions that have records of others.")
@cluster_options
def main(**options: Any) -> None:
    """Restore topics from a load, each record once."""
    sys.exit(exit_code(_JOB, lambda: _restore(**options)))


def _restore(
    output: str, topics: str, prefix: str, name: str | None, append: bool, cluster: ChosenCluster, as_json: bool
) -> int:
    client = cluster.settings()
    with reading_arguments():
        client_config(client)
    names = [topic.strip() for topic in topics.split(",") if topic.strip()]
    parts = plan_restore(RestoreOptions(output, client, names, prefix, name, append))

    done = partial(restored_offsets, client, parts)
    restored: list[Restored] = []
    if done() < (total := sum(part.end for part in parts)):
        partitions = [list(each) for _, each in groupby(parts, key=attrgetter("topic", "partition"))]
        spark = spark_session("klog restore")
        try:
            with progress_bar(as_json, total, done):
                tasks = spark.sparkContext.parallelize(partitions, len(partitions))
                restored = tasks.map(partial(restore_partition, client, output)).collect()
        finally:
            spark.stop()
    records = sum(part.records for part in restored)
    failed = [part for part in restored if part.error]
    line = {"records": records, "partitions": [vars(part) for part in restored]}
    say(as_json, line, f"restored {records:,} records of {len(restored):,} partitions")
    for part in failed:
        complain(_JOB, f"{part.topic}-{part.partition} is not complete: {part.error}")
    if failed:
        return FAILED
    return DONE if records else NOTHING_NEW


if __name__ == "__main__":
    main()
