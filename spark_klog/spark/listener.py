"""Show how much a running query has read and how far it is behind, for people and for monitoring.

    spark.streams.addListener(ProgressListener(show=sys.stderr))

After each micro-batch the listener computes figures from the offsets of klog sources in Spark's progress record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from spark_klog.metrics.thread import MetricsThread
from spark_klog.spark.observed import SinkProgress as SinkProgress, sink_progress
from spark_klog.spark.query_metrics import QueryMetrics
from spark_klog.spark.source_progress import SourceProgress as SourceProgress, source_progress

#: Return to the start of the terminal's line and clear it.
_REWRITE = "\r\x1b[2K"


class ProgressListener(StreamingQueryListener):
    """Keeps the last progress of each source in `last`, passes it to `on_progress` and writes it to `show`.

    `written` has what the last micro-batch of each query has written by topic, if its rows are counted by
    `spark_klog.spark.observed.observed`; `on_written` gets it after each micro-batch.

    On a terminal it rewrites one line; elsewhere it writes a line per progress. With `metrics`, HOST:PORT or a port of
    127.0.0.1, it serves the figures of running queries to Prometheus at /metrics (see `query_metrics`) until `close`;
    `ConfigError` if it can't listen there.
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
        self._on_written = on_written
        #: By query and number of the source.
        self.last: dict[tuple[str, int], SourceProgress] = {}
        #: By query.
        self.written: dict[str, SinkProgress] = {}
        #: Names of the running queries by id: the event of a query's end has no name.
        self._names: dict[str, str] = {}
        self._metrics = QueryMetrics()
        self._server = MetricsThread(metrics, self._metrics.page, "metrics") if metrics is not None else None

    @property
    def metrics_address(self) -> str | None:
        """HOST:PORT where the metrics are served."""
        return None if self._server is None else self._server.address

    def close(self) -> None:
        """Stop serving metrics."""
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
            found = source_progress(
                query,
                progress.batchId,
                source.numInputRows,
                source.processedRowsPerSecond,
                source.startOffset,
                source.endOffset,
                source.latestOffset,
                number,
            )
            if found is None:
                continue
            self.last[query, number] = found
            self._metrics.add(found)
            if self._on_progress is not None:
                self._on_progress(found)
            if self._show is not None:
                self._show.write(f"{_REWRITE}{found}" if self._show.isatty() else f"{found}\n")
                self._show.flush()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._metrics.remove(self._names.pop(str(event.id), str(event.id)))
        if self._show is not None and self._show.isatty():
            self._show.write("\n")
            self._show.flush()
