"""Plant single faults into sound histories, to test that a checker finds them.

Each function changes what the clients saw, as if the log had that fault. It returns the new history and the items that
the checker must report, or None if the history has no place for the fault. `rng` chooses the place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

from tests.support.checker.history import History, Outcome, Read, Seen, Sent, Write
from tests.support.checker.log_checker import Item, Kind

Planted = tuple[History, set[Item]]
#: Values by (partition, offset).
Log = dict[tuple[int, int], str]


def _log(history: History, *, is_committed: bool) -> Log:
    """The log's values according to the final readers of this isolation level."""
    return {
        (seen.partition, seen.offset): seen.value
        for read in history.reads
        if read.is_final and read.is_committed == is_committed
        for seen in read.seen
    }


def _where(history: History, item: Item) -> int:
    """The offset of a value that is in the log."""
    log = _log(history, is_committed=False)
    return next(offset for (partition, offset), value in log.items() if (partition, value) == item)


def _free_positions(history: History) -> list[tuple[int, int]]:
    """Offsets without a value, and some after the end."""
    log = _log(history, is_committed=False)
    ends: dict[int, int] = defaultdict(int)
    for partition, offset in log:
        ends[partition] = max(ends[partition], offset + 1)
    positions = [(partition, offset) for partition, end in ends.items() for offset in range(end + 3)]
    reported = {(sent.partition, sent.offset) for write in history.writes for sent in write.sent}
    return [each for each in positions if each not in log and each not in reported]


def _without(history: History, item: Item, hides: Callable[[Read], bool]) -> History:
    """The history without a value in the reads for which `hides` is true."""
    reads = [
        replace(read, seen=tuple(seen for seen in read.seen if (seen.partition, seen.value) != item))
        if hides(read)
        else read
        for read in history.reads
    ]
    return History(history.writes, reads)


def _with(history: History, added: Seen, sees: Callable[[Read], bool]) -> History:
    """Add a record to one read of each process: the first that `sees` it and is final or reads past its offset."""
    reads = list(history.reads)
    done: set[str] = set()
    for number, read in enumerate(reads):
        if not sees(read) or read.process in done:
            continue
        beyond = [
            index
            for index, seen in enumerate(read.seen)
            if seen.partition == added.partition and seen.offset > added.offset
        ]
        if beyond or read.is_final:
            index = beyond[0] if beyond else len(read.seen)
            reads[number] = replace(read, seen=(*read.seen[:index], added, *read.seen[index:]))
            done.add(read.process)
    return History(history.writes, reads)


def _rewritten(history: History, old: Write, new: Write) -> History:
    return History([new if write is old else write for write in history.writes], history.reads)


def _items(write: Write) -> list[Item]:
    return [(sent.partition, sent.value) for sent in write.sent]


def _visible(history: History) -> set[Item]:
    return {(partition, value) for (partition, _), value in _log(history, is_committed=True).items()}


def lost_write(history: History, rng: Random) -> Planted | None:
    """An acknowledged value is missing in all reads, or only in the final ones."""
    acknowledged = [item for write in history.writes if write.outcome is Outcome.OK for item in _items(write)]
    if not acknowledged:
        return None
    item = rng.choice(acknowledged)
    had_been_there = rng.random() < 0.5
    return _without(history, item, lambda read: read.is_final or not had_been_there), {item}


def duplicate(history: History, rng: Random) -> Planted | None:
    """A value is at a second offset of its partition."""
    log = sorted(_log(history, is_committed=True).items())
    if not log:
        return None
    (partition, offset), value = rng.choice(log)
    # after the first one, so that readers that get there see both
    free = rng.choice([each[1] for each in _free_positions(history) if each[0] == partition and each[1] > offset])
    return _with(history, Seen(partition, free, value), lambda _: True), {(partition, value)}


def phantom(history: History, rng: Random) -> Planted | None:
    """A value is read that no process sent."""
    positions = _free_positions(history)
    if not positions:
        return None
    partition, offset = rng.choice(positions)
    return _with(history, Seen(partition, offset, "nobody"), lambda _: True), {(partition, "nobody")}


def aborted_read(history: History, rng: Random) -> Planted | None:
    """A value of an aborted transaction is visible with read_committed."""
    hidden = {(partition, value) for (partition, _), value in _log(history, is_committed=False).items()}
    aborted = [
        item for write in history.writes if write.outcome is Outcome.FAILED for item in _items(write) if item in hidden
    ]
    if not aborted:
        return None
    item = rng.choice(aborted)
    added = Seen(item[0], _where(history, item), item[1])
    return _with(history, added, lambda read: read.is_committed), {item}


def precommitted_read(history: History, rng: Random) -> Planted | None:
    """A transaction's values are visible before its commit was requested."""
    found = [
        (write, read)
        for write, read in _first_readers(history)
        if write.is_transaction and write.outcome is not Outcome.FAILED
    ]
    if not found:
        return None
    write, read = rng.choice(found)
    late = replace(write, commit_began=read.ended + 1, ended=max(write.ended, read.ended + 2))
    mine = set(_items(write))
    seen = {(item.partition, item.value) for item in read.seen}
    return _rewritten(history, write, late), mine & seen


def _first_readers(history: History) -> list[tuple[Write, Read]]:
    """Writes, with the first read_committed read that received one of their records."""
    writers = {item: write for write in history.writes for item in _items(write)}
    first: dict[int, tuple[Write, Read]] = {}
    for read in sorted(history.reads, key=lambda read: read.ended):
        for seen in read.seen if read.is_committed else ():
            write = writers[seen.partition, seen.value]
            first.setdefault(id(write), (write, read))
    return list(first.values())


def torn_transaction(history: History, rng: Random) -> Planted | None:
    """One record of a transaction with unknown outcome is not visible with read_committed."""
    visible = _visible(history)
    whole = [
        write
        for write in history.writes
        if write.outcome is not Outcome.FAILED and len(write.sent) > 1 and visible.issuperset(_items(write))
    ]
    if not whole:
        return None
    write = rng.choice(whole)
    item = rng.choice(_items(write))
    history = _rewritten(history, write, replace(write, outcome=Outcome.UNKNOWN))
    return _without(history, item, lambda read: read.is_committed), {item}


def polls_repeated(history: History, rng: Random) -> Planted | None:
    """A consumer receives the records of its last poll again."""
    polls = _polls(history)
    pairs = [(first, second) for found in polls.values() for first, second in pairwise(found)]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    reads = [
        replace(read, seen=history.reads[first].seen + read.seen) if number == second else read
        for number, read in enumerate(history.reads)
    ]
    return History(history.writes, reads), {(seen.partition, seen.value) for seen in history.reads[first].seen}


def polls_reordered(history: History, rng: Random) -> Planted | None:
    """A consumer receives two polls in the wrong order."""
    pairs = [
        (first, second, common)
        for found in _polls(history).values()
        for first, second in pairwise(found)
        if (common := _partitions(history.reads[first]) & _partitions(history.reads[second]))
    ]
    if not pairs:
        return None
    first, second, common = rng.choice(pairs)
    reads = list(history.reads)
    reads[first], reads[second] = reads[second], reads[first]
    back = {(seen.partition, seen.value) for seen in history.reads[first].seen if seen.partition in common}
    return History(history.writes, reads), back


def _polls(history: History) -> dict[str, list[int]]:
    """The indexes of the polls with records, by process."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, read in enumerate(history.reads):
        if read.seen and not read.is_final:
            found[read.process].append(number)
    return found


def _partitions(read: Read) -> set[int]:
    return {seen.partition for seen in read.seen}


def poll_skip(history: History, rng: Random) -> Planted | None:
    """A consumer reads past a value that it did not receive."""
    last: dict[tuple[str, int], int] = {}
    given: list[tuple[Read, Seen]] = []
    for read in history.reads:
        for seen in read.seen if not read.is_final else ():
            given.append((read, seen))
            last[read.process, seen.partition] = seen.offset
    inner = [(read, seen) for read, seen in given if seen.offset < last[read.process, seen.partition]]
    if not inner:
        return None
    read, seen = rng.choice(inner)
    item = (seen.partition, seen.value)
    return _without(history, item, lambda other: other.process == read.process), {item}


def nonmonotonic_send(history: History, rng: Random) -> Planted | None:
    """Two successive records of a producer are in the log in reverse order."""
    sends: dict[tuple[str, int], list[Sent]] = defaultdict(list)
    for write in sorted(history.writes, key=lambda write: write.began):
        if write.outcome is Outcome.OK and not write.is_transaction:
            for sent in write.sent:
                sends[write.process, sent.partition].append(sent)
    pairs = [pair for found in sends.values() for pair in pairwise(found)]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    return _exchanged(history, first, second), {(second.partition, second.value)}


def _exchanged(history: History, first: Sent, second: Sent) -> History:
    """Exchange the offsets of two values, in reads and in the broker's answers."""
    other = {first.value: second.value, second.value: first.value}
    positions = {first.value: second.offset, second.value: first.offset}
    writes = [
        replace(write, sent=tuple(replace(sent, offset=positions.get(sent.value, sent.offset)) for sent in write.sent))
        for write in history.writes
    ]
    reads = [
        replace(read, seen=tuple(replace(seen, value=other.get(seen.value, seen.value)) for seen in read.seen))
        for read in history.reads
    ]
    return History(writes, reads)


def inconsistent_offset(history: History, rng: Random) -> Planted | None:
    """One poll shows two values at each other's offsets; readers of both isolation levels saw them correctly."""
    visible = _visible(history)
    pairs = [
        (number, first, second)
        for number, read in enumerate(history.reads)
        for partition in _partitions(read)
        for first, second in pairwise([seen for seen in read.seen if seen.partition == partition])
        if {(partition, first.value), (partition, second.value)} <= visible
    ]
    if not pairs:
        return None
    number, first, second = rng.choice(pairs)
    read = history.reads[number]
    exchanged = {first: replace(first, value=second.value), second: replace(second, value=first.value)}
    reads = list(history.reads)
    reads[number] = replace(read, seen=tuple(exchanged.get(seen, seen) for seen in read.seen))
    return History(history.writes, reads), {(seen.partition, seen.value) for seen in (first, second)}


#: The kind of anomaly that each function plants.
MUTATIONS: dict[Callable[[History, Random], Planted | None], Kind] = {
    lost_write: Kind.LOST_WRITE,
    duplicate: Kind.DUPLICATE,
    aborted_read: Kind.ABORTED_READ,
    precommitted_read: Kind.PRECOMMITTED_READ,
    phantom: Kind.PHANTOM,
    polls_repeated: Kind.NONMONOTONIC_POLL,
    polls_reordered: Kind.NONMONOTONIC_POLL,
    poll_skip: Kind.POLL_SKIP,
    nonmonotonic_send: Kind.NONMONOTONIC_SEND,
    inconsistent_offset: Kind.INCONSISTENT_OFFSET,
    torn_transaction: Kind.TORN_TRANSACTION,
}
