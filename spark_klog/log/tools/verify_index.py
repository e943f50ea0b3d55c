"""Compare a segment's index files with its log. Each check gets every batch in order, then the end of the log.

.index      An entry points to the start of a batch. Its offset is the batch's last one, or its first one before Kafka
            0.11. If several batches were appended at once (by a follower, by compaction), it is the last one of all.
.timeindex  An entry has the largest timestamp up to its batch, and an offset in the batch that has this timestamp.
.txnindex   An entry is an aborted transaction, which ends with an abort marker in this segment. Its last stable offset
            may be larger than on a leader, since a follower appends many batches at once.

Readers trust all three, so a wrong entry hides or invents records even if the log is sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_klog.log.segments.segment_files import INDEX, TIME_INDEX, TRANSACTION_INDEX
from spark_klog.log.tools.dump import Damage, Padding
from spark_klog.log.tools.dump_index import IndexEntry, dump_index
from spark_klog.records.formats.batch import Header
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.control import ABORT, read_marker


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


class _Entries:
    """The entries of an index, one entry ahead; problems of the file itself are collected in `findings`."""

    def __init__(self, path: Path, is_newest: bool) -> None:
        self.path = path
        self.findings: list[Finding] = []
        self._is_newest = is_newest
        self._found = dump_index(path) if path.exists() else iter(())
        self.next: IndexEntry | None = None
        self.step()

    def step(self) -> None:
        """Go to the next entry."""
        self.next = None
        for found in self._found:
            if isinstance(found, IndexEntry):
                self.next = found
                return
            if isinstance(found, Damage):
                self.findings.append(Finding(self.path, found.position, found.reason))
            elif not self._is_newest:
                self.findings.append(_padded(self.path, found))

    def wrong(self, entry: IndexEntry, what: str) -> None:
        fields = ", ".join(f"{name} {value}" for name, value in entry.fields.items())
        self.findings.append(Finding(self.path, entry.position, f"entry with {fields}: {what}"))

    def taken(self) -> Iterator[Finding]:
        """Yield the findings so far and clear them."""
        found, self.findings = self.findings, []
        yield from found

    def rest(self, what: str | None) -> Iterator[Finding]:
        """Yield the findings of the remaining entries; `what`, if given, is wrong with each of them."""
        while self.next:
            if what:
                self.wrong(self.next, what)
            self.step()
        yield from self.taken()


def _padded(path: Path, padding: Padding) -> Finding:
    return Finding(path, padding.position, f"{padding.size} zero bytes follow the entries, but a newer segment exists")


class OffsetIndexCheck:
    """Check of a segment's .index."""

    def __init__(self, log: Path, is_newest: bool) -> None:
        self._entries = _Entries(log.with_suffix(INDEX), is_newest)
        #: An entry for several batches, if the last one of them has not come yet.
        self._open: IndexEntry | None = None
        self._largest = -1

    def batch(self, batch: Batch) -> Iterator[Finding]:
        """Compare with the next batch."""
        entries = self._entries
        while (entry := entries.next) and entry.fields["position"] <= batch.position:
            offset = entry.fields["offset"]
            if self._open:
                self._no_end()
            if offset <= self._largest:
                entries.wrong(entry, "entries do not increase")
            elif entry.fields["position"] != batch.position:
                entries.wrong(entry, "no batch begins there")
            elif offset > batch.last:
                self._open = entry
            elif offset not in (batch.first, batch.last):
                entries.wrong(entry, f"the batch there has offsets {batch.first} to {batch.last}")
            self._largest = max(self._largest, offset)
            entries.step()
        if self._open and batch.last >= self._open.fields["offset"]:
            if batch.last > self._open.fields["offset"]:
                self._no_end()
            self._open = None
        yield from entries.taken()

    def _no_end(self) -> None:
        assert self._open is not None
        self._entries.wrong(
            self._open, "the batch there does not end with that offset, nor does one up to the next entry"
        )
        self._open = None

    def end(self, compare: bool) -> Iterator[Finding]:
        """The findings at the end of the log; without `compare` only problems of the index file itself."""
        if self._open and compare:
            self._no_end()
        yield from self._entries.rest("no batch begins there" if compare else None)


class TimeIndexCheck:
    """Check of a segment's .timeindex."""

    def __init__(self, log: Path, is_newest: bool) -> None:
        self._entries = _Entries(log.with_suffix(TIME_INDEX), is_newest)
        self._largest = -1

    def batch(self, batch: Batch) -> Iterator[Finding]:
        """Compare with the next batch."""
        entries = self._entries
        while (entry := entries.next) and entry.fields["offset"] <= batch.last:
            timestamp = entry.fields["timestamp"]
            if entry.fields["offset"] < batch.first:
                entries.wrong(entry, "no batch has that offset, or entries do not increase")
            elif timestamp != batch.max_timestamp:
                entries.wrong(entry, f"the largest timestamp of the batch with that offset is {batch.max_timestamp}")
            elif timestamp <= self._largest:
                entries.wrong(entry, f"a batch before has timestamp {self._largest}, or entries do not increase")
            entries.step()
        self._largest = max(self._largest, batch.max_timestamp)
        yield from entries.taken()

    def end(self, compare: bool) -> Iterator[Finding]:
        """The findings at the end of the log; without `compare` only problems of the index file itself."""
        yield from self._entries.rest("the segment has no such offset" if compare else None)


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

    def segment_end(self, log: Path) -> Iterator[Finding]:
        """Compare a segment's index with its batches."""
        entries = _Entries(log.with_suffix(TRANSACTION_INDEX), True)
        expected, self._aborted = self._aborted, {}
        previous = -1
        while entry := entries.next:
            last = entry.fields["lastOffset"]
            wrong = self._wrong(entry.fields, expected.pop(last, None))
            if wrong or last <= previous:
                entries.wrong(entry, wrong or "entries do not increase")
            previous = max(previous, last)
            entries.step()
        yield from entries.taken()
        for last, (producer_id, first, _) in expected.items():
            if first is not None:
                what = f"the transaction [{first}, {last}] of producer {producer_id}, which was aborted, is missing"
                yield Finding(entries.path, None, what)

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
