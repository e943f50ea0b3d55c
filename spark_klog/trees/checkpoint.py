"""Offsets in the checkpoint of a Spark query (Spark's OffsetSeqLog and CommitLog):

    offsets/N    the end of micro-batch N: a line "v1", a line of metadata in JSON, a line for each source
    commits/N    exists if micro-batch N is done

The line of a source klog or kafka is {"TOPIC":{"PARTITION":OFFSET}}; other sources have other lines, "-" for none.
klog adds a name that begins with "start of " if a micro-batch does not start at the end of the previous one, see
client/places.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from spark_klog.base.addresses import without_user
from spark_klog.errors import ConfigError, DecodeError, DirectoryError
from spark_klog.files import open_folder

#: Prefix of keys that do not name a topic; topic names contain no blanks.
START_OF = "start of "
_VERSION = "v1"
_INT32_MAX, _INT64_MAX = (1 << 31) - 1, (1 << 63) - 1


def checkpoint_offsets(address: str) -> dict[tuple[str, int], int]:
    """The end of the last completed micro-batch, by topic and partition, of all sources that read topics.

    If several sources read a partition, the lowest offset. `address` is a path or a URI of pyarrow's file systems.
    `ConfigError` if no micro-batch is complete, `DecodeError` if its file is malformed, `DirectoryError`.
    """
    files = open_folder(address, DirectoryError)
    address = without_user(address)
    done = _numbers(files.names("commits")) & _numbers(files.names("offsets"))
    if not done:
        raise ConfigError(f"{address} has no completed micro-batch: is it the checkpointLocation of a query?")
    path = f"offsets/{max(done)}"
    content = files.read(path)
    if content is None:
        raise DirectoryError(f"checkpoint {address}: {path} was removed while it was being read; try again")
    return parse_offsets_file(content, f"{address}/{path}")


def _numbers(names: Iterable[str]) -> set[int]:
    return {int(name) for name in names if name.isascii() and name.isdecimal()}


def parse_offsets_file(content: bytes, path: str) -> dict[tuple[str, int], int]:
    """The offsets by topic and partition in a file offsets/N; `DecodeError` if it is malformed or has none."""
    found: dict[tuple[str, int], int] = {}
    for value in offset_lines(content, path):
        for key, offset in _of_source(value).items():
            found[key] = min(offset, found.get(key, offset))
    if not found:
        raise DecodeError(f"{path}: no source of the query reads topics")
    return found


def offset_lines(content: bytes, path: str) -> list[Any]:
    """The JSON of each source in a file offsets/N, None for a line of another kind; `DecodeError` if malformed."""
    try:
        version, _, *sources = content.decode().splitlines()
    except ValueError:
        raise DecodeError(f"{path} is not a file of offsets: {content[:100]!r}") from None
    if version != _VERSION:
        raise DecodeError(f"{path} has version {version[:20]!r} of Spark's offsets, expected {_VERSION}")
    return [_json(line, path) for line in sources]


def _json(line: str, path: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        if line.startswith('{"'):  # cut off or edited: taken for another kind of source, its topics would be left out
            raise DecodeError(f"{path}: the line of a source is not JSON ({error}): {line[:100]!r}") from None
        return None


def _of_source(value: Any) -> dict[tuple[str, int], int]:
    """The offsets in a source's line; {} if the source does not read topics."""
    if not isinstance(value, dict) or not all(isinstance(partitions, dict) for partitions in value.values()):
        return {}
    entries = [entry for topic, partitions in value.items() if _is_topic(topic) for entry in partitions.items()]
    if not all(_is_partition(name) and _is_offset(offset) for name, offset in entries):
        return {}
    return from_json(value)


def from_json(value: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, int], int]:
    """The offsets in {"TOPIC":{"PARTITION":OFFSET}}, without what klog adds."""
    return {
        (topic, int(name)): int(offset)
        for topic, partitions in value.items()
        if _is_topic(topic)
        for name, offset in partitions.items()
    }


def to_json(offsets: Mapping[tuple[str, int], int]) -> dict[str, dict[str, int]]:
    """{topic: {partition: offset}}, the form in a checkpoint."""
    result: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        result.setdefault(topic, {})[str(partition)] = offset
    return result


def _is_topic(name: str) -> bool:
    return not name.startswith(START_OF)


def _is_partition(name: str) -> bool:
    return name.isascii() and name.isdecimal() and int(name[:11]) <= _INT32_MAX


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT64_MAX
