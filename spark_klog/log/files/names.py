"""Names of the folders of partitions: TOPIC-PARTITION, or TOPIC-PARTITION.UNIQUE-SUFFIX once retired.

In a retired name the topic is cut if the file system would refuse the whole, as in Kafka (`LocalLog.logDeleteDirName`).
"""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

#: Suffix of Kafka 0.7's log files; their name is the offset of their first byte.
SUFFIX_07 = ".kafka"
#: The longest name of a file, in bytes; topic names are ASCII.
_MAX_NAME = 255
_DELETED = re.compile(r".+\.[0-9a-f]{32}-delete")


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
    return _DELETED.fullmatch(name) is not None
