"""Producers of the sink's tasks, and the cache that keeps them for later tasks of a Python worker."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import pyarrow as pa

from spark_klog.base.names import check_topic_name
from spark_klog.client.admin.admin import Admin
from spark_klog.client.admin.topics import NewTopic
from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.producer import Producer
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import ErrorCode, KlogError, ProducerFenced, ProtocolError
from spark_klog.protocol.apis import METADATA
from spark_klog.spark.options import PREFIX

_log = logging.getLogger(__name__)
#: Seconds. A topic that was created just now may be missing in the metadata of some brokers.
_GRACE = 1.0
_LAST_ABORT_MS = 5_000
#: States of a committed transaction (DescribeTransactions): its markers may still be under way.
_COMMITTED = ("PrepareCommit", "CompleteCommit")
#: A worker rarely writes with more different settings at a time; each producer has two connections to a broker.
_MOST_IDLE = 8
#: As spark.kafka.producer.cache.timeout. No thread checks it: Spark stops a worker that is idle for a minute.
_IDLE_SECONDS = 600.0
#: Bounds a producer's state of the partitions that it has written to.
_LIFETIME_SECONDS = 3600.0
#: More than the tasks that a worker runs in a micro-batch.
_MOST_FREE_IDS = 1000
_Key = tuple[tuple[str, str], ...]


class SinkProducer:
    """Write Arrow rows to topics. Unlike `Producer` it does not let the broker create topics: a name may be wrong."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """`settings` by Kafka's names; raises what `Cluster.connect` and `Producer` raise."""
        self._cluster = Cluster.connect(settings, PREFIX)
        self._producer = Producer.of_cluster(self._cluster, creates_topics=False)
        #: Whether no transaction has used the producer's epoch.
        self._has_new_epoch = False
        #: The last transaction that was prepared.
        self.prepared: PreparedTransaction | None = None

    def send_arrow(self, rows: pa.RecordBatch, topic: str | None, create_partitions: int | None, first: int) -> None:
        """Add rows to batches; raises what the client's `Producer.send_arrow` raises, with rows counted from `first`.

        A topic that does not exist gets `create_partitions` partitions, or is a `ProtocolError` that names it.
        """
        records = self._producer.record_rows(rows, topic, first=first)
        self.require(records.topics, create_partitions)
        self._producer.send_rows(records)

    def require(self, names: Sequence[str], create_partitions: int | None) -> None:
        """Make sure that the topics exist; see `send_arrow`."""
        unknown = self._producer.unknown(names)
        missing = self._missing(unknown) if unknown else []
        for name in missing:
            check_topic_name(name)  # brokers answer one that is illegal as one that does not exist
        seconds = _GRACE if create_partitions is None else self._cluster.config.request_timeout_ms / 1000
        deadline, attempts = time.monotonic() + seconds, 0
        while missing and time.monotonic() < deadline:
            if attempts:
                time.sleep(pause_seconds(self._cluster.config, attempts))
            attempts += 1
            if create_partitions is not None:
                self._create(missing, create_partitions)
            missing = self._missing(missing)
        if missing:
            hint = "option createTopics=PARTITIONS creates topics"
            if create_partitions is not None:
                hint = f"not there {seconds:g} s after it was created: is a topic of this name being deleted?"
            what = f"topic{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise answer_error(METADATA, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{what} ({hint})")

    def _missing(self, names: list[str]) -> list[str]:
        there = self._cluster.attempt(lambda: self._cluster.partitions(names, missing_ok=True))
        return [name for name in names if name not in there]

    def _create(self, names: list[str], partitions: int) -> None:
        """Create topics with the brokers' default.replication.factor.

        Kafka answers TOPIC_ALREADY_EXISTS also while it deletes a topic that it no longer tells clients about.
        """
        outcomes = Admin(self._cluster).create_topics([NewTopic(name, partitions) for name in names])
        for error in outcomes.failures.values():
            # else another task has created the topic, or it will have to be created later
            if not isinstance(error, ProtocolError) or error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
                raise error

    def flush(self) -> None:
        """Send all rows and wait until they are confirmed."""
        self._producer.flush()

    def begin_transaction(self, known: PreparedTransaction | None) -> None:
        """Begin a transaction with another epoch, the next one of `known`, the last transaction of this id, if any.

        That one must have ended. `ProducerFenced` if it is not committed: someone has fenced this id.
        """
        if not self._has_new_epoch:
            self._producer.init_transactions(None if known is None else self._committed(known))
        self._producer.begin_transaction()

    def _committed(self, known: PreparedTransaction) -> PreparedTransaction:
        """The id with the epoch that it has since its commit; `ProducerFenced` if it is not committed.

        EndTxn from version 5 on (transaction.version 2, KIP-890) raises the epoch by one, by which the coordinator
        tells a commit from what has come after it. It raises it for an abort, too, and takes an InitProducerId with the
        epoch before for a repeated one: so the state counts, and the producer goes on from the epoch as it is.
        """
        name = known.transactional_id
        now = Admin(self._cluster).describe_transactions([name])[name]
        if isinstance(now, ProtocolError) and now.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            raise ProducerFenced(name)
        if isinstance(now, KlogError):
            raise now
        is_its_own = now.producer_id == known.producer_id and now.producer_epoch in (known.epoch, known.epoch + 1)
        if not is_its_own or now.state not in _COMMITTED:
            raise ProducerFenced(name)
        return replace(known, epoch=now.producer_epoch)

    def prepare_transaction(self) -> PreparedTransaction | None:
        """Prepare the transaction as the client's producer does, and remember it as `prepared`."""
        prepared = self._producer.prepare_transaction()
        self._has_new_epoch = prepared is None
        self.prepared = prepared or self.prepared
        return prepared

    def abort_transaction(self) -> None:
        """Abort what the task has written, for readers not to wait for it; within 5 s, and without errors.

        Records may be in flight: brokers refuse them then. The producer can only be closed.
        """
        with suppress(KlogError), self._cluster.within(_LAST_ABORT_MS):
            under_way = self._producer.transaction_under_way()
            Admin(self._cluster).fence_transactions([] if under_way is None else [under_way])

    def refresh(self) -> bool:
        """As `Producer.refresh`; topics that are gone since have to be created again."""
        self._cluster.forget_leaders()
        return self._producer.refresh()

    def abort(self) -> None:
        """Close the connections. Rows that were not flushed may or may not be written."""
        self._producer.abort()


@dataclass(frozen=True)
class _Entry:
    """A producer, with times of the cache's clock."""

    key: _Key = field(repr=False)  # passwords
    producer: SinkProducer
    made_at: float
    idle_since: float = 0.0
    #: The claim that its last transaction is of; -1 without transactions.
    claim: int = -1
    #: The last transaction of its id; None before the first.
    last: PreparedTransaction | None = None


class ProducerCache:
    """Idle producers by their settings. Threads may share a cache; each borrowed producer belongs to one thread.

    Every new producer connects and requests a producer id, which brokers remember for a day in each partition that it
    writes to. Spark reuses its Python workers, so a worker keeps the producer of a successful task, with all records
    acknowledged, for the next task with the same settings. The producer of a failed task is closed, and its
    unacknowledged record batches are dropped.

    A transactional producer has an id of its own. The driver ends its transactions, and it serves another task only in
    a later micro-batch, and not if the driver has fenced it: `exactly_once.py` says why.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: The longest idle first.
        self._idle: list[_Entry] = []
        #: The last transactions of closed producers, with their claims: brokers keep transactional ids for a week.
        self._free_ids: list[tuple[_Key, PreparedTransaction, int]] = []

    @contextmanager
    def borrow(self, settings: Mapping[str, str]) -> Iterator[SinkProducer]:
        """A producer for the block; flushes it at the end. Errors as of `Producer`."""
        key = tuple(sorted(settings.items()))
        entry = self._take(key) or _Entry(key, SinkProducer(settings), self._clock())
        try:
            yield entry.producer
            entry.producer.flush()
        except BaseException:
            entry.producer.abort()
            raise
        self._keep(entry, -1)

    @contextmanager
    def borrow_transactional(self, settings: Mapping[str, str], id_prefix: str, claim: int) -> Iterator[SinkProducer]:
        """A producer in an open transaction for the block, which prepares it; errors as of `Producer`.

        Its id was not used since the claim. If the block fails, the transaction is aborted, and the id not used again.
        """
        key = tuple(sorted({**settings, "transactional.id": id_prefix}.items()))
        entry = self._in_transaction(settings, key, id_prefix, claim)
        try:
            yield entry.producer
        except BaseException:
            try:
                entry.producer.abort_transaction()
            finally:
                entry.producer.abort()
            raise
        self._keep(replace(entry, last=entry.producer.prepared or entry.last), claim)

    def _in_transaction(self, settings: Mapping[str, str], key: _Key, id_prefix: str, claim: int) -> _Entry:
        """A producer with an id that nobody has fenced, which has begun a transaction."""
        while True:
            entry = self._take(key, claim)
            if entry is None:
                last = self._free_id(key, claim)
                name = f"{id_prefix}{uuid.uuid4()}" if last is None else last.transactional_id
                producer = SinkProducer({**settings, "transactional.id": name})
                entry = _Entry(key, producer, self._clock(), last=last)
            try:
                entry.producer.begin_transaction(entry.last)
            except BaseException as error:
                entry.producer.abort()
                if isinstance(error, ProducerFenced) and entry.last is not None:
                    _log.info("another transactional.id than %s, which was fenced", entry.last.transactional_id)
                    continue
                raise
            return entry

    def _free_id(self, key: _Key, claim: int) -> PreparedTransaction | None:
        with self._lock:
            for place, (its_key, last, its_claim) in enumerate(self._free_ids):
                if its_key == key and its_claim < claim:
                    del self._free_ids[place]
                    return last
        return None

    def _close(self, entry: _Entry) -> None:
        """Close a producer; an open transaction stays open. The caller holds the lock."""
        entry.producer.abort()
        if entry.last is not None:
            self._free_ids.append((entry.key, entry.last, entry.claim))
            del self._free_ids[:-_MOST_FREE_IDS]

    def _take(self, key: _Key, claim: int = 0) -> _Entry | None:
        """Take the producer used last, if its brokers still answer and belong to the same cluster.

        Only one whose claim is before `claim`.
        """
        with self._lock:
            self._close_outdated()
            fit = [entry for entry in self._idle if entry.key == key and entry.claim < claim]
            if not fit:
                return None
            entry = fit[-1]
            self._idle.remove(entry)
        try:
            if entry.producer.refresh():
                return entry
            _log.info("replacing the producer: its brokers now belong to another cluster")
        except KlogError as error:
            _log.info("replacing the producer: %s", error)
        except BaseException:
            entry.producer.abort()
            raise
        with self._lock:
            self._close(entry)
        return None

    def _keep(self, entry: _Entry, claim: int) -> None:
        with self._lock:
            self._idle.append(replace(entry, idle_since=self._clock(), claim=claim))
            self._close_outdated()

    def _close_outdated(self) -> None:
        """Close producers beyond the bounds of number and age. The caller holds the lock."""
        now = self._clock()
        kept = [
            entry
            for entry in self._idle[-_MOST_IDLE:]
            if now - entry.idle_since < _IDLE_SECONDS and now - entry.made_at < _LIFETIME_SECONDS
        ]
        for entry in self._idle:
            if entry not in kept:
                self._close(entry)
        self._idle = kept

    def forget(self) -> None:
        """Close the idle producers. A forked process calls this first, as it shares its parent's connections."""
        self._lock = threading.Lock()  # in the parent another thread may hold the old one
        self._free_ids = []
        idle, self._idle = self._idle, []
        for entry in idle:
            entry.producer.abort()


#: The cache of this process.
PRODUCERS = ProducerCache()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=PRODUCERS.forget)
