"""Partitions that a consumer group's leader assigned to a member."""

from __future__ import annotations

from spark_klog.protocol.codec import decode_versioned
from spark_klog.protocol.tables.consumer_protocol import ASSIGNMENT
from spark_klog.wire.primitives import Buffer


def decode_assignment(data: Buffer) -> dict[str, list[int]]:
    """Partitions by topic, {} if `data` is empty; `DecodeError`."""
    if not len(data):
        return {}
    rows = decode_versioned(ASSIGNMENT, data)["assigned_partitions"]
    return {row["topic"]: sorted(row["partitions"]) for row in rows}
