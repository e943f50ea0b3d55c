"""Removal of segments on a failing disk: by retention, by DeleteRecords, by compaction."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spark_klog.log.partition_log import PartitionLog
from tests.log.compacted_logs import CONFIG, clean, fill, records
from tests.log.faulty_files import Faults, FaultyFiles
from tests.log.faulty_logs import FOLDER, SMALL, Clock, batch_of, content, open_log
from tests.support.brokers.producer_batches import batch, marker

DELAY_MS = 50


def _filled(files: FaultyFiles, clock: Clock, retention_bytes: int = -1) -> PartitionLog:
    config = replace(SMALL, retention_bytes=retention_bytes, file_delete_delay_ms=DELAY_MS)
    log = open_log(files, config, clock)
    for number in range(30):
        log.append(memoryview(bytearray(batch_of(number, 2))))
    log.append(memoryview(batch(7, 1, 0, 3)))  # with a transaction index in one of the segments
    log.append(memoryview(marker(7, 1, 0)))
    log.append(memoryview(bytearray(batch_of(30, 2))))
    log.flush()
    return log


def _fails_at(files: FaultyFiles, operation: str, which: int) -> Callable[[], bool]:
    """Let one call fail; returns a function that tells whether it has failed."""
    calls = [0]

    def fails(name: str, _: Path) -> bool:
        calls[0] += name == operation
        return name == operation and calls[0] == which + 1

    files.faults = Faults(fails=fails)
    return lambda: calls[0] > which


def _by_retention(log: PartitionLog) -> None:
    log.config = replace(log.config, retention_bytes=0)
    log.delete_expired()


def _by_request(log: PartitionLog) -> None:
    assert log.delete_records(41) == 41  # within the fifth segment; the files may be deleted later


@pytest.mark.parametrize("delete", [_by_retention, _by_request])
@pytest.mark.parametrize("operation", ["rename", "remove"])
def test_a_deletion_that_fails_midway_leaves_no_hole(delete: Callable[[PartitionLog], None], operation: str) -> None:
    """Each call fails in turn; then the process is killed, or the deletion is retried."""
    failing, has_failed, left_over = 0, True, 0
    while has_failed:
        files, clock = FaultyFiles(), Clock()
        log = _filled(files, clock)
        before = content(log)
        segments = log.segments
        was_reached = _fails_at(files, operation, failing)
        try:
            delete(log)
        except OSError:
            pass
        files.faults = Faults()
        has_failed, failing = was_reached(), failing + 1
        # the log's segments are those in the folder
        first = log.segments[0]
        assert [each for each in segments if each.base_offset >= first.base_offset] == [
            each for each in log.segments if each.size
        ]
        assert log.expired_segments == sum(each not in log.segments for each in segments)
        there = {name for name in files.names(FOLDER) if name.endswith(".log")}
        assert there == {each.path.name for each in log.segments}
        assert content(log) == [item for item in before if item[0] + 2 > log.start_offset]
        for power in (False, True):
            again = open_log(files.after_crash(random.Random(failing), power=power), point=log.recovery_point)
            found = content(again)  # from its start to its end, without a hole
            assert found == before[len(before) - len(found) :]
            assert again.end_offset == log.end_offset
            if not power:
                assert again.start_offset == first.base_offset
        delete(log)
        assert log.start_offset >= segments[4].base_offset
        clock.now += DELAY_MS
        log.deleted_files.remove_due()
        left_over += len([name for name in files.names(FOLDER) if name.endswith(".deleted")])
        for number in range(31, 40):
            log.append(memoryview(bytearray(batch_of(number, 2))))
        log.close()
        expected = content(log)
        assert content(open_log(files, clean=True, point=log.end_offset)) == expected
    assert failing > 4
    assert not left_over


def test_a_file_that_cannot_be_removed_is_removed_later() -> None:
    for failing in (0, 1, 2, 4, 5):  # there is no transaction index at 3
        files, clock = FaultyFiles(), Clock()
        log = _filled(files, clock)
        _by_request(log)
        clock.now += DELAY_MS
        _fails_at(files, "remove", failing)
        with pytest.raises(OSError, match="Input/output"):
            log.deleted_files.remove_due()
        files.faults = Faults()
        assert len([name for name in files.names(FOLDER) if name.endswith(".deleted")]) == 1
        assert not log.deleted_files.are_due
        clock.now += 60_000
        assert log.deleted_files.are_due
        log.deleted_files.remove_due()
        assert not [name for name in files.names(FOLDER) if name.endswith(".deleted")]


@pytest.mark.parametrize("operation", ["rename", "remove", "sync"])
def test_a_swap_of_compacted_segments_that_fails_midway_loses_nothing(operation: str) -> None:
    """Each call fails in turn: the log is unchanged, or rejects appends until the next start completes the swap."""
    failing, has_failed = 0, True
    while has_failed:
        files = FaultyFiles()
        log = PartitionLog(FOLDER, CONFIG, files=files, now_ms=Clock())
        log.append(memoryview(batch(7, 1, 0, 3)))
        log.append(memoryview(marker(7, 1, 0)))
        last = fill(log, random.Random(7), 40)
        log.flush()
        before = records(log)
        was_reached = _fails_at(files, operation, failing)
        try:
            clean(log, None)
        except OSError:
            pass
        files.faults = Faults()
        has_failed, failing = was_reached(), failing + 1
        if log.failure is None:
            found = records(log)
            assert {key: (offset, value) for offset, key, value in found if key.startswith(b"key")} == last
        for seed in range(4):
            left = files.after_crash(random.Random(seed), power=seed > 0)
            again = PartitionLog(FOLDER, CONFIG, files=left, recovery_point=log.recovery_point, now_ms=Clock())
            found = records(again)
            assert set(found) <= set(before)
            assert {key: (offset, value) for offset, key, value in found if key.startswith(b"key")} == last
            assert not [name for name in left.names(FOLDER) if name.endswith((".cleaned", ".swap", ".deleted"))]
    assert failing > 3
