"""Find anomalies in a history of a log's clients that a correct log can't produce.

The anomalies are those of Jepsen's checks of Kafka (jepsen.tests.kafka, used for Redpanda and Bufstream), except cycles
of transactions, since the clients here do not write what they read. Two checks are stronger, because there are final
reads of everything: lost writes are also found at the end of the log and after an earlier read, and a write that was
acknowledged before another one began must have the smaller offset, whichever process wrote them.

If possible, a fault is reported as one kind. If an offset has two values, no other anomalies of these values are
reported. If a part of a transaction is missing, the transaction is torn if its outcome is unknown, and the part is lost
if it was acknowledged.

Offsets without a value are not a fault: they may be transaction markers or, with read_committed, aborted records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tests.support.checker.history import History, Outcome, Write

#: (partition, value). Each value is sent once, to one partition.
Item = tuple[int, str]
#: (partition, offset)
Position = tuple[int, int]


class Kind(Enum):
    """The names of the anomalies."""

    #: A value that was acknowledged or read before is not in a final read.
    LOST_WRITE = "lost write"
    #: A value is at two offsets.
    DUPLICATE = "duplicate"
    #: A read_committed consumer received a record of an aborted transaction.
    ABORTED_READ = "aborted read"
    #: A read_committed consumer received a record before the transaction's commit was requested.
    PRECOMMITTED_READ = "precommitted read"
    #: A value was read that no process sent to this partition.
    PHANTOM = "phantom"
    #: A consumer received an offset that is not larger than all earlier ones.
    NONMONOTONIC_POLL = "non-monotonic poll"
    #: A consumer skipped a record that others with its isolation level saw, and read later ones.
    POLL_SKIP = "poll skip"
    #: A write has a smaller offset than an earlier one of its process, or than one acknowledged before it began.
    NONMONOTONIC_SEND = "non-monotonic send"
    #: Two values were read, or acknowledged, at one offset.
    INCONSISTENT_OFFSET = "inconsistent offset"
    #: Only some records of a transaction with unknown outcome are visible.
    TORN_TRANSACTION = "torn transaction"


@dataclass(frozen=True)
class Anomaly:
    """A fault and its location; `process` is the client that saw it, or else the writer."""

    kind: Kind
    partition: int
    offset: int | None
    value: str
    process: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.value!r} in partition {self.partition} at {self.offset}, {self.process}"


def anomalies(history: History) -> list[Anomaly]:
    """All anomalies, by kind. ValueError unless there are final reads of both isolation levels, to find lost writes."""
    finals = {read.is_committed for read in history.reads if read.is_final}
    if finals != {True, False}:
        raise ValueError("the history has no final read of each isolation level")
    check = _Check(history)
    found = [
        *check.inconsistent_offsets(),
        *check.duplicates(),
        *check.phantoms(),
        *check.uncommitted_reads(),
        *check.lost_writes(),
        *check.torn_transactions(),
        *check.polls_back(),
        *check.polls_over(),
        *check.sends_back(),
    ]
    return list(dict.fromkeys(found))


class _Check:
    """A history with its indexes."""

    def __init__(self, history: History) -> None:
        self._writes = sorted(history.writes, key=lambda write: write.began)
        self._reads = history.reads
        #: The write of each value.
        self._writer: dict[Item, Write] = {}
        #: The values reported at each position, with the first process that reported each.
        self._reported: dict[Position, dict[str, str]] = defaultdict(dict)
        for write in self._writes:
            for sent in write.sent:
                self._writer[sent.partition, sent.value] = write
                if sent.offset is not None:
                    self._reported[sent.partition, sent.offset].setdefault(sent.value, write.process)
        for read in self._reads:
            for seen in read.seen:
                self._reported[seen.partition, seen.offset].setdefault(seen.value, read.process)
        #: The offsets of each value, except offsets that have several values.
        self._offsets: dict[Item, list[int]] = defaultdict(list)
        for (partition, offset), values in self._reported.items():
            if len(values) == 1:
                self._offsets[partition, next(iter(values))].append(offset)

    def _offset(self, item: Item) -> int | None:
        """The offset of a value, if it has exactly one."""
        offsets = self._offsets.get(item, ())
        return offsets[0] if len(offsets) == 1 else None

    def inconsistent_offsets(self) -> Iterator[Anomaly]:
        for (partition, offset), values in self._reported.items():
            if len(values) > 1:
                for value, process in values.items():
                    yield Anomaly(Kind.INCONSISTENT_OFFSET, partition, offset, value, process)

    def duplicates(self) -> Iterator[Anomaly]:
        for (partition, value), offsets in self._offsets.items():
            if len(offsets) > 1:
                for offset in offsets:
                    yield Anomaly(Kind.DUPLICATE, partition, offset, value, self._reported[partition, offset][value])

    def phantoms(self) -> Iterator[Anomaly]:
        for read in self._reads:
            for seen in read.seen:
                if (seen.partition, seen.value) not in self._writer:
                    yield Anomaly(Kind.PHANTOM, seen.partition, seen.offset, seen.value, read.process)

    def uncommitted_reads(self) -> Iterator[Anomaly]:
        """Reads of records of aborted transactions, and of transactions that were still open."""
        for read in self._reads:
            if not read.is_committed:
                continue
            for seen in read.seen:
                write = self._writer.get((seen.partition, seen.value))
                if write is None or not write.is_transaction:
                    continue
                if write.outcome is Outcome.FAILED:
                    yield Anomaly(Kind.ABORTED_READ, seen.partition, seen.offset, seen.value, read.process)
                elif read.ended < write.commit_began:
                    yield Anomaly(Kind.PRECOMMITTED_READ, seen.partition, seen.offset, seen.value, read.process)

    def _seen_by(self, is_committed: bool) -> dict[Item, str]:
        """The sent values that non-final readers received, with the first reader of each."""
        return {
            (seen.partition, seen.value): read.process
            for read in reversed(self._reads)
            if read.is_committed == is_committed and not read.is_final
            for seen in read.seen
            if (seen.partition, seen.value) in self._writer
        }

    def lost_writes(self) -> Iterator[Anomaly]:
        """Values missing in final reads; read_uncommitted reads must also have acknowledged aborted records."""
        committed = {item for item, write in self._writer.items() if write.outcome is Outcome.OK}
        answered = {
            (sent.partition, sent.value) for write in self._writes for sent in write.sent if sent.offset is not None
        }
        seen = {item for item in self._seen_by(True) if self._writer[item].outcome is not Outcome.FAILED}
        expected = {True: committed | seen, False: committed | answered | self._seen_by(False).keys() | seen}
        finals: dict[tuple[str, bool], set[Item]] = defaultdict(set)
        for read in self._reads:
            if read.is_final:
                finals[read.process, read.is_committed] |= {(seen.partition, seen.value) for seen in read.seen}
        for (process, is_committed), found in finals.items():
            for partition, value in sorted(expected[is_committed] - found):
                yield Anomaly(Kind.LOST_WRITE, partition, self._offset((partition, value)), value, process)

    def torn_transactions(self) -> Iterator[Anomaly]:
        visible = {(seen.partition, seen.value) for read in self._reads if read.is_committed for seen in read.seen}
        for write in self._writes:
            if write.outcome is Outcome.UNKNOWN:
                missing = [sent for sent in write.sent if (sent.partition, sent.value) not in visible]
                for sent in missing if len(missing) < len(write.sent) else ():
                    offset = self._offset((sent.partition, sent.value))
                    yield Anomaly(Kind.TORN_TRANSACTION, sent.partition, offset, sent.value, write.process)

    def polls_back(self) -> Iterator[Anomaly]:
        last: dict[tuple[str, int], int] = {}
        for read in self._reads:
            for seen in read.seen:
                before = last.get((read.process, seen.partition), -1)
                if seen.offset <= before:
                    yield Anomaly(Kind.NONMONOTONIC_POLL, seen.partition, seen.offset, seen.value, read.process)
                last[read.process, seen.partition] = max(before, seen.offset)

    def polls_over(self) -> Iterator[Anomaly]:
        """Records that a reader skipped; final readers are left out, since there they are lost writes."""
        visible: dict[bool, dict[int, set[int]]] = {True: defaultdict(set), False: defaultdict(set)}
        had: dict[tuple[str, bool, int], set[int]] = defaultdict(set)
        for read in self._reads:
            for seen in read.seen:
                visible[False][seen.partition].add(seen.offset)
                if read.is_committed:
                    visible[True][seen.partition].add(seen.offset)
                if not read.is_final:
                    had[read.process, read.is_committed, seen.partition].add(seen.offset)
        for (process, is_committed, partition), offsets in had.items():
            last = max(offsets)
            for offset in sorted(visible[is_committed][partition] - offsets):
                if offset < last:
                    value = next(iter(self._reported[partition, offset]))
                    yield Anomaly(Kind.POLL_SKIP, partition, offset, value, process)

    def sends_back(self) -> Iterator[Anomaly]:
        of_process: dict[tuple[str, int], int] = {}
        acknowledged: dict[int, int] = {}
        ending = iter(sorted(self._ends()))
        end = next(ending, None)
        for write in self._writes:
            while end is not None and end[0] < write.began:
                acknowledged[end[1]] = max(acknowledged.get(end[1], -1), end[2])
                end = next(ending, None)
            for sent in write.sent:
                offset = self._offset((sent.partition, sent.value))
                if offset is None:
                    continue
                before = of_process.get((write.process, sent.partition), -1)
                if offset < max(before, acknowledged.get(sent.partition, -1)):
                    yield Anomaly(Kind.NONMONOTONIC_SEND, sent.partition, offset, sent.value, write.process)
                of_process[write.process, sent.partition] = max(before, offset)

    def _ends(self) -> Iterator[tuple[int, int, int]]:
        """(time of the acknowledgement, partition, offset) of acknowledged values."""
        for write in self._writes:
            if write.outcome is Outcome.OK:
                for sent in write.sent:
                    offset = self._offset((sent.partition, sent.value))
                    if offset is not None:
                        yield write.ended, sent.partition, offset
