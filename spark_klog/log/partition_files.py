"""The small text files of a data directory and of a partition's folder, and that folder's name.

TOPIC-PARTITION                   a partition's folder
TOPIC-PARTITION.UNIQUE-SUFFIX     once it is retired; the topic is cut if the file system would refuse the whole name,
                                  as in Kafka (`LocalLog.logDeleteDirName`)

In a partition's folder; the first two are Kafka's:

partition.metadata        "version: 0", "topic_id: " and 22 characters of URL-safe base64 (KIP-516)
leader-epoch-checkpoint   "0" (version), the number of lines, then lines "EPOCH START_OFFSET", ascending (KIP-101)
klog.json                 {"version": 1, "config": {NAME: VALUE}}: the topic's own settings, if it has any
klog.deleted              exists if the topic was deleted but the folder could not be renamed

Checkpoints of a data directory, an offset per partition in Kafka's format:

recovery-point-offset-checkpoint  the log is flushed up to this offset, and needs no check there after an unclean stop
log-start-offset-checkpoint       DeleteRecords has deleted the records before it, although their segment exists
cleaner-offset-checkpoint         the start of the dirty part of a compacted log

    0                       version
    2                       the number of lines
    clicks 0 1234           topic, partition, offset
    clicks 1 99
"""

from __future__ import annotations

import base64
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from spark_klog.base.durable import check_version
from spark_klog.base.settings import settings_of
from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import FileSystem, write_all

_log = logging.getLogger(__name__)
#: Suffix of Kafka 0.7's log files; their name is the offset of their first byte.
SUFFIX_07 = ".kafka"
#: The longest name of a file, in bytes; topic names are ASCII.
_MAX_NAME = 255
_DELETED_FOLDER = re.compile(r".+\.[0-9a-f]{32}-delete")
RECOVERY_POINT = "recovery-point-offset-checkpoint"
LOG_START = "log-start-offset-checkpoint"
CLEANER = "cleaner-offset-checkpoint"
PARTITION_METADATA = "partition.metadata"
LEADER_EPOCHS = "leader-epoch-checkpoint"
OVERRIDES, _OVERRIDES_VERSION = "klog.json", 1
_SETTINGS = settings_of(LogConfig)
_REMOVE = "remove it to use the broker's settings"
_RESTORE = f"restore it, or {_REMOVE}"
_DELETED = "klog.deleted"
_METADATA = re.compile(rb"version: *0\s*\ntopic_id: *([A-Za-z0-9_-]{22})=?=?\s*")
_METADATA_HEAD, _OVERRIDES_HEAD = b"version: 0\ntopic_id: ", b'{"version": '
_PART_OF_ID = re.compile(rb"[A-Za-z0-9_-]{0,22}")
#: Bytes that numbers and words of JSON may begin with.
_WORDS = b"-aeflnrstu"
_EPOCH = re.compile(rb"([0-9]+) ([0-9]+)")
#: Without replication a leader never changes: a log keeps its last epoch.
_FIRST_EPOCH = 0
_UNKNOWN = -1

Offsets = dict[tuple[str, int], int]


def partition_of_folder(name: str) -> tuple[str, int] | None:
    """(topic, partition) of a partition's folder, None for any other name."""
    topic, dash, partition = name.rpartition("-")
    return (topic, int(partition)) if dash and topic and partition.isdecimal() else None


def retired_folder(folder: Path, suffix: str) -> Path:
    """The path of a partition's folder once it is retired; `suffix` is delete or stray, as in Kafka."""
    topic, _, partition = folder.name.rpartition("-")
    ending = f"-{partition}.{uuid4().hex}-{suffix}"
    return folder.with_name(topic[: _MAX_NAME - len(ending)] + ending)


def is_deleted_folder(name: str) -> bool:
    """Whether a broker renamed the folder in order to delete it."""
    return _DELETED_FOLDER.fullmatch(name) is not None


def write_checkpoint(files: FileSystem, path: Path, offsets: Mapping[tuple[str, int], int]) -> None:
    """Replace the file atomically; OSError."""
    lines = [f"{topic} {partition} {offset}\n" for (topic, partition), offset in sorted(offsets.items())]
    files.replace(path, f"0\n{len(lines)}\n{''.join(lines)}".encode())


def read_checkpoint(files: FileSystem, path: Path) -> Offsets | None:
    """Read the offsets; None if the file is missing, `LogCorrupted` if its format is wrong."""
    try:
        return parse_checkpoint(files.read(path), str(path))
    except FileNotFoundError:
        return None


def parse_checkpoint(content: bytes, path: str) -> Offsets:
    """The offsets in the content of a checkpoint; `LogCorrupted` if its format is wrong."""
    text = content.decode("utf-8", "replace")
    if not text:
        return {}  # Kafka 4.1 leaves an empty cleaner checkpoint
    offsets: Offsets = {}
    try:
        version, count, *lines = text.split("\n")
        for line in lines[: int(count)]:
            topic, partition, offset = line.split(" ")
            offsets[topic, int(partition)] = int(offset)
        if version.strip() != "0" or len(offsets) != int(count) or min(offsets.values(), default=0) < 0:
            raise ValueError
    except ValueError:
        raise LogCorrupted(
            f"{path} is not a checkpoint of version 0: {text[:200]!r}; remove it to have the logs checked completely"
        ) from None
    return offsets


def _write(files: FileSystem, path: Path, content: bytes, *, is_new: bool) -> None:
    """Write a small file; OSError. If its folder `is_new`, do not wait for the disk: the log's first flush does.

    After a power failure before that the file may be missing or unfinished, which readers take for missing.
    """
    if is_new:
        file = files.create(path)
        write_all(file, 0, content)
        file.truncate(len(content))  # an earlier try may have left more, after a power failure
        file.close()
    else:
        files.replace(path, content)


def is_unfinished(files: FileSystem, folder: Path, *, is_ours: bool = False) -> bool:
    """Whether a failure may have come before the first flush of the log in a folder: its id is not whole. OSError.

    `is_ours`: the folder has had an id, so that a missing one is not whole either. Kafka before 2.8 writes none.
    """
    try:
        content = files.read(folder / PARTITION_METADATA)
    except FileNotFoundError:
        return is_ours
    return not _METADATA.fullmatch(content) and _is_unfinished(content, _METADATA_HEAD, _PART_OF_ID.fullmatch)


def read_topic_id(files: FileSystem, folder: Path) -> UUID | None:
    """The topic id of a partition's folder; None if it has none yet. `DecodeError` for a damaged file, OSError."""
    path = folder / PARTITION_METADATA
    try:
        match = _METADATA.fullmatch(files.read(path))
    except FileNotFoundError:
        return None
    if not match:
        raise DecodeError(f"{path} has no topic id of version 0")
    topic_id = UUID(bytes=base64.urlsafe_b64decode(match[1] + b"=="))
    if not topic_id.int:
        raise DecodeError(f"{path} has the topic id zero, which is invalid")
    return topic_id


def read_leader_epochs(files: FileSystem, folder: Path) -> list[tuple[int, int]]:
    """(epoch, start offset) of a partition's folder; empty if it has none yet. `DecodeError`, OSError."""
    path = folder / LEADER_EPOCHS
    try:
        lines = files.read(path).split(b"\n")
    except FileNotFoundError:
        return []
    epochs = [(int(match[1]), int(match[2])) for line in lines[2:-1] if (match := _EPOCH.fullmatch(line))]
    if lines != [b"0", str(len(epochs)).encode(), *(b"%d %d" % entry for entry in epochs), b""]:
        raise DecodeError(f"{path} is not a leader epoch checkpoint of version 0")
    for before, after in pairwise(epochs):
        if after[0] <= before[0] or after[1] < before[1]:
            raise DecodeError(f"{path}: epoch {after[0]} at offset {after[1]} follows {before[0]} at {before[1]}")
    return epochs


def _is_unfinished(content: bytes, head: bytes, is_part: Callable[[bytes], object]) -> bool:
    """Whether it is the beginning of a file of `_write`, or zeros; `is_part` looks at what follows its head."""
    text = content.rstrip(b"\0")
    return head.startswith(text) or (text.startswith(head) and bool(is_part(text[len(head) :])))


def _ends_early(text: bytes) -> bool:
    """Whether it is the beginning of JSON in ASCII."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip(_WORDS))
    except UnicodeDecodeError:
        pass
    return False


def topic_id_of(files: FileSystem, folder: Path) -> UUID | None:
    """The topic id of a folder; None if it has none yet; `LogCorrupted` if the file is damaged."""
    try:
        return read_topic_id(files, folder)
    except DecodeError as error:
        raise LogCorrupted(f"{error}; restore it, or remove it to get a new one") from None


def write_topic_id(files: FileSystem, folder: Path, topic_id: UUID, *, is_new: bool = False) -> None:
    """Write the folder's topic id; OSError. `is_new`: see `_write`."""
    encoded = base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")
    content = f"version: 0\ntopic_id: {encoded}\n".encode()
    _write(files, folder / PARTITION_METADATA, content, is_new=is_new)


def read_overrides(files: FileSystem, folder: Path) -> dict[str, Any]:
    """Read the topic's own values of `LogConfig`; `LogCorrupted` if the file is damaged, or of another version."""
    path, content = folder / OVERRIDES, b""
    try:
        content = files.read(path)
        written = json.loads(content)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        if _is_unfinished(content, _OVERRIDES_HEAD, lambda rest: _ends_early(_OVERRIDES_HEAD + rest)):
            return {}
        raise LogCorrupted(f"{path} is not JSON: {error}; {_RESTORE}") from None
    if not isinstance(written, dict) or not isinstance(written.get("config"), dict):
        raise LogCorrupted(f"{path} has no object config; {_RESTORE}")
    check_version(written.get("version"), _OVERRIDES_VERSION, str(path), _REMOVE, LogCorrupted)
    return {_SETTINGS[name].name: value for name, value in written["config"].items() if name in _SETTINGS}


def write_overrides(files: FileSystem, folder: Path, overrides: Mapping[str, Any], *, is_new: bool = False) -> None:
    """Write the topic's own values of `LogConfig`; OSError. `is_new`: see `_write`."""
    config = {name: overrides[row.name] for name, row in _SETTINGS.items() if row.name in overrides}
    content = json.dumps({"version": _OVERRIDES_VERSION, "config": config}).encode()
    _write(files, folder / OVERRIDES, content, is_new=is_new)


def mark_deleted(files: FileSystem, folder: Path) -> None:
    """Mark a folder that can't be renamed as that of a deleted topic, also for later starts; OSError."""
    files.create(folder / _DELETED).close()
    files.sync_folder(folder)


def is_marked_deleted(files: FileSystem, folder: Path) -> bool:
    """Whether the folder is that of a deleted topic; OSError."""
    try:
        files.info(folder / _DELETED)
    except FileNotFoundError:
        return False
    return True


class LeaderEpochs:
    """The epochs of one log. The file is read at first use, as a start opens thousands of logs."""

    def __init__(self, files: FileSystem, folder: Path) -> None:
        self._files = files
        self._folder = folder
        self._is_damaged = False

    @cached_property
    def _epochs(self) -> list[tuple[int, int]]:
        """(epoch, start offset), ascending."""
        try:
            return read_leader_epochs(self._files, self._folder)
        except (DecodeError, OSError) as error:
            _log.warning("%s: earlier leader epochs are unknown", error)
            self._is_damaged = isinstance(error, DecodeError)
            return []

    @property
    def latest(self) -> int:
        """The epoch of new record batches."""
        return self._epochs[-1][0] if self._epochs else _FIRST_EPOCH

    def begin(self, offset: int) -> bool:
        """Start the first epoch at `offset` if the log has none, as it is new; whether it had none. OSError.

        At the first record of all the file is as those of a new folder, see `_write`: an append waits for no disk.
        """
        if self._epochs:
            return False
        content = f"0\n1\n{_FIRST_EPOCH} {offset}\n".encode()
        _write(self._files, self._folder / LEADER_EPOCHS, content, is_new=not offset)
        self._epochs.append((_FIRST_EPOCH, offset))
        return True

    def mend(self, offset: int) -> None:
        """Write the file anew if a power failure before the first flush has damaged it, for a log from `offset` on."""
        if not self._epochs and self._is_damaged:
            self.begin(offset)

    def end_of(self, epoch: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, the offset after its last record); -1 if unknown.

        The log has the records of [start_offset, end_offset). As Kafka's OffsetForLeaderEpoch (KIP-101, KIP-279).
        """
        if epoch == self.latest:
            return epoch, end_offset
        after = bisect_right(self._epochs, epoch, key=lambda entry: entry[0])
        if epoch < 0 or after == len(self._epochs):
            return _UNKNOWN, _UNKNOWN
        return (self._epochs[after - 1][0] if after else epoch), max(start_offset, self._epochs[after][1])
