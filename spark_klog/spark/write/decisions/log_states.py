"""Decision logs as an operator sees them: which query and micro-batch a transaction is of, and what a restart will do.

Reads only: unlike `DecisionLog.read`, nothing is removed, created or claimed, so a query may run meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from spark_klog.base.addresses import local_path, without_user
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.decoding import RecordDecoder
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import offset_range
from spark_klog.errors import DecodeError
from spark_klog.files.folder import LocalFolder
from spark_klog.spark.write.decisions.decision_log import Identity, decode_entry
from spark_klog.spark.write.decisions.decision_place import query_key, stream_key
from spark_klog.spark.write.decisions.hard_link_log import FOLDER, HardLinkLog, planned, read_back
from spark_klog.spark.write.decisions.live_entries import LiveEntries
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry, Log
from spark_klog.trees.checkpoint import CheckpointState

_log = logging.getLogger(__name__)
_MOST_ROWS = 10_000
#: Of the UUID at the end of a sink's transactional id, which the worker has drawn.
_UUID_LENGTH = 36
_EMPTY = Log()
#: How the keys of logs in a topic begin: of a stream, and of writes that have a name.
_STREAM, _WRITE = "stream/", "write/"


@dataclass(frozen=True)
class Holder:
    """What holds a transaction of a sink open.

    `batch` is the micro-batch, or the version of a write that has a name; None if it is the first one. `task` is None
    unless it is decided: a transactional id belongs to a worker process, and only the decision says which task wrote.
    """

    query: str
    place: str
    batch: int | None
    task: int | None
    is_decided: bool

    def __str__(self) -> str:
        kind, unit = ("write", "version") if self.query.startswith(_WRITE) else ("query", "micro-batch")
        batch = f"its first {unit}" if self.batch is None else f"{unit} {self.batch}"
        held = f"{kind} {self.query.removeprefix(_WRITE)}, {batch}"
        if self.is_decided:
            return f"{held}, task {self.task}: decided; the {kind} commits it when it runs again"
        return f"{held} or an earlier attempt: not decided; the {kind}'s next run aborts it"


@dataclass(frozen=True)
class LogState:
    """A decision log: `query` is a checkpoint, Spark's id of a query or a write's name, `place` where the log is.

    `identity` is None if it has no entry. `is_known` is False if it is in a topic, and there is no cluster to read it.
    """

    query: str
    place: str
    identity: Identity | None = None
    log: Log = _EMPTY
    is_in_topic: bool = False
    is_known: bool = True

    @property
    def decision(self) -> Decision | None:
        """The last decision."""
        first = self.log.entries[0] if self.log.entries else None
        return first if isinstance(first, Decision) else None

    @property
    def is_ended(self) -> bool:
        """Whether all transactions of the last decision are committed; True if there is none."""
        return self.decision is None or Ended() in self.log.entries

    @property
    def claims(self) -> int:
        """How many runs or micro-batches have begun since the last decision."""
        return sum(isinstance(entry, Claim) for entry in self.log.entries)

    def owns(self, transactional_id: str) -> bool:
        return self.identity is not None and transactional_id.startswith(self.identity.id_prefix)

    def holder(self, transactional_id: str, producer_id: int, epoch: int) -> Holder | None:
        """What holds an open transaction; None if it is of another log."""
        if not self.owns(transactional_id):
            return None
        decision = self.decision
        if decision is None:
            return Holder(self.query, self.place, None, None, False)
        if not self.is_ended:
            for one in decision.transactions:
                if (one.transactional_id, one.producer_id, one.epoch) == (transactional_id, producer_id, epoch):
                    return Holder(self.query, self.place, decision.batch, one.task, True)
        return Holder(self.query, self.place, decision.batch + 1, None, False)


def log_of_checkpoint(
    location: str, cluster: Cluster | None, topic: str, folder: Path | None = None
) -> LogState | None:
    """The log of a query by its option checkpointLocation; None if it has none.

    It is in files of the checkpoint or, if they say so or there are none, in a topic of `cluster`: in the one that the
    files name, or in `topic`. `folder` is where the checkpoint's files are, if not at the location. `DecodeError` if a
    file is damaged; otherwise raises what `logs_in_topic` does.
    """
    local = local_path(location)
    if folder is None and local is not None:
        folder = Path(local)
    name = without_user(location)
    key = ("" if local is None else query_key(Path(local))) or stream_key(location)
    if folder is not None and (folder / FOLDER).is_dir():
        moved = HardLinkLog(folder, Identity(), is_any=True).moved()
        if moved is None:
            return _log_in(name, folder / FOLDER)
        topic, key = moved.topic, moved.key
    elif cluster is None:
        return None
    found = LogState(name, _place(topic, key), is_in_topic=True, is_known=cluster is not None)
    if cluster is not None:
        found = next(iter(logs_in_topic(cluster, topic, lambda name, _: name == key)), found)
    is_there = found.identity is not None or (folder is not None and (folder / FOLDER).is_dir())
    return replace(found, query=name) if is_there else None


def _place(topic: str, key: str) -> str:
    return f"topic {topic} ({key})"


def _log_in(query: str, folder: Path) -> LogState:
    identity: Identity | None = None

    def entry_of(number: int) -> Entry:
        nonlocal identity
        file = folder / str(number)
        identity, entry = decode_entry(file.read_bytes(), str(file))
        return entry

    log = read_back(LocalFolder(folder), entry_of)
    return LogState(query, str(folder), identity if log.entries else None, log)


def owning_one_of(transactional_ids: Iterable[str]) -> Callable[[str, bytes], bool]:
    """A condition for `logs_in_topic`: logs that own one of these ids of an exactly-once sink."""
    prefixes = {one[:-_UUID_LENGTH] for one in transactional_ids}

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
    if topic not in cluster.attempt(lambda: cluster.partitions([topic], missing_ok=True)):
        return []
    start, end = offset_range(cluster, topic, 0)
    live: dict[str, LiveEntries] = {}
    damaged: set[str] = set()
    decoder = RecordDecoder(cluster.config.decompressed_max_bytes, _MOST_ROWS)
    for fetched in fetch_range(cluster, topic, 0, start, end):
        for records, _ in decoder.parts(fetched):
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
        LogState(
            name.removeprefix(_STREAM),
            _place(topic, name),
            one.identity,
            Log(tuple(one.entries), one.last + 1 - len(one.entries)),
            is_in_topic=True,
        )
        for name, one in sorted(live.items())
        if one.entries and name not in damaged
    ]


def restart(state: LogState, spark: CheckpointState) -> list[str]:
    """What the next run of a query will do, a line for each step; `spark` is Spark's part of the checkpoint.

    Nothing is known of a log that is not.
    """
    if not state.is_known:
        return []
    decision, steps = state.decision, []
    if decision is not None and decision.transactions and not state.is_ended:
        steps.append(
            f"commits the {len(decision.transactions)} transactions of micro-batch {decision.batch}; if one has timed "
            "out: DecidedButAborted"
        )
    steps.append("aborts all other open transactions of the query")
    following = spark.planned + 1 if spark.done >= spark.planned else spark.planned
    decided = -1 if decision is None else decision.batch
    if decision is None and state.is_in_topic and following > 0:
        steps.append(f"fails with CheckpointMismatch: Spark runs micro-batch {following}, and no decision is there")
    elif decision is not None and following not in (decided, decided + 1):
        steps.append(
            f"fails with CheckpointMismatch: Spark runs micro-batch {following}, but the last decision is of {decided}"
        )
    elif decision is not None and following == decided:
        now = planned(spark.folder, decided)
        if decision.planned and now and now != decision.planned:
            steps.append(
                f"fails with CheckpointMismatch: micro-batch {decided} is decided, and has other offsets in the "
                "checkpoint now"
            )
        else:
            steps.append(f"runs micro-batch {following} without writing: it is decided")
    else:
        again = "again " if following == spark.planned else ""
        steps.append(f"runs and writes micro-batch {following} {again}".rstrip())
    return steps
