"""Compaction and retention of whole logs: files, crashes in between, and Kafka's own tool on the result."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.config import COMPACT, LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.index import IndexMemory
from tests.log.compacted_logs import CONFIG, Survivors, clean, fill, records
from tests.log.faulty_files import Faults, FaultyFile, FaultyFiles, Killed
from tests.log.faulty_logs import FOLDER, NOW, Clock, check_indexes, content
from tests.support.brokers.batches import make_batch
from tests.support.brokers.compaction_logs import dumped_with_holes
from tests.support.checker.log_model import ABORT, COMMIT, CONTROL, TRANSACTIONAL, encoded, marker_pair
from tests.support.servers.kafka import NEWEST

BATCH = 130


def check_compacted(
    log: PartitionLog, last: Survivors, clean_up_to: int, before: list[tuple[int, bytes, bytes | None]]
) -> None:
    """Check that below the clean offset each key has its last record only, above it all are left, and none is new."""
    now = records(log)
    assert set(now) <= set(before)
    assert [item for item in now if item[0] >= clean_up_to] == [item for item in before if item[0] >= clean_up_to]
    kept = {key: offset for offset, key, _ in before if offset < clean_up_to}
    for offset, key, _ in now:
        if offset < clean_up_to:
            assert kept[key] == offset
    assert {key: (offset, value) for offset, key, value in now} == last


def test_a_log_is_compacted_and_kafka_finds_nothing_wrong(tmp_path: Path) -> None:
    rng = random.Random(4)
    log = PartitionLog(tmp_path / "t-0", CONFIG, clean=True)
    last = fill(log, rng, 200)
    before, size = records(log), log.size
    end = clean(log, None)
    assert end == log.segments[-1].base_offset
    check_compacted(log, last, end, before)
    assert log.size < size / 3
    log.deleted_files.remove_due()
    log.close()
    assert not list((tmp_path / "t-0").glob("*.deleted"))
    seen = {item.offset for item in dumped_with_holes(NEWEST, *sorted((tmp_path / "t-0").glob("*.log")))}
    assert seen == {offset for offset, _, _ in records(log)}
    # and again after a restart, with more records
    log = PartitionLog(tmp_path / "t-0", CONFIG, clean=True)
    segments = len(log.segments)
    last |= fill(log, rng, 60)
    before = records(log)
    check_compacted(log, last, clean(log, end), before)
    assert len(log.segments) < segments / 2  # small neighbours were merged


def test_killed_while_it_compacts() -> None:
    """A kill at any operation or byte leaves the log as before or compacted, and no key is lost."""
    limit, crashes, states = 0, 0, set()
    while True:
        files = FaultyFiles()
        log = PartitionLog(FOLDER, CONFIG, files=files, now_ms=Clock())
        last = fill(log, random.Random(7), 40)
        log.flush()
        before = records(log)
        files.faults = Faults(bytes_left=limit // 2, fails=lambda operation, path: False)
        if limit % 2:  # at an operation, not within a write
            left = [limit // 2]

            def stops(operation: str, path: Path, left: list[int] = left) -> bool:
                left[0] -= operation != "read"
                if left[0] < 0:
                    raise Killed
                return False

            files.faults = Faults(fails=stops)
        try:
            clean(log, None)
        except Killed:
            crashes += 1
        else:
            if limit % 2:
                break
        left_over = files.after_crash(random.Random(limit), power=limit % 3 == 0)
        again = PartitionLog(FOLDER, CONFIG, files=left_over, recovery_point=log.recovery_point, now_ms=Clock())
        now = records(again)
        assert set(now) <= set(before)
        assert {key: (offset, value) for offset, key, value in now} == last
        check_indexes(left_over, again)
        assert not [name for name in left_over.names(FOLDER) if name.endswith((".cleaned", ".swap", ".deleted"))]
        states.add(len(now))
        limit += 1 if limit < 200 else 7
    assert crashes > 60
    assert len(states) > 1


def test_a_swap_of_segments_that_are_gone_changes_nothing() -> None:
    files, clock = FaultyFiles(), Clock()
    log = PartitionLog(FOLDER, CONFIG, files=files, now_ms=clock)
    fill(log, random.Random(2), 60)
    found = plan(log, None, NOW)

    def later(change: object) -> bool:
        log.delete_records(log.segments[-1].base_offset)
        return change()  # type: ignore[operator, no-any-return]

    assert compact(log, found, OffsetMap(1 << 16), NOW, later) == found.first_dirty_offset
    assert len(log.segments) == 1
    assert content(log)


@pytest.mark.parametrize("operation", ["rename", "remove", "sync"])
def test_a_swap_with_a_call_that_fails_leaves_no_index_of_other_records(operation: str) -> None:
    """The new segment has the name of the first old one, whose index may not have been renamed."""
    failing, failures = 0, 1
    while failures:
        files, clock = FaultyFiles(), Clock()
        log = PartitionLog(FOLDER, CONFIG, files=files, now_ms=clock)
        last = fill(log, random.Random(2), 60)
        before = records(log)
        left, failures = failing, 0

        def fails(name: str, _: Path) -> bool:
            nonlocal left, failures
            if name != operation:
                return False
            left -= 1
            failures += left == -1
            return left == -1

        files.faults = Faults(fails=fails)
        with suppress(OSError):
            clean(log, None)
        files.faults = Faults()
        is_clean = log.failure is None
        if is_clean:
            log.close()
        opened = PartitionLog(FOLDER, CONFIG, clean=is_clean, recovery_point=log.recovery_point, files=files)
        check_indexes(files, opened)
        after = records(opened)
        assert set(after) <= set(before)
        assert {key: (offset, value) for offset, key, value in after} == last
        failing += 1
    assert failing > 3


def _append(
    log: PartitionLog, pair: tuple[bytes, bytes | None], producer: int = -1, attributes: int = 0, sequence: int = 0
) -> None:
    epoch, sequence = (-1, -1) if producer < 0 else (0, sequence)
    batch = encoded([pair], [NOW], producer=producer, epoch=epoch, sequence=sequence, attributes=attributes)
    log.append(memoryview(bytearray(batch)))


def test_an_aborted_transaction_that_ends_beyond_the_cleanable_part_supersedes_nothing() -> None:
    """The abort marker, and so the transaction index entry, comes after the start of another open transaction."""
    config = replace(CONFIG, segment_bytes=1)
    log = PartitionLog(FOLDER, config, files=FaultyFiles(), now_ms=Clock())

    append = partial(_append, log)
    append((b"a", b"committed"))
    append((b"a", b"aborted"), 1, TRANSACTIONAL)
    append((b"b", b"open"), 2, TRANSACTIONAL)
    append(marker_pair(ABORT), 1, TRANSACTIONAL | CONTROL, -1)
    append((b"c", b"active"))
    end = clean(log, None)
    assert end == log.last_stable_offset == 2
    assert records(log)[:2] == [(0, b"a", b"committed"), (2, b"b", b"open")]
    append(marker_pair(COMMIT), 2, TRANSACTIONAL | CONTROL, -1)
    append((b"d", b"active"))
    assert clean(log, end) == 6
    assert [item[:2] for item in records(log)] == [(0, b"a"), (2, b"b"), (4, b"c"), (6, b"d")]


def test_what_a_transaction_supersedes_goes_when_its_commit_is_on_the_disk() -> None:
    """Otherwise a power failure could lose the commit, after older committed and flushed records were removed."""
    files = FaultyFiles()
    log = PartitionLog(FOLDER, CONFIG, files=files, now_ms=Clock())

    append = partial(_append, log)
    append((b"a", b"first"))
    append((b"a", b"second"), 1, TRANSACTIONAL)
    log.roll()
    append(marker_pair(COMMIT), 1, TRANSACTIONAL | CONTROL, -1)
    clean(log, None)
    assert [item[:2] for item in records(log)] == [(1, b"a")]
    for seed in range(10):
        left = files.after_crash(random.Random(seed), power=True)
        again = PartitionLog(FOLDER, CONFIG, files=left, recovery_point=log.recovery_point, now_ms=Clock())
        assert [item[0] for item in records(again) if item[0] < again.last_stable_offset]


def test_a_round_that_is_given_up_changes_nothing() -> None:
    """A round may stop at any batch; groups cleaned before stay cleaned."""

    class Stopped(Exception):
        pass

    for limit in (0, 5, 45, 55):
        files = FaultyFiles()
        log = PartitionLog(FOLDER, CONFIG, files=files, now_ms=Clock())
        last = fill(log, random.Random(7), 40)
        before, calls = records(log), iter(range(1000))

        def check(limit: int = limit, calls: Iterator[int] = calls) -> None:
            if next(calls) == limit:
                raise Stopped

        with pytest.raises(Stopped):
            compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW, check=check)
        assert not [name for name in files.names(FOLDER) if name.endswith(".cleaned")]
        now = records(log)
        assert set(now) <= set(before)
        assert now == before or limit > 40
        assert {key: (offset, value) for offset, key, value in now} == last
        check_compacted(log, last, clean(log, None), now)


def test_batches_are_read_many_at_once() -> None:
    """Each read lets other threads run, but so briefly that none can start and each waits anew."""
    files = FaultyFiles()
    log = PartitionLog(FOLDER, replace(CONFIG, segment_bytes=1 << 20), files=files, now_ms=Clock())
    for number in range(300):
        log.append(memoryview(make_batch([(b"key-%d" % (number % 10), bytes(2000))], [NOW])))
    log.roll()
    reads: list[int] = []
    read_at = FaultyFile.read_at

    def counted(file: FaultyFile, position: int, size: int) -> bytes:
        reads.append(size)
        return read_at(file, position, size)

    planned = plan(log, None, NOW)
    with mock.patch.object(FaultyFile, "read_at", counted):
        compact(log, planned, OffsetMap(1 << 16), NOW)
    assert len(records(log)) == 10
    assert sum(reads) >= 2 * 300 * 2000  # two passes
    assert len(reads) < 30


def test_what_a_full_disk_could_not_hold_is_removed() -> None:
    """The unfinished file would keep the disk full until the next start."""
    files = FaultyFiles()
    log = PartitionLog(FOLDER, CONFIG, files=files, now_ms=Clock())
    last = fill(log, random.Random(7), 40)
    log.flush()

    def fails(operation: str, path: Path) -> bool:
        if operation == "write" and path.name.endswith(".cleaned"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return False

    files.faults = Faults(fails=fails)
    with pytest.raises(OSError, match="No space left"):
        compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW)
    assert not [name for name in files.names(FOLDER) if name.endswith(".cleaned")]
    assert {key: (offset, value) for offset, key, value in records(log)} == last


def test_indexes_that_were_given_back_are_not_read_again_for_a_plan(tmp_path: Path) -> None:
    """A plan is made every few seconds, for all segments, in the owner's thread."""
    log = PartitionLog(tmp_path / "t-0", CONFIG, clean=True, memory=IndexMemory(limit=1))
    fill(log, random.Random(7), 300)
    planned = plan(log, None, NOW)
    sealed = log.segments[:-1]
    sizes = [(segment.offset_index.size, segment.time_index.size) for segment in sealed]
    assert all(sum(pair) for pair in sizes)
    for segment in sealed[:-1]:
        segment.path.with_suffix(".index").unlink()
        segment.path.with_suffix(".timeindex").unlink()
    assert plan(log, None, NOW) == planned
    assert [(segment.offset_index.size, segment.time_index.size) for segment in sealed] == sizes


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"retention_ms": 1000}, 5),
        ({"retention_ms": -1}, 10),
        ({"retention_bytes": 4 * BATCH}, 4),
        ({"retention_bytes": 4 * BATCH - 1}, 4),
        ({"retention_bytes": 4 * BATCH + 1}, 5),
        ({"retention_bytes": 0}, 1),
        ({"retention_ms": 0}, 1),
        ({"retention_ms": 1000, "cleanup_policy": COMPACT}, 10),
        ({"retention_ms": 1000, "cleanup_policy": "compact,delete"}, 5),
    ],
)
def test_retention(settings: dict[str, object], kept: int) -> None:
    """Ten segments of one batch each, 200 ms apart; the clock is 1 ms after the last one's time."""
    files, clock = FaultyFiles(), Clock()
    config = LogConfig(**{"segment_bytes": BATCH, "file_delete_delay_ms": 50, "retention_ms": -1, **settings})  # type: ignore[arg-type]
    log = PartitionLog(FOLDER, config, files=files, now_ms=clock)
    for number in range(10):
        batch = make_batch([(b"k", bytes(60))], [NOW + 200 * number])
        assert len(batch) == BATCH
        log.append(memoryview(batch))
    assert len(log.segments) == 10
    clock.now = NOW + 1800 + 1
    held = log.read(0, 1)
    assert held is not None
    log.delete_expired()
    remaining = [segment for segment in log.segments if segment.size]
    wanted = kept if settings.get("retention_bytes") != 0 and settings.get("retention_ms") != 0 else 0
    assert len(remaining) == wanted
    assert log.start_offset == 10 - wanted
    assert held.read()  # a reader can finish with the deleted segment
    doomed = {name for name in files.names(FOLDER) if name.endswith(".log.deleted")}
    assert len(doomed) == 10 - wanted
    log.deleted_files.remove_due()
    assert {name for name in files.names(FOLDER) if name.endswith(".log.deleted")} == doomed
    clock.now += 50
    log.deleted_files.remove_due()
    assert not [name for name in files.names(FOLDER) if name.endswith(".deleted")]
    assert log.append(memoryview(make_batch([(b"k", b"v")], [clock.now]))).base_offset == 10
