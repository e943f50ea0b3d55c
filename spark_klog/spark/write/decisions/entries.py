"""The entries of a decision log: JSON objects, in the values of a compacted topic's records, and which of them count.

{"version": 1, "log": UUID, "prefix": "klog-", "entry": "claim"}
{..., "entry": "decision", "batch": 5, "transactions": [[TRANSACTIONAL_ID, PRODUCER_ID, EPOCH, TASK], ...],
 "planned": SHA-256}
{..., "entry": "ended"}

A record has the key LOG-KEY/NUMBER/UUID, and an entry or nothing (a tombstone) as its value. In the order of the
partition, an entry counts if its number is higher than all that counted before; any other is void, whenever it comes.
So the partition decides between drivers, and a late record of one that was overtaken changes nothing.

UUIDs make keys unique, so that compaction never drops an entry for another one. What stands before the last decision is
removed by tombstones. Nothing there can make an entry count or void for a reader who does not see it:

* The decision counts for every reader, as its number is higher than that of every record before it, void or not.
* An entry after it that counted is never removed before the next decision, so what it made void stays void.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import astuple, dataclass, field
from typing import Any

from spark_klog.base.cache import Newest
from spark_klog.base.durable import check_version
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.spark.option_table import DEFAULT_ID_PREFIX
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry, Log, Superseded, Transaction

_VERSION = 1
#: Keys that wait for a tombstone. Those beyond it stay in the topic until another process reads it.
_MOST_OBSOLETE = 10_000
#: Digits of a number. No log gets as far; Python refuses to convert thousands of them.
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Identity:
    """What distinguishes a log from those of other queries: a UUID, which entry 0 draws, and transactionalIdPrefix."""

    prefix: str = DEFAULT_ID_PREFIX
    log: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def id_prefix(self) -> str:
        """The beginning of the query's transactional ids, and of no other query's."""
        return f"{self.prefix}{self.log}-"

    def check(self, other: Identity, who: str, where: str, *, is_claimed: bool) -> None:
        """Check the identity of an entry that was read `where`, of the log that `who` writes.

        Raises `Superseded` if this one `is_claimed` and the entry is of another log; `ConfigError` if it has another
        prefix.
        """
        if is_claimed and other.log != self.log:
            raise Superseded
        if other.prefix != self.prefix:
            raise ConfigError(
                f"option transactionalIdPrefix is {self.prefix}, but {who} has written with {other.prefix} until now "
                f"({where}): what it left open could not be found and aborted. Set transactionalIdPrefix="
                f"{other.prefix} again"
            )


def encode_entry(identity: Identity, entry: Entry, **more: int) -> bytes:
    """The JSON of an entry, with `more` fields."""
    fields: dict[str, Any] = {"version": _VERSION, "log": identity.log, "prefix": identity.prefix, **more}
    fields["entry"] = type(entry).__name__.lower()
    if isinstance(entry, Decision):
        fields["batch"] = entry.batch
        fields["transactions"] = [astuple(transaction) for transaction in entry.transactions]
        fields["planned"] = entry.planned
    return json.dumps(fields).encode()


def decode_entry(data: bytes, where: str) -> tuple[Identity, Entry]:
    """The log's identity and the entry; `DecodeError` names `where` it is from."""
    try:
        fields = json.loads(data)
        version = fields["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DecodeError(f"{where} is not an entry of a decision log: {error!r}") from error
    check_version(version, _VERSION, where, "begin with a new checkpoint", DecodeError)
    try:
        # entries from before transactionalIdPrefix have none
        identity = Identity(str(fields.get("prefix", DEFAULT_ID_PREFIX)), str(uuid.UUID(fields["log"])))
        return identity, _decoded(fields)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise DecodeError(f"{where} is not an entry of a decision log: {error!r}") from error


def _decoded(fields: dict[str, Any]) -> Entry:
    if fields["entry"] == "claim":
        return Claim()
    if fields["entry"] == "ended":
        return Ended()
    if fields["entry"] != "decision":
        raise ValueError(f"entry {fields['entry']!r}")
    transactions = tuple(
        Transaction(str(name), int(producer_id), int(epoch), int(task))
        for name, producer_id, epoch, task in fields["transactions"]
    )
    # decisions of earlier versions have no plan
    return Decision(int(fields["batch"]), transactions, str(fields.get("planned", "")))


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
    obsolete: Newest[bytes, None] = field(default_factory=lambda: Newest(_MOST_OBSOLETE))
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
            for old in self._keys:
                self.obsolete[old] = None
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
