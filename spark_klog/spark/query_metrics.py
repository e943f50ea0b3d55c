"""Metrics of running Spark queries for Prometheus.

| metric | kind | labels | what |
| --- | --- | --- | --- |
| klog_query_lag_records | gauge | query, source, topic, partition | offsets behind the latest at the last progress |
| klog_query_lag_seconds | gauge | query, source, topic, partition | how long ago the oldest unread record was written |
| klog_query_rows_total | counter | query, source | rows read since the listener was added |
| klog_query_rows_per_second | gauge | query, source | rows a second in the last micro-batch |
| klog_query_batch_id | gauge | query, source | the last micro-batch |
| klog_query_lost_ranges_total | counter | query, source | ranges that could not be read (failOnDataLoss=report) |
| klog_query_progress_timestamp_seconds | gauge | query, source | when the last progress was reported |

Progress records have offsets, not times. The seconds are found by when an offset was first seen as the latest one: they
are right to the time between two micro-batches, and of records older than the listener a lower bound.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from spark_klog.metrics.exposition import COUNTER, GAUGE, Family, Labels, lines
from spark_klog.spark.source_progress import SourceProgress

#: Samples of a metric: a query with many partitions must not flood a monitoring system.
_MAX_SERIES = 10_000
#: Latest offsets kept for each partition.
_HISTORY = 120
_SOURCE, _PARTITION = ("query", "source"), ("query", "source", "topic", "partition")


class _Partition:
    """A partition's state: the offset reached, and the latest offsets with the times at which they were seen."""

    def __init__(self) -> None:
        self.end = 0
        self.behind = 0
        self._seen: deque[tuple[float, int]] = deque(maxlen=_HISTORY)

    def add(self, now: float, end: int, behind: int) -> None:
        self.end, self.behind = end, behind
        if not self._seen or self._seen[-1][1] != end + behind:
            self._seen.append((now, end + behind))
        while len(self._seen) > 1 and self._seen[1][1] <= end:
            self._seen.popleft()

    def lag_seconds(self, now: float) -> float:
        """Seconds since the next record was first seen; it may have been written before."""
        if not self.behind:
            return 0.0
        return max(0.0, now - next((seen for seen, latest in self._seen if latest > self.end), now))


class _Source:
    def __init__(self) -> None:
        self.rows = self.lost = 0
        self.rows_per_second = self.reported = 0.0
        self.batch_id = -1
        self.partitions: dict[str, _Partition] = {}


class QueryMetrics:
    """The figures of running queries. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sources: dict[tuple[str, int], _Source] = {}

    def add(self, progress: SourceProgress) -> None:
        """Take over the figures of a source's micro-batch."""
        now = self._clock()
        with self._lock:
            source = self._sources.setdefault((progress.query, progress.source), _Source())
            source.rows += progress.rows
            source.lost += len(progress.lost)
            source.rows_per_second, source.reported = progress.rows_per_second, now
            source.batch_id = progress.batch_id
            known = source.partitions
            source.partitions = {name: known.get(name) or _Partition() for name in progress.end}
            for name, partition in source.partitions.items():
                partition.add(now, progress.end[name], progress.behind[name])

    def remove(self, query: str) -> None:
        """Forget a query that has ended."""
        with self._lock:
            for key in [key for key in self._sources if key[0] == query]:
                del self._sources[key]

    def page(self) -> Iterator[str]:
        """The page's lines."""
        with self._lock:
            families = self._families(self._clock())
        for family in families:
            yield from lines(family._replace(samples=islice(family.samples, _MAX_SERIES)))

    def _families(self, now: float) -> list[Family]:
        sources = [((query, str(number)), source) for (query, number), source in sorted(self._sources.items())]
        partitions: list[tuple[Labels, _Partition]] = []
        for labels, source in sources:
            for name, partition in sorted(source.partitions.items()):
                topic, _, index = name.rpartition("-")
                partitions.append(((*labels, topic, index), partition))

        def by_source(name: str, kind: str, text: str, value: Callable[[_Source], float]) -> Family:
            return Family(f"klog_query_{name}", kind, text, _SOURCE, [(key, value(found)) for key, found in sources])

        records: list[tuple[Labels, float]] = [(labels, found.behind) for labels, found in partitions]
        seconds = [(labels, found.lag_seconds(now)) for labels, found in partitions]
        return [
            Family("klog_query_lag_records", GAUGE, "Offsets behind the latest offset", _PARTITION, records),
            Family("klog_query_lag_seconds", GAUGE, "Age of the oldest unread record", _PARTITION, seconds),
            by_source("rows_total", COUNTER, "Rows read", lambda source: source.rows),
            by_source("rows_per_second", GAUGE, "Rows a second", lambda source: source.rows_per_second),
            by_source("batch_id", GAUGE, "The last micro-batch", lambda source: source.batch_id),
            by_source("lost_ranges_total", COUNTER, "Ranges that could not be read", lambda source: source.lost),
            by_source("progress_timestamp_seconds", GAUGE, "Time of the last progress", lambda source: source.reported),
        ]
