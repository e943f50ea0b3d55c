"""`spark_klog.write_updates`: the rows of a micro-batch to a topic, exactly once, within `foreachBatch`.

    def process(df, batch_id):
        spark_klog.write_updates(
            df, batch_id, name="counts", topic="counts", key=["window", "word"], columns=["count"],
            **{"kafka.bootstrap.servers": servers},
        )

    counts.writeStream.foreachBatch(process).outputMode("update").option("checkpointLocation", ...).start()

It is a batch write (`exactly_once_batch.py`) whose `writeId` is QUERY/NAME, and whose `writeVersion` is the
micro-batch. QUERY is the id that Spark keeps in the query's checkpoint. Spark tells it, as a local property, to the
thread that calls the function of `foreachBatch`, and not to threads that the function starts, nor to Spark Connect.
What `RunningQuery` finds of its plan is the `writePlan`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from spark_klog.base.cache import Newest
from spark_klog.base.extras import require

require("spark_klog.write_updates", "pyarrow", "pyspark")

from py4j.protocol import Py4JError
from pyspark.sql import Column, DataFrame, SparkSession, functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType, TimestampType

from spark_klog.errors import ConfigError
from spark_klog.spark.write.decisions.decision_place import hash_of_plan

if TYPE_CHECKING:
    from pyspark import SparkContext

_log = logging.getLogger(__name__)
#: Local properties of the thread of a streaming query: the query's id, its run, the micro-batch.
_QUERY, _RUN, _BATCH = "sql.streaming.queryId", "spark.jobGroup.id", "streaming.sql.batchId"
#: Options that are parameters of `write_updates`.
_OWN = ("topic", "deliveryguarantee", "writeid", "writeversion", "writeplan", "path")
#: Time zone and missing fields do not depend on the session: a key has to be the same in each micro-batch.
_JSON = {"timeZone": "UTC", "ignoreNullFields": "false"}
_LONGEST_NAME = 200
#: Queries of one process whose calls are remembered.
_MOST_QUERIES = 1000

#: A column, or the name of one; `window.start` is a field of a struct.
ColumnOrName: TypeAlias = Column | str


def write_updates(
    df: DataFrame,
    batch_id: int,
    *,
    name: str,
    topic: str | None = None,
    key: ColumnOrName | Sequence[ColumnOrName] | None = None,
    value: ColumnOrName | None = None,
    columns: Sequence[ColumnOrName] | None = None,
    tombstones: Column | str | None = None,
    query_id: str | None = None,
    **options: Any,
) -> None:
    """Write the rows of a micro-batch exactly once: call it in the function of `foreachBatch`, in any output mode.

    `name` distinguishes the calls for one micro-batch, each of which is exactly once by itself; keep it when the query
    restarts. A micro-batch that was written before is skipped. `options` are those of `df.write.format("klog")`.

    `key` and `value` are columns: strings and bytes are written as they are, structs, arrays and maps as JSON, and
    other types as strings. A list of columns as `key`, and `columns` instead of `value`, are a JSON object of these
    columns. With `keyFormat` or `valueFormat` they are rows by a schema instead. What is not given is the column `key`
    or `value`, and without `topic` the column `topic`. If none of the three is given, a record is made of all columns
    that `df.write.format("klog")` takes.

    `tombstones` is a condition: a column, its name, or SQL as in "count > 3". Rows for which it holds delete their key,
    as their value is null.

    `query_id` is needed in threads that the function starts, and with Spark Connect: a text that no other query uses,
    without '/', and that stays the same when the query restarts.

    Raises `ConfigError` for two calls with one name for a micro-batch, and what `save()` raises.
    """
    calls = _MicroBatch.of(df, batch_id, query_id)
    own = next((option for option in options if option.lower() in _OWN), None)
    if own is not None:
        raise ConfigError(f"option {own} can't be given to write_updates, which sets it itself")
    if "options" in options:
        raise ConfigError("write_updates takes each option as an argument: write **options, not options=options")
    if not name or name != name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigError(f"name={name!r} must be 1 to {_LONGEST_NAME} printable characters, no spaces at its ends")
    rows = _Records(df, {option.lower() for option in options}, topic).rows(key, value, columns, tombstones)
    writer = rows.write.format("klog").options(**options)
    if topic is not None:
        writer = writer.option("topic", topic)
    if calls.plan:
        writer = writer.option("writePlan", calls.plan)
    writer = writer.option("deliveryGuarantee", "exactly-once")
    writer = writer.option("writeId", f"{calls.query}/{name}").option("writeVersion", batch_id).mode("append")
    calls.begin(name)
    try:
        writer.save()
    except BaseException:
        calls.failed(name)
        raise


class _Records:
    """Rows with the columns of records, made of a DataFrame."""

    def __init__(self, df: DataFrame, options: set[str], topic: str | None) -> None:
        self._df, self._options, self._topic = df, options, topic

    def rows(
        self,
        key: ColumnOrName | Sequence[ColumnOrName] | None,
        value: ColumnOrName | None,
        columns: Sequence[ColumnOrName] | None,
        tombstones: Column | str | None,
    ) -> DataFrame:
        if value is not None and columns is not None:
            raise ConfigError("set only one of value= and columns=")
        if isinstance(columns, str):
            raise ConfigError(f"columns={columns!r} must be a list of columns")
        there = self._df.columns
        has_key = key is not None or "key" in there
        if tombstones is not None and not has_key:
            raise ConfigError("tombstones= needs key=, or a column 'key': a record without a key deletes nothing")
        rows = self._df
        if key is not None or value is not None or columns is not None:
            if value is None and columns is None and "value" not in there:
                raise ConfigError(f"set value= or columns=: there is no column 'value' in {', '.join(there)}")
            made = []
            if has_key:
                made.append(self._made("key", "key" if key is None else key))
            if columns is None:
                made.append(self._made("value", "value" if value is None else value))
            else:
                made.append(self._made("value", list(columns)))
            if self._topic is None and "topic" in there:
                made.append(F.col("topic"))
            if tombstones is not None:
                made.append(_condition(tombstones, there).alias(_DELETES))
            rows = rows.select(*made)
        elif tombstones is not None:
            rows = rows.withColumn(_DELETES, _condition(tombstones, there))
        if tombstones is None:
            return rows
        # a condition that is null does not hold
        kept = F.when(F.coalesce(F.col(_DELETES), F.lit(False)), F.lit(None)).otherwise(F.col("value"))
        return rows.withColumn("value", kept).drop(_DELETES)

    def _made(self, column: str, source: ColumnOrName | Sequence[ColumnOrName]) -> Column:
        """A column of records: a row if it has a format, otherwise a string or bytes."""
        if isinstance(source, str | Column):
            made = _column(source)
        elif source:
            made = F.struct(*(_column(part) for part in source))
        else:
            raise ConfigError(f"{'columns' if column == 'value' else column}=[] names no column")
        if f"{column}format" not in self._options:
            made = _as_text(made, self._df.select(made.alias(column)).schema[column].dataType)
        return made.alias(column)


#: The name of a column while records are made.
_DELETES = "__klog_deletes"


def _column(source: ColumnOrName) -> Column:
    return F.col(source) if isinstance(source, str) else source


def _condition(source: Column | str, columns: Sequence[str]) -> Column:
    return F.expr(source) if isinstance(source, str) and source not in columns else _column(source)


def _as_text(column: Column, kind: DataType) -> Column:
    if isinstance(kind, StringType | BinaryType):
        return column
    if isinstance(kind, StructType | ArrayType | MapType):
        return F.to_json(column, _JSON)
    if isinstance(kind, TimestampType):  # a cast depends on the session's time zone
        return F.get_json_object(F.to_json(F.struct(column.alias("t")), _JSON), "$.t")
    return column.cast("string")


@dataclass
class _MicroBatch:
    """The calls for a micro-batch of a query.

    Spark may run a micro-batch again in this process, after the query has failed and was started again. `runs` has the
    calling run: another one has none of it, as that is over. `plan` is a hash of the offsets that it reads, or empty.
    """

    query: str
    batch: int
    runs: frozenset[str]
    plan: str = ""
    names: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, df: DataFrame, batch_id: int, query_id: str | None) -> _MicroBatch:
        """The micro-batch whose function has called; `ConfigError` if that is unknown."""
        if df.isStreaming:
            raise ConfigError("write_updates is for foreachBatch: this DataFrame is a stream, and no micro-batch")
        if isinstance(batch_id, bool) or not isinstance(batch_id, int) or batch_id < 0:
            raise ConfigError(f"batch_id={batch_id!r} must be the number that foreachBatch passes")
        session = df.sparkSession
        # Spark Connect raises an AttributeError
        context: SparkContext | None = getattr(session, "sparkContext", None)
        own, group, batch = (context.getLocalProperty(name) if context else None for name in (_QUERY, _RUN, _BATCH))
        if batch is not None and int(batch) != batch_id:
            raise ConfigError(f"batch_id={batch_id} must be the number that foreachBatch passes, {batch}")
        query = query_id or own
        if not query:
            raise ConfigError(
                "the query of this micro-batch is unknown: Spark tells it in foreachBatch only, to the thread that "
                "calls the function, and not with Spark Connect. Set query_id to a text that no other query uses, and "
                "that stays the same when the query restarts"
            )
        if "/" in query:
            raise ConfigError(f"query_id={query!r} must be without '/': that separates it from name= in the writeId")
        running = RunningQuery.find(session, (own, query_id), batch_id)
        runs = running.runs or frozenset({group or ""})
        with _lock:
            known = _batches.get(query)
            if known is None or known.batch != batch_id or not (known.runs <= runs or runs <= known.runs):
                known = cls(query, batch_id, runs)
            known.runs, known.plan = known.runs & runs, running.plan or known.plan
            _batches[query] = known
        return known

    def begin(self, name: str) -> None:
        with _lock:
            if name in self.names:
                raise ConfigError(
                    f"write_updates was called twice with name={name!r} for micro-batch {self.batch}: the second call "
                    "would write nothing. Give each call a name of its own"
                )
            self.names.add(name)

    def failed(self, name: str) -> None:
        """A call may be repeated then: it finishes what was decided, or writes anew."""
        with _lock:
            self.names.discard(name)


_lock = threading.Lock()
#: The last micro-batch of each query; the one used last is last.
_batches: Newest[str, _MicroBatch] = Newest(_MOST_QUERIES)


@dataclass(frozen=True)
class RunningQuery:
    """The run of a query, by Spark's id for it, and a hash of the offsets that it has planned for a micro-batch.

    Spark's JVM tells them, by names of Spark 4.0 to 4.3: Spark has no other interface for it in Python. The plan comes
    from the query's own log of offsets, as Spark writes it into `offsets`, so it is there for checkpoints on any file
    system.

    `runs` are those of all active queries if it is unknown which one calls.
    """

    runs: frozenset[str] = frozenset()
    plan: str = ""

    @classmethod
    def find(cls, session: SparkSession, ids: Sequence[str | None], batch: int) -> RunningQuery:
        """The active query with the first of these ids that one has; else the one whose micro-batches have the session.

        Both are empty without a JVM (Spark Connect), and where a platform denies access to it.
        """
        java = getattr(session, "_jsparkSession", None)
        if java is None:
            return cls()
        try:
            active = {str(run.id().toString()): run for run in java.sharedState().activeStreamingQueries().values()}
            query = next((active[query_id] for query_id in ids if query_id in active), None)
            if query is None:
                own = java.sessionUUID()
                of_session = (each for each in active.values() if each.sparkSessionForStream().sessionUUID() == own)
                query = next(of_session, None)
            if query is None:
                return cls(frozenset(map(_run, active.values())))
            return cls(frozenset({_run(query)}), _plan(session, query.offsetLog(), batch))
        except Py4JError as error:
            _log.info("the JVM does not tell the plan of micro-batch %d: %s", batch, error)
            return cls()


def _run(query: Any) -> str:
    return str(query.runId().toString())


def _plan(session: SparkSession, offsets: Any, batch: int) -> str:
    written = offsets.get(batch)
    if written.isEmpty():
        return ""
    assert session._jvm is not None, "a session with a JVM"
    out = session._jvm.java.io.ByteArrayOutputStream()
    offsets.serialize(written.get(), out)
    return hash_of_plan(bytes(out.toByteArray()))
