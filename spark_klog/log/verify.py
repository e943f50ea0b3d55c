"""Whether the files of a log are sound: for `klog log verify`. Nothing is changed, and damage is told, never raised.

.log and .kafka     each batch's checksum, structure and records; offsets grow, and lie between the segment's base
                    offset and the next one's; the files of Kafka 0.7 follow each other without a hole
.index, .timeindex  entries agree with the log; zeros that Kafka has preallocated may follow them in the newest segment
.txnindex           entries are the aborted transactions of the log
.snapshot           its checksum and structure
leader-epoch-checkpoint, partition.metadata     can be read

An index that is missing is no finding: brokers build it anew. Not protected by anything: the leader epoch in a batch's
header, its base offset where the offsets remain in order, the attributes of a message of Kafka 0.7, a topic id and
epochs that can be read, and what an entry of a .txnindex says where compaction or retention took the records. A log
that is being written to may end with a part of a batch, which is told: stop the broker first.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.log.dump import Damage, Dumped, dump
from spark_klog.log.dump_index import INDEX_SUFFIXES
from spark_klog.log.layout import check_no_cluster
from spark_klog.log.log_07 import files_07, hole_07
from spark_klog.log.names import SUFFIX_07, partition_of_folder
from spark_klog.log.partition_files import LEADER_EPOCHS, PARTITION_METADATA, read_leader_epochs, read_topic_id
from spark_klog.log.producer_state import SNAPSHOT, ProducerState
from spark_klog.log.segment import TRANSACTION_INDEX
from spark_klog.log.verify_index import Batch, Finding, OffsetIndexCheck, TimeIndexCheck, TransactionCheck
from spark_klog.records import kernels
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.records.contract import ColumnBuilder
from spark_klog.records.message_07 import Message07
from spark_klog.records.message_set import key_and_value
from spark_klog.records.reader import append_batch

_LOG = ".log"
_SUFFIXES = (_LOG, SUFFIX_07, *INDEX_SUFFIXES)
_SEGMENT_NAME = re.compile(r"[0-9]{20}")
_FIRST, _END = -(1 << 63), (1 << 63) - 1

#: Called with a .log or .kafka file, and how many of its bytes have been checked.
Progress = Callable[[Path, int], None]


def verify(path: Path, progress: Progress | None = None) -> Iterator[Finding]:
    """What is wrong with a data directory, the folder of a partition, or one of its files; files are read meanwhile.

    `ConfigError` where `path` is none of these. A file that can't be read is a finding.
    """
    if path.is_dir():
        for folder in _partitions(path):
            yield from _partition(folder, progress)
    elif reader := _reader(path):
        yield from _guarded(path, _small_file(path, reader))
    elif path.suffix == SUFFIX_07:
        yield from _guarded(path, _messages_07(path, progress))
    elif path.suffix in _SUFFIXES and (wrong := _misnamed(path)):
        yield wrong
    elif path.suffix == _LOG:
        yield from _guarded(path, _segment(path, _next_base(path), None, progress))
    elif path.suffix in INDEX_SUFFIXES:
        yield from _index(path, progress)
    else:
        raise ConfigError(f"{path} is no file of a log")


def log_files(path: Path) -> list[Path]:
    """The .log and .kafka files that `verify` would read; `ConfigError`, OSError."""
    if not path.is_dir():
        return [path] if path.suffix in (_LOG, SUFFIX_07) else []
    folders = _partitions(path)
    return [file for folder in folders for file in _files(folder) if file.suffix in (_LOG, SUFFIX_07)]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _partitions(path: Path) -> list[Path]:
    """The folders of partitions: of a data directory, or `path` itself."""
    if any(file.suffix in _SUFFIXES for file in _files(path)):
        return [path]
    check_no_cluster(path)
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and partition_of_folder(folder.name))
    if not folders and not partition_of_folder(path.absolute().name):
        raise ConfigError(f"{path} holds neither files of a log nor folders named TOPIC-PARTITION")
    return folders or [path]


def _guarded(path: Path, findings: Iterator[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except OSError as error:
        yield Finding(path, None, f"it can't be read: {error}")


def _partition(folder: Path, progress: Progress | None) -> Iterator[Finding]:
    files = _files(folder)
    segments: list[Path] = []
    for path in files:
        if path.suffix in (_LOG, *INDEX_SUFFIXES) and (wrong := _misnamed(path)):
            yield wrong
        elif path.suffix == _LOG:
            segments.append(path)
        elif path.suffix in INDEX_SUFFIXES and not path.with_suffix(_LOG).exists():
            yield Finding(path, None, f"there is no {path.stem}{_LOG} beside it")
        elif reader := _reader(path):
            yield from _guarded(path, _small_file(path, reader))
    yield from _log_07([path for path in files if path.suffix == SUFFIX_07], progress)
    transactions = TransactionCheck()
    for path, after in zip_longest(segments, segments[1:]):
        yield from _guarded(path, _segment(path, int(after.stem) if after else None, transactions, progress))


def _misnamed(path: Path) -> Finding | None:
    if _SEGMENT_NAME.fullmatch(path.stem):
        return None
    return Finding(path, None, f"a segment is named by the 20 digits of its first offset, not {path.stem}")


def _next_base(path: Path) -> int | None:
    """The base offset of the segment after this one, None for the newest."""
    others = (file.stem for file in path.parent.glob(f"*{_LOG}") if _SEGMENT_NAME.fullmatch(file.stem))
    return min((int(stem) for stem in others if stem > path.stem), default=None)


def _index(path: Path, progress: Progress | None) -> Iterator[Finding]:
    """An index alone: the log beside it is read, but nothing is said of it."""
    log = path.with_suffix(_LOG)
    if path.suffix == TRANSACTION_INDEX or not log.exists():
        findings = _partition(path.parent, progress)
    else:
        findings = _guarded(path, _segment(log, _next_base(log), None, progress))
    yield from (finding for finding in findings if finding.file == path)


def _reader(path: Path) -> Callable[[Path], object] | None:
    """What reads a small file of a partition's folder, and raises `DecodeError`; None for another file."""
    if path.suffix == SNAPSHOT:
        return lambda path: ProducerState.decode(path.read_bytes())
    readers: dict[str, Callable[[Path], object]] = {
        LEADER_EPOCHS: read_leader_epochs,
        PARTITION_METADATA: read_topic_id,
    }
    return readers.get(path.name)


def _small_file(path: Path, reader: Callable[[Path], object]) -> Iterator[Finding]:
    try:
        reader(path)
    except DecodeError as error:
        yield Finding(path, None, str(error))


def _segment(
    path: Path, next_base: int | None, transactions: TransactionCheck | None, progress: Progress | None
) -> Iterator[Finding]:
    """A .log file and its indexes; they are compared up to the first damage in the log."""
    checks = (OffsetIndexCheck(path, next_base is None), TimeIndexCheck(path, next_base is None))
    builder = kernels.load().builder(frozenset({"offset"}))
    base_offset = int(path.stem)
    last = base_offset - 1
    sound = True
    for found in dump(path):
        try:
            if isinstance(found, Damage):
                raise DecodeError(found.reason)
            batch = _checked(found, builder, base_offset, last, next_base)
            last = batch.last
            if transactions:
                assert not isinstance(found.header, Message07)
                transactions.batch(found.header, found.data, batch)
            if sound:
                for check in checks:
                    yield from check.batch(batch)
        except DecodeError as error:
            yield Finding(path, found.position, str(error))
            sound = False
        if progress:
            progress(path, found.position + found.size)
    for check in checks:
        yield from check.end(sound)
    if transactions:
        transactions.exact &= sound
        yield from transactions.segment_end(path)


def _checked(found: Dumped, builder: ColumnBuilder, base_offset: int, last: int, next_base: int | None) -> Batch:
    """The batch, whose records can be read; `DecodeError` where offsets are not in order, or of another segment."""
    header = found.header
    assert not isinstance(header, Message07)
    first, end = header.base_offset, header.last_offset
    if not isinstance(header, BatchHeader) and not header.codec_id:
        key_and_value(header, found.data)  # as quick a look as there is for messages one by one
    else:
        append_batch(builder, header, found.data, _FIRST, _END)
        offsets = array("q", bytes(builder.finish().offset or b""))
        if any(after <= before for before, after in pairwise(offsets)):
            raise DecodeError(f"offsets do not grow in the batch of offsets {first} to {end}")
        if not isinstance(header, BatchHeader):
            if not offsets or offsets[-1] != end:
                raise DecodeError(f"the message of offset {end} holds others, but none with its offset as the last")
            first = offsets[0]
        elif offsets and offsets[-1] > end:
            raise DecodeError(f"a record of offset {offsets[-1]} in the batch of offsets {first} to {end}")
    if first <= last:
        what = f"offset {last}" if last >= base_offset else f"the segment's base offset {base_offset}"
        raise DecodeError(f"a batch of offsets {first} to {end} follows {what}")
    if next_base is not None and end >= next_base:
        raise DecodeError(f"a batch of offsets {first} to {end}, but the next segment begins at {next_base}")
    return Batch(found.position, first, end, header.max_timestamp)


def _log_07(files: list[Path], progress: Progress | None) -> Iterator[Finding]:
    """The files of a log of Kafka 0.7, and whether they follow each other."""
    for path in files:
        yield from _guarded(path, _messages_07(path, progress))
    if files:
        try:
            for before, after in pairwise(files_07(files[0].parent)):
                if before.end_offset != after.base_offset:
                    yield Finding(after.path, 0, hole_07(before, after))
        except DecodeError:
            return  # a name that is no offset: told with the file


def _messages_07(path: Path, progress: Progress | None) -> Iterator[Finding]:
    for found in dump(path):
        try:
            if isinstance(found, Damage):
                raise DecodeError(found.reason)
            found.records()
        except DecodeError as error:
            yield Finding(path, found.position, str(error))
        if progress:
            progress(path, found.position + found.size)
