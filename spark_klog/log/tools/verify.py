"""Check the files of a log, for `klog log verify`. It changes nothing; damage is returned as findings, never raised.

.log and .kafka     each batch's checksum, structure and records; offsets grow, and lie between the base offsets of the
                    segment and of the next one; preallocated zeros may follow them in the newest segment only, and
                    not after a clean stop; the log reaches the offset up to which its broker had flushed it; the files
                    of Kafka 0.7 follow each other without a gap
.index, .timeindex  entries agree with the log; preallocated zeros may follow them in the newest segment only
.txnindex           entries are the aborted transactions of the log
.snapshot           checksum and structure
leader-epoch-checkpoint, partition.metadata     can be parsed

A missing index is not a finding: brokers rebuild it. Some damage can't be detected, since no checksum covers it: the
leader epoch in a batch's header, its base offset if the offsets remain in order, the attributes of a message of Kafka
0.7, a topic id or epochs that parse, and an entry of a .txnindex if compaction or retention removed the records. A log
that is being written to may end with a partial batch, which is reported: stop the broker first.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path

from spark_klog.errors import ConfigError, DecodeError, LogCorrupted
from spark_klog.log.directory import CLEAN_STOP
from spark_klog.log.files.checkpoints import RECOVERY_POINT, read_checkpoint
from spark_klog.log.files.file_system import LocalFileSystem
from spark_klog.log.files.names import SUFFIX_07, partition_of_folder
from spark_klog.log.files.partition_files import LEADER_EPOCHS, PARTITION_METADATA, read_leader_epochs, read_topic_id
from spark_klog.log.layout import check_no_cluster
from spark_klog.log.log_07 import files_07, hole_07
from spark_klog.log.producer_state import SNAPSHOT, ProducerState
from spark_klog.log.segments.segment_files import TRANSACTION_INDEX
from spark_klog.log.tools.dump import Damage, Dumped, Padding, dump
from spark_klog.log.tools.dump_index import INDEX_SUFFIXES
from spark_klog.log.tools.verify_index import Batch, Finding, OffsetIndexCheck, TimeIndexCheck, TransactionCheck
from spark_klog.records import kernels
from spark_klog.records.contract import ColumnBuilder
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.formats.message_07 import Message07
from spark_klog.records.formats.message_set import key_and_value
from spark_klog.records.reading.reader import append_batch

_LOG = ".log"
_SUFFIXES = (_LOG, SUFFIX_07, *INDEX_SUFFIXES)
_SEGMENT_NAME = re.compile(r"[0-9]{20}")
_FIRST, _END = -(1 << 63), (1 << 63) - 1

#: Called with a .log or .kafka file and the number of its bytes checked so far.
Progress = Callable[[Path, int], None]


def verify(path: Path, progress: Progress | None = None) -> Iterator[Finding]:
    """Yield what is wrong with a data directory, a partition's folder or one of its files, while reading it.

    `ConfigError` if `path` is none of these. A file that can't be read is a finding.
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
        raise ConfigError(f"{path} is not a file of a log")


def log_files(path: Path) -> list[Path]:
    """The .log and .kafka files that `verify` would read; `ConfigError`, OSError."""
    if not path.is_dir():
        return [path] if path.suffix in (_LOG, SUFFIX_07) else []
    folders = _partitions(path)
    return [file for folder in folders for file in _files(folder) if file.suffix in (_LOG, SUFFIX_07)]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _partitions(path: Path) -> list[Path]:
    """The partitions' folders in a data directory, or `path` itself if it is one."""
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
            yield Finding(path, None, f"{path.stem}{_LOG} is missing beside it")
        elif reader := _reader(path):
            yield from _guarded(path, _small_file(path, reader))
    if not any(path.suffix in (_LOG, SUFFIX_07) for path in files):
        yield Finding(folder, None, f"it has no {_LOG} files: its records are gone")
    yield from _log_07([path for path in files if path.suffix == SUFFIX_07], progress)
    transactions = TransactionCheck()
    for path, after in zip_longest(segments, segments[1:]):
        yield from _guarded(path, _segment(path, int(after.stem) if after else None, transactions, progress))


def _misnamed(path: Path) -> Finding | None:
    if _SEGMENT_NAME.fullmatch(path.stem):
        return None
    return Finding(path, None, f"a segment is named by the 20 digits of its first offset, not {path.stem}")


def _next_base(path: Path) -> int | None:
    """The base offset of the next segment, None for the newest."""
    others = (file.stem for file in path.parent.glob(f"*{_LOG}") if _SEGMENT_NAME.fullmatch(file.stem))
    return min((int(stem) for stem in others if stem > path.stem), default=None)


def _index(path: Path, progress: Progress | None) -> Iterator[Finding]:
    """Check one index. The log beside it is read too, but its findings are left out."""
    log = path.with_suffix(_LOG)
    if path.suffix == TRANSACTION_INDEX or not log.exists():
        findings = _partition(path.parent, progress)
    else:
        findings = _guarded(path, _segment(log, _next_base(log), None, progress))
    yield from (finding for finding in findings if finding.file == path)


def _reader(path: Path) -> Callable[[Path], object] | None:
    """The function that parses this small file of a partition's folder or raises `DecodeError`; None for others."""
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
    """Check a .log file and its indexes; the indexes are compared up to the first damage in the log."""
    checks = (OffsetIndexCheck(path, next_base is None), TimeIndexCheck(path, next_base is None))
    builder = kernels.load().builder(frozenset({"offset"}))
    base_offset = int(path.stem)
    last = base_offset - 1
    flushed = _recovery_point(path)  # before the records: a broker may run
    sound = True
    for found in dump(path):
        try:
            if isinstance(found, Padding):
                if next_base is not None:
                    raise DecodeError(f"{found.size} zeros at its end, which only the newest segment may have")
                if (path.absolute().parent.parent / CLEAN_STOP).exists():
                    raise DecodeError(f"{found.size} zeros at its end, although a clean stop cuts preallocated ones")
                continue
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
    if sound and next_base is None and last + 1 < flushed:
        what = f"it ends at offset {last + 1}, but had been flushed up to offset {flushed}: records are missing"
        yield Finding(path, None, what)
    for check in checks:
        yield from check.end(sound)
    if transactions:
        transactions.exact &= sound
        yield from transactions.segment_end(path)


def _recovery_point(path: Path) -> int:
    """The offset up to which the broker had flushed the log of a segment, 0 if that is not known."""
    folder = path.absolute().parent
    try:
        points = read_checkpoint(LocalFileSystem(), folder.parent / RECOVERY_POINT) or {}
    except LogCorrupted:
        return 0  # it is no file of a partition
    return points.get(partition_of_folder(folder.name) or ("", 0), 0)


def _checked(found: Dumped, builder: ColumnBuilder, base_offset: int, last: int, next_base: int | None) -> Batch:
    """Read all records of a batch; `DecodeError` if offsets are not in order or outside the segment."""
    header = found.header
    assert not isinstance(header, Message07)
    first, end = header.base_offset, header.last_offset
    if not isinstance(header, BatchHeader) and not header.codec_id:
        key_and_value(header, found.data)  # uncompressed messages of magic 0 and 1: the fastest check
    else:
        append_batch(builder, header, found.data, _FIRST, _END)
        offsets = array("q", bytes(builder.finish().offset or b""))
        if any(after <= before for before, after in pairwise(offsets)):
            raise DecodeError(f"offsets do not increase in the batch of offsets {first} to {end}")
        if not isinstance(header, BatchHeader):
            if not offsets or offsets[-1] != end:
                raise DecodeError(f"the message of offset {end} contains others, but the last one has another offset")
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
    """Check the files of a log of Kafka 0.7, and that they follow each other without a gap."""
    for path in files:
        yield from _guarded(path, _messages_07(path, progress))
    if files:
        try:
            for before, after in pairwise(files_07(files[0].parent)):
                if before.end_offset != after.base_offset:
                    yield Finding(after.path, 0, hole_07(before, after))
        except DecodeError:
            return  # a file name that is not an offset: already a finding of that file


def _messages_07(path: Path, progress: Progress | None) -> Iterator[Finding]:
    for found in dump(path):
        try:
            if isinstance(found, Damage):
                raise DecodeError(found.reason)
            if isinstance(found, Dumped):
                found.records()
        except DecodeError as error:
            yield Finding(path, found.position, str(error))
        if progress:
            progress(path, found.position + found.size)
