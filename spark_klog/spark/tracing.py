"""Spans of Spark's streams by OpenTelemetry: one for each micro-batch that reads records; docs/recipes/tracing.md."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from spark_klog.base.extras import require

require("The Spark connector", "pyspark")

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.range_spans import RangeSpans
from spark_klog.client.settings import client_config
from spark_klog.spark.listener import source_progress

__all__ = ["TracingListener"]


class TracingListener(StreamingQueryListener):
    """Makes a span `process TOPIC` of each micro-batch that has read records of klog sources.

        spark.streams.addListener(TracingListener({"bootstrap.servers": servers}))

    Spark's driver makes them from its progress records, with their times. With the settings of a client for the cluster
    that the streams read, by Kafka's names, the spans link to records at the start of the ranges whose traces are
    sampled; a small fetch gets their headers. A query that fails has a span with the error.

    Without a TracerProvider at this time the listener does nothing. `ConfigError` if the settings are wrong; nothing is
    connected before the first micro-batch.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._cluster = None if settings is None else Cluster(client_config(settings))
        self._spans = RangeSpans(self._cluster)
        #: The ranges of the last micro-batch, and when it ended in ns since 1970, by the query's run.
        self._last: dict[str, tuple[dict[TopicPartition, tuple[int, int]], int]] = {}
        self._names: dict[str, str] = {}

    def close(self) -> None:
        """Close the connections."""
        if self._cluster is not None:
            self._cluster.close()

    # Spark calls these.

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._names[str(event.runId)] = event.name or ""
        self._last[str(event.runId)] = {}, time.time_ns()

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        if not self._spans.is_on:
            return
        progress = event.progress
        query = progress.name or str(progress.id)
        ranges: dict[TopicPartition, tuple[int, int]] = {}
        count = 0
        for number, source in enumerate(progress.sources):
            read = source_progress(query, progress.batchId, source, number)
            if read is not None:
                count += read.rows
                for name, moved in read.records.items():
                    topic, _, partition = name.rpartition("-")
                    ranges[topic, int(partition)] = read.end[name] - moved, read.end[name]
        began = int(datetime.fromisoformat(progress.timestamp.replace("Z", "+00:00")).timestamp() * 1e9)
        ended = began + 1_000_000 * int(progress.batchDuration)
        run = str(progress.runId)
        self._last[run] = dict.fromkeys(ranges, (0, 0)), ended
        attributes = _attributes(progress.name, str(progress.id), run) | {"klog.query.batch_id": int(progress.batchId)}
        moved_ranges = {key: (start, stop) for key, (start, stop) in ranges.items() if start < stop}
        self._spans.processed(moved_ranges, count, began, ended, attributes=attributes)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        run = str(event.runId)
        ranges, ended = self._last.pop(run, ({}, time.time_ns()))
        name = self._names.pop(run, "")
        if event.exception:
            kind = event.errorClassOnException or "pyspark.errors.StreamingQueryException"
            self._spans.processed(ranges, 0, ended, error=kind, attributes=_attributes(name, str(event.id), run))


def _attributes(name: str | None, query: str, run: str) -> dict[str, Any]:
    named = {"klog.query.name": name} if name else {}
    return {**named, "klog.query.id": query, "klog.query.run_id": run}
