"""Prepare an append: assign offsets, compute index entries, decide whether to roll a new segment."""

from __future__ import annotations

from typing import NamedTuple

from spark_klog.log.config import LogConfig
from spark_klog.log.segments.segment import Segment
from spark_klog.records.building.assignment import assign_offsets
from spark_klog.records.contract import BatchRun, IndexState, Kernel
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.kernels.batch_run import run_of


class Appended(NamedTuple):
    """Result of an append: the offsets of the first and last record, and the log append time (ms, else -1).

    For a duplicate, the offsets of its first append.
    """

    base_offset: int
    last_offset: int
    append_time: int = -1


def assigned(
    kernel: Kernel,
    records: memoryview,
    active: Segment,
    first: int,
    leader_epoch: int,
    append_time: int | None,
) -> tuple[memoryview, BatchRun]:
    """Assign offsets from `first` on, in place if possible: (record batches, their run).

    `append_time`: the timestamp (ms) of all records; None keeps their own. `DecodeError`.
    """
    if append_time is None and len(records):
        run = kernel.scan_batches(records, 0, active.state, active.target(), first, leader_epoch)
        if run.end == len(records):
            return records, run
    data = assign_offsets(records, first, leader_epoch=leader_epoch, append_time=append_time).data
    return data, run_in(data, active)


def run_in(data: memoryview, segment: Segment) -> BatchRun:
    """The run of record batches with assigned offsets, for the indexes of this segment."""
    batches, position = [], 0
    for header, _ in iter_batches(data):
        batches.append((position, header))
        position += header.size
    state = segment.state if segment.size else IndexState()
    return run_of(batches, 0, state, segment.target(), segment.base_offset)


def is_full(active: Segment, size: int, timestamp: int, config: LogConfig, now_ms: int) -> bool:
    """Whether an append of `size` bytes with this largest timestamp (ms) needs a new segment: by size, age, indexes."""
    if not active.size:
        return False
    if active.size + size > config.segment_bytes:
        return True
    limit = config.segment_index_bytes
    if active.offset_index.is_full(limit) or active.time_index.is_full(limit):
        return True
    return _age(active, timestamp, now_ms) > config.segment_ms


def _age(active: Segment, timestamp: int, now_ms: int) -> int:
    """The age of a segment as in Kafka: by timestamps if the records have them, else by the clock."""
    first = active.first_timestamp()
    return timestamp - first if first >= 0 and timestamp >= 0 else now_ms - active.made_ms
