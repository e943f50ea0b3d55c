"""`klog log`: looking into log files, checking and upgrading them."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from spark_klog.errors import ConfigError, DataDirectoryError, DecodeError
from spark_klog.log.dump import Damage, Dumped, dump as dump_file
from spark_klog.log.dump_index import INDEX_SUFFIXES, IndexEntry, Padding, dump_index
from spark_klog.log.names import SUFFIX_07
from spark_klog.log.repair import repair as repair_log
from spark_klog.log.segment import LOG
from spark_klog.log.upgrade import Upgraded, old_logs_size, upgrade as upgrade_logs
from spark_klog.log.verify import log_files, verify as verify_logs
from spark_klog.records.contract import NO_TIMESTAMP_TYPE, Record


@click.group()
def log() -> None:
    """Look into log files, check and upgrade them."""


@log.command()
@click.argument("old", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("new", type=click.Path(path_type=Path, file_okay=False))
@click.option("--no-topic-ids", is_flag=True, help="Leave out partition.metadata, for Apache Kafka to write its own.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON a partition, no progress on stderr.")
def upgrade(old: Path, new: Path, no_topic_ids: bool, as_json: bool) -> None:
    """Write the logs of Kafka 0.7 in OLD (a data directory, or a partition's folder) to the data directory NEW.

    OLD stays as it is. Each partition's folder in NEW gets a map from old to new offsets, offsets-of-kafka-0.7. A
    partition that can't be upgraded is named on stderr and left out; then the exit code is 1. After it was mended, or
    after a crash, run the same command again: what is done stays.

    Retention goes by the time of the upgrade, since the records have no timestamp. Before Apache Kafka serves NEW,
    create the topics there with their numbers of partitions, and upgrade with --no-topic-ids.
    """
    with _progress(as_json) as progress:
        task = progress.add_task("", total=old_logs_size(old))
        sizes: dict[str, int] = {}

        def done(partition: str, size: int) -> None:
            sizes[partition] = size
            progress.update(task, description=partition, completed=sum(sizes.values()))

        try:
            results = upgrade_logs(old, new, done, topic_ids=not no_topic_ids)
        except OSError as error:  # what was begun has been removed
            place = f"{error.filename}: " if error.filename is not None else ""
            reason = f"{place}{error.strerror or error}"
            raise DataDirectoryError(f"{reason}; what is done stays, run the same command again") from None
    for result in results:
        if isinstance(result, Upgraded):
            fields = asdict(result)
            state = "done before" if fields.pop("done_before") else "upgraded"
            text = f"{result.partition}: {state}, {result.old_start} to {result.old_end} became 0 to {result.new_end}"
        else:
            fields, state = {"partition": result.partition, "error": str(result.error)}, "failed"
            text = f"{result.partition}: {result.error}"
        _say({"state": state} | fields if as_json else text, state == "failed" and not as_json)
    if not all(isinstance(result, Upgraded) for result in results):
        sys.exit(1)


@log.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Findings as lines of JSON on stdout, no progress on stderr.")
def verify(paths: tuple[Path, ...], as_json: bool) -> None:
    """Check data directories, folders of partitions, or files of logs: of klog, of Kafka 0.7, of Kafka 0.8 and later.

    Checksums, records, the order of offsets, and that indexes agree with their logs. Nothing is changed. What is wrong
    is named on stderr (with --json: file, position, what); then the exit code is 1. Stop the broker first: a file that
    is being written to may end with half a batch.
    """
    wrong = False
    with _progress(as_json) as progress:
        for path in paths:
            task = progress.add_task(path.name, total=sum(file.stat().st_size for file in log_files(path)))
            before, current = 0, (path, 0)

            def done(file: Path, size: int) -> None:
                nonlocal before, current
                if file != current[0]:
                    before += current[1]
                current = file, size
                progress.update(task, completed=before + size)  # noqa: B023

            for finding in verify_logs(path, done):
                wrong = True
                place = "" if finding.position is None else f"position {finding.position}: "
                fields = asdict(finding) | {"file": str(finding.file)}
                _say(fields if as_json else f"{finding.file}: {place}{finding.what}", not as_json)
    if wrong:
        sys.exit(1)


@log.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def repair(folder: Path, as_json: bool) -> None:
    """Cut the log in a partition's FOLDER before its first damaged batch: what follows it is given up.

    The broker must be stopped. Files that lose something are kept as *.log.damaged. A broker never does this by itself
    to records that had been flushed.
    """
    found = repair_log(folder.absolute())  # "." has no name
    kept = [str(path) for path in found.kept] if found else []
    if as_json:
        _say({"endOffset": found.end_offset, "reason": found.reason, "kept": kept} if found else {}, False)
    elif found is None:
        _say(f"{folder} is sound: nothing was changed", False)
    else:
        _say("\n".join([f"{folder} ends at offset {found.end_offset} now; {found.reason}", *kept]), False)


def _say(line: dict[str, object] | str, err: bool) -> None:
    click.echo(line if isinstance(line, str) else json.dumps(line), err=err)


@log.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--batches", is_flag=True, help="A line a batch, control batches too, instead of a line a record.")
@click.option("--json", "as_json", is_flag=True, help="No progress on stderr, for machines.")
def dump(paths: tuple[Path, ...], batches: bool, as_json: bool) -> None:
    """Print the records of .log files (and .kafka files of Kafka 0.7) as JSON, one a line.

    Of a partition's folder all that it holds.

    offset, timestamp (ms, null without one), timestampType (0 create time, 1 log append time, -1 none), key and
    value (base64 or null), headers ([[name, base64 or null], ...]). Of .index, .timeindex and .txnindex files the
    entries, with absolute offsets: offset, position; timestamp, offset; version, producerId, firstOffset, lastOffset,
    lastStableOffset. What is damaged is named on stderr; then the exit code is 1.
    """
    damaged = 0
    files = [file for path in paths for file in _files_to_dump(path)]
    with _progress(as_json or sys.stdout.isatty()) as progress:
        for path in files:
            task = progress.add_task(path.name, total=path.stat().st_size)
            for found in dump_index(path) if path.suffix in INDEX_SUFFIXES else dump_file(path):
                reason = found.reason if isinstance(found, Damage) else _print(found, batches)
                if reason:
                    damaged += 1
                    click.echo(f"{path}: position {found.position}, {found.size} bytes: {reason}", err=True)
                progress.update(task, completed=found.position + found.size)
    if damaged:
        sys.exit(1)


def _files_to_dump(path: Path) -> list[Path]:
    """`path`, or the logs in the folder; `ConfigError` if it is no file of a log, or the folder holds none."""
    if not path.is_dir():
        known = (LOG, SUFFIX_07, *INDEX_SUFFIXES)
        if not set(path.suffixes) & set(known):  # .log.damaged and .log.deleted are files of a log, too
            raise ConfigError(f"{path} is no file of a log: those are {', '.join(known)}")
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in (LOG, SUFFIX_07))
    if not found:
        raise ConfigError(f"{path} holds neither {LOG} nor {SUFFIX_07} files: give the folder of one partition")
    return found


def _progress(quiet: bool) -> Progress:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    quiet = quiet or not console.is_terminal
    # redirected, stdout would be printed on the console, which is stderr
    return Progress(*columns, console=console, disable=quiet, transient=True, redirect_stdout=False)


def _print(found: Dumped | IndexEntry | Padding, batches: bool) -> str | None:
    """Print a batch or its records, or an index entry; why it can't be read, or None."""
    try:
        if isinstance(found, Padding):
            return None
        if isinstance(found, IndexEntry):
            lines: list[dict[str, object]] = [dict(found.fields)]
        elif batches:
            lines = [found.describe()]
        elif found.header.is_control:
            return None
        else:
            lines = [_line(record) for record in found.records()]
    except DecodeError as error:
        return str(error)
    sys.stdout.write("".join(f"{json.dumps(line)}\n" for line in lines))
    return None


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _line(record: Record) -> dict[str, object]:
    return {
        "offset": record.offset,
        "timestamp": None if record.timestamp_type == NO_TIMESTAMP_TYPE else record.timestamp,
        "timestampType": record.timestamp_type,
        "key": _base64(record.key),
        "value": _base64(record.value),
        "headers": [[name, _base64(value)] for name, value in record.headers],
    }
