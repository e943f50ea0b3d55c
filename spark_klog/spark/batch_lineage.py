"""OpenLineage events of batch queries: `LineageListener(spark, batches=True)`.

Spark tells a QueryExecutionListener of each action after its end: START and COMPLETE, or FAIL, are sent together, with
the times at which it began and ended. Queries that read or write no topics have no events. A write within a function of
`foreachBatch` is a run whose parent is the streaming query's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pyspark
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from spark_klog.errors import ConfigError
from spark_klog.lineage.datasets import DatasetUse, DatasetUses, folder_use, topic_uses
from spark_klog.lineage.emitter import Emitter
from spark_klog.lineage.events import JobSettings, RunEvents, RunState, cause, job_name
from spark_klog.spark.plans import BatchRead, BatchWrite, add_figures, batch_reads, batch_write

_log = logging.getLogger(__name__)


class BatchLineage:
    """Spark's listener of batch queries, until `close`.

    `settings_in` returns the settings for the queries of a session by its UUID. `ConfigError` without a JVM.
    """

    def __init__(
        self, spark: SparkSession, emitter: Emitter, application: str, settings_in: Callable[[str], JobSettings]
    ) -> None:
        if not hasattr(spark, "_jsc"):
            raise ConfigError("batches=True needs a session with a JVM: Spark Connect does not tell of batch queries")
        self._emitter, self._application, self._settings_in = emitter, application, settings_in
        self._is_closed = self._has_warned = False
        ensure_callback_server_started(spark.sparkContext._gateway)
        spark._jsparkSession.listenerManager().register(self)

    def close(self) -> None:
        """Send nothing from now on. Spark keeps the listener: py4j gives it another object at each call."""
        self._is_closed = True

    # Spark calls these.

    def onSuccess(self, function: str, execution: Any, nanoseconds: int) -> None:
        self._safely(function, execution, nanoseconds, None)

    def onFailure(self, function: str, execution: Any, error: Any) -> None:
        self._safely(function, execution, 0, error)

    class Java:
        implements = ("org.apache.spark.sql.util.QueryExecutionListener",)

    def _safely(self, function: str, execution: Any, nanoseconds: int, error: Any) -> None:
        if self._is_closed:
            return
        try:
            self._send(function, execution, nanoseconds, None if error is None else str(error.toString()))
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("lineage of a batch query is incomplete; the query is not affected", exc_info=True)

    def _send(self, function: str, execution: Any, nanoseconds: int, failure: str | None) -> None:
        write, reads = batch_write(execution), batch_reads(execution)
        if not reads and (write is None or write.place.namespace is None):
            return
        ended = datetime.now(timezone.utc)
        if failure is None:
            add_figures(execution, write, reads)
        inputs, outputs = _inputs(reads), _outputs(write)
        names = [use.name.strip("/") for use in (*outputs.values(), *inputs.values())]
        settings = self._settings_in(str(execution.sparkSession().sessionUUID()))
        name = job_name(self._application, function, *names[:1])
        events = RunEvents(self._emitter, settings, name, str(uuid4()), "BATCH", pyspark.__version__)
        begun = ended - timedelta(microseconds=nanoseconds // 1000)
        events.send(RunState.START, inputs.values(), outputs.values(), time=begun)
        state = RunState.COMPLETE if failure is None else RunState.FAIL
        error = None if failure is None else cause(failure)
        events.send(state, inputs.values(), outputs.values(), time=ended, error=error)


def _inputs(reads: list[BatchRead]) -> DatasetUses:
    uses = DatasetUses()
    for read in reads:
        if read.place.namespace is not None:
            ranged = topic_uses(read.place.namespace, read.ranges, read.rows)
            named = {use.name for use in ranged}
            uses.add(ranged)
            uses.add(DatasetUse(read.place.namespace, topic) for topic in read.place.topics if topic not in named)
    return uses


def _outputs(write: BatchWrite | None) -> DatasetUses:
    uses = DatasetUses()
    if write is not None and write.folder is not None:
        uses.add([folder_use(write.folder, write.rows)])
    elif write is not None and write.place.namespace is not None:
        uses.add(DatasetUse(write.place.namespace, topic, rows=write.rows) for topic in write.place.topics)
    return uses
