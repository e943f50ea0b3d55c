"""The log on a failing file system (faulty_files.py), against a list as the model."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from spark_klog.errors import LogCorrupted
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.segment import segment_name
from spark_klog.records.formats.batch import read_header
from tests.log.faulty_files import Faults, FaultyFiles, Killed
from tests.log.faulty_logs import FOLDER, NOW, SMALL, Clock, batch_of, check_indexes, content, open_log
from tests.support.brokers.batches import make_batch
from tests.support.brokers.logs import searched
from tests.support.checker.log_model import stored

#: With SPARK_KLOG_KILLS kill at every byte, in CI at every ninth.
_STEP = 1 if "SPARK_KLOG_KILLS" in os.environ else 9


def check_recovered(
    log: PartitionLog, files: FaultyFiles, appended: list[tuple[int, bytes]], acknowledged: int
) -> None:
    """Check that the log has a prefix of the appends with all acknowledged ones, and accepts more."""
    found = content(log)
    assert found == appended[: len(found)]
    assert log.end_offset >= acknowledged
    check_indexes(files, log)
    for offset, data in found:
        timestamp = read_header(data).max_timestamp
        assert searched(log, timestamp) == (timestamp, offset)
    batch = batch_of(99, 2)
    end = log.end_offset
    assert log.append(memoryview(bytearray(batch))).base_offset == end
    assert content(log) == [*found, (end, stored(batch, end))]
    log.close()
    assert content(open_log(files, clean=True)) == [*found, (end, stored(batch, end))]


def work(log: PartitionLog, appended: list[tuple[int, bytes]], *, ahead: bool = False) -> None:
    """Append over several segments, and flush once; with `ahead` flush before each roll, as the broker does."""
    for number in range(9):
        batch = batch_of(number, number % 3 + 1, 40)
        # after a crash the batch that was being written may be there, too
        appended.append((log.end_offset, stored(batch, log.end_offset)))
        if ahead and log.waits_to_roll(len(batch), -1):
            flush = log.begin_flush(with_snapshot=True)
            flush.run()
            log.end_flush(flush)
            assert not log.waits_to_roll(len(batch), -1)
        log.append(memoryview(bytearray(batch)))
        if number == 4:
            log.flush()


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("flushed", ["at rolls", "before rolls", "flush.messages=1"])
def test_killed_at_every_byte(power: bool, flushed: str) -> None:
    every = flushed == "flush.messages=1"
    config = LogConfig(**{**SMALL.__dict__, "flush_messages": 1 if every else 1 << 40})
    limit, crashes = 0, 0
    while True:
        files, appended = FaultyFiles(), list[tuple[int, bytes]]()
        log, acknowledged = None, 0
        files.faults = Faults(bytes_left=limit)
        try:
            log = open_log(files, config)
            work(log, appended, ahead=flushed == "before rolls")
        except Killed:
            crashes += 1
        else:
            break
        if log is not None:
            acknowledged = log.recovery_point
        if every and appended:  # all but the one that was being written
            assert acknowledged == appended[-1][0]
        rng = random.Random(limit)
        left = files.after_crash(rng, power=power)
        again = open_log(left, config, point=acknowledged)
        check_recovered(again, left, appended, acknowledged)
        limit += _STEP
    assert crashes > 1000 / _STEP


@pytest.mark.parametrize("operation", ["write", "sync", "open", "open folder", "rename", "truncate", "remove"])
def test_a_disk_that_fails_at_any_call_harms_nothing_before(operation: str) -> None:
    """EIO at the n-th call of a kind, for each n; then the log is opened again on a disk that works."""
    failing, failures = 0, 0
    while True:
        files, appended = FaultyFiles(), list[tuple[int, bytes]]()
        calls = [0]

        def fails(name: str, _: Path, calls: list[int] = calls, failing: int = failing) -> bool:
            if name != operation:
                return False
            calls[0] += 1
            return calls[0] == failing + 1

        log = None
        files.faults = Faults(fails=fails)
        try:
            log = open_log(files)
            work(log, appended)
            log.delete_records(log.end_offset - 1)
            log.deleted_files.remove_due()
        except OSError as error:
            failed = error
        else:
            failed = None
        assert failed is None or failed.errno == errno.EIO
        if calls[0] <= failing:
            break
        failures += 1
        files.faults = Faults()
        acknowledged = log.recovery_point if log else 0
        start = log.start_offset if log else 0
        if log is not None:
            whole = [item for item in appended if start < read_header(item[1]).next_offset]
            assert content(log) == [item for item in whole if item[0] < log.end_offset]
        left = files.after_crash(random.Random(failing), power=True)
        again = open_log(left, point=acknowledged)
        assert again.end_offset >= acknowledged
        found = content(again)
        assert [item for item in appended if found and found[0][0] <= item[0] <= found[-1][0]] == found
        failing += 1
    assert failures or operation == "truncate"


def test_a_full_disk_refuses_the_append_and_goes_on_when_there_is_room() -> None:
    for capacity in range(300, 2600, 23):
        files, appended = FaultyFiles(), list[tuple[int, bytes]]()
        files.faults = Faults(capacity=capacity)
        log, refused = None, 0
        for number in range(20):
            batch = batch_of(number, 2, 40)
            try:
                log = log or open_log(files)
                end = log.end_offset
                log.append(memoryview(bytearray(batch)))
            except OSError as error:
                failed = error
                refused += 1
                if log is not None:
                    assert log.end_offset == end
            else:
                failed = None
                appended.append((end, stored(batch, end)))
            assert failed is None or failed.errno == errno.ENOSPC
            if log is not None:
                assert content(log) == appended
        assert refused
        files.faults = Faults()
        log = log or open_log(files)
        assert log.append(memoryview(bytearray(batch_of(50, 1)))).base_offset == sum(
            read_header(data).next_offset - base for base, data in appended
        )
        check_recovered(open_log(files), files, [*appended, content(log)[-1]], log.recovery_point)


@pytest.mark.parametrize("suffix", [".log", ".timeindex", ""])
def test_a_first_append_that_fails_can_be_repeated(suffix: str) -> None:
    """Its files are made by it; a flush meanwhile does not keep the next one from the names of these files."""
    files = FaultyFiles()
    log = open_log(files)
    wrong = FOLDER / "leader-epoch-checkpoint" if not suffix else (FOLDER / segment_name(0)).with_suffix(suffix)
    files.faults.fails = lambda operation, path: (operation, path) == ("open", wrong)
    for _ in range(2):
        with pytest.raises(OSError, match=wrong.name):
            log.append(memoryview(bytearray(batch_of(0, 3))))
        assert (log.end_offset, log.read(0, 100)) == (0, None)
    files.faults = Faults()
    log.flush()
    log.append(memoryview(bytearray(batch_of(0, 3))))
    log.flush()
    for seed in range(10):
        left = files.after_crash(random.Random(seed), power=True)
        again = open_log(left, point=log.recovery_point)
        assert content(again) == content(log)
        assert again.end_of_epoch(0) == (0, 3)
        check_indexes(left, again)


def test_small_files_that_a_kill_has_left_are_synced_before_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next flush, or by a stop, after which nothing else tells the topic's id and settings."""
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    first = PartitionLog(tmp_path / "t-0", LogConfig(), uuid4(), overrides={"retention_ms": 5})
    first.append(memoryview(bytearray(batch_of(0, 3))))
    assert synced == []
    small = ["partition.metadata", "klog.json", "leader-epoch-checkpoint", segment_name(0) + ".log"]
    first.flush()
    assert [name for name in synced if name in small] == small
    log = PartitionLog(tmp_path / "t-0", LogConfig())  # after a kill
    synced.clear()
    log.close()
    assert [name for name in synced if name in small] == small
    same = PartitionLog(tmp_path / "t-0", LogConfig(), clean=True, recovery_point=3)
    synced.clear()
    same.close()
    assert synced == []


def test_short_writes_are_completed() -> None:
    files, appended = FaultyFiles(), list[tuple[int, bytes]]()
    files.faults = Faults(short_writes=random.Random(1))
    log = open_log(files)
    work(log, appended)
    assert content(log) == appended
    check_indexes(files, log)


def test_a_read_that_fails_is_told_and_passes() -> None:
    files, appended = FaultyFiles(), list[tuple[int, bytes]]()
    log = open_log(files)
    work(log, appended)
    assert len(content(log)) == len(appended)
    files.faults = Faults(fails=lambda operation, path: operation == "read" and path.suffix == ".log")
    with pytest.raises(OSError, match="Input/output"):
        content(log)
    files.faults = Faults()
    assert content(log) == appended


def test_a_read_that_fails_while_indexes_are_built_leaves_no_half_of_them() -> None:
    """Each read fails in turn; the next look-up builds the indexes completely."""
    files = FaultyFiles()
    log = open_log(files)
    for number in range(30):
        log.append(memoryview(bytearray(batch_of(number, 2))))
    log.close()
    expected = content(log), searched(log, None), [searched(log, NOW + number) for number in range(31)]
    for failing in range(20):
        left = files.after_crash(random.Random(1), power=False)
        for name in left.names(FOLDER):
            if name.endswith("index") and not name.startswith(log.segments[-1].path.stem):
                left.open(FOLDER / name).truncate(0)
        again = open_log(left, clean=True)
        calls = [0]

        def fails(operation: str, path: Path, calls: list[int] = calls, failing: int = failing) -> bool:
            calls[0] += operation == "read"
            return operation == "read" and calls[0] == failing + 1

        left.faults = Faults(fails=fails)
        with pytest.raises(OSError, match="Input/output"):
            searched(again, None)
        left.faults = Faults()
        found = content(again), searched(again, None), [searched(again, NOW + item) for item in range(31)]
        assert found == expected
        check_indexes(left, again)


def test_the_segment_of_a_roll_that_failed_does_not_come_back() -> None:
    """Its segment would hide later appends to the one before it, so its files are durably removed first."""
    for seed in range(20):
        files = FaultyFiles()
        log = open_log(files)
        log.append(memoryview(bytearray(batch_of(1, 1))))
        log.flush()
        files.faults = Faults(fails=lambda op, path: op != "remove" and path.name == segment_name(1) + ".timeindex")
        with pytest.raises(OSError, match="Input/output"):
            log.roll()
        assert log.failure is None
        files.faults = Faults()
        log.append(memoryview(bytearray(batch_of(2, 1))))
        expected = content(log)
        again = open_log(files.after_crash(random.Random(seed), power=True), point=log.recovery_point)
        found = content(again)
        assert found == expected[: again.end_offset]
        assert again.size == sum(len(data) for _, data in found)


def test_after_a_flush_that_failed_nothing_is_appended_until_the_log_is_opened_again() -> None:
    files, appended = FaultyFiles(), list[tuple[int, bytes]]()
    log = open_log(files, LogConfig(flush_messages=1))
    batch = batch_of(1, 1)
    log.append(memoryview(bytearray(batch)))
    appended.append((0, stored(batch, 0)))
    files.faults = Faults(fails=lambda operation, path: operation == "sync")
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            log.append(memoryview(bytearray(batch_of(2, 1))))
        files.faults = Faults()
    assert log.recovery_point == 1
    assert content(log)[:1] == appended
    again = open_log(files.after_crash(random.Random(1), power=True), point=log.recovery_point)
    assert content(again)[:1] == appended


@pytest.mark.parametrize("flush_messages", [1, 1 << 40])
def test_a_flush_that_could_not_begin_leaves_the_log_as_it_was(flush_messages: int) -> None:
    """No descriptor is free (EMFILE): no sync has failed, so the next one that succeeds proves that all is on disk."""
    for seed in range(20):
        files = FaultyFiles()
        log = open_log(files, replace(SMALL, flush_messages=flush_messages))
        files.faults = Faults(fails=lambda operation, path: operation == "open folder")
        for _ in range(9):
            try:
                log.append(memoryview(bytearray(batch_of(1, 1, 100))))
            except OSError as error:
                refused = error
        assert refused.errno == errno.EIO
        assert (log.failure, len(log.segments)) == (None, 1)
        files.faults = Faults()
        log.append(memoryview(bytearray(batch_of(2, 1, 600))))
        assert len(log.segments) == 2
        log.flush()
        expected = content(log)
        assert log.recovery_point == log.end_offset
        again = open_log(files.after_crash(random.Random(seed), power=True), point=log.recovery_point)
        assert content(again) == expected


def test_a_flush_beside_one_that_failed_fails_as_well() -> None:
    """The kernel reports a write error to only one of several syncs of a file; success of the other proves nothing."""
    files = FaultyFiles()
    log = open_log(files)
    log.append(memoryview(bytearray(batch_of(1, 1))))
    first = log.begin_flush(with_snapshot=False)
    log.append(memoryview(bytearray(batch_of(2, 1))))
    second = log.begin_flush(with_snapshot=True)
    files.faults = Faults(fails=lambda operation, path: operation == "sync")
    with pytest.raises(OSError, match="Input/output") as failed:
        first.run()
    files.faults = Faults()
    second.run()
    log.end_flush(first, failed.value)
    with pytest.raises(OSError, match="Input/output"):
        log.end_flush(second)
    assert log.recovery_point == 0
    again = open_log(files.after_crash(random.Random(1), power=True), point=log.recovery_point)
    assert content(again) == [(0, stored(batch_of(1, 1), 0)), (1, stored(batch_of(2, 1), 1))][: again.end_offset]


def test_a_log_that_takes_no_more_keeps_nothing_of_what_it_refuses() -> None:
    """A shared error would collect the frames, and so the records, of all rejected appends in its traceback."""
    files = FaultyFiles()
    log = open_log(files, LogConfig(flush_messages=1))
    files.faults = Faults(fails=lambda operation, path: operation == "sync")
    refusals: list[Callable[[], object]] = [
        lambda: log.append(memoryview(bytearray(batch_of(1, 1)))),
        log.roll,
        log.flush,
    ]
    for refusal in refusals:
        lengths = []
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output") as refused:
                refusal()
            lengths.append(len(refused.traceback))
        assert lengths[1] == lengths[2]


def test_settings_that_can_not_be_written_are_not_in_force() -> None:
    """Otherwise setting them again would change nothing, and the next start would have the old ones."""
    files = FaultyFiles()
    log = open_log(files)
    before, wanted = log.config, {"segment_bytes": 1500}
    files.faults = Faults(fails=lambda operation, path: operation != "read")
    with pytest.raises(OSError, match="Input/output error"):
        log.set_overrides(wanted)
    assert (log.config, log.overrides) == (before, {})
    files.faults = Faults()
    log.set_overrides(wanted)
    log.close()
    assert open_log(files, clean=True).overrides == wanted


def test_damage_before_the_recovery_point_is_named_and_not_cut() -> None:
    files, appended = FaultyFiles(), list[tuple[int, bytes]]()
    log = open_log(files, LogConfig(index_interval_bytes=150))
    work(log, appended)
    log.flush()
    path = log.segments[0].path
    good = files.read(path)
    file = files.open(path)
    file.write_at(good.index(appended[2][1]) + 70, b"\xff\xfe\xfd")
    bad = files.read(path)
    words = rf"{path.name}.*position \d+, offset {appended[2][0]}.*klog log repair"
    with pytest.raises(LogCorrupted, match=words) as told:
        open_log(files, point=log.recovery_point)
    assert str(path) in str(told.value)
    assert files.read(path) == bad
    # if it was not flushed yet, it is cut
    again = open_log(files, point=appended[2][0])
    assert content(again) == appended[:2]


def test_a_base_offset_that_is_damaged_is_no_index_entry() -> None:
    """No checksum covers a base offset: rebuilt indexes must not depend on a wrong one."""
    files, times = FaultyFiles(), [NOW, NOW + 20, *range(NOW + 10, NOW, -1)]
    log = open_log(files)
    for when in times:
        log.append(memoryview(make_batch([(b"k", bytes(60))] * 2, [when] * 2)))
    log.close()
    batches, damaged = content(log), log.segments[0].path
    position = files.read(damaged).index(batches[1][1])
    for bit in range(64):
        left = files.after_crash(random.Random(1), power=False)
        left.remove(damaged.with_suffix(".index"))
        left.open(damaged).write_at(position, struct.pack(">Q", batches[1][0] ^ 1 << bit))
        again = open_log(left, clean=True)
        for offset, data in batches:
            if offset < log.segments[1].base_offset:
                with suppress(LogCorrupted):
                    again.read(offset, 1)
                continue
            found = again.read(offset, 1)
            assert found is not None
            assert found.read() == data


def test_a_log_that_ends_before_its_recovery_point_is_named() -> None:
    files, appended = FaultyFiles(), list[tuple[int, bytes]]()
    log = open_log(files, LogConfig(index_interval_bytes=150))
    work(log, appended)
    log.flush()
    path = log.segments[0].path
    files.open(path).truncate(len(files.read(path)) - len(appended[-1][1]))
    with pytest.raises(LogCorrupted, match=f"ends at offset {appended[-1][0]}, but had been flushed up to"):
        open_log(files, point=log.recovery_point)


def test_a_clean_start_scans_nothing() -> None:
    files, appended = FaultyFiles(), list[tuple[int, bytes]]()
    config = LogConfig(segment_bytes=100_000, index_interval_bytes=4096)
    log = open_log(files, config)
    for number in range(400):
        batch = batch_of(number, 5, 200)
        appended.append((log.end_offset, stored(batch, log.end_offset)))
        log.append(memoryview(bytearray(batch)))
    log.close()
    assert log.size > 400_000
    files.bytes_read = 0
    again = open_log(files, config, clean=True)
    assert files.bytes_read < 20_000
    assert content(again) == appended
    files.bytes_read = 0
    open_log(files, config)
    assert files.bytes_read >= log.size


def test_a_clock_that_goes_back() -> None:
    """Neither the records' timestamps nor the machine's clock need to be right, as only offsets count."""
    files, clock, appended = FaultyFiles(), Clock(), list[tuple[int, bytes]]()
    config = LogConfig(segment_bytes=700, index_interval_bytes=150, segment_ms=1000, retention_ms=5000)
    log = open_log(files, config, clock)
    for number in range(30):
        clock.now -= 100
        batch = batch_of(-10 * number, 2, 40)  # older and older
        appended.append((log.end_offset, stored(batch, log.end_offset)))
        log.append(memoryview(bytearray(batch)))
        if log.is_flush_due:
            log.flush()
        log.delete_expired()
    assert content(log) == appended
    times = [read_header(data).max_timestamp for _, data in appended]
    for timestamp in times:
        first = next(base for (base, _), time in zip(appended, times, strict=True) if time >= timestamp)
        found = searched(log, timestamp)
        assert found is not None
        assert found[1] == first
    left = files.after_crash(random.Random(1), power=False)
    assert content(open_log(left, config, clock)) == appended
    check_indexes(left, log)
