"""Trigger.AvailableNow with limits, on a pyspark that ends it after one micro-batch (4.0 and 4.1).

Spark takes the first latest offset of a run as its end, and tells no source in Python which trigger it is. So a limit
cuts each run short. The source notes in the offsets of a run's first micro-batch up to where its partitions went on
then (`groups.checkpoint.with_left`): they come back in the query's progress, and say how far the next runs have to
read. A run that finds a micro-batch that is planned and not done repeats it, and ends without a look at what is there:
its note is of the run that failed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_klog.client.places import Offsets
from spark_klog.errors import ConfigError
from spark_klog.groups.checkpoint import from_json, left_in

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)


def run_available_now(start_query: Callable[[], StreamingQuery], timeout: float | None = None) -> list[StreamingQuery]:
    """Run a query with Trigger.AvailableNow until all is read that was there at its first start; limits are kept.

        def start() -> StreamingQuery:
            rows = spark.readStream.format("klog").options(**options, maxOffsetsPerTrigger=100_000).load()
            writer = rows.writeStream.format("parquet").option("path", path).option("checkpointLocation", checkpoint)
            return writer.trigger(availableNow=True).start()

        spark_klog.run_available_now(start)

    `start_query` starts the query, always with the same checkpoint. With pyspark 4.2 and later one run reads all; with
    4.0 and 4.1 a run ends after one micro-batch, and is started again until every klog source has read what it had at
    the first start. Records that arrive meanwhile may be left, as with format("kafka"). Sources without limits need one
    run, and one before it that repeats a micro-batch that failed. Returns the queries in the order of their runs; all
    have ended.

    An error of a query is raised as by `awaitTermination`. `timeout` bounds all runs in seconds: after it the running
    query is stopped, and `TimeoutError` raised; the next call goes on from its checkpoint. `ConfigError` if
    `start_query` is no function, or returns no query.
    """
    if not callable(start_query):
        raise ConfigError(f"start_query must be the function that starts the query, not {type(start_query).__name__}")
    until = None if timeout is None else time.monotonic() + timeout
    queries: list[StreamingQuery] = []
    wanted: dict[int, Offsets] | None = None
    reached: dict[int, Offsets] = {}
    while True:
        query = start_query()
        if not hasattr(query, "awaitTermination"):
            raise ConfigError(f"start_query must return the query, as .start() does, not {type(query).__name__}")
        queries.append(query)
        _wait(query, until, timeout)
        last = query.lastProgress  # its attributes have the offsets as pyspark prints them
        progress = {"sources": []} if last is None else json.loads(last.json)
        before, ends = reached, _ends(progress["sources"])
        reached = before | {number: from_json(end) for number, end in ends.items()}  # a run may have no micro-batch
        if len(queries) == 1 and ends and "latestOffset" not in progress["durationMs"]:
            _log.info("the run repeated a micro-batch that had failed, and looked for nothing new: starting it again")
            continue
        if wanted is None:
            wanted = {number: left_in(end) for number, end in ends.items()}
        left = sum(
            offset - reached[number][key]
            for number, offsets in wanted.items()
            if number in reached
            for key, offset in offsets.items()
            # a partition that has no offset any more was deleted
            if key in reached[number] and reached[number][key] < offset
        )
        if not left:
            return queries
        if reached == before:
            _log.warning(
                "the query got no further, though %d of the offsets that were there at its start are left: was a topic "
                "created again, or its log truncated?",
                left,
            )
            return queries
        _log.info("run %d ended with %d offsets left: starting the query again", len(queries), left)


def _wait(query: StreamingQuery, until: float | None, timeout: float | None) -> None:
    if until is None:
        query.awaitTermination()
        return
    # Spark takes no 0
    if not query.awaitTermination(max(0.001, until - time.monotonic())):
        query.stop()
        raise TimeoutError(
            f"the query did not end within {timeout:g} s: it is stopped, and goes on with the next run. A query "
            "without .trigger(availableNow=True) never ends"
        )


def _ends(sources: list[dict[str, Any]]) -> dict[int, dict[str, dict[str, int]]]:
    """The end of a micro-batch as the checkpoint has it, by the numbers of the klog sources."""
    ends: dict[int, dict[str, dict[str, int]]] = {}
    for number, source in enumerate(sources):
        try:
            from_json(source["endOffset"])
        except (ValueError, AttributeError, TypeError):  # of another source
            continue
        ends[number] = source["endOffset"]
    return ends
