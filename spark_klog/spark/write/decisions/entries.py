"""The entries of a decision log: JSON objects, in the values of a compacted topic's records.

{"version": 1, "log": UUID, "prefix": "klog-", "entry": "claim"}
{..., "entry": "decision", "batch": 5, "transactions": [[TRANSACTIONAL_ID, PRODUCER_ID, EPOCH, TASK], ...],
 "planned": SHA-256}
{..., "entry": "ended"}
"""

from __future__ import annotations

import json
import uuid
from dataclasses import astuple, dataclass, field
from typing import Any

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.spark.option_table import DEFAULT_ID_PREFIX
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry, Superseded, Transaction

_VERSION = 1


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
        # entries from before transactionalIdPrefix have none
        identity = Identity(str(fields.get("prefix", DEFAULT_ID_PREFIX)), str(uuid.UUID(fields["log"])))
        return identity, _decoded(fields)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DecodeError(f"{where} is not an entry of a decision log: {error!r}") from error


def _decoded(fields: dict[str, Any]) -> Entry:
    if fields["version"] != _VERSION:
        raise ValueError(f"version {fields['version']!r}, not {_VERSION}")
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
