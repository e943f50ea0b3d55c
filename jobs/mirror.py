"""Mirror topics of a cluster into another with Spark: `klog mirror` in several tasks.

    spark-submit jobs/mirror.py --from source.properties --to target.properties --tasks 8 --exactly-once

Each task copies its share of the partitions up to the offsets that the source has when the task begins, and commits its
progress at the target (see spark_klog/mirror/progress.py): after a kill, the next run goes on from there. With
--exactly-once, a task that runs twice (after a failure, or by speculation) fences its other attempt.

The number of tasks is fixed when the mirror of that name is made. --every repeats the run, until SIGTERM or Ctrl-C.
The exit codes are those of all jobs: 0 done, 1 failed, 2 wrong arguments, 3 nothing new.
The driver reads the settings files and sends the settings to the tasks; files that they name, such as
ssl.truststore.location, must exist on each worker. This job does not translate consumer groups: use `klog offsets`, or
a mirror that runs in one process.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from spark_klog.cli.commands.mirror import mirror, mirror_settings
from spark_klog.cli.jobs.running import CONTEXT, DONE, NOTHING_NEW, exit_code, spark_session
from spark_klog.client import Admin
from spark_klog.mirror.mirror import Mirror, Totals, check_clusters, mirror_name
from spark_klog.mirror.progress import prepare_progress
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.topics import MirroredTopics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DEFAULT_TASKS = 4


def prepare(settings: MirrorSettings, tasks: int | None) -> tuple[MirrorSettings, int]:
    """Create the topics at the target; return the settings with the mirror's name, and its number of tasks."""
    with Admin(settings.source_admin()) as source, Admin(settings.target_client()) as target:
        check_clusters(settings, source, target)
        name = mirror_name(settings, source)
        slots = prepare_progress(target, name, tasks, _DEFAULT_TASKS)
        MirroredTopics(settings, source, target).refresh()
    return replace(settings, name=name), slots


def run_slot(settings: MirrorSettings, slots: int, slot: int) -> Totals:
    """Mirror a slot's partitions to their ends; runs in a task."""
    return Mirror(settings, slot=slot, slots=slots).run(until_end=True)


def run_once(spark: SparkSession, settings: MirrorSettings, tasks: int | None) -> Totals:
    """Mirror all partitions to their ends."""
    settings, slots = prepare(settings, tasks)
    found = spark.sparkContext.parallelize(range(slots), slots).map(partial(run_slot, settings, slots)).collect()
    total = Totals(lag=0)
    for one in found:
        for name, count in vars(one).items():
            setattr(total, name, getattr(total, name) + (count or 0))
    return total


_SHARED = ["source", "target", "topics", "exclude", "prefix", "name", "exactly_once", "recreated", "copy_again"]


@click.command(
    "mirror.py", params=[option for option in mirror.params if option.name in _SHARED], context_settings=CONTEXT
)
@click.option(
    "--tasks",
    type=click.IntRange(1),
    metavar="N",
    help=f"Default: as before, {_DEFAULT_TASKS} for a new mirror.",
)
@click.option("--every", type=float, metavar="SECONDS", help="Repeat, with this pause; default: run once.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each run.")
def main(tasks: int | None, every: float | None, as_json: bool, **options: Any) -> None:
    """Mirror topics of a cluster into another, with several tasks."""
    sys.exit(exit_code("mirror", lambda: _mirror(mirror_settings(**options), tasks, every, as_json)))


def _mirror(settings: MirrorSettings, tasks: int | None, every: float | None, as_json: bool) -> int:
    stopped = threading.Event()
    records = 0
    prepare(settings, tasks)  # report wrong settings before Spark starts
    spark = spark_session("klog mirror")
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.is_set():
            began = time.monotonic()
            totals = run_once(spark, settings, tasks)
            records += totals.records
            if as_json:
                sys.stdout.write(json.dumps(vars(totals)) + "\n")
                sys.stdout.flush()
            else:
                seconds = time.monotonic() - began
                told = f"{totals.records:,} records of {totals.partitions:,} partitions in {seconds:.1f} s"
                click.echo(f"{told}, {totals.copied:,} batches copied, {totals.rebuilt:,} rebuilt")
            if every is None:
                break
            stopped.wait(every)
    finally:
        spark.stop()
    return DONE if records else NOTHING_NEW


if __name__ == "__main__":
    main()
