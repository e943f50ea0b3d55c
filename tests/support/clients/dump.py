"""Run Apache Kafka's DumpLogSegments on segment files, raise if it reports problems, and parse its output."""

from __future__ import annotations

import atexit
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.servers.java_tools import JavaTools
from tests.support.servers.kafka import Kafka, Version

# DumpLogSegments' messages about problems. (0.10.2.2 really prints "Non-secutive".)
_COMPLAINT = re.compile(
    r"Mismatches|Non-(con)?secutive|not found|corrupt|Found |Exception|Error|Ignoring|is[vV]alid: false|WARN|ERROR"
)
#: Kafka 4.4's says this of each segment that does not begin with offset 0, those of Kafka among them.
_FIRST_OFFSET = re.compile(r"^Non-consecutive offsets in .*\n  -1 is followed by \d+\n?(?!  )", re.MULTILINE)
_CONTENT = re.compile(r" (headerKeys|key|payload): .*")
_BATCH = re.compile(
    r"(?:baseOffset: \d+ lastOffset: (\d+) .* isControl: (true|false) .*|offset: (\d+) )"
    r"position: (\d+) .* magic: (\d) compresscodec: (\w+) "
)
_RECORD = re.compile(r"\| offset: (\d+) (\w+): (-?\d+) keySize: (-?\d+) valueSize: (-?\d+) ")
_OLD_RECORD = re.compile(
    r"offset: (\d+) position: \d+ (\w+): (-?\d+) isvalid: \w+ payloadsize: (-?\d+) magic: (\d) "
    r"compresscodec: \w+ crc: \d+(?: keysize: (\d+))?"
)


class DumpComplaint(Exception):
    """DumpLogSegments found a problem; the text is its output."""


class DumpedRecord(NamedTuple):
    """A record as DumpLogSegments prints it."""

    offset: int
    magic: int
    timestamp_type: str
    """CreateTime, LogAppendTime or NoTimestampType."""
    timestamp: int
    """-1 if there is none."""
    key: str | None
    """None also in records with a null value by 0.10.2.2, which then prints no key."""
    value: str | None


class DumpedBatch(NamedTuple):
    """A batch as DumpLogSegments prints it; with magic 0 and 1 a message, possibly a compressed wrapper."""

    last_offset: int
    position: int
    magic: int
    codec: str


@cache
def _tools(version: Version) -> JavaTools:
    """A JVM for all dumps of this process: most of a dump's time is the start of a JVM."""
    tools = JavaTools(version)
    atexit.register(tools.close)
    return tools


def _run(version: Version, *command: str) -> tuple[int, str]:
    """Run one of Kafka's tools; return its exit code and output."""
    if version != "0.10.2.2":  # whose tools end their JVM
        try:
            return _tools(version).run(*command)
        except BaseException:
            _tools.cache_clear()
            raise
    with tempfile.TemporaryDirectory() as work_dir:
        done = Kafka(version, Path(work_dir)).tool(*command)
    return done.returncode, done.stdout + done.stderr


def dump_files(version: Version, paths: list[Path], *options: str) -> str:
    """Return DumpLogSegments' output for .log, .index or .timeindex files; `DumpComplaint` if it has problems."""
    files = ",".join(str(path.absolute()) for path in paths)
    code, output = _run(version, "kafka.tools.DumpLogSegments", "--files", files, *options)
    # Remove contents of records and names of files, which could look like complaints.
    text = _FIRST_OFFSET.sub("", _CONTENT.sub("", output))
    for path in paths:
        text = text.replace(str(path.absolute()), "")
    if code != 0 or _COMPLAINT.search(text):  # most complaints leave the exit code at 0
        raise DumpComplaint(output)
    return output


def dump_log(version: Version, *paths: Path, deep: bool = True) -> str:
    """Dump .log files as input for `dumped_records`, or for `dumped_batches` if not `deep`."""
    if not deep:
        return dump_files(version, list(paths))
    if version == "0.10.2.2":  # its deep iteration does not check the CRC of a wrapper
        dump_files(version, list(paths))
    return dump_files(version, list(paths), "--deep-iteration", "--print-data-log")


def dumped_records(output: str) -> list[DumpedRecord]:
    """The records of a deep dump, except control records. Keys and values must be printable ASCII."""
    records = []
    magic, is_control = -1, False
    for line in output.split("\n"):
        if match := _OLD_RECORD.match(line):
            offset, kind, timestamp, value_size, magic_of_record, key_size = match.groups()
            key_size = "-1" if key_size is None or value_size == "-1" else key_size
            key, value = _key_and_value(line, int(key_size), int(value_size))
            records.append(DumpedRecord(int(offset), int(magic_of_record), kind, int(timestamp), key, value))
        elif match := _BATCH.match(line):
            magic, is_control = int(match[5]), match[2] == "true"
        elif line.startswith("| ") and not is_control:
            match = _RECORD.match(line)
            if match is None:
                raise ValueError(f"not a record of DumpLogSegments: {line!r}")
            offset, kind, timestamp, key_size, value_size = match.groups()
            key, value = _key_and_value(line, int(key_size), int(value_size))
            records.append(DumpedRecord(int(offset), magic, kind, int(timestamp), key, value))
    return records


def dumped_batches(output: str) -> list[DumpedBatch]:
    """The batches of a dump made without `deep`."""
    return [
        DumpedBatch(int(match[1] or match[3]), int(match[4]), int(match[5]), match[6].lower())
        for line in output.split("\n")
        if (match := _BATCH.match(line))
    ]


def _key_and_value(line: str, key_size: int, value_size: int) -> tuple[str | None, str | None]:
    rest, value = _cut(line, "payload", value_size)
    _, key = _cut(rest, "key", key_size)
    return key, value


def _cut(line: str, label: str, size: int) -> tuple[str, str | None]:
    """Cut `label` and a value of `size` characters off the end of `line`; return (the rest, the value)."""
    if size < 0:
        return line, None
    start = len(line) - size
    rest = line[:start].removesuffix(f" {label}: ")
    if len(rest) == start:
        raise ValueError(f"no {label} of {size} characters of printable ASCII at the end of {line!r}")
    return rest, line[start:]
