"""Decision logs as an operator sees them: which query and micro-batch a transaction is of, and what a restart will do.

Reads only: unlike by `DecisionLog.read`, nothing is created or claimed, so a query may run meanwhile.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spark_klog.base.addresses import local_path, without_user
from spark_klog.client.admin.admin import TransactionDescription
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import offset_range
from spark_klog.errors import DecodeError, ErrorCode, KlogError, ProtocolError
from spark_klog.groups.checkpoint import CheckpointState
from spark_klog.spark.write.decisions.decision_log import is_there, read_records
from spark_klog.spark.write.decisions.decision_place import DecisionPlace, planned, query_key, stream_key
from spark_klog.spark.write.decisions.entries import Identity, LiveEntries, decode_entry
from spark_klog.spark.write.exactly_once import PLAN, Decision, Ended, Log, Transaction

_log = logging.getLogger(__name__)
#: Of the UUID at the end of a sink's transactional id, which the worker has drawn.
_UUID_LENGTH = 36
_EMPTY = Log()
#: How the keys of logs in a topic begin: of a stream, and of writes that have a name.
_STREAM, _WRITE = "stream/", "write/"
#: The key of a log of `write_updates`: Spark's id of the query, and the name of the call.
_UPDATES = re.compile(f"{_WRITE}([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})/(.+)", re.DOTALL)
_COMMITTED = frozenset({"PrepareCommit", "CompleteCommit"})


@dataclass(frozen=True)
class Holder:
    """What holds a transaction of a sink open.

    `batch` is the micro-batch, or the version of a write that has a name; None if it is the first one. `task` is None
    unless it is decided: a transactional id belongs to a worker process, and only the decision says which task wrote.
    `name` is that of a call of `write_updates`, empty for a sink and for a write of its own.
    """

    query: str
    place: str
    batch: int | None
    task: int | None
    is_decided: bool
    name: str = ""

    def __str__(self) -> str:
        kind, unit = ("write", "version") if self.query.startswith(_WRITE) else ("query", "micro-batch")
        batch = f"its first {unit}" if self.batch is None else f"{unit} {self.batch}"
        call = f", write_updates {self.name}" if self.name else ""
        held = f"{kind} {self.query.removeprefix(_WRITE)}{call}, {batch}"
        if self.is_decided:
            return f"{held}, task {self.task}: decided; the {kind} commits it when it runs again"
        return f"{held} or an earlier attempt: not decided; the {kind}'s next run aborts it"


@dataclass(frozen=True)
class LogState:
    """A decision log: `query` is a checkpoint, Spark's id of a query or a write's name, `place` where the log is.

    `name` is that of a call of `write_updates`. `identity` is None if the log has no entry.
    """

    query: str
    place: str
    name: str = ""
    identity: Identity | None = None
    log: Log = _EMPTY

    @property
    def decision(self) -> Decision | None:
        """The last decision."""
        first = self.log.entries[0] if self.log.entries else None
        return first if isinstance(first, Decision) else None

    @property
    def decided(self) -> int:
        """The last decided micro-batch; -1 if there is none."""
        return self.log.decided

    @property
    def to_commit(self) -> tuple[Transaction, ...]:
        """The transactions of the last decision, unless all are committed."""
        return () if self.decision is None or Ended() in self.log.entries else self.decision.transactions

    def owns(self, transactional_id: str) -> bool:
        return self.identity is not None and transactional_id.startswith(self.identity.id_prefix)

    def holder(self, transactional_id: str, producer_id: int, epoch: int) -> Holder | None:
        """What holds an open transaction; None if it is of another log."""
        if not self.owns(transactional_id):
            return None
        for txn in self.to_commit:
            if (txn.transactional_id, txn.producer_id, txn.epoch) == (transactional_id, producer_id, epoch):
                return Holder(self.query, self.place, self.decided, txn.task, True, self.name)
        following = None if self.decision is None else self.decided + 1
        return Holder(self.query, self.place, following, None, False, self.name)


@dataclass(frozen=True)
class QueryLogs:
    """The logs of a query: its sink's, and those of its calls of `write_updates`.

    `searched` says in a message where they were looked for.
    """

    sink: LogState | None
    updates: tuple[LogState, ...]
    searched: str

    @property
    def all(self) -> tuple[LogState, ...]:
        return self.updates if self.sink is None else (self.sink, *self.updates)


def logs_of_checkpoint(location: str, cluster: Cluster, topic: str, folder: Path | None = None) -> QueryLogs:
    """The logs of a query in a `topic` of `cluster`, by its option checkpointLocation.

    Those of `write_updates` are found by Spark's id of the query, which the checkpoint's files have. `folder` is where
    these files are, if not at the location. Raises what `logs_in_topic` does.
    """
    local = local_path(location)
    if folder is None and local is not None:
        folder = Path(local)
    by_id = query_key(folder) if folder is not None else ""
    sinks = by_id if local is not None and by_id else stream_key(location)
    calls = f"{_WRITE}{by_id.removeprefix(_STREAM)}/" if by_id else ""

    def is_wanted(key: str, _: bytes) -> bool:
        return key == sinks or (calls != "" and key.startswith(calls))

    logs = [replace(state, query=without_user(location)) for state in logs_in_topic(cluster, topic, is_wanted)]
    place = DecisionPlace(topic, sinks).told
    sink = next((state for state in logs if state.place == place), None)
    searched = f"in topic {topic} ({sinks} or {calls}NAME)" if calls else f"in topic {topic} ({sinks})"
    if not logs and not is_there(cluster, topic):
        searched += ", which does not exist"
    return QueryLogs(sink, tuple(state for state in logs if state.name), searched)


def owning_one_of(transactional_ids: Iterable[str]) -> Callable[[str, bytes], bool]:
    """A condition for `logs_in_topic`: logs that own one of these ids of an exactly-once sink."""
    prefixes = {transactional_id[:-_UUID_LENGTH] for transactional_id in transactional_ids}

    def is_owner(_: str, value: bytes) -> bool:
        try:
            return decode_entry(value, "")[0].id_prefix in prefixes
        except DecodeError:  # whose entry it is, nobody knows
            return False

    return is_owner


def logs_in_topic(cluster: Cluster, topic: str, is_wanted: Callable[[str, bytes], bool]) -> list[LogState]:
    """The wanted logs in a topic, sorted by key; none if it does not exist. Logs with damaged entries are left out.

    `is_wanted` is called with the key of a log and the JSON of one of its entries. Only logs for which it was true are
    kept in memory, from that entry on: a topic may have one log for each write that ever ran. Entries of other
    identities before it don't count, or are of a log that was lost.

    Raises what `fetch_range` and `list_offsets` raise.
    """
    if not is_there(cluster, topic):
        return []
    start, end = offset_range(cluster, topic, 0)
    live: dict[str, LiveEntries] = {}
    damaged: set[str] = set()
    for records, _ in read_records(cluster, topic, start, end):
        for record in records:
            name = (record.key or b"").decode(errors="replace").rsplit("/", 2)[0]
            if name not in live:
                if record.value is None or not is_wanted(name, record.value):
                    continue
                live[name] = LiveEntries(name)
            try:
                live[name].add(record.key, record.value, f"{topic}-0 {record.offset}")
            except DecodeError as error:
                damaged.add(name)
                _log.warning("%s", error)
    return [
        LogState(*_whose(name, topic), identity=state.identity, log=state.left)
        for name, state in sorted(live.items())
        if state.entries and name not in damaged
    ]


def _whose(key: str, topic: str) -> tuple[str, str, str]:
    """The query, the place and the name of `write_updates` of a log's key."""
    match = _UPDATES.fullmatch(key)
    query, name = (match[1], match[2]) if match else (key.removeprefix(_STREAM), "")
    return query, DecisionPlace(topic, key).told, name


@dataclass(frozen=True)
class Lost:
    """The tasks of a decision whose transactions can't be committed any more.

    Brokers have `aborted` them, or `forgotten` them: then nobody knows whether they were committed.
    """

    aborted: tuple[int, ...] = ()
    forgotten: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, transactions: Iterable[Transaction], described: Mapping[str, TransactionDescription | KlogError]
    ) -> Lost | None:
        """What the coordinators say of transactions; None if one does not answer."""
        aborted, forgotten = [], []
        for transaction in transactions:
            now = described[transaction.transactional_id]
            if isinstance(now, TransactionDescription):
                if not _can_commit(transaction, now):
                    aborted.append(transaction.task)
            elif isinstance(now, ProtocolError) and now.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                forgotten.append(transaction.task)
            else:
                return None
        return cls(tuple(aborted), tuple(forgotten))


def _can_commit(transaction: Transaction, now: TransactionDescription) -> bool:
    """Whether EndTxn would commit a transaction, or has: that adds 1 to the epoch (KIP-890)."""
    if now.state in _COMMITTED:
        return now.producer_epoch in (transaction.epoch, transaction.epoch + 1)
    return (now.state, now.producer_id, now.producer_epoch) == ("Ongoing", transaction.producer_id, transaction.epoch)


def restart(state: LogState, spark: CheckpointState, lost: Lost | None = None) -> list[str]:
    """What the next run of a query will do, a line for each step; `spark` is Spark's part of the checkpoint.

    `lost` is what the cluster says of `state.to_commit`, None if it is not known.
    """
    following, decided = spark.following, state.decided
    is_replanned = following == decided and _is_replanned(state, spark.folder)
    replanned = f"micro-batch {decided} is decided, and has other offsets in the checkpoint now"
    if state.name and following < decided:
        return [f"fails with EarlierWrite: Spark runs micro-batch {following}, but the last decision is of {decided}"]
    if state.name and is_replanned:
        return [f"fails with ReplannedWrite: {replanned}"]
    steps = [_commits(state, lost)] if state.to_commit else []
    if lost is not None and (lost.aborted or lost.forgotten):
        return steps
    whose = "the call" if state.name else "the query"
    others = f"all other open transactions of {whose}"
    steps.append(f"aborts {others if steps else f'open transactions of {whose} (none of them is decided)'}")
    if following not in (decided, decided + 1) and not state.name:  # as `ExactlyOnceWriter.write` has it
        last = f"the last decision is of {decided}" if decided >= 0 else "no decision is there"
        steps.append(f"fails with CheckpointMismatch: Spark runs micro-batch {following}, but {last}")
    elif is_replanned:
        steps.append(f"fails with CheckpointMismatch: {replanned}")
    elif following == decided:
        steps.append(f"runs micro-batch {following} without writing: it is decided")
    else:
        again = "again " if following == spark.planned else ""
        steps.append(f"runs and writes micro-batch {following} {again}".rstrip())
    return steps


def _is_replanned(state: LogState, checkpoint: Path) -> bool:
    """Whether the last decided micro-batch has other offsets in the checkpoint now than when it was decided."""
    was = "" if state.decision is None else state.decision.planned
    if state.name:  # without the plan it is the topic
        was = was.removeprefix(PLAN) if was.startswith(PLAN) else ""
    now = planned(checkpoint, state.decided)
    return bool(was and now and was != now)


def _commits(state: LogState, lost: Lost | None) -> str:
    """How a run ends the last decision, whose transactions are not all committed."""
    count, error = len(state.to_commit), "PartlyWritten" if state.name else "DecidedButAborted"
    of_it = f"{count} transactions of micro-batch {state.decided}"
    if lost is None:
        return f"commits the {of_it}; if one has timed out: {error}"
    rest = count - len(lost.forgotten) - len(lost.aborted)
    tasks = ", ".join(map(str, lost.forgotten or lost.aborted))
    if lost.forgotten:
        why = f"fails: the brokers have forgotten those of task {tasks} (transactional.id.expiration.ms)"
        return f"commits {rest} of the {of_it}, and {why}"
    if lost.aborted:
        return f"commits {rest} of the {of_it}, and fails with {error}: the brokers have aborted those of task {tasks}"
    return f"commits the {of_it}"
