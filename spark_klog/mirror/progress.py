"""Where a mirror keeps its offsets: a compacted topic of the target, `klog-mirror.NAME.internal`.

It has a record for each run of offsets (see `PartitionMap`), and notes on topics and the mirror. Where new partitions
begin is written before their records. The record of a run is written after the records that it tells of; with
exactly-once it is part of their transaction, so that both are there or neither. Each partition of the topic belongs to
one process of the mirror (a slot): no other's open transaction hides what it has committed.

The first fields of each record are those of an OffsetSync of Kafka's MirrorMaker 2, whose readers take a run as one:
"the source's offset `upstream` is the target's offset `downstream`". A run:

    key     topic STRING (INT16 length, UTF-8), partition INT32
    value   upstream INT64, downstream INT64; then, of the run that ends there, the first source offset INT64

A note:

    key     topic, partition: the kind
    value   INT64 -1, INT64 -1, then by kind
            of a topic          -1: its id at the source (16 bytes, zeros if unknown): the runs of offsets before this
                                record are of another topic of that name
                                -2: the id of its copy at the target (16 bytes)
            of the empty name   -1: the prefix of the copies, UTF-8
                                -2: the process that has begun last, JSON: `VERSION`, its id, how long to wait for
                                it, ... A process that finds another version in it ends before it changes anything
                                -3: the id of the last process that has ended in order, UTF-8
                                -4: clusters by prefix, JSON: where the target's topics with that prefix come from
"""

from __future__ import annotations

import json
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from struct import Struct, error as StructError
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.durable import check_version
from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin, Consumer, ConsumerRecord
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import ConfigError, DecodeError, ErrorCode, ProtocolError, RequestTimedOut
from spark_klog.protocol.tables.records import EARLIEST, LATEST, READ_COMMITTED

VERSION = 1
ORIGINAL, COPY = -1, -2
PREFIX, OWNER, RELEASE, ORIGINS = -1, -2, -3, -4
_UNKNOWN = UUID(int=0)
_NO_OFFSETS = Struct(">qq").pack(-1, -1)
_SECONDS = 60.0
_MOST_COPIES = 3
_LENGTH, _PARTITION, _VALUE, _MM2_VALUE = Struct(">h"), Struct(">i"), Struct(">qqq"), Struct(">qq")
#: The most runs of a partition that are kept; older offsets are then mapped to an earlier record.
_MOST_RUNS = 10_000


class Run(NamedTuple):
    """The source's offsets [first, upstream) are the target's offsets up to `downstream`; it may be empty."""

    first: int
    upstream: int
    downstream: int

    @property
    def is_empty(self) -> bool:
        return self.first == self.upstream

    @property
    def shift(self) -> int:
        return self.downstream - self.upstream


class PartitionMap:
    """The map from a partition's offsets at the source to the target's: runs, by offset.

    A run is of consecutive offsets at the source that are consecutive at the target, too. A gap on either side (markers
    of transactions, compaction, records of other producers) begins another run. The last run ends at the mirror's
    position, so the map is also its progress.
    """

    def __init__(self) -> None:
        self._runs: list[Run] = []
        #: How many runs at the end have changed since `take_changes`.
        self._changed = 0

    @property
    def position(self) -> int | None:
        """The source's offset up to which the partition is mirrored; None before the first run."""
        return self._runs[-1].upstream if self._runs else None

    @property
    def downstream(self) -> int:
        """The target's offset after the last record that was written; 0 before the first."""
        return self._runs[-1].downstream if self._runs else 0

    def load(self, run: Run) -> None:
        """Add a run as it was written; one that begins before the end of the last replaces what it overlaps."""
        while self._runs and self._runs[-1].upstream > run.first:
            self._runs.pop()
        if not (run.is_empty and self._runs and self._runs[-1].upstream == run.upstream):
            self._add(run)

    def copied(self, first: int, count: int, target: int) -> None:
        """Note records that were written: `count` from the source's offset `first`, at the target's from `target`."""
        last = self._runs[-1] if self._runs else None
        if last is not None and (last.upstream, last.downstream) == (first, target):
            self._runs[-1] = Run(last.first, first + count, target + count)
            self._changed = max(self._changed, 1)
        else:
            self._changed += self._add(Run(first, first + count, target + count))

    def moved(self, position: int) -> None:
        """Note that nothing is left to copy before this source offset."""
        last = self._runs[-1] if self._runs else None
        if last is None or last.upstream < position:
            self._changed += self._add(Run(position, position, 0 if last is None else last.downstream))

    def write_again(self) -> None:
        """Make the last run part of the next changes."""
        self._changed = max(self._changed, min(1, len(self._runs)))

    def take_changes(self) -> list[Run]:
        """The runs to write, in order: all that have changed since the last call."""
        changed = self._runs[len(self._runs) - self._changed :]
        self._changed = 0
        return changed

    def translate(self, offset: int) -> int | None:
        """The target's offset to read from instead of the source's `offset`; never too late.

        Exact within a run; else the end of the run before it. None before the first known run: read from the beginning.
        """
        index = bisect_right(self._runs, offset, key=lambda run: run.upstream)
        if index < len(self._runs) and self._runs[index].first <= offset:
            return offset + self._runs[index].shift
        return self._runs[index - 1].downstream if index else None

    def _add(self, run: Run) -> bool:
        """Append a run, in place of an empty one that ends where it begins; return whether more runs have changed."""
        if self._runs and self._runs[-1].is_empty and self._runs[-1].upstream == run.first:
            self._runs[-1] = run
            return not self._changed
        self._runs.append(run)
        if len(self._runs) > _MOST_RUNS:
            del self._runs[: _MOST_RUNS // 10]
            self._changed = min(self._changed, len(self._runs) - 1)
        return True


def encode_run(key: TopicPartition, run: Run) -> tuple[bytes, bytes]:
    return encode_key(key), _VALUE.pack(run.upstream, run.downstream, run.first)


def encode_key(key: TopicPartition) -> bytes:
    name = key[0].encode()
    return _LENGTH.pack(len(name)) + name + _PARTITION.pack(key[1])


def decode_key(key: bytes) -> TopicPartition:
    """Decode a record's key; `DecodeError`."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(key)[0]
        if len(key) != end + _PARTITION.size:
            raise DecodeError(f"a key of {len(key)} bytes holds no topic and partition")
        return key[_LENGTH.size : end].decode(), _PARTITION.unpack_from(key, end)[0]
    except (StructError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a record of a mirror's offsets: {error}") from None


def decode_run(value: bytes) -> Run:
    """Decode the value of a partition's record; one of MirrorMaker 2 is an empty run. `DecodeError`."""
    try:
        upstream, downstream = _MM2_VALUE.unpack_from(value)
        first = _VALUE.unpack_from(value)[2] if len(value) >= _VALUE.size else upstream
    except StructError as error:
        raise DecodeError(f"not a record of a mirror's offsets: {error}") from None
    return Run(min(first, upstream), upstream, downstream)


@dataclass(frozen=True)
class Owner:
    """The process that mirrors a slot; another one has `seconds` to wait until this one has noticed it."""

    id: str
    seconds: float
    is_transactional: bool


def _decoded_owner(data: bytes) -> Owner:
    fields = json.loads(data)
    check_version(fields["version"], VERSION, "the mirror's topic", "mirror by another --name", DecodeError)
    return Owner(str(fields["id"]), float(fields["seconds"]), bool(fields["is_transactional"]))


@dataclass
class Progress:
    """The content of the mirror's topic: maps of offsets, ids of topics, the prefix (None: never written)."""

    maps: dict[TopicPartition, PartitionMap] = field(default_factory=dict)
    topic_ids: dict[str, UUID] = field(default_factory=dict)
    #: The ids of the copies, by the names of topics at the source.
    copy_ids: dict[str, UUID] = field(default_factory=dict)
    prefix: str | None = None
    #: The ids of the clusters that topics of the target come from, by the topics' prefix.
    origins: dict[str, str] = field(default_factory=dict)
    #: The processes that have begun, in order; compaction may have left the last one only.
    owners: list[Owner] = field(default_factory=list)
    released: str = ""

    def load(self, key: bytes, value: bytes) -> None:
        """Take in a record, in the order of the topic; `DecodeError` if it is not a mirror's."""
        topic, kind = decode_key(key)
        if kind >= 0:
            self.maps.setdefault((topic, kind), PartitionMap()).load(decode_run(value))
            return
        rest = value[len(_NO_OFFSETS) :]
        try:
            if topic and kind == COPY:
                self.copy_ids[topic] = UUID(bytes=rest)
            elif topic:
                topic_id = UUID(bytes=rest)
                self.forget(topic)
                self.topic_ids.pop(topic, None)
                if topic_id != _UNKNOWN:
                    self.topic_ids[topic] = topic_id
            elif kind == PREFIX:
                self.prefix = rest.decode()
            elif kind == OWNER:
                self.owners.append(_decoded_owner(rest))
            elif kind == RELEASE:
                self.released = rest.decode()
            elif kind == ORIGINS:
                self.origins = dict(json.loads(rest))
        except DecodeError:
            raise
        except (ValueError, TypeError, StructError, KeyError) as error:
            raise DecodeError(f"not a record of a mirror's topics: {error}") from None

    def forget(self, topic: str) -> None:
        for key in [key for key in self.maps if key[0] == topic]:
            del self.maps[key]

    def check_prefix(self, name: str, prefix: str) -> None:
        """Raise `ConfigError` if the mirror wrote to topics with another prefix before."""
        if self.prefix is not None and self.prefix != prefix:
            raise ConfigError(
                f"the mirror {name} writes to topics with the prefix {self.prefix!r}, not {prefix!r}: give this copy "
                "another name (--name)"
            )


def topic_record(topic: str, topic_id: UUID | None, kind: int = ORIGINAL) -> tuple[bytes, bytes]:
    """The record (key, value) of the id of a topic at the source, or with the kind `COPY` of its copy."""
    return encode_key((topic, kind)), _NO_OFFSETS + (topic_id or _UNKNOWN).bytes


def note_record(kind: int, text: str) -> tuple[bytes, bytes]:
    """The record (key, value) of a note on the mirror: `PREFIX`, `OWNER`, `RELEASE` or `ORIGINS`."""
    return encode_key(("", kind)), _NO_OFFSETS + text.encode()


def progress_topic(name: str) -> str:
    return f"klog-mirror.{name}.internal"


def slot_of(key: TopicPartition, slots: int) -> int:
    """The slot that mirrors a partition; partitions of a topic take turns."""
    return (zlib.crc32(key[0].encode()) + key[1]) % slots


def prepare_progress(admin: Admin, name: str, slots: int | None = None, default: int = 1) -> int:
    """Make the topic of a mirror if it is missing, with `slots` or `default`; return its number of slots.

    `ConfigError` if it has another number of slots than the given one. Raises what `Admin` raises.
    """
    topic = progress_topic(name)
    if all(listed.name != topic for listed in admin.list_topics()):
        copies = max(1, min(_MOST_COPIES, len(admin.cluster.nodes)))
        try:
            admin.create_topic(
                topic, slots or default, replication_factor=copies, configs={"cleanup.policy": "compact"}
            )
        except ProtocolError as error:
            if error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
    there = len(admin.describe_topic(topic).partitions)
    if slots is not None and slots != there:
        raise ConfigError(
            f"the mirror {name} runs as {there} {'process' if there == 1 else 'tasks'}, not {slots}: its topic {topic} "
            f"has {there} partitions. Use {'klog mirror' if there == 1 else 'jobs/mirror.py'}, or another name"
        )
    return there


class ProgressReader:
    """Reads a slot's partition of a mirror's topic: what is noted, and later which process has begun since."""

    def __init__(self, settings: Mapping[str, str], admin: Admin, topic: str, slot: int) -> None:
        self._admin, self._key = admin, (topic, slot)
        self.progress = Progress()
        own = {"isolation.level": "read_committed", "auto.offset.reset": "earliest", "enable.auto.commit": "false"}
        self._consumer = Consumer({**settings, **own})
        self._consumer.assign([(*self._key, EARLIEST)])

    def close(self) -> None:
        self._consumer.close()

    def load(self, *, notes_only: bool = False) -> Progress:
        """What is noted of the slot's partitions now. `DecodeError` if the topic holds other records.

        With `notes_only` without the maps of offsets, which may be large, and other records of topics.
        """
        key = self._key
        end = list_offsets(self._admin.cluster, {key: LATEST}, READ_COMMITTED)[key]
        until = time.monotonic() + _SECONDS
        while self._consumer.position(*key) < end:
            records = self._consumer.poll(1.0)
            self._take_in(records, lambda key: key[0] == "" or not notes_only)
            if records:
                until = time.monotonic() + _SECONDS
            elif time.monotonic() > until:
                raise RequestTimedOut(f"the offsets in topic {key[0]} could not be read within {_SECONDS:g} s")
        return self.progress

    def look(self) -> None:
        """Take in which process has begun since, without waiting; the mirror's own records come back, too."""
        while records := self._consumer.poll(0.0):
            self._take_in(records, lambda key: key == ("", OWNER))

    def _take_in(self, records: Iterable[ConsumerRecord], is_wanted: Callable[[TopicPartition], bool]) -> None:
        for record in records:
            if record.key is not None and record.value is not None and is_wanted(decode_key(record.key)):
                self.progress.load(record.key, record.value)
