"""OpenLineage events of Spark's streams: the topics that each query reads and writes, with offsets by micro-batch.

OpenLineage's agent for Spark knows the sources that are written in Java, not Python data sources. `LineageListener`
makes the events from Spark's progress records, which have the offsets, and from the query's plan in the JVM, which has
the addresses of brokers and the sink's topic:

| event | when |
| --- | --- |
| START | the query starts; with the inputs that its options name |
| RUNNING | a micro-batch has read or written something; with its offsets |
| COMPLETE | the query has ended without an error, also by `stop()`; with the offsets of all its micro-batches |
| FAIL | the query has ended with an error, which the facet `errorMessage` has |
| ABORT | the listener is closed, the session is stopped, or the program ends, while the query runs |

A run of OpenLineage is a run of the query, with Spark's `runId`; the job is the application's name and the query's, or
its id, which its checkpoint keeps. What is not seen: UNSUPPORTED.md.
"""

from __future__ import annotations

import atexit
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from spark_klog.base.cache import Newest
from spark_klog.base.extras import require

require("The Spark connector", "pyspark")

import pyspark
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from spark_klog.errors import ConfigError
from spark_klog.lineage.datasets import DatasetUse, DatasetUses, folder_use, kafka_namespace, topic_uses
from spark_klog.lineage.emitter import Emitter
from spark_klog.lineage.events import JobSettings, RunEvents, RunState, ending, job_name
from spark_klog.spark.listener import SinkProgress, sink_progress, source_progress
from spark_klog.spark.plans import (
    BatchRead,
    BatchWrite,
    Place,
    add_figures,
    batch_reads,
    batch_write,
    is_stopped,
    qualified,
    stream_execution,
    stream_sink,
    stream_sources,
)

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient

__all__ = ["LineageListener"]

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 5.0
#: Between two looks whether Spark has told of a query's end.
_LOOK_SECONDS = 0.1
#: Spark's names of what its threads know of the query.
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
#: How Spark describes its own sources and sinks of files.
_FILES = re.compile(r"(?:FileSink|FileStreamSource)\[(.+)\]")
#: Micro-batches whose writes are noted and that have not ended.
_MOST_OPEN_BATCHES = 16
#: Sessions of streams whose batch queries are known as theirs.
_MOST_SESSIONS = 1000


@dataclass
class _Run:
    """A run of a query. `handle` is the JVM's query, None without a JVM in reach."""

    events: RunEvents
    query_id: str
    handle: Any
    sources: list[Place] = field(default_factory=list)
    #: None until the query has planned a micro-batch.
    sink: Place | None = None
    #: What the query's options say that it reads.
    declared: DatasetUses = field(default_factory=DatasetUses)
    inputs: DatasetUses = field(default_factory=DatasetUses)
    outputs: DatasetUses = field(default_factory=DatasetUses)
    #: By micro-batch, what a function of foreachBatch said that it wrote.
    written: dict[int, DatasetUses] = field(default_factory=dict)
    #: The last micro-batch of which Spark has told.
    batch: int = -1

    def has_news(self) -> bool:
        """Whether the query has ended, or has done a micro-batch, and Spark has not told of it yet."""
        try:
            progress = self.handle.lastProgress()
            return not self.handle.isActive() or (progress is not None and progress.batchId() > self.batch)
        except Exception:  # there is no JVM, or it has ended
            return False

    def state(self, is_stopped: bool) -> tuple[RunState, str | None]:
        """ABORT of a query that runs; how another one has ended, of which Spark has not told."""
        try:
            if self.handle.isActive():
                return RunState.ABORT, None
            failure = self.handle.exception()
            return ending(None if failure.isEmpty() else str(failure.get().toString()), is_stopped)
        except Exception:  # there is no JVM, or it has ended
            return RunState.ABORT, None


class LineageListener(StreamingQueryListener):
    """Sends OpenLineage events of the session's streams: see the module, and docs/recipes/lineage.md.

        lineage = LineageListener(spark)
        spark.streams.addListener(lineage)

    The server is configured as for OpenLineage's agent, by spark.openlineage.transport.*, else as for all programs that
    use its Python client: OPENLINEAGE_URL, openlineage.yml and others; or give a `client`, which is not closed.
    `namespace` is that of the jobs. `bootstrap_servers` names the cluster of topics if no plan names it, as with Spark
    Connect. With `batches` batch queries have events, too.

    A thread sends the events, see `Emitter`: a query neither waits nor fails if the server is down. `close`, which also
    runs when the program ends, waits `flush_seconds` for them at most. `ConfigError` if the client's settings are
    wrong, `MissingPackage` without the extra `lineage`.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        client: OpenLineageClient | None = None,
        namespace: str | None = None,
        bootstrap_servers: str | None = None,
        batches: bool = False,
        flush_seconds: float = _FLUSH_SECONDS,
    ) -> None:
        self._spark = spark
        self._namespace = None if bootstrap_servers is None else _namespace_of(bootstrap_servers)
        self._flush_seconds = flush_seconds
        conf = lineage_settings(spark)
        self._settings = JobSettings.of(conf, namespace)
        self.emitter = Emitter(client, conf=conf)
        self._changed = threading.Condition()
        self._runs: dict[str, _Run] = {}
        #: Settings for batch queries by the session of a stream.
        self._sessions: Newest[str, JobSettings] = Newest(_MOST_SESSIONS)
        self._is_closed = self._has_warned = False
        self._batches = BatchLineage(spark, self.emitter, self._settings_in) if batches else None
        atexit.register(self.close)

    # Spark calls these.

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._safely(lambda: self._begin(str(event.runId), str(event.id), event.name))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self._safely(lambda: self._progress(event.progress))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._safely(lambda: self._end(str(event.runId), event.exception))

    def wrote(self, *topics: str, bootstrap_servers: str | None = None, folder: str | None = None) -> None:
        """Name what the function of foreachBatch writes in this micro-batch, as Spark shows nothing of it.

            def split(rows, batch_id):
                rows.where("value is not null").write.format("klog").options(**to_good).mode("append").save()
                lineage.wrote("good", bootstrap_servers=servers)

        Call it in the function's own thread, as often as there are outputs. `folder` is the path or URI of files.
        Without `bootstrap_servers` the topics are at the cluster that the query reads. The event of the micro-batch has
        them.
        """
        self._safely(lambda: self._note(topics, bootstrap_servers, folder))

    def close(self) -> bool:
        """Send ABORT of queries that still run, wait for the events to be sent, and end.

        False if `flush_seconds` were too short for all of them. May be called twice.
        """
        began = time.monotonic()
        if self._batches is not None:
            self._batches.close(self._flush_seconds / 2)
        self._safely(lambda: self._wait_for_news(began + self._flush_seconds / 2))
        with self._changed:
            self._is_closed = True
            runs, self._runs = self._runs, {}
            for run in runs.values():
                self._safely(partial(self._send_end, run, *run.state(_is_stopped(self._spark))))
        atexit.unregister(self.close)
        return self.emitter.close(max(0.0, began + self._flush_seconds - time.monotonic()))

    def _safely(self, work: Callable[[], object]) -> None:
        """Do `work`; warn if it fails for the first time."""
        try:
            work()
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("lineage of a query is incomplete; the query itself is not affected", exc_info=True)

    def _begin(self, run_id: str, query_id: str, name: str | None) -> _Run:
        with self._changed:
            known = self._runs.get(run_id)
        if known is not None:
            return known
        job = job_name(self._settings.application, name or f"query_{query_id}")
        events = RunEvents(self.emitter, self._settings, job, run_id, "STREAMING", pyspark.__version__)
        run = _Run(events, query_id, None)
        self._safely(lambda: self._look_up(run))  # a platform may deny it: the offsets are still known
        for place in run.sources:
            namespace = place.namespace or self._namespace
            run.declared.add(DatasetUse(namespace, topic) for topic in place.topics if namespace)
        with self._changed:
            if not self._is_closed:
                self._runs[run_id] = run
                events.send(RunState.START, run.declared.values(), query=(query_id, None))
        return run

    def _look_up(self, run: _Run) -> None:
        """Ask the JVM for the query and its plan."""
        run.handle = stream_execution(self._spark, run.query_id)
        if run.handle is not None:
            run.sources = stream_sources(run.handle)
            if self._batches is not None:
                self._keep_session(str(run.handle.sparkSessionForStream().sessionUUID()), run.events)

    def _settings_in(self, session: str) -> JobSettings:
        """The settings for batch queries of a session: those in a stream's are its children."""
        with self._changed:
            return self._sessions.get(session, self._settings)

    def _keep_session(self, session: str, events: RunEvents) -> None:
        """Keep the settings for batch queries of a stream's session; Spark may tell of them after the stream's end."""
        with self._changed:
            self._sessions[session] = events.as_parent()

    def _progress(self, progress: StreamingQueryProgress) -> None:
        run_id = str(progress.runId)
        run = self._begin(run_id, str(progress.id), progress.name)
        inputs, outputs = DatasetUses(), DatasetUses()
        batch = int(progress.batchId)
        for number, source in enumerate(progress.sources):
            files = _FILES.fullmatch(source.description)
            if files is not None:
                inputs.add([self._folder(files[1], source.numInputRows)] if source.numInputRows else [])
                continue
            read = source_progress("", batch, source, number)
            if read is None:
                continue
            namespace = self._namespace_of_source(run, number, len(progress.sources))
            ranges = {}
            for partition, records in read.records.items():
                topic, _, index = partition.rpartition("-")
                if records > 0:
                    ranges[topic, int(index)] = read.end[partition] - records, read.end[partition]
            if namespace is not None:
                # of a source that a query has twice Spark counts no rows
                inputs.add(topic_uses(namespace, ranges, source.numInputRows or None))
        written = sink_progress("", batch, progress.observedMetrics)
        self._safely(lambda: outputs.add(self._outputs(run, progress, written)))
        with self._changed:
            if self._runs.get(run_id) is not run:
                return
            outputs.add(run.written.pop(batch, DatasetUses()).values())
            for earlier in [earlier for earlier in run.written if earlier < batch]:
                del run.written[earlier]
            # how much a micro-batch without input has written is not always known: mostly nothing
            has_written = any(use.rows or (use.rows is None and progress.numInputRows) for use in outputs.values())
            if inputs or has_written:
                run.inputs.add(inputs.values())
                run.outputs.add(outputs.values())
                run.events.send(RunState.RUNNING, inputs.values(), outputs.values(), query=(run.query_id, batch))
            run.batch = max(run.batch, batch)
            self._changed.notify_all()

    def _folder(self, address: str, rows: int | None = None) -> DatasetUse:
        """A folder that Spark reads or writes."""
        with suppress(Exception):  # a platform may deny it
            address = qualified(self._spark, address)
        return folder_use(address, rows)

    def _namespace_of_source(self, run: _Run, number: int, count: int) -> str | None:
        if len(run.sources) == count and run.sources[number].namespace:
            return run.sources[number].namespace
        return self._only_namespace(run)

    def _only_namespace(self, run: _Run) -> str | None:
        """The cluster that all sources of the query read."""
        namespaces = {place.namespace for place in run.sources if place.namespace}
        if not namespaces:
            return self._namespace
        return namespaces.pop() if len(namespaces) == 1 else None

    def _outputs(self, run: _Run, progress: StreamingQueryProgress, written: SinkProgress | None) -> list[DatasetUse]:
        """What the sink has written, as far as its options, `observed` or its description tell."""
        files = _FILES.fullmatch(progress.sink.description)
        count = progress.sink.numOutputRows
        rows = None if count is None or count < 0 else int(count)
        if files is not None:
            return [self._folder(files[1], rows)]
        if run.sink is None:
            try:
                run.sink = stream_sink(run.handle)
            except Exception:
                run.sink = Place()
                raise
        place = run.sink or Place()
        namespace = place.namespace or (self._namespace if run.handle is None else None)
        if namespace is None:
            return []
        if written is not None:
            return [
                DatasetUse(namespace, topic, rows=records, size=written.bytes[topic])
                for topic, records in written.records.items()
            ]
        return [DatasetUse(namespace, topic, rows=rows) for topic in place.topics]

    def _note(self, topics: tuple[str, ...], bootstrap_servers: str | None, folder: str | None) -> None:
        context = self._spark.sparkContext
        query_id, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        with self._changed:
            run = next((run for run in self._runs.values() if run.query_id == query_id), None)
        if run is None or batch is None:
            raise ConfigError(
                "wrote() is for the thread that runs a function of foreachBatch, in a query that the listener knows"
            )
        uses = [] if folder is None else [self._folder(folder)]
        if topics:
            if bootstrap_servers is not None:
                namespace: str | None = _namespace_of(bootstrap_servers)
            else:
                namespace = self._only_namespace(run)
            if namespace is None:
                raise ConfigError(f"wrote({', '.join(topics)}) needs bootstrap_servers: the query does not say which")
            uses += [DatasetUse(namespace, topic) for topic in topics]
        with self._changed:
            run.written.setdefault(int(batch), DatasetUses()).add(uses)
            while len(run.written) > _MOST_OPEN_BATCHES:
                del run.written[min(run.written)]

    def _end(self, run_id: str, failure: str | None) -> None:
        state, error = ending(failure, failure is not None and _is_stopped(self._spark))
        with self._changed:
            run = self._runs.pop(run_id, None)
            if run is not None:
                self._send_end(run, state, error)
            self._changed.notify_all()

    def _send_end(self, run: _Run, state: RunState, error: str | None) -> None:
        for uses in run.written.values():  # of a micro-batch that failed
            run.outputs.add(uses.values())
        inputs = {**run.declared, **run.inputs}
        run.events.send(state, inputs.values(), run.outputs.values(), query=(run.query_id, None), error=error)

    def _wait_for_news(self, deadline: float) -> None:
        """Wait for Spark to tell of micro-batches and ends of queries; it does so a moment after them."""
        while time.monotonic() < deadline:
            with self._changed:
                runs = list(self._runs.values())
            if not any(run.has_news() for run in runs):
                return
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)


def _is_stopped(spark: SparkSession) -> bool:
    try:
        return is_stopped(spark)
    except Exception:  # a platform denies it, or the JVM has ended
        return False


def lineage_settings(spark: SparkSession) -> dict[str, str]:
    """The session's settings of OpenLineage, and the application's name."""
    every = spark.conf.getAll
    return {name: every[name] for name in every if name.startswith("spark.openlineage.") or name == "spark.app.name"}


def _namespace_of(bootstrap_servers: str) -> str:
    namespace = kafka_namespace(bootstrap_servers)
    if namespace is None:
        raise ConfigError("bootstrap_servers must be HOST:PORT[,HOST:PORT...]")
    return namespace


class BatchLineage:
    """Spark's listener of batch queries, until `close`: `LineageListener(spark, batches=True)`.

    Spark tells a QueryExecutionListener of each action after its end: START and COMPLETE, or FAIL, are sent together,
    with the times at which it began and ended. Queries that read or write no topics have no events. A write within a
    function of `foreachBatch` is a run whose parent is the streaming query's.

    `settings_in` returns the settings for the queries of a session by its UUID. `ConfigError` without a JVM.
    """

    def __init__(self, spark: SparkSession, emitter: Emitter, settings_in: Callable[[str], JobSettings]) -> None:
        if not hasattr(spark, "_jsc"):
            raise ConfigError("batches=True needs a session with a JVM: Spark Connect does not tell of batch queries")
        self._spark, self._emitter, self._settings_in = spark, emitter, settings_in
        self._is_closed = self._has_warned = False
        self._spark = spark
        ensure_callback_server_started(spark.sparkContext._gateway)
        spark._jsparkSession.listenerManager().register(self)

    def close(self, seconds: float) -> None:
        """Wait for what Spark has still to tell, `seconds` at most, and send nothing from then on.

        Spark keeps the listener: py4j gives it another object at each call.
        """
        try:
            self._spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(round(1000 * seconds))
        except Exception as error:  # the time is over, or the session has been stopped
            _log.debug("batch queries may have ended of which Spark has not told: %s", error)
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
        name = job_name(settings.application, function, *names[:1])
        events = RunEvents(self._emitter, settings, name, str(uuid4()), "BATCH", pyspark.__version__)
        begun = ended - timedelta(microseconds=nanoseconds // 1000)
        events.send(RunState.START, inputs.values(), outputs.values(), time=begun)
        state, error = ending(failure, failure is not None and _is_stopped(self._spark))
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
