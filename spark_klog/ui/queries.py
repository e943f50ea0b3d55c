"""Spark queries, from their checkpoints, and loads, from their audits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_klog.base.addresses import without_user
from spark_klog.client import Admin
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import KlogError
from spark_klog.groups.moves import existing
from spark_klog.protocol.tables.records import LATEST
from spark_klog.trees.switching import checkpoint_state


def queries(admin: Admin, checkpoints: Sequence[str]) -> list[dict[str, Any]]:
    """What each checkpoint holds, and how far its planned end is behind; or the error that it can't be read by."""
    found: list[dict[str, Any]] = []
    for address in checkpoints:
        try:
            state = checkpoint_state(address)
            keys = {key for source in state.sources for key in source.offsets or {}}
            with admin.exclusive() as cluster:
                latest = list_offsets(cluster, dict.fromkeys(existing(cluster, keys), LATEST))
        except (KlogError, OSError) as error:
            found.append({"checkpoint": without_user(address), "error": str(error)})
            continue
        partitions = [
            {
                "source": source.number,
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "latest": latest.get((topic, partition)),
            }
            for source in state.sources
            for (topic, partition), offset in sorted((source.offsets or {}).items())
        ]
        found.append(
            {
                "checkpoint": without_user(address),
                "query": state.query,
                "planned": state.planned,
                "done": state.done,
                "stateful": state.is_stateful,
                "partitions": partitions,
            }
        )
    return found


def loads(outputs: Sequence[str]) -> list[dict[str, Any]]:
    """The status of each load, as `klog load status --json` prints it; or its error."""
    if not outputs:
        return []
    from spark_klog.load.audit import status, status_json

    found: list[dict[str, Any]] = []
    for output in outputs:
        try:
            found.append(status_json(status(output)))
        except (KlogError, OSError) as error:
            found.append({"output": without_user(output), "error": str(error)})
    return found
