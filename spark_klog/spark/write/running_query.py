"""What Spark's JVM says of the streaming query that calls a function of `foreachBatch`: its run and its plan.

Spark has no other interface that tells it to Python. The names are those of Spark 4.0 to 4.3. The plan comes from the
query's own log of offsets, as Spark writes it into `offsets`, so it is there for checkpoints on any file system.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from spark_klog.spark.write.decisions.decision_place import hash_of_plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningQuery:
    """The run of a query, by Spark's id for it, and a hash of the offsets that it has planned for a micro-batch.

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
