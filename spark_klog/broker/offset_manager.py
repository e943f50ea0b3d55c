"""The offset manager: the offsets that groups commit, kept in the topic __consumer_offsets (1.0 chapter
"Consumer Offset Tracking").

    key    INT16 version 1, STRING group, STRING topic, INT32 partition
    value  INT16 version 3, INT64 offset, INT32 leader epoch, STRING metadata, INT64 commit time (ms); null: deleted

A commit is answered after it has been appended; fetches are answered from memory, which is filled from the log at
start. Values of versions 0-2, as older Kafka wrote them, are read too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.log.partition_log import PartitionLog
from spark_klog.records.batch_v2 import build_batch
from spark_klog.records.reader import read_records
from spark_klog.records.reference import append_record
from spark_klog.wire.primitives import Buffer, Reader, Writer

_log = logging.getLogger(__name__)

OFFSETS_TOPIC = "__consumer_offsets"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, "__transaction_state"})
_OFFSET_KEY_VERSIONS = (0, 1)
_READ_BYTES = 4 * 1024 * 1024


class Committed(NamedTuple):
    """A committed offset. `timestamp` is the commit's, in ms."""

    offset: int
    leader_epoch: int
    metadata: str
    timestamp: int


def java_hash(text: str) -> int:
    """java.lang.String.hashCode, which Kafka chooses a group's partition by."""
    result = 0
    data = text.encode("utf-16-be")
    for position in range(0, len(data), 2):
        result = (31 * result + int.from_bytes(data[position : position + 2], "big")) & 0xFFFFFFFF
    return result - (1 << 32) if result >= 1 << 31 else result


def partition_for(group: str, partitions: int) -> int:
    """The partition of __consumer_offsets that holds the group (Kafka: Utils.abs(hash) % partitions)."""
    return (java_hash(group) & 0x7FFFFFFF) % partitions


def _key(group: str, topic: str, partition: int) -> bytes:
    writer = Writer()
    writer.int16(1)
    writer.nullable_string(group)
    writer.nullable_string(topic)
    writer.int32(partition)
    return writer.to_bytes()


def _value(committed: Committed) -> bytes:
    writer = Writer()
    writer.int16(3)
    writer.int64(committed.offset)
    writer.int32(committed.leader_epoch)
    writer.nullable_string(committed.metadata)
    writer.int64(committed.timestamp)
    return writer.to_bytes()


def _parse_key(data: Buffer) -> tuple[str, str, int] | None:
    reader = Reader(data)
    if reader.int16() not in _OFFSET_KEY_VERSIONS:
        return None
    return reader.nullable_string() or "", reader.nullable_string() or "", reader.int32()


def _parse_value(data: Buffer) -> Committed:
    reader = Reader(data)
    version = reader.int16()
    if not 0 <= version <= 3:
        raise DecodeError(f"committed offset of unknown version {version}")
    offset = reader.int64()
    leader_epoch = reader.int32() if version == 3 else -1
    return Committed(offset, leader_epoch, reader.nullable_string() or "", reader.int64())


class OffsetManager:
    """All committed offsets of the groups whose partitions this broker leads."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[str, int], Committed]] = {}

    def load(self, log: PartitionLog) -> None:
        """Take in what a partition of __consumer_offsets holds; later records win."""
        count = 0
        offset = log.start_offset
        while (found := log.read(offset, _READ_BYTES)) is not None:
            last = offset
            for record in read_records(found.read()):
                last = record.offset
                key = _parse_key(record.key) if record.key else None
                if key is None:
                    continue
                group, topic, partition = key
                offsets = self._groups.setdefault(group, {})
                if record.value is None:
                    offsets.pop((topic, partition), None)
                else:
                    offsets[topic, partition] = _parse_value(record.value)
                count += 1
            offset = max(last, offset) + 1
        _log.info("loaded %d commits from %s", count, log.directory.name)

    def commit(self, log: PartitionLog, group: str, offsets: dict[tuple[str, int], tuple[int, int, str]]) -> None:
        """Append commits of (offset, leader epoch, metadata) to the group's partition; OSError where that fails."""
        now = time.time_ns() // 1_000_000
        committed = {key: Committed(*entry, now) for key, entry in offsets.items()}
        records = bytearray()
        for delta, ((topic, partition), entry) in enumerate(committed.items()):
            append_record(records, 0, delta, _key(group, topic, partition), _value(entry))
        batch = bytearray(build_batch(records, len(committed), base_timestamp=now, max_timestamp=now))
        log.append(memoryview(batch))
        self._groups.setdefault(group, {}).update(committed)

    def fetch(self, group: str, topic: str, partition: int) -> Committed | None:
        return self._groups.get(group, {}).get((topic, partition))

    def all(self, group: str) -> Iterator[tuple[str, int, Committed]]:
        """(topic, partition, committed) of everything the group committed."""
        for (topic, partition), committed in sorted(self._groups.get(group, {}).items()):
            yield topic, partition, committed

    def everything(self) -> Iterator[tuple[str, str, int, Committed]]:
        """(group, topic, partition, committed) of all groups; commits may come in between."""
        for group in sorted(self._groups):
            for topic, partition, committed in self.all(group):
                yield group, topic, partition, committed

    def forget_topic(self, topic: str) -> None:
        """Drop the topic's offsets from memory."""
        for offsets in self._groups.values():
            for key in [key for key in offsets if key[0] == topic]:
                del offsets[key]
