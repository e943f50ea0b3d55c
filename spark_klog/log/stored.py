"""A partition's folder that is only read: without a broker, from any file system, also while a broker writes to it.

    OFFSET.log .index .timeindex    see stored_segment.py; the name is the offset of the first record, 20 digits
    OFFSET.txnindex                 aborted transactions that end in the segment, see transaction_index.py
    OFFSET.snapshot                 see producer_state.py

Other names are not looked at: *.deleted are no part of the log any more, *.cleaned and *.swap not yet.

The log ends with its last whole batch, whether it has been replicated or not: nothing in the files says that. For
read_committed it ends before the first open transaction. What is open is found by a walk over headers from the newest
good producer snapshot on, which is within the last segment where a Kafka from 0.11 on wrote the log; without one, from
the start of the log.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from spark_klog.errors import DecodeError, OffsetOutOfRange
from spark_klog.log.producer_state import SNAPSHOT, ProducerState
from spark_klog.log.segment import LOG
from spark_klog.log.stored_files import LogFiles, read_whole
from spark_klog.log.stored_segment import Block, StoredSegment, Tail
from spark_klog.log.transaction_index import AbortedTransaction
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.records.offset_order import NOTHING
from spark_klog.records.reader import BadBatch, refuse

_log = logging.getLogger(__name__)
T = TypeVar("T")
#: What `OffsetOutOfRange.available` says of a partition that is not there any more.
GONE = (-1, -1)
#: How often a listing may be older than the files without anything read in between: compaction replaces files.
_LISTINGS = 10


class StoredBatches(NamedTuple):
    """Whole batches, the offset after the last sound one, and (producer id, first offset) of aborted transactions.

    `data` is valid until the next one is asked for. `damaged` has the errors of batches that are not where they
    say, by their positions in it.
    """

    data: memoryview
    next_offset: int
    aborted: list[tuple[int, int]]
    damaged: Mapping[int, DecodeError] = NOTHING


class StoredPartition:
    """The log in `folder` as the folder lists it now. `log_start` is what a checkpoint says of its first offset.

    `FileNotFoundError` where there is no such folder, OSError.
    """

    def __init__(
        self,
        files: LogFiles,
        folder: str,
        topic: str,
        partition: int,
        log_start: int = 0,
        *,
        read_committed: bool = False,
    ) -> None:
        self._files, self._folder = files, folder
        self._topic, self._partition = topic, partition
        self._log_start = log_start
        self._read_committed = read_committed
        self._list()

    def _list(self) -> None:
        names: dict[str, dict[str, int]] = {}
        for name, size, is_folder in self._files.entries(self._folder):
            stem, dot, suffix = name.rpartition(".")
            if not is_folder and stem.isdecimal():
                names.setdefault(stem, {})[dot + suffix] = size
        stems = sorted(names, key=int)
        self._segments = [
            StoredSegment(self._files, self._folder, stem, names[stem]) for stem in stems if LOG in names[stem]
        ]
        self._bases = [segment.base_offset for segment in self._segments]
        self._snapshots = [stem for stem in stems if SNAPSHOT in names[stem]]
        self._tail: Tail | None = None
        self._stable: int | None = None

    def _again(self, ask: Callable[[], T]) -> T:
        """The answer of a look at files, which retention or compaction may remove since they were listed."""
        for _ in range(_LISTINGS):
            try:
                return ask()
            except FileNotFoundError:
                _log.info("%s has changed since it was listed", self._folder)
                self._list()
        return ask()

    @property
    def is_empty(self) -> bool:
        """Whether there is no segment: the folder is of another kind, or nothing was ever written."""
        return not self._segments

    # ----- offsets

    @property
    def start_offset(self) -> int:
        """The first offset that the log has, or would have."""
        return max(self._log_start, self._bases[0] if self._bases else 0)

    @property
    def end_offset(self) -> int:
        """The offset after the last that may be read: of the last whole batch, or before the first open transaction.

        `DecodeError` where transactions are to be told apart and something on the way is no batch.
        """
        return max(self.start_offset, self._again(self._stable_end if self._read_committed else self._written_end))

    @property
    def damage(self) -> DecodeError | None:
        """What follows the last whole batch, if it is neither a part of one nor zeros: the log ends before it."""
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
        """The first offset of a record with a timestamp (ms) of `timestamp` or more, or None. `DecodeError`."""
        found = self._again(lambda: self._first_at(timestamp))
        return found if found is not None and found < self.end_offset else None

    def _first_at(self, timestamp: int) -> int | None:
        for segment, until in self._extents():
            if until > self.start_offset:
                found = segment.offset_for_time(timestamp, self.start_offset, until)
                if found is not None:
                    return found
        return None

    def timestamp_type(self, offset: int) -> int | None:
        """That of the batch with `offset` (see records/contract.py), None at the end of the log. `DecodeError`."""
        return self._again(lambda: self._timestamp_type(offset))

    def _timestamp_type(self, offset: int) -> int | None:
        for segment in self._segments[self._place(offset) :]:
            header = segment.header(offset)
            if header is not None:
                return header.timestamp_type
        return None

    def _place(self, offset: int) -> int:
        """The index of the segment that may have `offset`."""
        return max(0, bisect_right(self._bases, offset) - 1)

    def _extents(self) -> Iterator[tuple[StoredSegment, int]]:
        """(segment, where the next one begins; the end of the log for the last)."""
        for place, segment in enumerate(self._segments):
            is_last = place + 1 == len(self._segments)
            yield segment, self._find_tail().end_offset if is_last else self._bases[place + 1]

    # ----- transactions

    def _aborted(self, start: int, end: int) -> list[AbortedTransaction]:
        """The aborted transactions that [start, end) may have records of; `DecodeError` for a damaged index."""
        found: list[AbortedTransaction] = []
        for segment in self._segments[self._place(start) :]:
            entries = segment.aborted_transactions()
            found += [entry for entry in entries if entry.first_offset < end]
            if any(entry.last_stable_offset >= end for entry in entries):
                break
        return found

    def _unstable(self, end: int) -> Iterator[int]:
        """First offsets of transactions that are open, or were aborted and are in no transaction index (yet)."""
        start, state = self._newest_snapshot(end)
        listed = {(entry.producer_id, entry.last_offset) for entry in self._aborted(start, end + 1)}
        for segment, until in self._extents():
            for header, batch in segment.headers(start, until) if until > start else ():
                if not isinstance(header, BatchHeader) or not header.is_transactional:
                    continue
                aborted = state.add(header, batch)
                if aborted is not None and (aborted.producer_id, aborted.last_offset) not in listed:
                    _log.warning(
                        "%s: no transaction index has %s: read_committed ends before it", segment.path, aborted
                    )
                    yield aborted.first_offset
        if state.first_unstable_offset is not None:
            yield state.first_unstable_offset

    def _newest_snapshot(self, end: int) -> tuple[int, ProducerState]:
        """(offset, what was known there); the start of the log, and nothing, where there is no good snapshot."""
        for stem in reversed(self._snapshots):
            if not self.start_offset <= int(stem) <= end:
                continue
            path = f"{self._folder}/{stem}{SNAPSHOT}"
            try:
                return int(stem), ProducerState.decode(read_whole(self._files, path))
            except (DecodeError, FileNotFoundError) as error:
                _log.info("%s is of no use: %s", path, error)
        return self.start_offset, ProducerState()

    # ----- reading

    def check_offset(self, offset: int) -> None:
        """Nothing: any offset may be read from. It is otherwise in logs of Kafka 0.7."""

    def cuts(self, start: int, end: int, target: int) -> list[int]:
        """Offsets in (start, end), in order, that cut the range into parts of about even size, at most `target` bytes.

        They are those of index entries; where an index has none nearby, estimates.
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
        wanted = [total * number // parts for number in range(1, parts)]
        found, passed = set(), 0
        for segment, until, low, high in spans:
            size = max(0, high - low)
            found |= {
                segment.offset_estimate(low + place - passed, until, target // 4)
                for place in wanted
                if passed <= place < passed + size
            }
            passed += size
        return sorted(offset for offset in found if start < offset < end)

    def read(self, start: int, end: int, on_bad: Callable[[BadBatch], None] = refuse) -> Iterator[StoredBatches]:
        """The batches with offsets in [start, end); they may reach beyond both ends. Who decodes them sees bad ones.

        `OffsetOutOfRange` where the log does not have the wanted offsets (any more; `GONE` is available of a partition
        that is deleted), `DecodeError` at what is no batch, OSError.
        """
        offset, listings = start, 0
        while offset < end:
            if offset < self.start_offset:
                self._out_of_range(offset, end)
            try:
                aborted = self._aborted(offset, end) if self._read_committed else []
                for block in self._blocks(offset, end):
                    yield StoredBatches(block.data, block.next_offset, _from(aborted, offset), block.damaged)
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

    def _blocks(self, start: int, end: int) -> Iterator[Block]:
        for place in range(self._place(start), len(self._segments)):
            segment = self._segments[place]
            if segment.base_offset >= end:
                return
            following = self._bases[place + 1] if place + 1 < len(self._bases) else None
            for block in segment.blocks(start, end, following):
                yield block
                start = max(start, block.next_offset)
                if start >= end:
                    return

    def _list_again(self, offset: int, end: int) -> None:
        try:
            self._list()
        except FileNotFoundError:
            raise OffsetOutOfRange(self._topic, self._partition, (offset, end), GONE) from None

    def _out_of_range(self, offset: int, end: int) -> None:
        try:
            available = self.start_offset, self._again(self._written_end)
        except FileNotFoundError:
            available = GONE
        raise OffsetOutOfRange(self._topic, self._partition, (offset, end), available)


def _from(aborted: list[AbortedTransaction], offset: int) -> list[tuple[int, int]]:
    """Those that end after `offset`: given an earlier one, a later transaction of its producer would look aborted."""
    return [(entry.producer_id, entry.first_offset) for entry in aborted if entry.last_offset >= offset]
