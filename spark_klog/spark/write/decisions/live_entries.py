"""What the records of a decision topic say about one log: which entries count, and which records nobody needs.

A record has the key LOG-KEY/NUMBER/UUID, and an entry or nothing (a tombstone) as its value. In the order of the
partition, an entry counts if its number is higher than all that counted before; any other is void, whenever it comes.
So the partition decides between drivers, and a late record of one that was overtaken changes nothing.

UUIDs make keys unique, so that compaction never drops an entry for another one. What stands before the last decision is
removed by tombstones. Nothing there can make an entry count or void for a reader who does not see it:

* The decision counts for every reader, as its number is higher than that of every record before it, void or not.
* An entry after it that counted is never removed before the next decision, so what it made void stays void.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_klog.errors import DecodeError
from spark_klog.spark.write.decisions.entries import Identity, decode_entry
from spark_klog.spark.write.exactly_once import Decision, Entry, Log

#: Keys that wait for a tombstone. Those beyond it stay in the topic until another process reads it.
_MOST_OBSOLETE = 10_000
#: Digits of a number. No log gets as far; Python refuses to convert thousands of them.
_MOST_DIGITS = 18


def record_key(log_key: str, number: int, id_: str) -> bytes:
    """The key of a record of a log; `id_` is its UUID."""
    return f"{log_key}/{number}/{id_}".encode()


@dataclass
class LiveEntries:
    """The entries of a log in the records before offset `next_offset`: those from the last decision on."""

    log_key: str
    next_offset: int = 0
    #: Of the entries that count; None before the first.
    identity: Identity | None = None
    entries: list[Entry] = field(default_factory=list)
    #: The number of the last entry that counts, and the key of its record; -1 before the first.
    last: int = -1
    last_key: bytes = b""
    #: Records before the last decision that have no tombstone yet, and records from it on, in the partition's order.
    obsolete: dict[bytes, None] = field(default_factory=dict)
    _keys: dict[bytes, None] = field(default_factory=dict)
    #: The first number that was missing since the last decision.
    _missing: int | None = None

    def __post_init__(self) -> None:
        self._prefix = f"{self.log_key}/".encode()

    @property
    def is_incomplete(self) -> bool:
        """Whether entries are missing: removed since a later decision, or lost."""
        return self._missing is not None

    def add(self, key: bytes | None, value: bytes | None, where: str) -> None:
        """Take in the next record of the partition, of this log or another one; `DecodeError` names `where` it is."""
        if key is None or not key.startswith(self._prefix):
            return
        number_text, _, id_ = key[len(self._prefix) :].partition(b"/")
        is_number = number_text.isdigit() and len(number_text) <= _MOST_DIGITS
        if not is_number or b"/" in id_:  # of a log whose key begins with this one's
            return
        if value is None:
            self.obsolete.pop(key, None)
            self._keys.pop(key, None)
            return
        self._keys[key] = None
        number = int(number_text)
        if number <= self.last:
            return
        self.identity, entry = decode_entry(value, where)
        if isinstance(entry, Decision):
            del self._keys[key]
            self.obsolete.update(self._keys)
            while len(self.obsolete) > _MOST_OBSOLETE:
                del self.obsolete[next(iter(self.obsolete))]
            self._keys, self.entries, self._missing = {key: None}, [], None
        elif number != self.last + 1 and self._missing is None:
            self._missing = self.last + 1
        self.entries.append(entry)
        self.last, self.last_key = number, key

    @property
    def left(self) -> Log:
        """The entries, also if some are missing."""
        return Log(tuple(self.entries), self.last + 1 - len(self.entries))

    def log(self, where: str) -> Log:
        """The entries; `DecodeError` if the topic `where` they are has lost some."""
        if self._missing is not None:
            raise DecodeError(
                f"topic {where}: entry {self._missing} of the decision log {self.log_key} is missing: does the topic "
                "have another cleanup.policy than compact, or did someone delete records, or create it again? To go "
                "on, see continue_at in docs/recipes/exactly-once.md"
            )
        return self.left
