"""Read and write the small text files of a partition's folder; the first two are Kafka's.

partition.metadata        "version: 0", "topic_id: " and 22 characters of URL-safe base64 (KIP-516)
leader-epoch-checkpoint   "0" (version), the number of lines, then lines "EPOCH START_OFFSET", ascending (KIP-101)
klog.json                 the topic's own values of `LogConfig` as a JSON object, if it has any
klog.deleted              exists if the topic was deleted but the folder could not be renamed
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.files.file_system import FileSystem

_log = logging.getLogger(__name__)

PARTITION_METADATA = "partition.metadata"
LEADER_EPOCHS = "leader-epoch-checkpoint"
_OVERRIDES = "klog.json"
_DELETED = "klog.deleted"

_METADATA = re.compile(rb"version: *0\s*\ntopic_id: *([A-Za-z0-9_-]{22})=?=?\s*")
_EPOCH = re.compile(rb"([0-9]+) ([0-9]+)")


def read_topic_id(path: Path) -> UUID:
    """Read a partition.metadata file; `DecodeError` for a wrong format; OSError."""
    return _topic_id(path, path.read_bytes())


def _topic_id(path: Path, content: bytes) -> UUID:
    match = _METADATA.fullmatch(content)
    if not match:
        raise DecodeError(f"{path} has no topic id of version 0")
    topic_id = UUID(bytes=base64.urlsafe_b64decode(match[1] + b"=="))
    if not topic_id.int:
        raise DecodeError(f"{path} has the topic id zero, which is invalid")
    return topic_id


def read_leader_epochs(path: Path) -> list[tuple[int, int]]:
    """Read (epoch, start offset) from a leader-epoch-checkpoint; `DecodeError` for a wrong format; OSError."""
    return _leader_epochs(path, path.read_bytes())


def _leader_epochs(path: Path, content: bytes) -> list[tuple[int, int]]:
    lines = content.split(b"\n")
    epochs = [(int(match[1]), int(match[2])) for line in lines[2:-1] if (match := _EPOCH.fullmatch(line))]
    if lines != [b"0", str(len(epochs)).encode(), *(b"%d %d" % entry for entry in epochs), b""]:
        raise DecodeError(f"{path} is not a leader epoch checkpoint of version 0")
    for before, after in pairwise(epochs):
        if after[0] <= before[0] or after[1] < before[1]:
            raise DecodeError(f"{path}: epoch {after[0]} at offset {after[1]} follows {before[0]} at {before[1]}")
    return epochs


def topic_id_of(files: FileSystem, folder: Path) -> UUID | None:
    """The topic id of a folder; None if it has none yet; `LogCorrupted` if the file is damaged."""
    path = folder / PARTITION_METADATA
    try:
        return _topic_id(path, files.read(path))
    except FileNotFoundError:
        return None
    except DecodeError as error:
        raise LogCorrupted(f"{error}; restore it, or remove it to get a new one") from None


def write_topic_id(files: FileSystem, folder: Path, topic_id: UUID) -> None:
    """Write the folder's topic id; OSError."""
    encoded = base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")
    files.replace(folder / PARTITION_METADATA, f"version: 0\ntopic_id: {encoded}\n".encode())


def read_overrides(files: FileSystem, folder: Path) -> dict[str, Any]:
    """Read the topic's own values of `LogConfig`; `LogCorrupted` if the file is damaged."""
    path = folder / _OVERRIDES
    try:
        overrides = json.loads(files.read(path))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LogCorrupted(
            f"{path} is not JSON: {error}; restore it, or remove it to use the broker's settings"
        ) from None
    assert isinstance(overrides, dict)
    return overrides


def write_overrides(files: FileSystem, folder: Path, overrides: Mapping[str, Any]) -> None:
    """Write the topic's own values of `LogConfig`; OSError."""
    files.replace(folder / _OVERRIDES, json.dumps(dict(overrides)).encode())


def leader_epochs_of(files: FileSystem, folder: Path) -> list[tuple[int, int]]:
    """(epoch, start offset) of a folder; empty if it has none yet or the file can't be read."""
    path = folder / LEADER_EPOCHS
    try:
        return _leader_epochs(path, files.read(path))
    except FileNotFoundError:
        return []
    except (DecodeError, OSError) as error:
        _log.warning("%s: earlier leader epochs are unknown", error)
        return []


def write_leader_epochs(files: FileSystem, folder: Path, epoch: int, start_offset: int) -> None:
    """Write the log's only leader epoch, which starts at `start_offset`; OSError."""
    files.replace(folder / LEADER_EPOCHS, f"0\n1\n{epoch} {start_offset}\n".encode())


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
