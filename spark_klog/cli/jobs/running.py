"""What jobs share: options of the cluster, exit codes, the Spark session, a progress bar, the message of a failure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from spark_klog.cli.clusters import ChosenCluster
from spark_klog.cli.output import INTERRUPTED, progress
from spark_klog.errors import KlogError
from spark_klog.load.tasks.task import cause_of
from spark_klog.load.tasks.time_limit import beside

#: Exit codes. 2 is for arguments that can't be read or exclude each other.
DONE, FAILED, NOTHING_NEW, DONE_WITH_BAD = 0, 1, 3, 4
_LOOK_SECONDS = 0.5


def spark_session(name: str) -> Any:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName(name).getOrCreate()
    if hasattr(spark, "_jsc"):
        spark.sparkContext.setLogLevel("ERROR")
    return spark


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which cluster: bootstrap_servers, cluster, command_config."""
    parser.add_argument("--bootstrap-servers", metavar="HOST:PORT[,...]")
    parser.add_argument("--cluster", metavar="NAME", help="a cluster of clusters.toml, see KLOG_CONFIG")
    parser.add_argument("--command-config", type=Path, metavar="FILE", help="client settings: TLS, SASL, ...")


def check_cluster_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error of the arguments if they name no cluster, or a file that can't be read."""
    if options.bootstrap_servers is None and options.command_config is None and options.cluster is None:
        parser.error("give --bootstrap-servers, --cluster, or bootstrap.servers in the file of --command-config")
    if options.command_config is not None:
        try:
            options.command_config.open("rb").close()
        except OSError as error:
            parser.error(f"argument --command-config: {options.command_config}: {error.strerror}")


def client_settings(options: argparse.Namespace) -> dict[str, str]:
    servers, config, name = options.bootstrap_servers, options.command_config, options.cluster
    return ChosenCluster(servers, config, name, "--bootstrap-servers").settings()


def complain(job: str, text: str) -> None:
    """Say on stderr, in one line, why a job has failed."""
    Console(stderr=True).print(f"{job}: {text}", style="red", markup=False, soft_wrap=True)


def exit_code(job: str, work: Callable[[], int]) -> int:
    """Run `work` and return its exit code. If it raises, print the cause on stderr and return FAILED.

    After Ctrl-C return INTERRUPTED.
    """
    try:
        return work()
    except KeyboardInterrupt:
        complain(job, "interrupted; the next call goes on from what is complete")
        return INTERRUPTED
    except (KlogError, OSError) as error:
        complain(job, str(error))
    except Exception as error:
        complain(job, cause_of(error))
    return FAILED


@contextmanager
def progress_bar(is_quiet: bool, total: int, done: Callable[[], int]) -> Iterator[None]:
    """Show on stderr how many of `total` offsets are done for the duration of the block, if that is a terminal."""
    columns = (SpinnerColumn(), TextColumn("offsets"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress(*columns, is_quiet=is_quiet) as bar:
        if bar.disable:
            yield
            return
        task = bar.add_task("offsets", total=total)

        def look() -> float | None:
            try:
                bar.update(task, completed=done())
            except KlogError:  # the job itself says what is wrong
                return None
            return _LOOK_SECONDS

        with beside(look, _LOOK_SECONDS):
            yield
