"""What jobs share: options, exit codes, the Spark session, a progress bar, the message of a failure.

It can be imported without pyarrow, so that jobs can say in a line that they need it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from functools import wraps
from typing import Any

import click

from spark_klog.base.addresses import is_single_writer
from spark_klog.base.extras import packages_at, require
from spark_klog.cli.clusters import ChosenCluster, client_options
from spark_klog.cli.output import INTERRUPTED, Bar, WrongArguments, escaped, secho
from spark_klog.errors import KlogError, MissingPackage

#: Exit codes. 2 is click's, for arguments that are refused before the work.
DONE, FAILED, NOTHING_NEW, DONE_WITH_BAD = 0, 1, 3, 4
#: Of a job's command.
CONTEXT = {"help_option_names": ["-h", "--help"]}
_LOOK_SECONDS = 0.5
#: An object store, of whose two writers conditional puts keep one out.
_IN_STORE = re.compile(r"(?:delta:)?(?:s3|gs|gcs|abfss?)://", re.IGNORECASE)
_OF_OPTIONS = {"--schema-registry": "httpx", "--lineage": "openlineage"}


@contextmanager
def needed_packages(job: str) -> Iterator[None]:
    """Around a program's imports: one that needs an extra ends the program, with a line on stderr.

    The line names all packages that the program's arguments need.
    """
    try:
        yield
    except MissingPackage as error:
        what, text = str(error).partition(" needs ")[0], str(error)
        try:
            require(what, *packages_of(sys.argv[1:], writes=job == "batch_load"))
        except MissingPackage as of_all:
            text = str(of_all)
        complain(job, text)
        sys.exit(FAILED)


def packages_of(words: Iterable[str], *, writes: bool = True) -> list[str]:
    """The packages that a job needs with these arguments (`--name value`, `--name=value`); a load `writes` files."""
    packages, of_options, option, stores = ["pyarrow", "pyspark"], [], "", []
    for word in words:
        value = word
        if word.startswith("-"):
            option, _, value = word.partition("=")
            if option in _OF_OPTIONS:
                of_options.append(_OF_OPTIONS[option])
        packages += packages_at(value)
        # a table of dead letters has no journal
        if writes and option != "--dead-letters" and _IN_STORE.match(value) and not is_single_writer(value):
            stores.append("obstore")
        writes &= option != "--checkpoint"  # then Spark writes
    return [*dict.fromkeys([*packages, *(stores if writes else ()), *of_options])]


def spark_session(name: str) -> Any:
    """Begin a session, or take the one that is there. Spark runs this Python, unless PYSPARK_PYTHON names another."""
    require(name, "pyspark")
    from pyspark.sql import SparkSession

    # As `activate` does: the JVM starts the python3 of its PATH, not what pythonExec says, for data sources.
    own, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = os.pathsep.join([own, path])
    spark = SparkSession.builder.appName(name).getOrCreate()
    if hasattr(spark, "_jsc"):
        context = spark.sparkContext
        context.setLogLevel("ERROR")
        if "PYSPARK_PYTHON" not in os.environ and context.master.startswith("local"):
            # Spark would take the python3 of the PATH: not this one, if no environment is activated
            context.pythonExec = context.getConf().get("spark.pyspark.python", sys.executable)
    return spark


def option(*names: str, **attributes: Any) -> Any:
    """A field of a dataclass of options: an option of a job. Without `names` it is called as the field; the other
    arguments are click's."""
    return field(metadata={"names": names, "attributes": attributes})


def options_of(kind: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that are fields of a dataclass."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(fields(kind)):
            if each.metadata:
                names = each.metadata["names"] or [f"--{each.name.replace('_', '-')}"]
                function = click.option(*names, each.name, **each.metadata["attributes"])(function)
        return function

    return decorate


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which cluster, of which a job needs one, and --json: `cluster`, `as_json`."""

    @click.option(
        "--bootstrap-servers",
        "--bootstrap-server",
        "-b",
        "servers",
        metavar="HOST:PORT[,...]",
        help="Brokers of the cluster.",
    )
    @client_options
    @click.option("--json", "as_json", is_flag=True, help="Print a line of JSON, and no progress.")
    @wraps(function)
    def command(*args: Any, cluster: ChosenCluster, **others: Any) -> Any:
        if cluster == ChosenCluster():
            raise click.UsageError(
                "give --bootstrap-servers, --cluster, or bootstrap.servers in the file of --command-config"
            )
        return function(*args, cluster=cluster._replace(option="--bootstrap-servers"), **others)

    return command


def complain(job: str, text: str) -> None:
    """Say on stderr, in one line, why a job has failed."""
    secho(f"{job}: {text}", fg="red", err=True)


def exit_code(job: str, work: Callable[[], int]) -> int:
    """Run `work` and return its exit code. If it raises, print the cause on stderr and return FAILED.

    After Ctrl-C return INTERRUPTED. Wrong arguments are for click, which ends with 2.
    """
    try:
        return work()
    except click.UsageError:
        raise
    except WrongArguments as error:
        raise click.UsageError(str(error)) from None
    except KeyboardInterrupt:
        complain(job, "interrupted; the next call goes on from what is complete")
        return INTERRUPTED
    except (KlogError, OSError) as error:
        complain(job, str(error))
    except Exception as error:
        from spark_klog.load.tasks.task import cause_of

        complain(job, cause_of(error))
    return FAILED


def log_to_stderr(job: str) -> None:
    """From now on say on stderr what the package warns of, and what a load does beside loading (info)."""
    package = logging.getLogger("spark_klog")
    if not any(isinstance(handler, _ToStderr) for handler in package.handlers):
        package.addHandler(_ToStderr(job))
        logging.getLogger("spark_klog.load").setLevel(logging.INFO)


class _ToStderr(logging.Handler):
    def __init__(self, job: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"{job}: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            secho(escaped(self.format(record), has_lines=True), err=True)
        except Exception:  # as all handlers: a job does not end for its log
            self.handleError(record)


@contextmanager
def progress_bar(is_quiet: bool, total: int, done: Callable[[], int]) -> Iterator[None]:
    """Show on stderr how many of `total` offsets are done for the duration of the block, if that is a terminal."""
    from spark_klog.load.tasks.time_limit import beside

    bar = Bar("offsets", total, is_quiet=is_quiet)
    with bar:
        if not bar.is_shown:
            yield
            return

        def look() -> float | None:
            try:
                bar.update(done())
            except KlogError:  # the job itself says what is wrong
                return None
            return _LOOK_SECONDS

        with beside(look, _LOOK_SECONDS):
            yield
