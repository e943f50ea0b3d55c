"""The decisions of exactly-once streams: what to do when they and the checkpoint say different things."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pyspark.sql.utils import to_str

from spark_klog.errors import ConfigError
from spark_klog.groups.checkpoint import checkpoint_state
from spark_klog.spark.worker_process import cluster_of
from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.spark.write.decisions.log_states import LogState, logs_of_checkpoint
from spark_klog.spark.write.exactly_once_driver import continue_at as _continue_at
from spark_klog.spark.write.sink_options import sink_options

__all__ = ["continue_at"]

_log = logging.getLogger(__name__)
#: Transactions that an error names.
_MOST_NAMED = 5


def continue_at(options: Mapping[str, Any], batch: int, *, drop_decided: bool = False) -> None:
    """Have a stopped query go on with a micro-batch that its decision log does not expect.

        continue_at({"kafka.bootstrap.servers": servers, "deliveryGuarantee": "exactly-once",
                     "checkpointLocation": "s3a://bucket/checkpoints/clean"}, 7)

    `options` are those of the query's writer, `batch` is the number that the query's error names. Rows of that
    micro-batch and of those after it may be in the topic already: they are written again. A run that is alive fails
    with `Superseded`. A warning in the log says which decision log was changed.

    A micro-batch before `batch` may be decided and not committed yet, as its run has died: a start of the query would
    commit it. Its rows are lost with `drop_decided`; without it `continue_at` refuses, and names the transactions.

    Raises `ConfigError` for wrong options, for a decided micro-batch, for one beyond the next one of a checkpoint that
    this machine can read, and if no run of the query has used the topic with its decisions; `Superseded` if a run of
    the query begins a micro-batch meanwhile; and what brokers' answers raise.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
        raise ConfigError(f"batch={batch!r} must be the number of a micro-batch, an integer of at least 0")
    # values may be numbers and bools, as for the writer
    given = {name: text for name, value in options.items() if (text := to_str(value)) is not None}
    checked = sink_options(given, streaming=True)
    if checked.checkpoint is None:
        raise ConfigError("continue_at needs the options of the query's writer, deliveryGuarantee=exactly-once too")
    place = decision_place(checked.checkpoint, checked.decision_topic)
    state = logs_of_checkpoint(checked.checkpoint, cluster_of(checked.client), place.topic).sink
    if state is None:
        raise ConfigError(
            f"no run of this query has used {place.told}: check checkpointLocation, decisionTopic and the brokers. If "
            "they are new, start the query once before: its error names the micro-batch"
        )
    if place.folder is not None and batch > (following := checkpoint_state(str(place.folder)).following):
        raise ConfigError(
            f"batch={batch} is beyond micro-batch {following}, which Spark runs next by {place.folder}: "
            f"give {following}"
        )
    if state.to_commit and state.decided < batch and not drop_decided:
        raise _not_committed(state, batch)
    _continue_at(checked.client, place, checked.id_prefix, batch)
    last = "there was no decision"
    if state.decided >= 0:
        last = f"the last decision was of micro-batch {state.decided}"
    _log.warning("%s: the query goes on with micro-batch %d; %s", place.told, batch, last)


def _not_committed(state: LogState, batch: int) -> ConfigError:
    """The refusal to pass over the last decided micro-batch."""
    names = [f"{task.transactional_id} (task {task.task})" for task in state.to_commit[:_MOST_NAMED]]
    if len(state.to_commit) > _MOST_NAMED:
        names.append(f"{len(state.to_commit) - _MOST_NAMED} more")
    return ConfigError(
        f"micro-batch {state.decided} is decided, and {state.place} does not say that its transactions are committed: "
        f"{', '.join(names)}. A start of the query commits them; continue_at(OPTIONS, {batch}) would have it abort "
        f"them, and their rows would be lost. Start the query first; or call continue_at(OPTIONS, {state.decided}) to "
        "write these rows again, or with drop_decided=True to lose them"
    )
