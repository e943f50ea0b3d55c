"""Recognize a DataFrame that is read again after its topics have grown.

Spark asks a Python data source for a plan once for each DataFrame, and reads that plan whenever the DataFrame is used:
the static side of a stream's join in each micro-batch, a temporary view in each query. Tasks can't look up newer ends
by themselves: the tasks of one action, and their retries, would see different ends. So a task warns.

A plan is known by its identity, an action by Spark's execution id; both are remembered in each worker process, so the
warning comes when a process reads the plan in a second action.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timezone

from spark_klog.base.clock import system_ms
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.client.places import Offsets
from spark_klog.errors import KlogError
from spark_klog.protocol.tables.records import LATEST

_log = logging.getLogger(__name__)

#: Spark's local property that tells the action that a task belongs to, of a stream the micro-batch.
_EXECUTION = "spark.sql.execution.root.id"
#: How long the look-up of newer records may take, in ms.
_LOOK_UP_MS = 2000
_MOST_PLANS = 1000
#: The execution id that this process has first read each plan in; None after the warning. The newest plan is last.
_executions: dict[str, str | None] = {}


@dataclass(frozen=True)
class Plan:
    """A batch query's plan. `ends` is where it ends in each partition, if that was the log's end."""

    ends: Offsets
    planned_at_ms: int = field(default_factory=system_ms)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def advice(self) -> str:
        """What to do about a plan that is too old."""
        moment = datetime.fromtimestamp(self.planned_at_ms / 1000, timezone.utc).isoformat(" ", "seconds")
        return (
            f"the DataFrame was planned at {moment}, and Spark keeps the offsets of that time whenever it is read: "
            "call load() again for each use, in a stream within foreachBatch"
        )


def warn_if_read_again(plan: Plan, cluster: Cluster) -> None:
    """Log, once per plan and process, that another action reads the plan while its partitions have newer records."""
    from pyspark import TaskContext  # here: a load that has nothing to do reads this module, and needs no Spark

    context = TaskContext.get()
    execution = context.getLocalProperty(_EXECUTION) if context else None
    if execution is None or not plan.ends:
        return
    first = _executions.setdefault(plan.identity, execution)
    while len(_executions) > _MOST_PLANS:
        _executions.pop(next(iter(_executions)))
    if first in (None, execution):
        return
    try:
        with cluster.within(_LOOK_UP_MS, "the look-up of newer records"):
            latest = list_offsets(cluster, dict.fromkeys(plan.ends, LATEST))
    except KlogError:  # the read itself reports what matters
        return
    newer = {key: offset for key, offset in latest.items() if offset > plan.ends[key]}
    if newer:
        (topic, partition), offset = next(iter(newer.items()))
        _executions[plan.identity] = None
        _log.warning(
            "records are not read: %s-%d ends at offset %d, this read at %d; %s",
            *(topic, partition, offset, plan.ends[topic, partition], plan.advice),
        )
