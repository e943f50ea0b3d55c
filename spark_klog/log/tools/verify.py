"""Check the files of a log, for `klog log verify`, and repair it.

The check changes nothing; damage is returned as findings, never raised. It compares:

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

An index's check gets every batch in order, then the end of the log:

.index      An entry points to the start of a batch. Its offset is the batch's last one, or its first one before Kafka
            0.11. If several batches were appended at once (by a follower, by compaction), it is the last one of all.
.timeindex  An entry has the largest timestamp up to its batch, and an offset in the batch that has this timestamp.
.txnindex   An entry is an aborted transaction, which ends with an abort marker in this segment. Its last stable offset
            may be larger than on a leader, since a follower appends many batches at once.

Readers trust all three, so a wrong entry hides or invents records even if the log is sound.

`klog log repair` truncates a log at its first damaged batch. If all .log files are gone, the log goes on, empty, where
it ended: the offsets of lost records are not given again.
"""

from __future__ import annotations

import re
import shutil
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from spark_klog.base.durable import sync_folder, write_synced
from spark_klog.errors import ConfigError, DecodeError, LogCorrupted
from spark_klog.files.folder import LocalFolder
from spark_klog.log.config import LogConfig
from spark_klog.log.directory import CLEAN_STOP
from spark_klog.log.file_system import FileSystem, locked
from spark_klog.log.layout import check_no_cluster
from spark_klog.log.partition_files import (
    LEADER_EPOCHS,
    LOG_START,
    OVERRIDES,
    PARTITION_METADATA,
    RECOVERY_POINT,
    SUFFIX_07,
    partition_of_folder,
    read_checkpoint,
    read_leader_epochs,
    read_topic_id,
    write_checkpoint,
)
from spark_klog.log.producer_state import SNAPSHOT, ProducerState
from spark_klog.log.recovery import overlap_of
from spark_klog.log.segments.index import IndexMemory
from spark_klog.log.segments.segment import INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX, Segment, segment_name
from spark_klog.log.stored.partition_07 import StoredPartition07
from spark_klog.log.tools.dump import INDEX_SUFFIXES, Damage, Dumped, IndexEntry, Padding, dump, dump_index
from spark_klog.records import kernels
from spark_klog.records.contract import ColumnBuilder
from spark_klog.records.formats.batch import Header
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.formats.message_07 import Message07
from spark_klog.records.formats.message_set import key_and_value
from spark_klog.records.reading.reader import ABORT, append_batch, read_marker

_SUFFIXES = (LOG, SUFFIX_07, *INDEX_SUFFIXES)
_SEGMENT_NAME = re.compile(r"[0-9]{20}")
_FIRST, _END = -(1 << 63), (1 << 63) - 1

#: Called with a .log or .kafka file and the number of its bytes checked so far.
Progress = Callable[[Path, int], None]
#: Ending of the copies of .log files that `repair` keeps.
DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a file; `position` is None if it concerns the whole file."""

    file: Path
    position: int | None
    what: str


@dataclass(frozen=True, slots=True)
class Batch:
    """A sound batch of a segment: its position in the file, and the offsets of its first and last record."""

    position: int
    first: int
    last: int
    max_timestamp: int


class IndexCheck:
    """The entries of an index, one entry ahead; appends what is wrong with them to `findings`."""

    #: What is wrong with entries that are left at the end of the log.
    left = ""

    def __init__(self, path: Path, findings: list[Finding], *, is_newest: bool = True) -> None:
        self.path = path
        self.findings = findings
        self._is_newest = is_newest
        self._found = dump_index(path) if path.exists() else iter(())
        self._largest = -1
        self.next: IndexEntry | None = None
        self.advance()

    def advance(self) -> None:
        self.next = None
        for part in self._found:
            if isinstance(part, IndexEntry):
                self.next = part
                return
            if isinstance(part, Damage):
                self.findings.append(Finding(self.path, part.position, part.reason))
            elif not self._is_newest:
                what = f"{part.size} zero bytes follow the entries, but a newer segment exists"
                self.findings.append(Finding(self.path, part.position, what))

    def wrong(self, entry: IndexEntry, what: str) -> None:
        fields = ", ".join(f"{name} {value}" for name, value in entry.fields.items())
        self.findings.append(Finding(self.path, entry.position, f"entry with {fields}: {what}"))

    def end(self, *, is_sound: bool) -> None:
        """Check the rest at the end of the log; if that is not sound, only the index file itself."""
        while self.next:
            if is_sound:
                self.wrong(self.next, self.left)
            self.advance()


class OffsetIndexCheck(IndexCheck):
    left = "no batch begins there"
    #: An entry for several batches, if the last one of them has not come yet.
    _open: IndexEntry | None = None

    def batch(self, batch: Batch) -> None:
        while (entry := self.next) and entry.fields["position"] <= batch.position:
            offset = entry.fields["offset"]
            self._close()
            if offset <= self._largest:
                self.wrong(entry, "entries do not increase")
            elif entry.fields["position"] != batch.position:
                self.wrong(entry, self.left)
            elif offset > batch.last:
                self._open = entry
            elif offset not in (batch.first, batch.last):
                self.wrong(entry, f"the batch there has offsets {batch.first} to {batch.last}")
            self._largest = max(self._largest, offset)
            self.advance()
        if self._open and batch.last == self._open.fields["offset"]:
            self._open = None
        elif self._open and batch.last > self._open.fields["offset"]:
            self._close()

    def _close(self) -> None:
        if self._open:
            what = "the batch there does not end with that offset, nor does one up to the next entry"
            self.wrong(self._open, what)
        self._open = None

    def end(self, *, is_sound: bool) -> None:
        if is_sound:
            self._close()
        super().end(is_sound=is_sound)


class TimeIndexCheck(IndexCheck):
    left = "the segment has no such offset"

    def batch(self, batch: Batch) -> None:
        while (entry := self.next) and entry.fields["offset"] <= batch.last:
            timestamp = entry.fields["timestamp"]
            if entry.fields["offset"] < batch.first:
                self.wrong(entry, "no batch has that offset, or entries do not increase")
            elif timestamp != batch.max_timestamp:
                self.wrong(entry, f"the largest timestamp of the batch with that offset is {batch.max_timestamp}")
            elif timestamp <= self._largest:
                self.wrong(entry, f"a batch before has timestamp {self._largest}, or entries do not increase")
            self.advance()
        self._largest = max(self._largest, batch.max_timestamp)


class TransactionCheck:
    """Check of a partition's .txnindex files. It gets all batches of the partition, segment by segment."""

    def __init__(self) -> None:
        #: The first offset of each open transaction, by producer id.
        self._open: dict[int, int] = {}
        #: By the offset of an abort marker in this segment: producer id, first offset (None: unknown), stable offset.
        self._aborted: dict[int, tuple[int, int | None, int]] = {}
        self._start: int | None = None
        self._next = 0
        #: False if damage or compaction has removed records: starts of transactions may then be unknown.
        self.exact = True

    def batch(self, header: Header, data: memoryview, batch: Batch) -> None:
        """Process the next batch; `DecodeError` for a control batch whose record is not a marker."""
        if self._start is None:
            self._start = batch.first
        elif batch.first != self._next:
            self.exact = False
        self._next = batch.last + 1
        if not isinstance(header, BatchHeader) or not header.is_transactional:
            return
        if not header.is_control:
            self._open.setdefault(header.producer_id, batch.first)
            return
        first = self._open.pop(header.producer_id, None)
        marker = read_marker(header, data)
        if marker is None:
            self.exact = False  # compaction has emptied the batch: which transaction it ended is unknown
        elif marker.type == ABORT:
            stable = min(self._open.values(), default=batch.last + 1)
            self._aborted[batch.last] = header.producer_id, first, stable

    def segment_end(self, log: Path, findings: list[Finding]) -> None:
        """Compare a segment's index with its batches."""
        entries = IndexCheck(log.with_suffix(TRANSACTION_INDEX), findings)
        expected, self._aborted = self._aborted, {}
        previous = -1
        while entry := entries.next:
            last = entry.fields["lastOffset"]
            wrong = self._wrong(entry.fields, expected.pop(last, None))
            if wrong or last <= previous:
                entries.wrong(entry, wrong or "entries do not increase")
            previous = max(previous, last)
            entries.advance()
        for last, (producer_id, first, _) in expected.items():
            if first is not None:
                what = f"the transaction [{first}, {last}] of producer {producer_id}, which was aborted, is missing"
                findings.append(Finding(entries.path, None, what))

    def _wrong(self, fields: dict[str, int], expected: tuple[int, int | None, int] | None) -> str | None:
        """Describe how an entry disagrees with the log; None if it agrees."""
        first, last, stable = (fields[name] for name in ("firstOffset", "lastOffset", "lastStableOffset"))
        if expected is None:
            return "the segment has no abort marker at its last offset" if self.exact else None
        producer_id, known_first, known_stable = expected
        if fields["producerId"] != producer_id:
            return f"the abort marker is of producer {producer_id}"
        if not 0 <= first <= last or not 0 <= stable <= self._next:
            return "offsets that can't be"
        start = self._start or 0  # transactions before it are unknown
        if not self.exact or known_first is None:
            return None
        if first != known_first and first >= start:
            return f"the transaction began at offset {known_first}"
        if stable != known_stable and stable >= start and not stable > known_stable > last:
            return f"the last stable offset was {known_stable}"
        return None


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
    elif path.suffix == LOG:
        yield from _guarded(path, _segment(path, _next_base(path), None, progress))
    elif path.suffix in INDEX_SUFFIXES:
        yield from _index(path, progress)
    else:
        raise ConfigError(f"{path} is not a file of a log")


def log_files(path: Path) -> list[Path]:
    """The .log and .kafka files that `verify` would read; `ConfigError`, OSError."""
    if not path.is_dir():
        return [path] if path.suffix in (LOG, SUFFIX_07) else []
    folders = _partitions(path)
    return [file for folder in folders for file in _files(folder) if file.suffix in (LOG, SUFFIX_07)]


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
        if path.suffix in (LOG, *INDEX_SUFFIXES) and (wrong := _misnamed(path)):
            yield wrong
        elif path.suffix == LOG:
            segments.append(path)
        elif path.suffix in INDEX_SUFFIXES and not path.with_suffix(LOG).exists():
            yield Finding(path, None, f"{path.stem}{LOG} is missing beside it")
        elif reader := _reader(path):
            yield from _guarded(path, _small_file(path, reader))
    if not any(path.suffix in (LOG, SUFFIX_07) for path in files) and not _is_new(folder):
        yield Finding(folder, None, f"it has no {LOG} files: its records are gone")
    yield from _log_07([path for path in files if path.suffix == SUFFIX_07], progress)
    transactions = TransactionCheck()
    for path, after in zip_longest(segments, segments[1:]):
        yield from _guarded(path, _segment(path, int(after.stem) if after else None, transactions, progress))


def _is_new(folder: Path) -> bool:
    """Whether a folder without .log files is that of a partition that has had no records yet."""
    names = {path.name for path in _files(folder)}
    return {PARTITION_METADATA} <= names <= {PARTITION_METADATA, OVERRIDES} and not _recovery_point(folder / LOG)


def _misnamed(path: Path) -> Finding | None:
    if _SEGMENT_NAME.fullmatch(path.stem):
        return None
    return Finding(path, None, f"a segment is named by the 20 digits of its first offset, not {path.stem}")


def _next_base(path: Path) -> int | None:
    """The base offset of the next segment, None for the newest."""
    others = (file.stem for file in path.parent.glob(f"*{LOG}") if _SEGMENT_NAME.fullmatch(file.stem))
    return min((int(stem) for stem in others if stem > path.stem), default=None)


def _index(path: Path, progress: Progress | None) -> Iterator[Finding]:
    """Check one index. The log beside it is read too, but its findings are left out."""
    log = path.with_suffix(LOG)
    if path.suffix == TRANSACTION_INDEX or not log.exists():
        findings = _partition(path.parent, progress)
    else:
        findings = _guarded(path, _segment(log, _next_base(log), None, progress))
    yield from (finding for finding in findings if finding.file == path)


def _reader(path: Path) -> Callable[[], object] | None:
    """The function that parses this small file of a partition's folder or raises `DecodeError`; None for others."""
    if path.suffix == SNAPSHOT:
        return lambda: ProducerState.decode(path.read_bytes())
    readers = {LEADER_EPOCHS: read_leader_epochs, PARTITION_METADATA: read_topic_id}
    reader = readers.get(path.name)
    return reader and partial(reader, FileSystem(), path.parent)


def _small_file(path: Path, reader: Callable[[], object]) -> Iterator[Finding]:
    try:
        reader()
    except DecodeError as error:
        yield Finding(path, None, str(error))


def _segment(
    path: Path, next_base: int | None, transactions: TransactionCheck | None, progress: Progress | None
) -> Iterator[Finding]:
    """Check a .log file and its indexes; the indexes are compared up to the first damage in the log."""
    findings: list[Finding] = []
    checks = (
        OffsetIndexCheck(path.with_suffix(INDEX), findings, is_newest=next_base is None),
        TimeIndexCheck(path.with_suffix(TIME_INDEX), findings, is_newest=next_base is None),
    )
    builder = kernels.load().builder(frozenset({"offset"}))
    base_offset = int(path.stem)
    last = base_offset - 1
    flushed = _recovery_point(path)  # before the records: a broker may run
    sound = True
    for part in dump(path):
        try:
            if isinstance(part, Padding):
                if next_base is not None:
                    raise DecodeError(f"{part.size} zeros at its end, which only the newest segment may have")
                if (path.absolute().parent.parent / CLEAN_STOP).exists():
                    raise DecodeError(f"{part.size} zeros at its end, although a clean stop cuts preallocated ones")
                continue
            if isinstance(part, Damage):
                raise DecodeError(part.reason)
            batch = _checked(part, builder, base_offset, last, next_base)
            last = batch.last
            if transactions:
                assert not isinstance(part.header, Message07)
                transactions.batch(part.header, part.data, batch)
            if sound:
                for check in checks:
                    check.batch(batch)
        except DecodeError as error:
            findings.append(Finding(path, part.position, str(error)))
            sound = False
        yield from findings
        findings.clear()
        if progress:
            progress(path, part.position + part.size)
    if sound and next_base is None and last + 1 < flushed:
        what = f"it ends at offset {last + 1}, but had been flushed up to offset {flushed}: records are missing"
        yield Finding(path, None, what)
    for check in checks:
        check.end(is_sound=sound)
    yield from findings
    findings.clear()
    if transactions:
        transactions.exact &= sound
        transactions.segment_end(path, findings)
        yield from findings


def _recovery_point(path: Path) -> int:
    """The offset up to which the broker had flushed the log of a segment, 0 if that is not known."""
    folder = path.absolute().parent
    try:
        points = read_checkpoint(FileSystem(), folder.parent / RECOVERY_POINT) or {}
    except LogCorrupted:
        return 0  # it is no file of a partition
    return points.get(partition_of_folder(folder.name) or ("", 0), 0)


def _checked(part: Dumped, builder: ColumnBuilder, base_offset: int, last: int, next_base: int | None) -> Batch:
    """Read all records of a batch; `DecodeError` if offsets are not in order or outside the segment."""
    header = part.header
    assert not isinstance(header, Message07)
    first, end = header.base_offset, header.last_offset
    if not isinstance(header, BatchHeader) and not header.codec_id:
        key_and_value(header, part.data)  # uncompressed messages of magic 0 and 1: the fastest check
    else:
        append_batch(builder, header, part.data, _FIRST, _END)
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
    return Batch(part.position, first, end, header.max_timestamp)


def _log_07(files: list[Path], progress: Progress | None) -> Iterator[Finding]:
    """Check the files of a log of Kafka 0.7, and that they follow each other without a gap."""
    for path in files:
        yield from _guarded(path, _messages_07(path, progress))
    if files:
        log = StoredPartition07(LocalFolder("."), str(files[0].parent), "", 0)
        if not log.misnamed:  # else already a finding of that file
            yield from (Finding(Path(after), 0, problem) for after, problem in log.holes())


def _messages_07(path: Path, progress: Progress | None) -> Iterator[Finding]:
    for part in dump(path):
        try:
            if isinstance(part, Damage):
                raise DecodeError(part.reason)
            if isinstance(part, Dumped):
                part.records()
        except DecodeError as error:
            yield Finding(path, part.position, str(error))
        if progress:
            progress(path, part.position + part.size)


class Repaired(NamedTuple):
    """The log's new end offset, the reason, and the copies of the .log files that were truncated or deleted."""

    end_offset: int
    reason: str
    kept: list[Path]


def repair(folder: Path) -> Repaired | None:
    """Truncate a partition's log at its first damaged batch or overlapping segment; None if the log is sound.

    Files that lose data are first copied to *.log.damaged beside them. `LogDirLocked` if a broker runs on the data
    directory, `LogCorrupted` if `folder` is not a partition's folder, OSError.
    """
    key = partition_of_folder(folder.name)
    bases = sorted(int(path.stem) for path in folder.glob("*" + LOG) if path.stem.isdecimal())
    files, memory = FileSystem(), IndexMemory()
    end_offset = 0 if bases or key is None else _last_known_end(files, folder, key)
    if key is not None and not (bases or end_offset) and folder.is_dir() and _is_new(folder):
        return None
    if key is None or not (bases or end_offset):
        raise LogCorrupted(
            f"{folder} is not a partition's folder, named TOPIC-PARTITION, with {LOG} files or an entry in "
            f"{folder.parent / RECOVERY_POINT}"
        )
    with locked(folder.parent):
        if not bases:
            write_synced(folder / (segment_name(end_offset) + LOG), b"")
            sync_folder(folder)
            files.remove(folder.parent / CLEAN_STOP)
            return Repaired(end_offset, f"{folder} has no {LOG} files: its records are lost", [])
        interval = LogConfig().index_interval_bytes
        segments = [
            Segment(files, folder, base, interval, files.info(folder / (segment_name(base) + LOG)), memory)
            for base in bases
        ]
        end_offset, repaired = bases[0], None
        for index, segment in enumerate(segments):
            end_offset, damage = segment.recover()
            later = segments[index + 1 :]
            if damage is not None:
                reason = f"{segment.path} at position {damage.position}: {damage}"
                repaired = Repaired(end_offset, reason, _kept([segment, *later]))
            elif (overlap := overlap_of(segment, end_offset, later)) is not None:
                repaired = Repaired(end_offset, overlap, _kept(later))
            if repaired is not None:
                for path in chain.from_iterable(gone.paths() for gone in later):
                    path.unlink(missing_ok=True)
            if damage is not None:
                segment.cut(damage.position)
            segment.seal()
            segment.flush()
            if repaired is not None:
                break
        points = read_checkpoint(files, folder.parent / RECOVERY_POINT) or {}
        if points.get(key, 0) > end_offset:
            write_checkpoint(files, folder.parent / RECOVERY_POINT, points | {key: end_offset})
            repaired = repaired or Repaired(end_offset, f"the log ends before its recovery point {points[key]}", [])
        files.remove(folder.parent / CLEAN_STOP)  # the next start then recovers the whole log
    return repaired


def _last_known_end(files: FileSystem, folder: Path, key: tuple[str, int]) -> int:
    """The end of a log without files, as far as checkpoints and snapshots of producers tell."""
    checkpoints = (read_checkpoint(files, folder.parent / name) or {} for name in (RECOVERY_POINT, LOG_START))
    snapshots = (int(path.stem) for path in folder.glob("*" + SNAPSHOT) if path.stem.isdecimal())
    return max(*(points.get(key, 0) for points in checkpoints), *snapshots, 0)


def _kept(segments: list[Segment]) -> list[Path]:
    """Copy the .log files; return the copies."""
    kept = []
    for segment in segments:
        copy = segment.path.with_name(segment.path.name + DAMAGED)
        shutil.copyfile(segment.path, copy)
        kept.append(copy)
    return kept
