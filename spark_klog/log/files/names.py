"""Names of topics, and of the folders of partitions: TOPIC-PARTITION, or TOPIC-PARTITION.UNIQUE-SUFFIX once retired."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

from spark_klog.errors import ConfigError

#: Suffix of Kafka 0.7's log files; their name is the offset of their first byte.
SUFFIX_07 = ".kafka"
_LEGAL_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_DELETED = re.compile(r".+\.[0-9a-f]{32}-delete")


def check_topic_name(topic: str) -> None:
    """Raise `ConfigError` for a name that Kafka rejects (letters, digits, '.', '_', '-'; at most 249)."""
    if topic in (".", "..") or not _LEGAL_TOPIC.fullmatch(topic):
        raise ConfigError(f"illegal topic name {topic[:300]!r}: 1 to 249 of a-z A-Z 0-9 . _ - are allowed")


def partition_of_folder(name: str) -> tuple[str, int] | None:
    """(topic, partition) of a partition's folder, None for any other name."""
    topic, dash, partition = name.rpartition("-")
    return (topic, int(partition)) if dash and topic and partition.isdecimal() else None


def retired_folder(folder: Path, suffix: str) -> Path:
    """The path of a partition's folder once it is retired; `suffix` is delete or stray, as in Kafka."""
    return folder.with_name(f"{folder.name}.{uuid4().hex}-{suffix}")


def is_deleted_folder(name: str) -> bool:
    """Whether a broker renamed the folder in order to delete it."""
    return _DELETED.fullmatch(name) is not None
