"""Logs of Kafka 0.7 written anew in today's format: record batches of magic 2, in a data directory for today's brokers.

What becomes of a message: its payload is the value of a record without key and timestamp (-1), as when Kafka converts
old messages; a compressed set becomes a batch with the same codec, its messages records of it. Plain messages are
gathered into batches. New offsets count from 0 on, whatever the old ones began with.

The map from old to new offsets lies beside each partition's log, for positions that consumers have kept:

    offsets-of-kafka-0.7        text, a line ends with a newline
        0                       version
        0 0                     a line for each message of the old log, in order: its offset (a byte position in the
        25 1                    old log), and the offset of its first record in the new one
        311 16
        ...
        88123 9230              the last line: the ends of both logs

A partition is written in NEW/.klog-upgrade and renamed when it is on the disk as a whole, so that half of one is never
taken for a whole. A run that was cut short is repeated, and leaves what is done as it is. Apache Kafka does not start
where .klog-upgrade was left behind; the next run removes it.
"""

from __future__ import annotations

import mmap
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from uuid import UUID, uuid4

from spark_klog.errors import ConfigError, DecodeError, KlogError, OffsetOutOfRange
from spark_klog.log.config import LogConfig
from spark_klog.log.layout import check_data_directory
from spark_klog.log.lock import locked
from spark_klog.log.log_07 import Log07, NoMessageAtOffset
from spark_klog.log.names import SUFFIX_07, check_topic_name, partition_of_folder
from spark_klog.log.partition_files import PARTITION_METADATA, read_topic_id
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segment import LOG
from spark_klog.records import kernels
from spark_klog.records.batch_v2 import build_batch
from spark_klog.records.contract import NO_TIMESTAMP, BinaryColumn, Kernel, RecordColumns
from spark_klog.wire.codecs import NONE, Codec, codec_by_id

OFFSET_MAP = "offsets-of-kafka-0.7"
_MAP_VERSION = b"0\n"
_UNFINISHED = ".klog-upgrade"
#: Plain messages are gathered into batches of about so many bytes.
_BATCH_BYTES = 64 * 1024
_RECORD_OVERHEAD = 8
_NO_LIMIT = 1 << 62
# A batch that holds what one message held may be larger than brokers take of producers today.
_CONFIG = LogConfig(max_message_bytes=(1 << 31) - 1)

#: Called with a partition's folder, and how many bytes of its old log are done.
Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Upgraded:
    """A partition that is in the new format: its folder's name, the old log's offsets and the new one's end.

    The new log begins at 0. `done_before`: an earlier run had made it.
    """

    partition: str
    old_start: int
    old_end: int
    new_end: int
    done_before: bool = False


@dataclass(frozen=True, slots=True)
class NotUpgraded:
    """A partition of which nothing was written, and why."""

    partition: str
    error: KlogError


def upgrade(
    old: Path, new: Path, progress: Progress | None = None, *, topic_ids: bool = True
) -> list[Upgraded | NotUpgraded]:
    """Write the logs of `old`, a data directory of Kafka 0.7 or a partition's folder, to the data directory `new`.

    A damaged log, one that ends with half a message, one with records of a later broker beside it, and one whose folder
    in `new` has data already are not upgraded; the others are. Without `topic_ids` there is no partition.metadata:
    Apache Kafka writes it when the topic is created there, and would refuse another topic's id; a broker of ours needs
    it. `ConfigError` where `old` holds no log of Kafka 0.7, `DataDirectoryError` where `new` can be no data directory,
    `LogDirLocked` where a broker runs on it, OSError.
    """
    folders = _old_folders(old)
    check_data_directory(new)
    new.mkdir(parents=True, exist_ok=True)
    results: list[Upgraded | NotUpgraded] = []
    with locked(new), _work_folder(new) as work:
        ids: dict[str, UUID] = {}
        for folder in folders:
            target = new / folder.name
            try:
                done = _done_before(folder, target) or _upgrade(folder, work, target, ids, progress, topic_ids)
            except KlogError as error:
                results.append(NotUpgraded(folder.name, error))
            else:
                results.append(done)
    return results


def new_offset(folder: Path, old_offset: int) -> int:
    """The offset in the upgraded log `folder` of the first record of the message that had `old_offset`.

    The old log's end gives the new one's. `OffsetOutOfRange`, `NoMessageAtOffset` for an offset within a message,
    `DecodeError` where the map is damaged, OSError.
    """
    with _OffsetMap(folder) as offsets:
        return offsets.find(old_offset)


def old_logs_size(old: Path) -> int:
    """Bytes of the logs that `upgrade` would read; `ConfigError`, OSError."""
    return sum(path.stat().st_size for folder in _old_folders(old) for path in folder.glob(f"*{SUFFIX_07}"))


def _old_folders(old: Path) -> list[Path]:
    if any(old.glob(f"*{SUFFIX_07}")):
        return [old.absolute()]
    folders = [path for path in sorted(old.iterdir()) if path.is_dir() and partition_of_folder(path.name)]
    if not folders:
        raise ConfigError(f"{old} holds neither {SUFFIX_07} files nor folders named TOPIC-PARTITION")
    return folders


@contextmanager
def _work_folder(new: Path) -> Iterator[Path]:
    folder = new / _UNFINISHED
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _done_before(folder: Path, target: Path) -> Upgraded | None:
    """What an earlier run made of this very log; `ConfigError` where something else is there, None where nothing is."""
    if not target.exists() or not any(target.iterdir()):
        return None
    log = Log07(folder)
    try:
        with _OffsetMap(target) as offsets:
            (old_start, _), (old_end, new_end) = offsets.first, offsets.last
    except FileNotFoundError:
        raise ConfigError(f"{target} is there, but not upgraded from Kafka 0.7; choose another NEW") from None
    if (old_start, old_end) != (log.start_offset, log.end_offset):
        raise ConfigError(
            f"{target} was upgraded from a log with offsets {old_start} to {old_end}, {folder} has "
            f"{log.start_offset} to {log.end_offset}; remove {target} to upgrade it anew, or choose another NEW"
        )
    return Upgraded(folder.name, old_start, old_end, new_end, done_before=True)


def _upgrade(
    folder: Path, work: Path, target: Path, ids: dict[str, UUID], progress: Progress | None, topic_ids: bool
) -> Upgraded:
    log = Log07(folder)
    check_topic_name(log.topic)
    if later := [path.name for path in sorted(folder.glob(f"*{LOG}")) if path.stat().st_size]:
        raise ConfigError(
            f"{folder} holds records of a later broker beside those of Kafka 0.7: {', '.join(later)}; move these .log "
            "files elsewhere to upgrade the others (klog log dump shows what they hold)"
        )
    tail = log.tail
    if tail:
        raise DecodeError(
            f"{tail.path} at position {tail.position}: {tail.size} bytes are no whole message; where a crash has left "
            f"them, cut the file to {tail.position} bytes to go on without them"
        )
    unfinished = work / folder.name
    try:
        new_end = _write(log, unfinished, _topic_id(log.topic, target.parent, ids), progress)
        if not topic_ids:
            (unfinished / PARTITION_METADATA).unlink()
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        unfinished.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Upgraded(folder.name, log.start_offset, log.end_offset, new_end)


def _topic_id(topic: str, new: Path, ids: dict[str, UUID]) -> UUID:
    """One id for all partitions of a topic: that of those which are there already."""
    if topic not in ids:
        there = [
            path / PARTITION_METADATA
            for path in sorted(new.iterdir())
            if (partition_of_folder(path.name) or ("",))[0] == topic and (path / PARTITION_METADATA).exists()
        ]
        ids[topic] = read_topic_id(there[0]) if there else uuid4()
    return ids[topic]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(log: Log07, folder: Path, topic_id: UUID, progress: Progress | None) -> int:
    """Write the new log and the map; the new log's end offset."""
    kernel = kernels.load()
    new = PartitionLog(folder, _CONFIG, topic_id)
    try:
        with (folder / OFFSET_MAP).open("wb") as offsets:
            offsets.write(_MAP_VERSION)
            for mapped, codec, payloads, end in _batches(log):
                first = new.end_offset
                offsets.writelines(b"%d %d\n" % (old, first + ahead) for old, ahead in mapped)
                if payloads:
                    new.append(memoryview(_batch(kernel, payloads, codec)))
                if progress:
                    progress(log.directory.name, end - log.start_offset)
            offsets.write(b"%d %d\n" % (log.end_offset, new.end_offset))
    finally:
        new.close()
    return new.end_offset


def _batches(log: Log07) -> Iterator[tuple[list[tuple[int, int]], Codec, list[bytes], int]]:
    """What becomes a batch: [(old offset of a message, number of its first record)], codec, payloads, old end."""
    mapped: list[tuple[int, int]] = []
    payloads: list[bytes] = []
    size = 0
    for message in log.messages(log.start_offset):
        if message.codec_id and mapped:
            yield mapped, NONE, payloads, message.offset
            mapped, payloads, size = [], [], 0
        mapped.append((message.offset, len(payloads)))
        if message.codec_id:
            payloads += (record.value or b"" for record in log.records(message))
        else:
            payloads.append(bytes(message.payload))
        size += _RECORD_OVERHEAD + len(message.payload)
        if message.codec_id or size >= _BATCH_BYTES:
            yield mapped, codec_by_id(message.codec_id), payloads, message.next_offset
            mapped, payloads, size = [], [], 0
    if mapped:
        yield mapped, NONE, payloads, log.end_offset


def _batch(kernel: Kernel, payloads: list[bytes], codec: Codec) -> bytearray:
    ends = array("i", accumulate(map(len, payloads), initial=0))
    columns = RecordColumns(
        len(payloads),
        value=BinaryColumn(ends.tobytes(), b"".join(payloads), None, 0),
        timestamp=array("q", [NO_TIMESTAMP] * len(payloads)).tobytes(),
    )
    body, *_ = kernel.encode(columns, 0, _NO_LIMIT)
    batch = build_batch(body, len(payloads), base_timestamp=NO_TIMESTAMP, max_timestamp=NO_TIMESTAMP, codec=codec)
    return bytearray(batch)


class _OffsetMap:
    """An open map of offsets; see the module for its bytes. Lines are found by halving: nothing is loaded."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / OFFSET_MAP
        self._folder = folder
        with self._path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise self._damaged(0) from None
        if self._data[: len(_MAP_VERSION)] != _MAP_VERSION or self._data[-1:] != b"\n":
            raise self._damaged(0)

    def __enter__(self) -> _OffsetMap:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    @property
    def first(self) -> tuple[int, int]:
        """(old, new) of the first message."""
        return self._line(len(_MAP_VERSION))

    @property
    def last(self) -> tuple[int, int]:
        """(old, new) end offset."""
        return self._line(self._data.rfind(b"\n", 0, len(self._data) - 1) + 1)

    def find(self, old: int) -> int:
        """See `new_offset`."""
        topic, partition = partition_of_folder(self._folder.absolute().name) or (str(self._folder), 0)
        start, end = self.first[0], self.last[0]
        if not start <= old <= end:
            raise OffsetOutOfRange(topic, partition, (old, old), (start, end))
        low, high = len(_MAP_VERSION), len(self._data)  # where lines begin: that of `low` is not above `old`
        while True:
            middle = (low + high) // 2
            at = self._data.rfind(b"\n", low, middle) + 1 or low
            if at == low:
                at = self._data.find(b"\n", middle) + 1
            if at >= high:
                break
            if self._line(at)[0] <= old:
                low = at
            else:
                high = at
        found, new = self._line(low)
        if found != old:
            after = self._line(self._data.find(b"\n", low) + 1)[0]
            raise NoMessageAtOffset(topic, partition, str(self._path), old, found, after)
        return new

    def _line(self, at: int) -> tuple[int, int]:
        try:
            old, new = self._data[at : self._data.find(b"\n", at)].split(b" ")
            return int(old), int(new)
        except ValueError:
            raise self._damaged(at) from None

    def _damaged(self, position: int) -> DecodeError:
        return DecodeError(f"{self._path} at position {position} is no map of offsets; upgrade the partition again")
