"""The log of one topic-partition: a folder of segments.

    TOPIC-PARTITION/
        00000000000000000000.log .index .timeindex      see segment.py
        partition.metadata                              "version: 0", "topic_id: " and 22 characters of base64
        leader-epoch-checkpoint                         "0", entry count, then "EPOCH START_OFFSET" lines
        klog.json                                       the topic's own values of `LogConfig`, where it has some

Appended offsets are dense. Readers see the segment list as it was when they looked: it is replaced, never changed.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from uuid import UUID, uuid4

from spark_klog.errors import ConfigError, DecodeError, LogCorrupted, OffsetOutOfRange
from spark_klog.log.segment import MAX_RELATIVE_OFFSET, FileRange, Segment
from spark_klog.records.assignment import assign_offsets
from spark_klog.records.batch import Header, iter_batches
from spark_klog.records.reader import records_of

_log = logging.getLogger(__name__)
_LEGAL_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_LEADER_EPOCH = 0


class BatchTooLarge(ConfigError):
    """A batch above `max.message.bytes`."""


@dataclass(frozen=True)
class LogConfig:
    """Sizes in bytes; Kafka's topic settings of the same names and defaults."""

    segment_bytes: int = 1024 * 1024 * 1024
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1024 * 1024 + 12


class Appended(NamedTuple):
    """What an append did: the offsets of the first and the last record."""

    base_offset: int
    last_offset: int


def check_topic_name(topic: str) -> None:
    """`ConfigError` for a name that Kafka refuses (letters, digits, '.', '_', '-'; at most 249)."""
    if topic in (".", "..") or not _LEGAL_TOPIC.fullmatch(topic):
        raise ConfigError(f"illegal topic name {topic[:300]!r}: 1 to 249 of a-z A-Z 0-9 . _ - are allowed")


def partition_of_folder(name: str) -> tuple[str, int] | None:
    """(topic, partition) of a folder's name, None for another folder."""
    topic, dash, partition = name.rpartition("-")
    return (topic, int(partition)) if dash and topic and partition.isdecimal() else None


class PartitionLog:
    """An open log. One thread at a time may append; `directory` is made where it is missing."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        topic_id: UUID | None = None,
        *,
        clean: bool = False,
        overrides: Mapping[str, int] | None = None,
    ) -> None:
        parsed = partition_of_folder(directory.name)
        if parsed is None:
            raise ConfigError(f"{directory} is not named TOPIC-PARTITION")
        self.topic, self.partition = parsed
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.config = self._own_config(config, overrides)
        self.topic_id = self._topic_id(topic_id)
        self._segments = self._open_segments()
        active = self._segments[-1]
        end_offset = active.next_offset() if clean else None
        if end_offset is None:
            active.recover()
            end_offset = active.next_offset()
            assert end_offset is not None
        self.end_offset = end_offset

    def _own_config(self, config: LogConfig, overrides: Mapping[str, int] | None) -> LogConfig:
        path = self.directory / "klog.json"
        if overrides:
            path.write_text(json.dumps(dict(overrides)))
        elif path.exists():
            overrides = json.loads(path.read_text())
        return replace(config, **overrides) if overrides else config

    def _topic_id(self, given: UUID | None) -> UUID:
        path = self.directory / "partition.metadata"
        if path.exists():
            match = re.search(r"^topic_id: *(\S{22})\s*$", path.read_text(), re.MULTILINE)
            if not match:
                raise LogCorrupted(f"{path} holds no topic id; restore it, or remove it to get a new one")
            return UUID(bytes=base64.urlsafe_b64decode(match[1] + "=="))
        topic_id = given or uuid4()
        encoded = base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")
        path.write_text(f"version: 0\ntopic_id: {encoded}\n")
        return topic_id

    def _open_segments(self) -> tuple[Segment, ...]:
        offsets = sorted(int(path.stem) for path in self.directory.glob("*.log") if path.stem.isdecimal())
        return tuple(self._segment(offset) for offset in offsets or [0])

    def _segment(self, base_offset: int) -> Segment:
        return Segment(self.directory, base_offset, self.config.index_interval_bytes)

    @property
    def start_offset(self) -> int:
        """The first offset that the log has, or would have."""
        return self._segments[0].base_offset

    @property
    def high_watermark(self) -> int:
        """The end of what consumers may read: without replication the end of the log."""
        return self.end_offset

    @property
    def size(self) -> int:
        """Bytes of all .log files."""
        return sum(segment.size for segment in self._segments)

    def append(self, records: memoryview) -> Appended:
        """Append whole batches, assigning their offsets (in place where it can be; `records` must be writable).

        `CorruptBatchError` for a wrong CRC, `DecodeError` for what is not whole batches, `BatchTooLarge`; OSError where
        the disk fails. Nothing is appended then.
        """
        largest = max((header.size for header, _ in iter_batches(records)), default=0)
        if largest > self.config.max_message_bytes:
            raise BatchTooLarge(
                f"batch of {largest} bytes for {self.directory.name}, max.message.bytes is "
                f"{self.config.max_message_bytes}"
            )
        try:
            assigned = assign_offsets(records, self.end_offset, leader_epoch=_LEADER_EPOCH)
        except DecodeError as error:
            raise type(error)(f"produced to {self.directory.name}: {error}") from None
        segment = self._segment_for(len(assigned.data), assigned.headers)
        first = self.end_offset
        if first == self.start_offset:
            self._write_leader_epochs(first)  # before the records: where it fails, nothing is appended
        segment.append(assigned.data, assigned.headers)
        self.end_offset = assigned.next_offset
        return Appended(first, assigned.next_offset - 1)

    def _segment_for(self, size: int, headers: list[Header]) -> Segment:
        """The active segment, after rolling where the batches would not fit."""
        active = self._segments[-1]
        relative_end = headers[-1].last_offset - active.base_offset
        if active.size and (active.size + size > self.config.segment_bytes or relative_end > MAX_RELATIVE_OFFSET):
            active.seal()
            active.flush()
            active = self._segment(self.end_offset)
            self._segments = (*self._segments, active)
            _log.info("%s rolled at offset %d", self.directory.name, self.end_offset)
        return active

    def _write_leader_epochs(self, start_offset: int) -> None:
        (self.directory / "leader-epoch-checkpoint").write_text(f"0\n1\n{_LEADER_EPOCH} {start_offset}\n")

    def read(self, offset: int, max_bytes: int) -> FileRange | None:
        """A range of one segment's file that begins with the batch that holds `offset`; at least one batch.

        None at the end of the log. `OffsetOutOfRange` before its start or beyond its end.
        """
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(self.topic, self.partition, (offset, offset), (self.start_offset, self.end_offset))
        segments = self._segments
        place = len(segments) - 1
        while segments[place].base_offset > offset:
            place -= 1
        for segment in segments[place:]:
            found = segment.read(offset, max_bytes)
            if found is not None:
                return found
        return None

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """(timestamp, offset) of the first record with a timestamp (ms) of `timestamp` or more, or None."""
        for segment in self._segments:
            if segment.max_timestamp[0] < timestamp:
                continue
            start = segment.offset_index.position_for(segment.time_index.offset_before(timestamp))
            for position, header in segment.headers(start):
                if header.max_timestamp < timestamp:
                    continue
                batch = memoryview(FileRange(segment.file, position, header.size).read())
                for record in records_of(header, batch):
                    if record.timestamp >= timestamp:
                        return record.timestamp, record.offset
        return None

    def max_timestamp(self) -> tuple[int, int] | None:
        """(timestamp, offset) of the record with the largest timestamp; None for an empty log."""
        timestamp = max(segment.max_timestamp[0] for segment in self._segments)
        return self.offset_for_timestamp(timestamp) if timestamp >= 0 else None

    def close(self) -> None:
        """Flush and close; a log that is closed so needs no recovery."""
        self._segments[-1].seal()
        self._segments[-1].flush()
        for segment in self._segments:
            segment.close()

    def retire(self, suffix: str) -> Path:
        """Rename the folder to one that is no partition's, and serve it no more; returns its new path.

        The .log files are closed by the last `FileRange` that holds them: a response may be under way, and a
        descriptor that is closed now could be another file's by then.
        """
        retired = self.directory.with_name(f"{self.directory.name}.{uuid4().hex}-{suffix}")
        self.directory.rename(retired)
        for segment in self._segments:
            segment.offset_index.close()
            segment.time_index.close()
        return retired

    def delete(self) -> None:
        """Remove the log. The folder is renamed first, so that a crash in between leaves no half a log."""
        shutil.rmtree(self.retire("delete"), ignore_errors=True)
