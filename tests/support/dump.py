"""DumpLogSegments of real Apache Kafka: run over segment files, complaining where it does, and its records parsed."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from .kafka import Kafka, Version

# What DumpLogSegments writes where something is wrong. (0.10.2.2 does say "Non-secutive".)
_COMPLAINT = re.compile(
    r"Mismatches|Non-(con)?secutive|not found|corrupt|Found |Exception|Error|Ignoring|is[vV]alid: false|WARN|ERROR"
)
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
    """DumpLogSegments found something wrong; the text is what it wrote."""


class DumpedRecord(NamedTuple):
    """A record as DumpLogSegments prints it."""

    offset: int
    magic: int
    timestamp_type: str
    """CreateTime, LogAppendTime or NoTimestampType."""
    timestamp: int
    """-1 where there is none."""
    key: str | None
    """0.10.2.2 prints no key where the value is null: None then, too."""
    value: str | None


class DumpedBatch(NamedTuple):
    """A batch as DumpLogSegments prints it; in magic 0 and 1 a message, which may hold others, compressed."""

    last_offset: int
    position: int
    magic: int
    codec: str


def dump_files(version: Version, paths: list[Path], *options: str) -> str:
    """What the DumpLogSegments of that version writes about .log, .index or .timeindex files."""
    with tempfile.TemporaryDirectory() as work_dir:
        files = ",".join(str(path.absolute()) for path in paths)
        done = Kafka(version, Path(work_dir)).tool("kafka.tools.DumpLogSegments", "--files", files, *options)
    output = done.stdout + done.stderr
    # What the records contain and the files are called is no complaint.
    text = _CONTENT.sub("", output)
    for path in paths:
        text = text.replace(str(path.absolute()), "")
    if done.returncode != 0 or _COMPLAINT.search(text):  # most complaints leave the exit code at 0
        raise DumpComplaint(output)
    return output


def dump_log(version: Version, *paths: Path, deep: bool = True) -> str:
    """A dump of .log files: for `dumped_records`, or if not `deep`, for `dumped_batches`."""
    if not deep:
        return dump_files(version, list(paths))
    if version == "0.10.2.2":  # its deep iteration doesn't look at the CRC of a message that holds others
        dump_files(version, list(paths))
    return dump_files(version, list(paths), "--deep-iteration", "--print-data-log")


def dumped_records(output: str) -> list[DumpedRecord]:
    """The records of a deep dump, but for control records. Their keys and values must be printable ASCII."""
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
    """The batches of a dump that is not deep."""
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
    """`line` without what it has under `label` at its end, and that; going by its size, whatever it contains."""
    if size < 0:
        return line, None
    start = len(line) - size
    rest = line[:start].removesuffix(f" {label}: ")
    if len(rest) == start:
        raise ValueError(f"no {label} of {size} characters of printable ASCII at the end of {line!r}")
    return rest, line[start:]
