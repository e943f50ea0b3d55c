"""`klog log`: dump, verify, repair and upgrade log files."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from spark_klog.cli.output import Bar, os_error_text, say
from spark_klog.errors import ConfigError, DataDirectoryError, DecodeError
from spark_klog.log.partition_files import PARTITION_METADATA, SUFFIX_07
from spark_klog.log.segments.segment import LOG
from spark_klog.log.tools.dump import INDEX_SUFFIXES, Damage, Dumped, IndexEntry, Padding, dump as dump_file, dump_index
from spark_klog.log.tools.upgrade import Upgraded, old_logs_size, upgrade as upgrade_logs
from spark_klog.log.tools.verify import log_files, repair as repair_log, verify as verify_logs
from spark_klog.records.contract import NO_TIMESTAMP_TYPE, Record


@click.group()
def log() -> None:
    """Dump, verify, repair and upgrade log files."""


@log.command(
    epilog="""\b
Examples:
  klog log upgrade /var/kafka-0.7 /var/klog
"""
)
@click.argument("old", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("new", type=click.Path(path_type=Path, file_okay=False))
@click.option("--no-topic-ids", is_flag=True, help="Write no partition.metadata: Apache Kafka then writes its own.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON per partition, and no progress.")
def upgrade(old: Path, new: Path, no_topic_ids: bool, as_json: bool) -> None:
    """Convert the logs of Kafka 0.7 in OLD (a data directory or a partition's folder) into the data directory NEW.

    OLD does not change. Each partition's folder in NEW gets a map from old to new offsets, offsets-of-kafka-0.7. A
    partition that can't be converted is reported on stderr and skipped; then the exit code is 1. After repairing it, or
    after a crash, run the same command again: finished partitions stay.

    Retention counts from the upgrade, since the records have no timestamps. Before Apache Kafka serves NEW, create the
    topics there with the same numbers of partitions, and upgrade with --no-topic-ids.
    """
    with Bar("", old_logs_size(old), is_quiet=as_json, is_size=True) as bar:
        sizes: dict[str, int] = {}

        def done(partition: str, size: int) -> None:
            sizes[partition] = size
            bar.what = partition
            bar.update(sum(sizes.values()))

        try:
            results = upgrade_logs(old, new, done, topic_ids=not no_topic_ids)
        except OSError as error:  # unfinished partitions have been removed
            raise DataDirectoryError(
                f"{os_error_text(error)}; finished partitions stay: run the same command again"
            ) from None
    for result in results:
        if isinstance(result, Upgraded):
            fields = asdict(result)
            state = "done before" if fields.pop("done_before") else "upgraded"
            text = f"{result.partition}: {state}, {result.old_start} to {result.old_end} became 0 to {result.new_end}"
        else:
            fields, state = {"partition": result.partition, "error": str(result.error)}, "failed"
            text = f"{result.partition}: {result.error}"
        click.echo(json.dumps({"state": state} | fields) if as_json else text, err=state == "failed" and not as_json)
    if not all(isinstance(result, Upgraded) for result in results):
        sys.exit(1)


@log.command(
    epilog="""\b
Examples:
  klog log verify /var/klog
  klog log verify /var/klog/clicks-0 --json
"""
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print findings as lines of JSON on stdout, and no progress.")
def verify(paths: tuple[Path, ...], as_json: bool) -> None:
    """Check data directories, partitions' folders or log files of klog and of any Kafka, 0.7 included.

    Checks checksums, records, the order of offsets, and whether indexes agree with their logs; changes nothing.
    Problems are reported on stderr (with --json on stdout: file, position, what); then the exit code is 1. For a path
    without problems a line on stdout says how much was checked. Stop the broker first: a file in use may end with an
    incomplete record batch.
    """
    sound: dict[Path, str] = {}
    for path in paths:
        files = log_files(path)
        total = sum(file.stat().st_size for file in files)
        with Bar(path.name, total, is_quiet=as_json, is_size=True) as bar:
            sound[path] = f"{path}: no problem in {len(files):,} log files, {total:,} bytes"
            before, current = 0, (path, 0)

            def done(file: Path, size: int) -> None:
                nonlocal before, current
                if file != current[0]:
                    before += current[1]
                current = file, size
                bar.update(before + size)

            for finding in verify_logs(path, done):
                sound.pop(path, None)
                where = "" if finding.position is None else f"position {finding.position}: "
                fields = asdict(finding) | {"file": str(finding.file)}
                bar.erase()
                click.echo(json.dumps(fields) if as_json else f"{finding.file}: {where}{finding.what}", err=not as_json)
    for line in () if as_json else sound.values():
        click.echo(line)
    if len(sound) < len(set(paths)):
        sys.exit(1)


@log.command(
    epilog="""\b
Examples:
  klog log repair /var/klog/clicks-0                the broker must not run
"""
)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def repair(folder: Path, as_json: bool) -> None:
    """Truncate the log in a partition's FOLDER before its first damaged record batch; all later records are lost.

    Stop the broker first. Truncated files are kept as *.log.damaged. A broker never truncates flushed records by
    itself.
    """
    repaired = repair_log(folder.absolute())  # "." has no name
    if repaired is None:
        say(as_json, {}, f"{folder} is not damaged: nothing was changed")
        return
    kept = [str(path) for path in repaired.kept]
    text = "\n".join([f"{folder} now ends at offset {repaired.end_offset}; {repaired.reason}", *kept])
    say(as_json, {"endOffset": repaired.end_offset, "reason": repaired.reason, "kept": kept}, text)


@log.command(
    epilog="""\b
Examples:
  klog log dump /var/klog/clicks-0 | head
  klog log dump --batches 00000000000000000000.log
"""
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--batches", is_flag=True, help="Print a line per record batch, including control batches.")
@click.option("--json", "as_json", is_flag=True, help="Show no progress.")
def dump(paths: tuple[Path, ...], batches: bool, as_json: bool) -> None:
    """Print the records of .log files (and .kafka files of Kafka 0.7) as lines of JSON.

    For a partition's folder, print all its log files.

    Fields of a record: offset, timestamp (ms or null), timestampType (0 create time, 1 log append time, -1 none), key
    and value (base64 or null), headers ([[name, base64 or null], ...]). For .index, .timeindex and .txnindex files,
    print the entries with absolute offsets: offset, position; timestamp, offset; version, producerId, firstOffset,
    lastOffset, lastStableOffset. Damage is reported on stderr; then the exit code is 1.
    """
    damaged = 0
    files = [file for path in paths for file in _files_to_dump(path)]
    for path in files:
        is_quiet = as_json or sys.stdout.isatty()
        with Bar(path.name, path.stat().st_size, is_quiet=is_quiet, is_size=True) as bar:
            for part in dump_index(path) if path.suffix in INDEX_SUFFIXES else dump_file(path):
                reason = part.reason if isinstance(part, Damage) else _print(part, batches)
                if isinstance(part, Padding) and path.suffix not in INDEX_SUFFIXES:
                    reason = "zeros, which are preallocated or stand for lost writes"
                if reason:
                    damaged += 1
                    bar.erase()
                    click.echo(f"{path}: position {part.position}, {part.size} bytes: {reason}", err=True)
                bar.update(part.position + part.size)
    if damaged:
        sys.exit(1)


def _files_to_dump(path: Path) -> list[Path]:
    """`path` itself or the log files in the folder; `ConfigError` if it is no partition's."""
    if not path.is_dir():
        known = (LOG, SUFFIX_07, *INDEX_SUFFIXES)
        if not set(path.suffixes) & set(known):  # .log.damaged and .log.deleted count, too
            raise ConfigError(f"{path} is not a log file: these end with {', '.join(known)}")
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (LOG, SUFFIX_07))
    if not files and not (path / PARTITION_METADATA).exists():  # one without records has no file yet
        raise ConfigError(f"{path} contains neither {LOG} nor {SUFFIX_07} files: give the folder of one partition")
    return files


def _print(part: Dumped | IndexEntry | Padding, batches: bool) -> str | None:
    """Print a record batch, its records, or an index entry. Returns why it can't be read, or None."""
    try:
        if isinstance(part, Padding):
            return None
        if isinstance(part, IndexEntry):
            lines: list[dict[str, object]] = [dict(part.fields)]
        elif batches:
            lines = [part.describe()]
        elif part.header.is_control:
            return None
        else:
            lines = [_line(record) for record in part.records()]
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
