"""The text files of Kafka's ExportZkOffsets and ImportZkOffsets (0.7 to 1.1): a line a partition.

    /consumers/GROUP/offsets/TOPIC/PARTITION:OFFSET

No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spark_klog.client.cluster import TopicPartition
from spark_klog.directories.paths import consumer_offset_path, parse_offset
from spark_klog.errors import ConfigError, DecodeError

_LINE = re.compile(r"/consumers/([^/]+)/offsets/([^/]+)/([0-9]{1,10}):([0-9]+)")


def export_lines(group: str, offsets: Mapping[TopicPartition, int]) -> list[str]:
    """The lines of a group's offsets; `ConfigError` for names that can't be part of a path."""
    return [f"{consumer_offset_path(group, *key)}:{offset}" for key, offset in sorted(offsets.items())]


def parse_export(text: str, group: str, where: str) -> dict[TopicPartition, int]:
    """The offsets of `group` in such a file; `ConfigError`, which begins with `where`, for other lines and without any.

    Lines of other groups are left out: an export may have all.
    """
    found: dict[TopicPartition, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(
                f"{where}, line {number}: {line[:200]!r} must be /consumers/GROUP/offsets/TOPIC/PARTITION:OFFSET"
            )
        if match[1] == group:
            try:
                found[match[2], int(match[3])] = parse_offset(match[4].encode(), where)
            except DecodeError as error:
                raise ConfigError(f"{where}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"{where} has no offsets of group {group}")
    return found
