"""Producers that outlive their task: Spark reuses its Python workers, and a new producer takes a new producer id.

A broker remembers a producer id for a day in each partition that it has written to, and every new producer connects and
asks for one. So a worker keeps a producer whose task has ended well, with everything confirmed, for the next task with
the same settings. One whose task has failed is never used again: batches that were not confirmed go with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from spark_klog.client.producer import Producer
from spark_klog.errors import KlogError
from spark_klog.spark.options import PREFIX

_log = logging.getLogger(__name__)
#: A worker rarely writes with more settings than these at a time; each producer has two connections to a broker.
_MOST_IDLE = 8
#: As spark.kafka.producer.cache.timeout. Spark ends a worker that has had no task for a minute, so no thread looks.
_IDLE_SECONDS = 600.0
#: Bounds what a producer remembers of the partitions that it has written to.
_LIFETIME_SECONDS = 3600.0
_Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Entry:
    """A producer; times are readings of the cache's clock."""

    key: _Key
    producer: Producer
    made_at: float
    idle_since: float = 0.0


class ProducerCache:
    """Idle producers by their settings. Threads may share a cache: a borrowed producer belongs to one of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: The one that has been idle for the longest time comes first.
        self._idle: list[_Entry] = []

    @contextmanager
    def borrow(self, settings: Mapping[str, str]) -> Iterator[Producer]:
        """A producer for the block, which is flushed at the end; errors as of `Producer`."""
        key = tuple(sorted(settings.items()))
        entry = self._take(key) or _Entry(key, Producer.connect(settings, PREFIX), self._clock())
        try:
            yield entry.producer
            entry.producer.flush()
        except BaseException:
            entry.producer.abort()
            raise
        self._keep(entry)

    def _take(self, key: _Key) -> _Entry | None:
        """The idle producer that was used last, if its brokers still answer as the same cluster."""
        with self._lock:
            self._close_outdated()
            found = next((entry for entry in reversed(self._idle) if entry.key == key), None)
            if found is None:
                return None
            self._idle.remove(found)
        try:
            if found.producer.refresh():
                return found
            _log.info("the brokers are another cluster's by now: the producer is replaced")
        except KlogError as error:
            _log.info("the producer of the task before is replaced: %s", error)
        except BaseException:
            found.producer.abort()
            raise
        found.producer.abort()
        return None

    def _keep(self, entry: _Entry) -> None:
        with self._lock:
            self._idle.append(_Entry(entry.key, entry.producer, entry.made_at, self._clock()))
            self._close_outdated()

    def _close_outdated(self) -> None:
        """Close the producers that are too many or too old; the lock is held."""
        now = self._clock()
        kept = [
            entry
            for entry in self._idle[-_MOST_IDLE:]
            if now - entry.idle_since < _IDLE_SECONDS and now - entry.made_at < _LIFETIME_SECONDS
        ]
        for entry in self._idle:
            if entry not in kept:
                entry.producer.abort()
        self._idle = kept

    def forget(self) -> None:
        """Close the idle producers. A forked process does so first: its connections are those of its parent."""
        self._lock = threading.Lock()  # a thread that is not here may hold it
        idle, self._idle = self._idle, []
        for entry in idle:
            entry.producer.abort()


#: Those of this process.
PRODUCERS = ProducerCache()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=PRODUCERS.forget)
