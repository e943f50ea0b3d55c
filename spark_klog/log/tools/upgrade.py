"""Convert logs of Kafka 0.7 to record batches of magic 2, in a data directory for current brokers.

A message becomes a record without key and timestamp (-1) whose value is the payload, as when Kafka converts old
messages. A compressed message set becomes one batch with the same codec; uncompressed messages are gathered into
batches. New offsets start at 0, whatever the first old offset is.

A map from old to new offsets is written beside each partition's log, to translate positions that consumers stored:

    offsets-of-kafka-0.7        text, a line ends with a newline
        0                       version
        0 0                     a line for each message of the old log, in order: its offset (a byte position in the
        25 1                    old log), and the offset of its first record in the new log
        311 16
        ...
        88123 9230              the last line: the end offsets of both logs

A partition is written in NEW/.klog-upgrade, flushed and then renamed, so that a partial one is never mistaken for a
complete one. After an interruption run the upgrade again: it skips the partitions that are complete. Apache Kafka does
not start on a directory that still has .klog-upgrade; the next run removes it.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from uuid import UUID, uuid4

from spark_klog.base.durable import sync_folder
from spark_klog.base.names import check_topic_name
from spark_klog.errors import ConfigError, DecodeError, KlogError, LogCorrupted
from spark_klog.files.folder import LocalFolder
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import FileSystem, locked
from spark_klog.log.layout import check_data_directory
from spark_klog.log.partition_files import PARTITION_METADATA, SUFFIX_07, partition_of_folder, read_topic_id
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.segment import LOG
from spark_klog.log.stored.partition_07 import StoredPartition07
from spark_klog.records import kernels
from spark_klog.records.contract import NO_TIMESTAMP, BinaryColumn, Kernel, RecordColumns
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.wire.codecs import NONE, Codec, codec_by_id

OFFSET_MAP = "offsets-of-kafka-0.7"
_MAP_VERSION = b"0\n"
#: Bytes that a line of the map has at most: two 64-bit numbers.
_MOST_LINE = 42
_UNFINISHED = ".klog-upgrade"
#: Approximate size of the batches that uncompressed messages are gathered into, in bytes.
_BATCH_BYTES = 64 * 1024
_RECORD_OVERHEAD = 8
_NO_LIMIT = 1 << 62
# The batch made from one compressed message may be larger than the default max.message.bytes.
_CONFIG = LogConfig(max_message_bytes=(1 << 31) - 1)

#: Called with the name of a partition's folder, and how many bytes of its old log are done.
Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Upgraded:
    """A converted partition: its folder's name, the old log's first and end offset, the new log's end offset.

    The new log begins at 0. `done_before` is set if an earlier run converted it.
    """

    partition: str
    old_start: int
    old_end: int
    new_end: int
    done_before: bool = False


@dataclass(frozen=True, slots=True)
class NotUpgraded:
    """A partition that was not converted, and why. Nothing of it was written."""

    partition: str
    error: KlogError


def upgrade(
    old: Path, new: Path, progress: Progress | None = None, *, topic_ids: bool = True
) -> list[Upgraded | NotUpgraded]:
    """Write the logs of `old`, a data directory of Kafka 0.7 or a partition's folder, to the data directory `new`.

    A log is not converted if it is damaged, ends with a partial message, lies beside records of a later broker, or if
    its folder in `new` already has data; the other logs are. Without `topic_ids` no partition.metadata is written:
    Apache Kafka writes it when the topic is created there and refuses another id, while the broker of this project
    needs it. `ConfigError` if `old` holds no log of Kafka 0.7, `DataDirectoryError` if `new` can't be used as a data
    directory, `LogDirLocked` if a broker runs on it, OSError.
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


def old_logs_size(old: Path) -> int:
    """Total bytes of the logs that `upgrade` would read; `ConfigError`, OSError."""
    return sum(path.stat().st_size for folder in _old_folders(old) for path in folder.glob(f"*{SUFFIX_07}"))


def _old_folders(old: Path) -> list[Path]:
    if any(old.glob(f"*{SUFFIX_07}")):
        return [old.absolute()]
    folders = [path for path in sorted(old.iterdir()) if path.is_dir() and partition_of_folder(path.name)]
    if not any(next(folder.glob(f"*{SUFFIX_07}"), None) for folder in folders):
        of_today = [folder.name for folder in [*folders, old.absolute()] if any(folder.glob(f"*{LOG}"))]
        if of_today:
            more = f" and {len(of_today) - 1} more" if len(of_today) > 1 else ""
            raise ConfigError(
                f"{old} holds logs of today's format ({of_today[0]}{more}) and none of Kafka 0.7: there is nothing to "
                "upgrade, a broker can start on it"
            )
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
    """The result of an earlier run for this log; None if `target` is missing or empty, otherwise `ConfigError`."""
    if not target.exists() or not any(target.iterdir()):
        return None
    _, log = _old_log(folder)
    try:
        (old_start, _), (old_end, new_end) = _ends_of_map(target / OFFSET_MAP)
    except FileNotFoundError:
        raise ConfigError(f"{target} exists, but was not upgraded from Kafka 0.7; choose another NEW") from None
    if (old_start, old_end) != (log.start_offset, log.end_offset):
        raise ConfigError(
            f"{target} was upgraded from a log with offsets {old_start} to {old_end}, {folder} has "
            f"{log.start_offset} to {log.end_offset}; remove {target} to upgrade it again, or choose another NEW"
        )
    return Upgraded(folder.name, old_start, old_end, new_end, done_before=True)


def _upgrade(
    folder: Path, work: Path, target: Path, ids: dict[str, UUID], progress: Progress | None, topic_ids: bool
) -> Upgraded:
    topic, log = _old_log(folder)
    check_topic_name(topic)
    if later := [path.name for path in sorted(folder.glob(f"*{LOG}")) if path.stat().st_size]:
        raise ConfigError(
            f"{folder} holds records of a later broker beside those of Kafka 0.7: {', '.join(later)}; move these .log "
            "files elsewhere to upgrade the others (klog log dump shows what they hold)"
        )
    position, size = log.tail
    if size > 0:
        raise DecodeError(
            f"{log.paths[-1]} at position {position}: {size} bytes are not a complete message; if a crash "
            f"has left them, truncate the file to {position} bytes to upgrade without them"
        )
    unfinished = work / folder.name
    try:
        new_end = _write(log, unfinished, _topic_id(topic, target.parent, ids), progress)
        if not topic_ids:
            (unfinished / PARTITION_METADATA).unlink()
        for path in (*unfinished.iterdir(), unfinished):
            sync_folder(path)
        unfinished.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Upgraded(folder.name, log.start_offset, log.end_offset, new_end)


def _old_log(folder: Path) -> tuple[str, StoredPartition07]:
    """The topic and the log in a folder, if it can be upgraded as a whole."""
    parsed = partition_of_folder(folder.name)
    if parsed is None:
        raise ConfigError(f"{folder} is not named TOPIC-PARTITION")
    log = StoredPartition07(LocalFolder("."), str(folder), *parsed)
    if log.misnamed:
        name = log.misnamed[0]
        raise DecodeError(
            f"{folder / name}: a {SUFFIX_07} file is named by the offset of its first byte, not "
            f"{name.removesuffix(SUFFIX_07)}"
        )
    if log.is_empty:
        raise ConfigError(f"{folder} has no log of Kafka 0.7: it contains no {SUFFIX_07} file")
    for _, problem in log.holes():
        raise LogCorrupted(problem)
    if log.damage is not None:
        raise log.damage
    return parsed[0], log


def _topic_id(topic: str, new: Path, ids: dict[str, UUID]) -> UUID:
    """One id for all partitions of a topic: that of its partitions in `new`, or else a random one."""
    if topic not in ids:
        there = [path for path in sorted(new.iterdir()) if (partition_of_folder(path.name) or ("",))[0] == topic]
        known = (read_topic_id(FileSystem(), path) for path in there)
        ids[topic] = next(filter(None, known), None) or uuid4()
    return ids[topic]


def _write(log: StoredPartition07, folder: Path, topic_id: UUID, progress: Progress | None) -> int:
    """Write the new log and the offset map; return the new log's end offset."""
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
                    progress(folder.name, end - log.start_offset)
            offsets.write(b"%d %d\n" % (log.end_offset, new.end_offset))
    finally:
        new.close()
    return new.end_offset


def _batches(log: StoredPartition07) -> Iterator[tuple[list[tuple[int, int]], Codec, list[bytes], int]]:
    """Yield batches to write: [(old offset of a message, index of its first record)], codec, payloads, old end."""
    mapped: list[tuple[int, int]] = []
    payloads: list[bytes] = []
    size = 0
    for message, records in log.messages():
        if message.codec_id and mapped:
            yield mapped, NONE, payloads, message.offset
            mapped, payloads, size = [], [], 0
        mapped.append((message.offset, len(payloads)))
        payloads += (record.value or b"" for record in records)
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


def _ends_of_map(path: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and the last line of an offset map: (old, new) offset of the first message, and the ends."""
    with path.open("rb") as file:
        version, first = file.readline(_MOST_LINE), file.readline(_MOST_LINE)
        file.seek(max(len(version), file.seek(0, 2) - _MOST_LINE))
        last = file.read().splitlines(keepends=True)[-1:]
    try:
        (old_start, new_start), (old_end, new_end) = (map(int, line.split(b" ")) for line in (first, *last))
        if version != _MAP_VERSION or not last[0].endswith(b"\n"):
            raise ValueError
    except ValueError:
        raise DecodeError(f"{path} is not a map of offsets; upgrade the partition again") from None
    return (old_start, new_start), (old_end, new_end)
