"""Read a partition's folder without a broker, on any file system, even while a broker writes to it.

    OFFSET.log .index .timeindex    see segments/segment.py; the name is the offset of the first record, 20 digits
    OFFSET.txnindex                 aborted transactions that end in the segment, see transaction_index.py
    OFFSET.snapshot                 see producer_state.py

    OFFSET.log.swap (and indexes)   a compacted segment; it replaces those within its offsets, see recovery.py

Other files are ignored: *.deleted no longer belong to the log, *.cleaned not yet.

The log ends with its last complete batch; the files do not tell whether it was replicated. For read_committed it ends
before the first open transaction. Open transactions are found by a walk over headers from the newest valid producer
snapshot on, which is in the last segment of logs of Kafka 0.11 and later; without one, from the start of the log.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TypeVar

from spark_klog.errors import DecodeError, OffsetOutOfRange
from spark_klog.files.folder import Entry, ReadableFolder, read_whole
from spark_klog.log.producer_state import SNAPSHOT, ProducerState
from spark_klog.log.segments.segment import CLEANED, DELETED, LOG, SWAP
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.log.stored.segment import StoredBatches, StoredSegment, Tail
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.reader import BadBatch, refuse

#: `OffsetOutOfRange.available` of a partition that does not exist.
GONE = (-1, -1)


_log = logging.getLogger(__name__)
T = TypeVar("T")
#: Attempts with outdated listings in a row before giving up: compaction replaces files.
_LISTINGS = 10


class ListedPartition:
    """The log in `folder`, as of its listing. `FileNotFoundError` if the folder does not exist, OSError."""

    def __init__(self, files: ReadableFolder, folder: str, topic: str, partition: int) -> None:
        self._files, self._folder = files, folder
        self._topic, self._partition = topic, partition
        self._list()

    def _list(self) -> None:
        """List the folder, and forget what an earlier listing has shown."""
        raise NotImplementedError

    def _list_again(self, start: int, end: int) -> None:
        """List the folder for a read of [start, end); `OffsetOutOfRange` with `GONE` if it was deleted."""
        try:
            self._list()
        except FileNotFoundError:
            raise OffsetOutOfRange(self._topic, self._partition, (start, end), GONE) from None


class StoredPartition(ListedPartition):
    """A log of Kafka 0.8 and later. `log_start` is its start offset in the checkpoint."""

    def __init__(
        self,
        files: ReadableFolder,
        folder: str,
        topic: str,
        partition: int,
        log_start: int = 0,
        *,
        read_committed: bool = False,
    ) -> None:
        super().__init__(files, folder, topic, partition)
        self._log_start = log_start
        self._read_committed = read_committed

    def _list(self) -> None:
        names: dict[str, dict[str, int]] = {}
        swaps: dict[str, dict[str, int]] = {}
        for name, size, is_folder, *_ in self._entries():
            stem, dot, suffix = name.removesuffix(SWAP).rpartition(".")
            if not is_folder and stem.isdecimal():
                (swaps if name.endswith(SWAP) else names).setdefault(stem, {})[dot + suffix] = size
        stems = sorted(names, key=int)
        segments = [StoredSegment(self._files, self._folder, stem, names[stem]) for stem in stems if LOG in names[stem]]
        for stem in swaps:
            if LOG in swaps[stem]:
                compacted = StoredSegment(self._files, self._folder, stem, swaps[stem], SWAP)
                try:
                    last = compacted.last_offset()
                except FileNotFoundError:  # the swap is complete by now
                    self._list()
                    return
                first = compacted.base_offset
                segments = [segment for segment in segments if not first <= segment.base_offset <= last]
                segments.append(compacted)
        self._segments = sorted(segments, key=lambda segment: segment.base_offset)
        self._bases = [segment.base_offset for segment in self._segments]
        self._snapshots = [stem for stem in stems if SNAPSHOT in names[stem]]
        self._tail: Tail | None = None
        self._stable: int | None = None

    def _entries(self) -> list[Entry]:
        """List the folder. During a compaction list it until nothing has changed: a listing may miss renamed files."""
        listed = self._files.entries(self._folder)
        for _ in range(_LISTINGS):
            if not any(entry.name.endswith((CLEANED, SWAP, DELETED)) for entry in listed):
                break
            before, listed = listed, self._files.entries(self._folder)
            if {entry.name for entry in before} == {entry.name for entry in listed}:
                break
        return listed

    def _again(self, look_up: Callable[[], T]) -> T:
        """Call `look_up`; list the folder again if retention or compaction has removed a file since the listing."""
        for _ in range(_LISTINGS):
            try:
                return look_up()
            except FileNotFoundError:
                _log.info("%s has changed since it was listed", self._folder)
                self._list()
        return look_up()

    @property
    def is_empty(self) -> bool:
        """Whether there is no segment: the folder has another format, or nothing was ever written."""
        return not self._segments

    # ----- offsets

    @property
    def start_offset(self) -> int:
        """The first offset of the log, or of the next record if it is empty."""
        return max(self._log_start, self._bases[0] if self._bases else 0)

    @property
    def end_offset(self) -> int:
        """The end of the readable part: after the last complete batch, or before the first open transaction.

        With read_committed, `DecodeError` if bytes on the way are not a batch.
        """
        return max(self.start_offset, self._again(self._stable_end if self._read_committed else self._written_end))

    @property
    def damage(self) -> DecodeError | None:
        """The error of bytes after the last complete batch that are neither a partial batch nor zeros."""
        return self._again(self._find_tail).damage

    def _find_tail(self) -> Tail:
        if self._tail is None:
            self._tail = self._segments[-1].tail() if self._segments else Tail(0, None)
        return self._tail

    def _written_end(self) -> int:
        return max(self.start_offset, self._find_tail().end_offset)

    def _stable_end(self) -> int:
        if self._stable is None:
            end = self._written_end()
            self._stable = min((end, *self._unstable(end)))
        return self._stable

    def offset_for_time(self, timestamp: int) -> int | None:
        """The first offset of a record with a timestamp (ms) of at least `timestamp`, or None. `DecodeError`."""
        offset = self._again(lambda: self._first_at(timestamp))
        return offset if offset is not None and offset < self.end_offset else None

    def _first_at(self, timestamp: int) -> int | None:
        for segment, until in self._extents():
            if until > self.start_offset:
                offset = segment.offset_for_time(timestamp, self.start_offset, until)
                if offset is not None:
                    return offset
        return None

    def timestamp_type(self, offset: int) -> int | None:
        """The timestamp type (records/contract.py) of the batch with `offset`; None at the end. `DecodeError`."""
        return self._again(lambda: self._timestamp_type(offset))

    def _timestamp_type(self, offset: int) -> int | None:
        for segment in self._segments[self._index_at(offset) :]:
            header = segment.header(offset)
            if header is not None:
                return header.timestamp_type
        return None

    def _index_at(self, offset: int) -> int:
        """The index of the segment that may contain `offset`."""
        return max(0, bisect_right(self._bases, offset) - 1)

    def _extents(self) -> Iterator[tuple[StoredSegment, int]]:
        """(segment, its end: the start of the next one, or the end of the log)."""
        for index, segment in enumerate(self._segments):
            is_last = index + 1 == len(self._segments)
            yield segment, self._find_tail().end_offset if is_last else self._bases[index + 1]

    # ----- transactions

    def _aborted(self, start: int, end: int) -> list[AbortedTransaction]:
        """The aborted transactions that may have records in [start, end); `DecodeError` for a damaged index."""
        aborted: list[AbortedTransaction] = []
        for segment in self._segments[self._index_at(start) :]:
            entries = segment.aborted_transactions()
            aborted += [entry for entry in entries if entry.first_offset < end]
            if any(entry.last_stable_offset >= end for entry in entries):
                break
        return aborted

    def _unstable(self, end: int) -> Iterator[int]:
        """First offsets of open transactions, and of aborted ones that no transaction index lists (yet)."""
        start, state = self._newest_snapshot(end)
        listed = {(entry.producer_id, entry.last_offset) for entry in self._aborted(start, end + 1)}
        for segment, until in self._extents():
            for header, batch in segment.headers(start, until) if until > start else ():
                if not isinstance(header, BatchHeader) or not header.is_transactional:
                    continue
                aborted = state.add(header, batch)
                if aborted is not None and (aborted.producer_id, aborted.last_offset) not in listed:
                    _log.warning(
                        "%s: no transaction index lists %s: read_committed stops before it", segment.path, aborted
                    )
                    yield aborted.first_offset
        if state.first_unstable_offset is not None:
            yield state.first_unstable_offset

    def _newest_snapshot(self, end: int) -> tuple[int, ProducerState]:
        """(offset, producers) of the newest valid snapshot; the start of the log and no producers if there is none."""
        for stem in reversed(self._snapshots):
            if not self.start_offset <= int(stem) <= end:
                continue
            path = f"{self._folder}/{stem}{SNAPSHOT}"
            try:
                return int(stem), ProducerState.decode(read_whole(self._files, path))
            except (DecodeError, FileNotFoundError) as error:
                _log.info("ignoring snapshot %s: %s", path, error)
        return self.start_offset, ProducerState()

    # ----- reading

    def check_offset(self, offset: int) -> None:
        """Do nothing: every offset is valid here, unlike in logs of Kafka 0.7."""

    def cuts(self, start: int, end: int, target: int) -> list[int]:
        """Offsets in (start, end), in order, that split the range evenly into parts of about `target` bytes at most.

        They come from index entries, or are estimates if an index has no entry nearby.
        """
        spans = [
            (
                segment,
                until,
                segment.position_estimate(max(start, segment.base_offset), until),
                segment.position_estimate(min(end, until), until),
            )
            for segment, until in self._again(lambda: list(self._extents()))
            if segment.base_offset < end and until > start
        ]
        total = sum(max(0, high - low) for *_, low, high in spans)
        parts = max(1, -(-total // target))
        goals = [total * number // parts for number in range(1, parts)]
        bounds, passed = set(), 0
        for segment, until, low, high in spans:
            size = max(0, high - low)
            bounds |= {
                segment.offset_estimate(low + goal - passed, until, target // 4)
                for goal in goals
                if passed <= goal < passed + size
            }
            passed += size
        return sorted(offset for offset in bounds if start < offset < end)

    def read(self, start: int, end: int, on_bad: Callable[[BadBatch], None] = refuse) -> Iterator[StoredBatches]:
        """The record batches with offsets in [start, end); they may extend beyond both ends. Does not decode them.

        `OffsetOutOfRange` if the log does not have the offsets (available is `GONE` for a deleted partition),
        `DecodeError` at bytes that are not a batch, OSError.
        """
        offset, listings = start, 0
        while offset < end:
            if offset < self.start_offset:
                self._out_of_range(offset, end)
            try:
                aborted = self._aborted(offset, end) if self._read_committed else []
                for block in self._blocks(offset, end):
                    yield block._replace(aborted=_from(aborted, offset))
                    offset, listings = max(offset, block.next_offset), 0
                break
            except FileNotFoundError:
                listings += 1
                if listings > _LISTINGS:
                    raise
                _log.info("%s has changed since it was listed", self._folder)
                self._list_again(offset, end)
        if offset < end:
            self._list_again(offset, end)
            if self._again(self._written_end) < end:
                self._out_of_range(offset, end)

    def _blocks(self, start: int, end: int) -> Iterator[StoredBatches]:
        for index in range(self._index_at(start), len(self._segments)):
            segment = self._segments[index]
            if segment.base_offset >= end:
                return
            following = self._bases[index + 1] if index + 1 < len(self._bases) else None
            for block in segment.blocks(start, end, following):
                yield block
                start = max(start, block.next_offset)
                if start >= end:
                    return

    def _out_of_range(self, offset: int, end: int) -> None:
        try:
            available = self.start_offset, self._again(self._written_end)
        except FileNotFoundError:
            available = GONE
        raise OffsetOutOfRange(self._topic, self._partition, (offset, end), available)


def _from(aborted: list[AbortedTransaction], offset: int) -> list[tuple[int, int]]:
    """The transactions that end after `offset`; an earlier one would make later ones of its producer look aborted."""
    return [(entry.producer_id, entry.first_offset) for entry in aborted if entry.last_offset >= offset]
