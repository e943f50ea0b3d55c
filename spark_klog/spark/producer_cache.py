"""Keep a producer for the next task of a Python worker, which Spark reuses.

Every new producer connects and requests a producer id, which brokers remember for a day in each partition that it
writes to. So a worker keeps the producer of a successful task, with all records acknowledged, for the next task with
the same settings. The producer of a failed task is closed, and its unacknowledged record batches are dropped.

A transactional producer has an id of its own. The driver ends its transactions, and it serves another task only in a
later micro-batch, and not if the driver has fenced it: `exactly_once/protocol.py` says why.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from spark_klog.client.delivery.transactions import PreparedTransaction
from spark_klog.errors import KlogError, ProducerFenced
from spark_klog.spark.sink_producer import SinkProducer

_log = logging.getLogger(__name__)
#: A worker rarely writes with more different settings at a time; each producer has two connections to a broker.
_MOST_IDLE = 8
#: As spark.kafka.producer.cache.timeout. No thread checks it: Spark stops a worker that is idle for a minute.
_IDLE_SECONDS = 600.0
#: Bounds a producer's state of the partitions that it has written to.
_LIFETIME_SECONDS = 3600.0
#: More than the tasks that a worker runs in a micro-batch.
_MOST_FREE_IDS = 1000
_Key = tuple[tuple[str, str], ...]


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
    """Idle producers by their settings. Threads may share a cache; each borrowed producer belongs to one thread."""

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
            fit = (entry for entry in reversed(self._idle) if entry.key == key and entry.claim < claim)
            found = next(fit, None)
            if found is None:
                return None
            self._idle.remove(found)
        try:
            if found.producer.refresh():
                return found
            _log.info("replacing the producer: its brokers now belong to another cluster")
        except KlogError as error:
            _log.info("replacing the producer: %s", error)
        except BaseException:
            found.producer.abort()
            raise
        with self._lock:
            self._close(found)
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
