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

import argparse
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pyspark.sql import SparkSession
from rich.console import Console

from spark_klog.cli.commands.mirror import mirror_settings
from spark_klog.cli.jobs.running import DONE, FAILED, NOTHING_NEW, complain, spark_session
from spark_klog.client import Admin
from spark_klog.errors import KlogError
from spark_klog.mirror.mirror import Mirror, Totals, check_clusters, mirror_name
from spark_klog.mirror.progress import prepare_progress
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.topics import MirroredTopics

_DEFAULT_TASKS = 4
_ERROR = re.compile(r"^spark_klog\.errors\.(\w+: .+)$", re.MULTILINE)


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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mirror.py", description="Mirror topics of a cluster into another.")
    parser.add_argument("--from", dest="source", required=True, metavar="FILE|HOST:PORT")
    parser.add_argument("--to", dest="target", required=True, metavar="FILE|HOST:PORT")
    parser.add_argument("--topics", default=".*", metavar="PATTERN")
    parser.add_argument("--exclude", metavar="PATTERN")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="put before the names of topics at the target")
    parser.add_argument("--name", help="of the mirror; default: the id of the source's cluster, and the prefix")
    parser.add_argument("--tasks", type=int, metavar="N", help=f"default: as before, {_DEFAULT_TASKS} for a new mirror")
    parser.add_argument("--exactly-once", action="store_true")
    parser.add_argument("--recreated", choices=["fail", "begin"], default="fail", help="see klog mirror --help")
    parser.add_argument("--copy-again", action="append", default=[], metavar="TOPIC", help="see klog mirror --help")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="repeat, with this pause; default: run once")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    options = parser.parse_args(argv)
    if options.tasks is not None and options.tasks < 1:
        parser.error("--tasks must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    stopped = threading.Event()
    spark, records = None, 0
    try:
        of_job = ("tasks", "every", "json")
        settings = mirror_settings(**{name: value for name, value in vars(options).items() if name not in of_job})
        prepare(settings, options.tasks)  # report wrong settings before Spark starts
        spark = spark_session("klog mirror")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.is_set():
            began = time.monotonic()
            totals = run_once(spark, settings, options.tasks)
            records += totals.records
            if options.json:
                sys.stdout.write(json.dumps(vars(totals)) + "\n")
                sys.stdout.flush()
            else:
                seconds = time.monotonic() - began
                told = f"{totals.records:,} records of {totals.partitions:,} partitions in {seconds:.1f} s"
                Console().print(f"{told}, {totals.copied:,} batches copied, {totals.rebuilt:,} rebuilt")
            if options.every is None:
                break
            stopped.wait(options.every)
    except Exception as error:
        found = [str(error)] if isinstance(error, KlogError) else _ERROR.findall(str(error))
        text = found[-1] if found else next(iter(str(error).strip().splitlines()), repr(error))
        complain("mirror", text)
        return FAILED
    finally:
        if spark is not None:
            spark.stop()
    return DONE if records else NOTHING_NEW


if __name__ == "__main__":
    sys.exit(main())
