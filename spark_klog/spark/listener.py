"""Figures of running Spark queries: for the program, for people, and for Prometheus.

| metric | kind | labels | what |
| --- | --- | --- | --- |
| klog_query_lag_records | gauge | query, source, topic, partition | offsets behind the latest at the last progress |
| klog_query_lag_seconds | gauge | query, source, topic, partition | how long ago the oldest unread record was written |
| klog_query_rows_total | counter | query, source | rows read since the listener was added |
| klog_query_rows_per_second | gauge | query, source | rows a second in the last micro-batch |
| klog_query_batch_id | gauge | query, source | the last micro-batch |
| klog_query_lost_ranges_total | counter | query, source | ranges that could not be read (failOnDataLoss=report) |
| klog_query_held_up_records | gauge | query, source, topic, partition | offsets behind an open transaction |
| klog_query_held_up_seconds | gauge | query, source, topic, partition | for how long it has held them up |
| klog_query_progress_timestamp_seconds | gauge | query, source | when the last progress was reported |

Progress records have offsets, not times. The seconds are found by when an offset was first seen as the latest one: they
are right to the time between two micro-batches, and of records older than the listener a lower bound.

A stream that is held up has no micro-batches, so the figures are those of its last one, and the seconds count on. What
begins after it is in the log of the source only, as a warning of `spark_klog.spark.read.open_transactions`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, TextIO

from spark_klog.base.extras import require

require("The Spark connector", "pyspark")

from pyspark.sql import Column, DataFrame, Row, functions as F
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    SourceProgress as SparkSourceProgress,
    StreamingQueryListener,
)
from pyspark.sql.types import LongType

from spark_klog.client.places import Offsets
from spark_klog.errors import ConfigError
from spark_klog.groups.checkpoint import START_OF, from_json, start_in
from spark_klog.metrics import COUNTER, GAUGE, Family, Labels, lines, metrics_page
from spark_klog.metrics.otel import export
from spark_klog.spark.options import HELD_UP, LOST, RECORD_BYTES
from spark_klog.wire.http import HttpThread

__all__ = ["ProgressListener", "SinkProgress", "SourceProgress", "observed"]

#: The name of the observation. A query may have one.
_NAME = "spark_klog written"
_RECORDS, _BYTES = "records of ", "bytes of "
#: Return to the start of the terminal's line and clear it.
_REWRITE = "\r\x1b[2K"
#: Samples of a metric: a query with many partitions must not flood a monitoring system.
_MAX_SERIES = 10_000
#: Latest offsets kept for each partition.
_HISTORY = 120
_SOURCE, _PARTITION = ("query", "source"), ("query", "source", "topic", "partition")


@dataclass(frozen=True)
class SourceProgress:
    """One micro-batch of one klog source.

    `source` is the index among the query's sources. `records` has the offsets that each "topic-partition" advanced, if
    its start is known; `bytes` estimates their compressed size in the log (option estimateRecordBytes). Minimum,
    maximum and average of the offsets behind latest are over the partitions. `lost` lists the ranges that could not be
    read (failOnDataLoss=report), see `ranges.Lost`. `end` has the offset that each "topic-partition" has reached,
    `behind` how many offsets that is behind the latest one. `held_up` lists the partitions of a read_committed stream
    in which records wait behind an open transaction: topic, partition, records (offsets), sinceMs (since 1970).
    """

    query: str
    batch_id: int
    rows: int
    rows_per_second: float
    records: dict[str, int]
    bytes: dict[str, int]
    min_offsets_behind_latest: int
    max_offsets_behind_latest: int
    avg_offsets_behind_latest: float
    lost: list[dict[str, Any]]
    source: int = 0
    end: dict[str, int] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)
    held_up: list[dict[str, Any]] = field(default_factory=list)

    @property
    def topics(self) -> list[str]:
        return sorted({name.rpartition("-")[0] for name in self.records})

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        behind = (
            f"{self.max_offsets_behind_latest:,} behind at most" if self.max_offsets_behind_latest else "up to date"
        )
        lost = f", {len(self.lost)} ranges lost" if self.lost else ""
        held_up = sum(partition["records"] for partition in self.held_up)
        waiting = f", {held_up:,} wait behind open transactions" if held_up else ""
        speed = f"{self.rows:,} rows, {self.rows_per_second:,.0f} rows/s"
        source = f"source {self.source} ({', '.join(self.topics)})"
        return f"{self.query} micro-batch {self.batch_id}, {source}: {speed}, {behind}{waiting}{lost}"


def source_progress(query: str, batch_id: int, source: SparkSourceProgress, number: int = 0) -> SourceProgress | None:
    """The figures of a source in Spark's progress record, from its offsets; None if it is not a klog source."""
    end = _object(source.endOffset)
    reached = _offsets(end)
    if reached is None:
        if START_OF not in end:
            return None
        reached = {}  # all partitions were deleted
    start, known = _object(source.startOffset), _object(source.latestOffset)
    lost, held_up = known.pop(LOST, []), known.pop(HELD_UP, [])
    sizes = {(entry["topic"], entry["partition"]): float(entry["bytes"]) for entry in known.pop(RECORD_BYTES, [])}
    before = dict.fromkeys(reached, 0) | (_offsets(start) or {})
    begun = start_in(end, before, is_first=not start)
    newest = from_json(known)
    behind = {key: max(0, newest.get(key, offset) - offset) for key, offset in reached.items()}
    moved = {key: offset - begun[key] for key, offset in reached.items() if key in begun}
    return SourceProgress(
        query,
        batch_id,
        source.numInputRows,
        source.processedRowsPerSecond,
        records=_by_name(moved),
        bytes=_by_name({key: round(moved[key] * size) for key, size in sizes.items() if key in moved}),
        min_offsets_behind_latest=min(behind.values(), default=0),
        max_offsets_behind_latest=max(behind.values(), default=0),
        avg_offsets_behind_latest=sum(behind.values()) / max(1, len(behind)),
        lost=lost,
        source=number,
        end=_by_name(reached),
        behind=_by_name(behind),
        held_up=held_up,
    )


def _by_name(values: Offsets) -> dict[str, int]:
    return {f"{topic}-{partition}": value for (topic, partition), value in values.items()}


def _object(text: str | None) -> dict[str, Any]:
    """Parse a JSON object; empty if it is none: a micro-batch that a restart repeats has no latest offset."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _offsets(value: dict[str, Any]) -> Offsets | None:
    """The offsets of a klog source; None if they are not a klog source's."""
    try:
        return from_json(value) or None
    except (ValueError, AttributeError, TypeError):
        return None


@dataclass(frozen=True)
class SinkProgress:
    """The counts of one micro-batch, by topic: records written, and bytes of their keys, values and headers.

    A micro-batch that a restart repeats is counted again, also if an exactly-once sink does not write it again.
    """

    query: str
    batch_id: int
    records: dict[str, int]
    bytes: dict[str, int]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def observed(rows: DataFrame, *topics: str) -> DataFrame:
    """Rows for the sink, counted for `ProgressListener.written` by their column topic.

        rows = observed(frame, "clicks", "orders")  # the topics of the column topic
        query = rows.writeStream.format("klog")...

    Spark takes no figures from a Python sink into a query's progress, but those of `DataFrame.observe`: so the rows are
    counted just before the sink. Name the topics to count. Without a column topic, name the one of the sink's option
    topic. The rows stay as they are; call it last, directly before `writeStream`. `ConfigError` without a topic, or for
    several without the column.
    """
    names = list(dict.fromkeys(topics))
    has_column = "topic" in rows.columns
    if not names or (len(names) > 1 and not has_column):
        raise ConfigError(
            "observed counts rows by topic: name the topics of the column topic, or the one of the option topic if "
            "there is no such column"
        )
    size = F.lit(0).cast(LongType())
    for name in ("key", "value"):
        if name in rows.columns:
            size = size + F.coalesce(F.octet_length(name), F.lit(0))
    if "headers" in rows.columns:
        size = size + F.coalesce(F.aggregate("headers", F.lit(0).cast(LongType()), _plus_header), F.lit(0))
    figures = []
    for name in names:
        is_its = F.col("topic") == F.lit(name) if has_column else F.lit(True)
        figures.append(F.count(F.when(is_its, 1)).alias(_RECORDS + name))
        figures.append(F.coalesce(F.sum(F.when(is_its, size)), F.lit(0)).alias(_BYTES + name))
    return rows.observe(_NAME, *figures)


def _plus_header(total: Column, header: Column) -> Column:
    key, value = F.octet_length(header["key"]), F.octet_length(header["value"])
    return total + F.coalesce(key, F.lit(0)) + F.coalesce(value, F.lit(0))


def sink_progress(query: str, batch_id: int, metrics: Mapping[str, Row]) -> SinkProgress | None:
    """The figures of `observed` in a progress record's observedMetrics; None if there are none."""
    if _NAME not in metrics:
        return None
    figures = metrics[_NAME].asDict()
    records = {name.removeprefix(_RECORDS): count for name, count in figures.items() if name.startswith(_RECORDS)}
    return SinkProgress(query, batch_id, records, {name: figures[_BYTES + name] or 0 for name in records})


class ProgressListener(StreamingQueryListener):
    """Shows how much running queries have read, and how far they are behind, after each micro-batch.

        spark.streams.addListener(ProgressListener(show=sys.stderr))

    The figures come from the offsets of klog sources in Spark's progress record. `last` keeps the last ones of each
    source; they are passed to `on_progress`, and written to `show`: on a terminal it rewrites one line, elsewhere it
    writes a line each time. `written` has what the last micro-batch of each query has written by topic, if its rows are
    counted by `observed`; `on_written` gets it after each micro-batch.

    With `metrics`, HOST:PORT or a port of 127.0.0.1, it serves the figures to Prometheus at /metrics (see the module)
    until `close`; `ConfigError` if it can't listen there.
    """

    def __init__(
        self,
        on_progress: Callable[[SourceProgress], None] | None = None,
        show: TextIO | None = None,
        metrics: str | None = None,
        on_written: Callable[[SinkProgress], None] | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._show = show
        self._rewrites = show is not None and show.isatty() and os.environ.get("TERM") != "dumb"
        self._on_written = on_written
        #: By query and number of the source.
        self.last: dict[tuple[str, int], SourceProgress] = {}
        #: By query.
        self.written: dict[str, SinkProgress] = {}
        #: Names of the running queries by id: the event of a query's end has no name.
        self._names: dict[str, str] = {}
        self._metrics = QueryMetrics()
        page = metrics_page(self._metrics.page)
        self._server = HttpThread(metrics, page, "metrics") if metrics is not None else None

    @property
    def metrics_address(self) -> str | None:
        """HOST:PORT where the metrics are served."""
        return None if self._server is None else self._server.address

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._names[str(event.id)] = event.name or str(event.id)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        query = self._names[str(progress.id)] = progress.name or str(progress.id)
        written = sink_progress(query, progress.batchId, progress.observedMetrics)
        if written is not None:
            self.written[query] = written
            if self._on_written is not None:
                self._on_written(written)
        for number, source in enumerate(progress.sources):
            read = source_progress(query, progress.batchId, source, number)
            if read is None:
                continue
            self.last[query, number] = read
            self._metrics.add(read)
            if self._on_progress is not None:
                self._on_progress(read)
            if self._show is not None:
                self._show.write(f"{_REWRITE}{read}" if self._rewrites else f"{read}\n")
                self._show.flush()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._metrics.remove(self._names.pop(str(event.id), str(event.id)))
        if self._show is not None and self._rewrites:
            self._show.write("\n")
            self._show.flush()


@dataclass
class _Source:
    """The last figures of a source, when they were reported, and sums."""

    last: SourceProgress
    reported: float
    rows: int = 0
    lost: int = 0
    #: By partition: the latest offsets, and when each was first seen.
    seen: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    def add(self, progress: SourceProgress, now: float) -> None:
        self.last, self.reported = progress, now
        self.rows += progress.rows
        self.lost += len(progress.lost)
        self.seen = {name: self.seen.get(name) or deque(maxlen=_HISTORY) for name in progress.end}
        for name, seen in self.seen.items():
            end, latest = progress.end[name], progress.end[name] + progress.behind[name]
            if not seen or seen[-1][1] != latest:
                seen.append((now, latest))
            while len(seen) > 1 and seen[1][1] <= end:
                seen.popleft()

    def lag_seconds(self, name: str, now: float) -> float:
        """Seconds since the next record of a partition was first seen; it may have been written before."""
        if not self.last.behind[name]:
            return 0.0
        end = self.last.end[name]
        return max(0.0, now - next((at for at, latest in self.seen[name] if latest > end), now))


class QueryMetrics:
    """The figures of running queries. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sources: dict[tuple[str, int], _Source] = {}
        export(self.families)

    def add(self, progress: SourceProgress) -> None:
        now = self._clock()
        with self._lock:
            self._sources.setdefault((progress.query, progress.source), _Source(progress, now)).add(progress, now)

    def remove(self, query: str) -> None:
        with self._lock:
            for key in [key for key in self._sources if key[0] == query]:
                del self._sources[key]

    def families(self) -> list[Family]:
        with self._lock:
            return self._families(self._clock())

    def page(self) -> Iterator[str]:
        for family in self.families():
            yield from lines(family._replace(samples=islice(family.samples, _MAX_SERIES)))

    def _families(self, now: float) -> list[Family]:
        sources = [((query, str(number)), source) for (query, number), source in sorted(self._sources.items())]
        records: list[tuple[Labels, float]] = []
        seconds: list[tuple[Labels, float]] = []
        for labels, source in sources:
            for name, behind in sorted(source.last.behind.items()):
                topic, _, index = name.rpartition("-")
                records.append(((*labels, topic, index), behind))
                seconds.append(((*labels, topic, index), source.lag_seconds(name, now)))

        held_up = [
            ((*labels, held["topic"], str(held["partition"])), held["records"], max(0.0, now - held["sinceMs"] / 1000))
            for labels, source in sources
            for held in source.last.held_up
        ]
        waiting = [(key, count) for key, count, _ in held_up]
        ages = [(key, age) for key, _, age in held_up]

        def by_source(name: str, kind: str, text: str, value: Callable[[_Source], float]) -> Family:
            return Family(f"klog_query_{name}", kind, text, _SOURCE, [(key, value(state)) for key, state in sources])

        return [
            Family("klog_query_lag_records", GAUGE, "Offsets behind the latest offset", _PARTITION, records),
            Family("klog_query_lag_seconds", GAUGE, "Age of the oldest unread record", _PARTITION, seconds),
            by_source("rows_total", COUNTER, "Rows read", lambda source: source.rows),
            by_source("rows_per_second", GAUGE, "Rows a second", lambda source: source.last.rows_per_second),
            by_source("batch_id", GAUGE, "The last micro-batch", lambda source: source.last.batch_id),
            by_source("lost_ranges_total", COUNTER, "Ranges that could not be read", lambda source: source.lost),
            Family("klog_query_held_up_records", GAUGE, "Offsets behind an open transaction", _PARTITION, waiting),
            Family("klog_query_held_up_seconds", GAUGE, "Age of the standstill", _PARTITION, ages),
            by_source("progress_timestamp_seconds", GAUGE, "Time of the last progress", lambda source: source.reported),
        ]
