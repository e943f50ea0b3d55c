"""Checks of a log against its model after each event of test_log_model.py."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.partition_log import PartitionLog
from tests.log.faulty_files import FaultyFiles
from tests.log.faulty_logs import NOW
from tests.support.brokers.batches import read_records, walk
from tests.support.brokers.logs import searched
from tests.support.checker.log_model import CONTROL, Batch, Derived, Model, committed_in, derive


def served(log: PartitionLog) -> list[bytes]:
    found, offset = [], log.start_offset
    while (part := log.read(offset, 1)) is not None:
        data = part.read()
        [batch] = walk(data)
        assert batch.base_offset <= batch.last_offset
        assert batch.last_offset >= offset
        found.append(data)
        offset = batch.last_offset + 1
    return found


def check_served(log: PartitionLog, model: Model, seed: int) -> None:
    batches = served(log)
    there = [batch for batch in model.batches if batch.last >= log.start_offset]
    if not log.config.compacts:
        assert batches == [batch.data for batch in there]
    stable = log.last_stable_offset
    aborted = [item[:2] for item in log.aborted_transactions(log.start_offset, stable)]
    readable = b"".join(data for data in batches if next(walk(data)).last_offset < stable)
    taken = committed_in(readable, aborted)
    seen = [record for record in read_records(readable) if _batch_of(readable, record.offset) in taken]
    visible = {item.offset: (item.key, item.value) for item in seen if item.offset >= model.largest_start}
    derived = model.derived
    committed = {
        record.offset: (record.key, record.value)
        for batch in there
        if batch.marker is None
        for record in batch.records
        if model.largest_start <= record.offset < stable and record.offset not in derived.aborted
    }
    if not log.config.compacts:
        assert visible == committed
    else:
        assert visible.items() <= committed.items()
        assert {offset for offset in committed if offset >= model.clean_offset} <= set(visible)
        last = {pair[0]: offset for offset, pair in sorted(committed.items())}
        kept = {pair[0]: offset for offset, pair in sorted(visible.items())}
        for name, offset in last.items():
            # a tombstone may be gone, with all records that it deletes
            assert kept.get(name) == offset or (name not in kept and committed[offset][1] is None)
    _check_fetches(log, stable, taken, readable, seed)


def _batch_of(data: bytes, offset: int) -> int:
    return next(item.base_offset for item in walk(data) if item.base_offset <= offset <= item.last_offset)


def _check_fetches(log: PartitionLog, stable: int, taken: set[int], readable: bytes, seed: int) -> None:
    """Check that any read_committed fetch, with the aborted transactions of its range, gives the same batches."""
    rng = random.Random(seed)
    for item in walk(readable):
        if item.base_offset < log.start_offset or rng.random() < 0.7:
            continue
        found = log.read(item.base_offset, rng.choice([1, 200, 1000]), stable)
        assert found is not None
        after = min(stable, log.offset_after(item.base_offset, found))
        aborted = [entry[:2] for entry in log.aborted_transactions(item.base_offset, after)]
        data = found.read()
        whole = next(
            (part for size in range(len(data), 0, -1) if (part := data[:size]) and readable.find(part) >= 0
             and _is_whole(part)),
            b"",
        )  # fmt: skip
        assert committed_in(whole, aborted) == {part.base_offset for part in walk(whole)} & taken


def _is_whole(data: bytes) -> bool:
    at = 0
    while at + 12 <= len(data):
        at += 12 + struct.unpack_from(">i", data, at + 8)[0]
    return at == len(data)


def check_times(log: PartitionLog, model: Model, seed: int) -> None:
    offsets = set()
    for data in served(log):
        offsets |= {record.offset for record in read_records(data)}
        offsets |= {item.base_offset for item in walk(data) if struct.unpack_from(">h", data, 21)[0] & CONTROL}
    live = [
        record
        for batch in model.batches
        for record in batch.records
        if record.offset >= log.start_offset and record.offset in offsets
    ]
    times = {record.timestamp for record in live}
    rng = random.Random(seed)
    for timestamp in {0, NOW * 2, *rng.sample(sorted(times), min(5, len(times))), *([max(times)] if times else [])}:
        expected = next(((item.timestamp, item.offset) for item in live if item.timestamp >= timestamp), None)
        assert searched(log, timestamp) == expected


def check_state(files: FaultyFiles, log: PartitionLog, model: Model) -> None:
    derived: Derived = model.derived
    low = min((max(first, model.start) for first in derived.open.values()), default=log.end_offset)
    high = min((max(first, model.largest_start) for first in derived.open.values()), default=log.end_offset)
    assert low <= log.last_stable_offset <= high
    assert log.end_of_epoch(0) == (0, log.end_offset)
    path = log.directory / "leader-epoch-checkpoint"
    if path.name in files.names(log.directory):
        assert files.read(path) == b"0\n1\n0 0\n"
    for producer, (epoch, known) in derived.producers.items():
        found = log.producers.producers[producer]
        assert found.epoch == epoch
        expected = _sequences(known)
        batches = [item[:2] for item in found.batches]
        assert batches == expected or (model.clean_offset and batches == expected[-len(batches) :])


def _sequences(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """(last sequence, last offset) of the batches."""
    return [(item.sequence + len(item.records) - 1, item.last) for item in batches]


def are_known(batches: Iterable[Batch], log: PartitionLog) -> bool:
    """Whether the log knows these batches as the last ones of their producers."""
    for producer, (epoch, known) in derive(batches).producers.items():
        found = log.producers.producers.get(producer)
        if found is None or found.epoch != epoch or [item[:2] for item in found.batches][-1:] != _sequences(known)[-1:]:
            return False
    return True


def check_after_damage(log: PartitionLog, path: Path, content: bytes, at: int, kind: str) -> None:
    """Check that intact batches are served and errors name damaged ones; byte `at` of `content` was damaged."""
    on_disk = list(walk(content))
    damaged = {item.base_offset for item in on_disk if item.position <= at < item.position + item.size}
    is_last = path == log.segments[-1].path
    if kind != "flip":
        damaged = {item.base_offset for item in on_disk if item.position + item.size > at}
        if not is_last and any(item.position == at for item in on_disk):
            return  # an older segment that is cut between two batches looks intact
    intact = {item.base_offset: content[item.position : item.position + item.size] for item in on_disk}
    for base, expected in intact.items():
        if base < log.start_offset or base >= log.end_offset or base in damaged:
            continue
        try:
            found = log.read(base, len(expected))
        except (LogCorrupted, DecodeError):
            continue  # the error names the damage
        assert found is not None
        served = found.read()
        position = found.position
        is_of_damaged = any(item.position == position for item in on_disk if item.base_offset in damaged)
        assert served == expected or is_of_damaged or _is_length(content, at), (base, position)
    for base in damaged:
        if base >= log.start_offset and base < log.end_offset and kind != "flip":
            with pytest.raises((LogCorrupted, DecodeError)):
                log.read(base, 1)


def _is_length(content: bytes, at: int) -> bool:
    """Whether a byte is of a batch's length: a wrong length may hide later batches, but its own checksum fails."""
    return any(item.position + 8 <= at < item.position + 12 for item in walk(content))
