"""The decision log of a query, or of a batch write that has a name, in a compacted topic of the target cluster.

`entries.py` says which records count: the order of the partition decides. `append` writes the entry, acknowledged by
all replicas in sync, and reads back to it. Nothing relies on clocks, on the fencing of producers, or on a read that is
up to date: a leader that was replaced and does not know it may answer reads with old data, but it can't acknowledge a
record (without unclean elections). So a read that must not lag writes a record without an entry first, and reads up to
that.

A run that has claimed a log appends only behind the entry before, and to a log of its own identity: somebody may have
deleted the topic since, and another run may have begun a log in a new one. A process that has read the first topic
compares the topics' ids before a decision.

If nobody has written since the process has read the topic, the offset of the record says so, and nothing is read back.
Otherwise compaction may have removed records in between: then the process reads on to the end, where the last decision
is always found.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from uuid import UUID

from spark_klog.base.cache import Newest
from spark_klog.client.admin.admin import Admin, create_compacted, replicas_for, settings_of_compacted
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.decoding import ConsumerRecord, RecordDecoder
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import list_offsets
from spark_klog.client.producer.producer import Producer
from spark_klog.client.retry import Retry
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError, RequestTimedOut
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.security.config import Settings
from spark_klog.spark.options import PREFIX
from spark_klog.spark.write.decisions.entries import Identity, LiveEntries, encode_entry, record_key
from spark_klog.spark.write.exactly_once import Decision, Entry, Log

_log = logging.getLogger(__name__)
#: A record to write: key and value, None for a tombstone.
_Record = tuple[bytes, bytes | None]
#: The settings of the log's client, which those of the query can't change. A decision of many tasks is large.
_OWN = {
    "acks": "all",
    "enable.idempotence": "true",
    "isolation.level": "read_uncommitted",
    "compression.type": "gzip",
    "linger.ms": "1000",  # until `flush`
    "max.request.size": str(64 * 1024 * 1024),
    "buffer.memory": str(128 * 1024 * 1024),
}
_MOST_TOMBSTONES = 500
_MOST_SESSIONS = 8
_MOST_LOGS = 100
#: Then connections and the producer's id are renewed: proxies drop quiet connections, brokers forget ids.
_IDLE_SECONDS = 60.0
_NO_TIME = (
    "three quarters of kafka.transaction.timeout.ms are over, and the brokers might abort transactions before they are "
    "committed. The next run finds out what is decided"
)
#: Reads of the end while the topic is being compacted.
_MOST_READS = 3
_ENOUGH_REPLICAS = 3
#: Records that are decoded at a time.
_MOST_ROWS = 10_000
#: Of a batch, compressed: the decision of about 100,000 tasks.
_LARGEST_BYTES = 4 * 1024 * 1024
_UNCLEAN, _IN_SYNC = "unclean.leader.election.enable", "min.insync.replicas"
_REFUSED = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED})


class DecisionLog:
    """Numbered entries, of which each number has one. `identity` is that of the entries, once they are read.

    Threads may use several logs at a time; calls on one cluster take turns.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        topic: str,
        key: str,
        identity: Identity,
        *,
        is_claimed: bool = False,
        decide_by: float = math.inf,
    ) -> None:
        """`settings` are the client's, without prefix. `key` names the log in the topic; it may be any text.

        `identity` is of the entries that were read before (`is_claimed`), or of a log that is empty. A decision is not
        sent after `decide_by`, in seconds since 1970, and `RequestTimedOut` if it is not confirmed then. The topic is
        created if it is missing, by the first call: see `_prepare_topic` for its errors. Each call raises
        `ProtocolError`, `ConnectionFailed` and `RequestTimedOut` within request.timeout.ms or, of an append, within
        delivery.timeout.ms.
        """
        self._settings = Settings({**settings, **_OWN})
        self._settings.pop("transactional.id", None)
        self._topic, self._key = topic, key
        self.identity = identity
        self._is_claimed, self._decide_by = is_claimed, decide_by

    def read(self, *, may_lag: bool = False) -> Log:
        """The entries from the last decision on: all that were appended before the call.

        With `may_lag` the last ones may be missing, which is faster: for who appends next, as `append` refuses then.
        Raises `ConfigError` if the entries have another transactionalIdPrefix, `Superseded` if another run has replaced
        the log that this one has claimed, `DecodeError` if an entry is damaged or missing.
        """
        with self._read(may_lag=may_lag) as live:
            return live.log(self._topic)

    def end(self) -> int:
        """The next free number, also of a log that has lost entries; raises what `read` raises otherwise."""
        with self._read() as live:
            return live.last + 1

    @contextmanager
    def _read(self, *, may_lag: bool = False) -> Iterator[LiveEntries]:
        with self._live() as (session, live):
            if may_lag or not live.next_offset:
                session.read_to_end(self._topic, live)
            if not may_lag:
                self._catch_up(session, live)
            if live.identity is not None:
                self.identity.check(live.identity, self._key, f"topic {self._topic}", is_claimed=self._is_claimed)
                self.identity = live.identity
            yield live

    def _catch_up(self, session: _Session, live: LiveEntries) -> None:
        """Read all that was written before the call: up to a record without an entry."""
        session.write(self._topic, live, [(record_key(self._key, 0, str(uuid.uuid4())), None)])

    def append(self, number: int, entry: Entry) -> bool:
        """Make an entry durable at a number; False if another driver has taken the number, or a later one.

        In the second case the entry may be in the log: a later driver goes on behind it, as after a crash of this one.
        After an exception it may be in the log, or come to be there later.
        """
        with self._live() as (session, live):
            if not live.next_offset or not self._may_append(live, number):
                session.read_to_end(self._topic, live)
            if not self._may_append(live, number):
                self._catch_up(session, live)  # the read may have lagged
                if live.last < number - 1 and live.identity in (None, self.identity):
                    raise _replaced(self._topic)
                if not self._may_append(live, number):
                    return False
            if number <= live.last:
                return False
            key = record_key(self._key, number, str(uuid.uuid4()))
            records: list[_Record] = [(key, encode_entry(self.identity, entry))]
            if not isinstance(entry, Decision):  # not before the last decision counts
                records += [(old, None) for old in list(live.obsolete)[:_MOST_TOMBSTONES]]
            decide_by = math.inf
            if isinstance(entry, Decision):
                session.check_again(self._topic)
                decide_by = self._decide_by
            session.write(self._topic, live, records, decide_by)
            return live.last_key == key

    def _may_append(self, live: LiveEntries, number: int) -> bool:
        """Whether `number` follows on the last entry that was read, which is of the claimed log, or is taken.

        An entry of a log that is not claimed may be any.
        """
        if not self._is_claimed or number <= live.last:
            return True
        return live.last == number - 1 and (number == 0 or live.identity == self.identity)

    @contextmanager
    def _live(self) -> Iterator[tuple[_Session, LiveEntries]]:
        """What the process knows of the log. After an error it knows nothing, and reads the topic again."""
        try:
            with _SESSIONS.of(self._settings) as session:
                try:
                    session.prepare(self._topic)
                    yield session, session.live(self._topic, self._key)
                except BaseException:
                    session.forget(self._topic)
                    raise
        except ProtocolError as error:
            raise _refused_access(error, self._topic) from None


@dataclass(eq=False)
class _Session:
    """A client of a cluster, and what was read with it. Hold `lock` to use it."""

    cluster: Cluster
    lock: threading.RLock = field(default_factory=threading.RLock)
    used_at: float = field(default_factory=time.monotonic)
    _producer: Producer | None = None
    #: Topics that are there, and their ids, None from brokers before 2.8.
    _prepared: dict[str, UUID | None] = field(default_factory=dict)
    #: By topic and the log's key.
    _logs: Newest[tuple[str, str], LiveEntries] = field(default_factory=lambda: Newest(_MOST_LOGS))

    def prepare(self, topic: str) -> None:
        if topic not in self._prepared:
            _prepare_topic(self.cluster, topic)
            self._prepared[topic] = self.cluster.topic_ids.get(topic)

    def live(self, topic: str, key: str) -> LiveEntries:
        self._logs[topic, key] = live = self._logs.get((topic, key)) or LiveEntries(key)
        return live

    def forget(self, topic: str) -> None:
        """Forget what was read: the topic may be another one by now."""
        for log in [log for log in self._logs if log[0] == topic]:
            del self._logs[log]
        self._prepared.pop(topic, None)

    def _check(self, topic: str) -> None:
        """Raise `ConfigError` if the last metadata have another topic of this name."""
        if self.cluster.topic_ids.get(topic) != self._prepared.get(topic):
            raise _replaced(topic)

    def check_again(self, topic: str) -> None:
        """Raise `ConfigError` if the topic was deleted and created again: offsets do not show that if it is longer."""
        self.cluster.attempt(lambda: self.cluster.partitions([topic]))
        self._check(topic)

    def read_to_end(self, topic: str, live: LiveEntries) -> None:
        """Read the records up to the end that the leader tells."""
        partition = topic, 0
        for _ in range(_MOST_READS):
            retry = Retry(self.cluster.config, self.cluster.deadline())
            while (end := list_offsets(self.cluster, {partition: LATEST})[partition]) < live.next_offset:
                # perhaps by a leader that was replaced, or by a new one that does not know yet what is confirmed
                self._check(topic)
                retry.pause(_replaced(topic))
                self.cluster.forget_leader(topic, 0)
            if not live.next_offset:
                live.next_offset = list_offsets(self.cluster, {partition: EARLIEST})[partition]
            self._read(topic, live, end)
            if not live.is_incomplete:  # else they were removed after the decision that follows was written
                return

    def _read(self, topic: str, live: LiveEntries, end: int) -> int:
        """Read the records before `end`, and perhaps more; return how many there are."""
        count = 0
        for records, next_offset in read_records(self.cluster, topic, live.next_offset, end):
            for record in records:
                live.add(record.key, record.value, f"{topic}-0 at offset {record.offset}")
                count += 1
            live.next_offset = max(live.next_offset, next_offset)
        return count

    def write(self, topic: str, live: LiveEntries, records: Sequence[_Record], confirmed_by: float = math.inf) -> None:
        """Write records, and read back up to them; `RequestTimedOut` if they are not confirmed by a time since 1970."""
        first, end = self._append(topic, records, confirmed_by)
        self._check(topic)
        if first < live.next_offset:
            raise _replaced(topic)
        if first == live.next_offset and end == first + len(records):
            for key, value in records:
                live.add(key, value, topic)
            live.next_offset = end
        else:
            expected = end - live.next_offset
            if self._read(topic, live, end) < expected:
                self.read_to_end(topic, live)

    def _append(self, topic: str, records: Sequence[_Record], confirmed_by: float) -> tuple[int, int]:
        """Write records; the offset of the first and that after the last."""
        if self._producer is None:
            self._producer = Producer.of_cluster(self.cluster, creates_topics=False)
        left = confirmed_by - time.time()
        if left <= 0:
            raise RequestTimedOut(f"nothing was sent to topic {topic}: {_NO_TIME}")
        try:
            sent = [self._producer.send(topic, value, key, partition=0) for key, value in records]
            self._producer.flush(left)
            if not all(delivery.done() for delivery in sent):
                raise RequestTimedOut(f"topic {topic} has not confirmed a decision in time: {_NO_TIME}")
            offsets = [delivery.result(0).offset for delivery in sent]
        except BaseException:  # records may be on their way: that producer writes no more
            self.renew()
            raise
        return min(offsets), max(offsets) + 1

    def renew(self) -> None:
        """Close the connections; the next call makes new ones, and another producer."""
        producer, self._producer = self._producer, None
        with suppress(KlogError):
            if producer is not None:
                producer.abort()
        self.cluster.close()


def _replaced(topic: str) -> ConfigError:
    return ConfigError(
        f"topic {topic} was deleted and created again while queries used it, or has lost records: their decisions are "
        "lost. Stop them, see docs/recipes/exactly-once.md, and start them again"
    )


class _Sessions:
    """The sessions of this process by their settings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Whoever uses one still that is removed, connects again.
        self._sessions: Newest[tuple[tuple[str, str], ...], _Session] = Newest(_MOST_SESSIONS)

    @contextmanager
    def of(self, settings: Mapping[str, str]) -> Iterator[_Session]:
        """The session of a cluster, for the block alone."""
        key = tuple(sorted(settings.items()))
        with self._lock:
            session = self._sessions.get(key) or _Session(Cluster(client_config(settings, PREFIX)))
            self._sessions[key] = session
        with session.lock:
            if time.monotonic() - session.used_at > _IDLE_SECONDS:
                session.renew()
            try:
                yield session
            finally:
                session.used_at = time.monotonic()

    def forget(self) -> None:
        """Close the connections in a forked process: they belong to its parent."""
        self._lock = threading.Lock()  # in the parent another thread may hold the old one
        sessions, self._sessions = self._sessions, Newest(_MOST_SESSIONS)
        for session in sessions.values():
            session.cluster.close()


_SESSIONS = _Sessions()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_SESSIONS.forget)


# ----- the topic


def _settings_of_topic(replicas: int | None) -> dict[str, str]:
    """The settings of the topic, beside its compaction. Segments are small, as brokers do not compact the last one,
    which each start reads."""
    settings = {
        _UNCLEAN: "false",
        "segment.bytes": str(_LARGEST_BYTES),
        "max.message.bytes": str(_LARGEST_BYTES),
        "min.cleanable.dirty.ratio": "0.1",
    }
    if replicas is not None:
        settings[_IN_SYNC] = str(max(1, replicas - 1))
    return settings


def is_there(cluster: Cluster, topic: str) -> bool:
    return topic in cluster.attempt(lambda: cluster.partitions([topic], missing_ok=True))


def read_records(cluster: Cluster, topic: str, start: int, end: int) -> Iterator[tuple[Iterator[ConsumerRecord], int]]:
    """The records from `start` to `end`, and perhaps more: those of each fetch, and the offset after them.

    Raises what `fetch_range` does.
    """
    decoder = RecordDecoder(cluster.config.decompressed_max_bytes, _MOST_ROWS)
    for fetched in fetch_range(cluster, topic, 0, start, end):
        yield (record for records, _ in decoder.parts(fetched) for record in records), fetched.next_offset


def _prepare_topic(cluster: Cluster, topic: str) -> None:
    """Create the topic if it is missing, or check the one that is there.

    It gets three replicas, or one for each broker if there are fewer, and min.insync.replicas one below; a warning says
    so if one that is there has less. Of its partitions only the first one is used. Raises `ConfigError` if it is there
    and not compacted; `ProtocolError` if ACLs forbid it.
    """
    admin = Admin(cluster)
    was_there = is_there(cluster, topic)
    if not was_there:
        create_compacted(admin, topic, _settings_of_topic)
        cluster.attempt(lambda: cluster.partitions([topic]))
    try:
        settings = settings_of_compacted(admin, topic, "decisions")
    except ProtocolError as error:
        if error.code not in _REFUSED:
            raise
        _log.info("whether topic %s is compacted is not checked: %s", topic, error)
        return
    if was_there:
        replicas = len(admin.describe_topic(topic).partitions[0].replicas)
        if risks := _risks(replicas, settings, replicas_for(admin)):
            _log.warning(
                "topic %s, which keeps decisions of exactly-once writes, may lose some when brokers fail: it has %s. "
                "Rows may be written twice then, see docs/recipes/exactly-once.md",
                topic,
                ", ".join(risks),
            )


def _risks(replicas: int, settings: Mapping[str, str | None], possible: int) -> list[str]:
    """What a topic has that does not keep decisions safe, if it could have this many `possible` replicas."""
    unclean, in_sync = settings.get(_UNCLEAN), settings.get(_IN_SYNC)
    risks = []
    if replicas < possible:
        risks.append(f"{replicas} of {possible} replicas")
    if replicas > 1 and unclean == "true":
        risks.append(f"{_UNCLEAN}=true")
    if replicas >= _ENOUGH_REPLICAS and in_sync == "1":
        risks.append(f"{_IN_SYNC}=1")
    return risks


def _refused_access(error: ProtocolError, topic: str) -> ProtocolError:
    """The error of any request about the topic; for want of ACLs with those that are needed."""
    if error.code not in _REFUSED:
        return error
    settings = {"cleanup.policy": "compact"} | _settings_of_topic(_ENOUGH_REPLICAS)
    configs = " ".join(f"--config {name}={value}" for name, value in settings.items())
    advice = (
        f"allow Read, Write and Describe on topic {topic}, which keeps decisions of exactly-once writes; and Create, "
        f"or create it: klog topics create {topic} --partitions 1 --replication-factor {_ENOUGH_REPLICAS} {configs}"
    )
    return ProtocolError(error.code, error.what, advice=advice)
