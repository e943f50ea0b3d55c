"""Offsets in the checkpoint of a Spark query (Spark's OffsetSeqLog and CommitLog):

    offsets/N    the end of micro-batch N: a line "v1", a line of metadata in JSON, a line for each source
    commits/N    exists if micro-batch N is done

The line of a source klog or kafka is {"TOPIC":{"PARTITION":OFFSET}}; other sources have other lines, "-" for none.
klog adds the start of a micro-batch, as the text of a name, if it is neither the end of the one before nor offset 0 of
a new partition:

{"topic":{"0":42},"start of query {\\"topic\\":{\\"0\\":23}}":{}}
                                 the query's first micro-batch: Spark asks for the initial offset again after a
                                 restart, and "latest" would then differ. Counts only if no micro-batch came before
{"topic":{"0":42},"start of micro-batch {\\"topic\\":{\\"0\\":23}}":{}}
                                 topics that were created again, and partitions that come back
{"topic":{"0":42},"start of what is left, up to {\\"topic\\":{\\"0\\":80}}":{}}
                                 the first micro-batch of a run, cut short by a limit, before pyspark 4.2: the latest
                                 offsets of partitions that it does not read to their end. `run_available_now` reads it

No topic can have such a name, and without partitions it means nothing to Spark's own Kafka connector, which can go on
from the same checkpoint. What begins with "start of " otherwise is of a newer version, and refused.

`checkpoint_state` tells whether format("kafka") and format("klog") can both continue from a checkpoint. Both write the
same line for a micro-batch's end. They differ in where they keep the start of the first micro-batch: Spark's connector
in sources/N/0, klog beside the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_klog.base.addresses import local_path, without_user
from spark_klog.base.settings import INT32_MAX, INT64_MAX
from spark_klog.errors import ConfigError, DecodeError, DirectoryError
from spark_klog.files import open_folder
from spark_klog.files.folder import LocalFolder

#: Prefix of keys that do not name a topic; topic names contain no blanks.
START_OF = "start of "
#: How the names begin that hold a start as JSON.
_QUERY, _MICRO_BATCH = START_OF + "query ", START_OF + "micro-batch "
#: How the name begins that holds the latest offsets of partitions that a run leaves unread.
_LEFT = START_OF + "what is left, up to "
_VERSION = "v1"


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
    offsets: dict[tuple[str, int], int] = {}
    for value in offset_lines(content, path):
        for key, offset in (_of_source(value) or {}).items():
            offsets[key] = min(offset, offsets.get(key, offset))
    if not offsets:
        raise DecodeError(f"{path}: no source of the query reads topics")
    return offsets


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


def _of_source(value: Any) -> dict[tuple[str, int], int] | None:
    """The offsets in a source's line; None if the source does not read topics."""
    if not isinstance(value, dict) or not all(isinstance(partitions, dict) for partitions in value.values()):
        return None
    entries = [entry for topic, partitions in value.items() if _is_topic(topic) for entry in partitions.items()]
    is_sound = all(
        name.isascii()
        and name.isdecimal()
        and int(name[:11]) <= INT32_MAX
        and type(offset) is int
        and 0 <= offset <= INT64_MAX
        for name, offset in entries
    )
    return from_json(value) if is_sound else None


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


def with_start(
    end: Mapping[tuple[str, int], int],
    start: Mapping[tuple[str, int], int],
    before: Mapping[tuple[str, int], int],
    *,
    is_first: bool,
) -> dict[str, dict[str, int]]:
    """The checkpoint's entry for a micro-batch from `start` to `end`, after one that ended at `before`.

    It is never empty: an empty entry means that the query has no micro-batch yet.
    """
    begun = to_json({key: offset for key, offset in start.items() if key in end and offset != before.get(key, 0)})
    value = to_json(end)
    if begun:
        value[(_QUERY if is_first else _MICRO_BATCH) + json.dumps(begun, separators=(",", ":"))] = {}
    return value or {START_OF: {}}


def told_apart(value: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The checkpoint's entry for a micro-batch, with the same meaning and another text.

    For one equal to the entry before it, which Spark takes for no news: a topic was created again twice, and has as
    many records as before.
    """
    return {name + " " if name.startswith(_MICRO_BATCH) else name: offsets for name, offsets in value.items()}


def with_left(
    value: dict[str, dict[str, int]], end: Mapping[tuple[str, int], int], latest: Mapping[tuple[str, int], int]
) -> dict[str, dict[str, int]]:
    """The checkpoint's entry for a micro-batch, with the latest offsets of the partitions that go on after its end."""
    left = to_json({key: offset for key, offset in latest.items() if offset > end.get(key, offset)})
    more: dict[str, dict[str, int]] = {_LEFT + json.dumps(left, separators=(",", ":")): {}} if left else {}
    return {**value, **more}


def left_in(value: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, int], int]:
    """The latest offsets of the partitions that a micro-batch's entry says are left unread; `DecodeError`."""
    names = [name for name in value if name.startswith(_LEFT)]
    return _decoded(names[0], _LEFT) if names else {}


def start_in(
    value: Mapping[str, Mapping[str, int]], before: Mapping[tuple[str, int], int], *, is_first: bool
) -> dict[tuple[str, int], int]:
    """The start of a micro-batch, from its entry and the end of the one before; missing partitions start at 0.

    `DecodeError` if the entry's start is malformed, or of a newer version.
    """
    start = dict(before)
    for name in value:
        if name.startswith(_MICRO_BATCH) or (is_first and name.startswith(_QUERY)):
            start |= _decoded(name, _QUERY if name.startswith(_QUERY) else _MICRO_BATCH)
        elif name.startswith(START_OF) and name != START_OF and not name.startswith((_QUERY, _LEFT)):
            raise DecodeError(
                f"the checkpoint's entry {name[:200]!r} is of a newer version: go on with the klog that wrote it, or "
                "begin with a new checkpoint"
            )
    return start


def _decoded(name: str, prefix: str) -> dict[tuple[str, int], int]:
    try:
        return from_json(json.loads(name.removeprefix(prefix)))
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise DecodeError(f"the checkpoint's entry {name[:200]!r} is not JSON with offsets by topic") from None


@dataclass(frozen=True)
class Source:
    """A source of the query: its number, and the end of its last planned micro-batch; None if it reads no topics."""

    number: int
    offsets: dict[tuple[str, int], int] | None


@dataclass(frozen=True)
class CheckpointState:
    """The last micro-batch that was planned and the last one that is done (-1: none), and the reasons not to switch."""

    folder: Path
    query: str | None
    planned: int
    done: int
    is_stateful: bool
    sources: list[Source]
    to_klog: list[str]
    to_kafka: list[str]

    @property
    def following(self) -> int:
        """The micro-batch that the next run begins with."""
        return self.planned + 1 if self.done >= self.planned else self.planned


def checkpoint_state(address: str) -> CheckpointState:
    """Read a local checkpoint. `ConfigError` if there is none, `DecodeError` if it is malformed, `OSError`."""
    path = local_path(address)
    if path is None:
        raise ConfigError(f"{without_user(address)} is not a local folder: copy the checkpoint to one to look at it")
    root = Path(path)
    files = LocalFolder(root)
    planned, done = (max(_numbers(files.names(folder)), default=-1) for folder in ("offsets", "commits"))
    if planned < 0 and not (root / "metadata").is_file():
        raise ConfigError(
            f"{without_user(address)} is not a checkpoint: it has neither offsets nor Spark's file metadata"
        )
    last = root / "offsets" / str(planned)
    values = offset_lines(last.read_bytes(), str(last)) if planned >= 0 else []
    sources = [Source(number, _of_source(value)) for number, value in enumerate(values)]
    to_klog: list[str] = []
    to_kafka: list[str] = []
    # Spark's connector keeps the start of a source before it plans a micro-batch of it
    of_kafka = {number for number in _numbers(files.names("sources")) if _began_with_kafka(root, number)}
    to_other, this, other = (to_klog, "kafka", "klog") if of_kafka else (to_kafka, "klog", "kafka")
    if planned < 0:
        to_other.append(f"no micro-batch is planned yet: {other} begins where its own startingOffsets say")
    elif done < planned and planned == 0:
        to_other.append(
            f"the first micro-batch is not done, and {other} does not find its start: let it end with {this}"
        )
    names = {name for value in values if isinstance(value, dict) for name in value if name.startswith(START_OF)}
    if done < planned and any(name.startswith(_MICRO_BATCH) for name in names):
        to_kafka.append(
            "the last micro-batch is not done, and begins elsewhere than the one before ended (a topic was created "
            "again, or a partition came back): let it end with klog"
        )
    waiting = [source.number for source in sources if source.offsets is None and source.number in of_kafka]
    if waiting:
        to_klog.append(
            f"source {waiting[0]} has read no partition yet, and klog does not find its start: run it with kafka until "
            "it reads a topic"
        )
    if not any(source.offsets is not None for source in sources) and planned >= 0:
        to_klog.append("no source of the query reads topics")
        to_kafka.append("no source of the query reads topics")
    has_state = (root / "state").is_dir()
    return CheckpointState(root, _query(root), planned, done, has_state, sources, to_klog, to_kafka)


def _query(root: Path) -> str | None:
    try:
        query = json.loads((root / "metadata").read_text())["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise DecodeError(f"{root / 'metadata'} is not Spark's: it has no id of a query") from None
    return str(query)


def _began_with_kafka(root: Path, number: int) -> bool:
    """Whether Spark's connector has kept the start of a source: offsets by topic, {} if no topic was there."""
    try:
        lines = (root / "sources" / str(number) / "0").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    try:
        return _of_source(json.loads(lines[-1])) is not None
    except (IndexError, ValueError, RecursionError):
        return False
