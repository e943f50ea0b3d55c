"""Sequences of events that involve several parts of the log, one test each. test_log_model.py searches for more."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spark_klog.errors import LogCorrupted, LogRetired
from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.config import COMPACT, LogConfig
from spark_klog.log.directory import CLEAN_STOP, LogDirectory
from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_files import CLEANER, LOG_START, RECOVERY_POINT, read_checkpoint
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.index import IndexMemory
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.reading.reader import ABORT, COMMIT
from tests.log.compacted_logs import CONFIG, clean, fill, records
from tests.log.faulty_files import Faults, FaultyFiles
from tests.log.faulty_logs import FOLDER, NOW, SMALL, Clock, batch_of, content, open_log
from tests.support.brokers.batches import make_batch
from tests.support.brokers.logs import add_log, searched
from tests.support.brokers.producer_batches import batch, marker

COMPACTED = replace(CONFIG, segment_bytes=1000)


def _append(log: PartitionLog, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        log.append(memoryview(bytearray(batch_of(number, 2))))


def _delete(directory: LogDirectory) -> None:
    rename = directory.take("t", 0)
    assert rename is not None
    rename()


@pytest.mark.parametrize("change", range(1, 12))
def test_a_topic_made_anew_while_its_log_is_compacted_keeps_its_records(tmp_path: Path, change: int) -> None:
    """The topic is deleted and created again before each step that the cleaner takes in the owner's thread."""
    directory = LogDirectory(tmp_path, 0, COMPACTED)
    old = add_log(directory, "t", 0)
    fill(old, random.Random(1), 30)
    steps = iter(range(1, 1000))

    def in_owner(function):  # type: ignore[no-untyped-def]
        if next(steps) == change:
            _delete(directory)
            fill(add_log(directory, "t", 0), random.Random(2), 40)
        return function()

    directory.note_clean(old, compact(old, plan(old, None, NOW), OffsetMap(1 << 12), NOW, in_owner))
    assert next(steps) > change, "the round has fewer steps: choose a smaller parameter"
    new = directory.logs["t", 0]
    expected = records(new)
    assert new.end_offset > 40
    assert ("t", 0) not in directory.clean_offsets
    assert not [path for path in (tmp_path / "t-0").iterdir() if path.suffix in (".cleaned", ".swap", ".deleted")]
    directory.close()
    directory = LogDirectory(tmp_path, 0, COMPACTED)
    assert records(directory.logs["t", 0]) == expected
    directory.close()


def test_a_retired_log_takes_no_changes_and_makes_no_files(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, 0, SMALL)
    old = add_log(directory, "t", 0)
    _append(old, 30)
    segments = old.segments
    _delete(directory)
    new = add_log(directory, "t", 0)
    _append(new, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "t-0").iterdir()}
    for change in (
        lambda: _append(old, 1),
        old.flush,
        lambda: old.delete_records(5),
        lambda: old.set_overrides({"segment_bytes": 5}),
    ):
        with pytest.raises(LogRetired, match="deleted"):
            change()
    for segment in segments:
        with pytest.raises(FileNotFoundError):
            assert segment.file
        segment.offset_index.write()
        segment.time_index.write()
    assert {path.name: path.read_bytes() for path in (tmp_path / "t-0").iterdir()} == before
    directory.close()


def test_times_are_looked_up_in_steps() -> None:
    """A batch of 1 MB may have a million records, so the step that scans them can run in another thread."""
    log = PartitionLog(FOLDER, LogConfig(), files=FaultyFiles(), now_ms=Clock())
    log.append(memoryview(make_batch([(b"k", b"v")] * 300, [NOW] * 299 + [NOW + 5], "gzip")))
    log.delete_records(2)
    steps = log.search(NOW + 5)
    assert next(steps) is None
    work = next(steps)
    assert work is not None
    with pytest.raises(StopIteration) as ended:
        steps.send(work())
    assert ended.value.value == (NOW + 5, 299)
    assert searched(log, NOW + 5) == searched(log, None) == (NOW + 5, 299)


@pytest.mark.parametrize("operation", ["open", "write", "sync", "read"])
def test_an_append_that_fails_is_not_there_or_is_flushed_before_the_next_answer(operation: str) -> None:
    """Any call may fail, including those that prepare and run a flush by flush.messages.

    A flush that could not begin (no free descriptor) is still due: the next append does it, or fails as well.
    """
    for failing in range(8):
        files = FaultyFiles()
        log = open_log(files, replace(SMALL, flush_messages=1))
        log.append(memoryview(batch(7, 1, 0, 3)))
        calls = iter(range(1000))

        def fails(name: str, _: Path, calls: Iterator[int] = calls, failing: int = failing) -> bool:
            return name == operation and next(calls) == failing

        files.faults = Faults(fails=fails)
        for data in (marker(7, 1, ABORT), *(batch_of(number, 2) for number in range(20))):
            end = log.end_offset
            try:
                log.append(memoryview(bytearray(data)))
            except OSError:
                assert log.end_offset == end or log.failure is not None or log.has_many_unflushed
                if log.failure is None:
                    files.faults = Faults()
                    _append(log, 1)
                    assert log.recovery_point == log.end_offset
                break


def test_a_log_whose_folder_cannot_be_renamed_stays_as_it_was() -> None:
    files = FaultyFiles()
    log = open_log(files)
    _append(log, 3)
    files.faults = Faults(fails=lambda operation, path: operation == "rename")
    with pytest.raises(OSError, match="Input/output"):
        log.retire("delete")
    _append(log, 20)  # rolls too
    log.flush()
    assert len(content(log)) == 23
    files.faults = Faults()
    retired = log.retire("delete")
    assert retired.name.startswith(f"{FOLDER.name}.")
    with pytest.raises(LogRetired):
        _append(log, 1)
    assert files.names(retired)
    assert not files.names(FOLDER)


def test_reading_makes_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileSystem().open(tmp_path / "x.log")
    assert not list(tmp_path.iterdir())


def test_a_topic_made_anew_has_none_of_the_offsets_of_the_earlier_one(tmp_path: Path) -> None:
    """The start offset, recovery point and cleaner offset of the deleted log do not apply to the new one."""
    files = FaultyFiles()
    directory = LogDirectory(tmp_path, 0, replace(COMPACTED, cleanup_policy="compact,delete"), files=files)
    old = add_log(directory, "t", 0)
    fill(old, random.Random(1), 30)
    old.delete_records(20)
    old.flush()
    directory.write_checkpoints()
    directory.note_clean(old, 15)
    _delete(directory)
    new = add_log(directory, "t", 0)
    _append(new, 3)
    for name in (RECOVERY_POINT, LOG_START, CLEANER):
        assert (read_checkpoint(files, tmp_path / name) or {}).get(("t", 0), 0) == 0
    left = files.after_crash(random.Random(1), power=False)
    (tmp_path / ".lock").unlink()  # the process is gone, and its lock
    again = LogDirectory(tmp_path, 0, COMPACTED, files=left).logs["t", 0]
    assert (again.start_offset, again.end_offset) == (0, 6)


def test_a_round_of_compaction_that_ends_as_its_topic_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleaner stores its offset in another thread; it must not become the new log's."""
    directory = LogDirectory(tmp_path, 0, COMPACTED)
    old = add_log(directory, "t", 0)
    fill(old, random.Random(1), 30)
    waits, goes_on, serves = threading.Event(), threading.Event(), directory.serves

    def slow(log: PartitionLog) -> bool:
        answer = serves(log)
        waits.set()
        assert goes_on.wait(60)
        return answer

    monkeypatch.setattr(directory, "serves", slow)
    cleaning = threading.Thread(target=directory.note_clean, args=(old, 15))
    cleaning.start()
    assert waits.wait(60)
    _delete(directory)
    making = threading.Thread(target=add_log, args=(directory, "t", 0))
    making.start()
    making.join(0.5)  # it may have to wait for the cleaner
    goes_on.set()
    for thread in (cleaning, making):
        thread.join(60)
    assert ("t", 0) in directory.logs
    assert ("t", 0) not in directory.clean_offsets
    assert ("t", 0) not in (read_checkpoint(FileSystem(), tmp_path / CLEANER) or {})
    directory.close()


def _damaged(directory: Path, change: object) -> tuple[LogDirectory, bytes]:
    files = FileSystem()
    logs = LogDirectory(directory, 0, LogConfig(index_interval_bytes=100))
    _append(add_log(logs, "t", 0), 50)
    logs.close()
    path = directory / "t-0" / f"{0:020}.log"
    data = bytearray(path.read_bytes())
    change(data)  # type: ignore[operator]
    path.write_bytes(data)
    assert CLEAN_STOP in files.names(directory)
    return LogDirectory(directory, 0, LogConfig()), bytes(data)


def _flip(data: bytearray) -> None:
    data[-len(batch_of(49, 2)) + 8] ^= 1  # the last batch's length


def _halve(data: bytearray) -> None:
    del data[len(data) // 2 :]


def _cut_last_batch(data: bytearray) -> None:
    del data[-len(batch_of(49, 2)) :]


@pytest.mark.parametrize("change", [_flip, _halve, _cut_last_batch])
def test_damage_after_a_clean_stop_is_named_kept_and_refused(tmp_path: Path, change: object) -> None:
    directory, data = _damaged(tmp_path, change)
    assert not directory.logs
    error = directory.offline["t", 0]
    assert f"{0:020}.log" in str(error)
    assert "klog log repair" in str(error)
    assert (tmp_path / "t-0" / f"{0:020}.log").read_bytes() == data
    directory.close()
    assert not (tmp_path / CLEAN_STOP).exists()
    # the next start refuses it again
    directory = LogDirectory(tmp_path, 0, LogConfig())
    assert ("t", 0) in directory.offline
    assert (tmp_path / "t-0" / f"{0:020}.log").read_bytes() == data
    directory.close()


def test_a_closed_segment_that_was_cut_is_named_when_it_is_read() -> None:
    """The next segment's records are not served in place of the missing ones."""
    files = FaultyFiles()
    log = open_log(files)
    _append(log, 30)
    log.close()
    path = log.segments[1].path
    file = files.open(path)
    file.truncate(len(files.read(path)) // 2)
    log = open_log(files, clean=True, point=60)
    following = log.segments[2].base_offset
    with pytest.raises(LogCorrupted, match=path.name):
        log.read(following - 1, 1000)
    assert log.read(following, 1000)
    assert log.read(log.segments[1].base_offset, 1)
    assert log.read(log.segments[1].base_offset, 1, following)


@pytest.mark.parametrize("was_compacted", [False, True])
def test_a_segment_that_lost_whole_batches_is_not_compacted(tmp_path: Path, was_compacted: bool) -> None:
    """The compacted segment would look as if nothing were missing."""
    log = PartitionLog(tmp_path / "t-0", COMPACTED, clean=True)
    fill(log, random.Random(1), 40)
    checkpoint = clean(log, None) if was_compacted else None
    fill(log, random.Random(2), 40)
    for segment in log.segments:
        sizes = [header.size for header, _ in iter_batches(segment.path.read_bytes())]
        if len(sizes) > 1:
            break
    assert segment is not log.segments[-1]
    assert not was_compacted or segment.base_offset < (checkpoint or 0)
    os.truncate(segment.path, sizes[0])
    with pytest.raises(LogCorrupted, match=f"{segment.path}: .* bytes are missing from position {sizes[0]} on"):
        clean(log, checkpoint)
    assert segment in log.segments
    log.close()


def test_producers_are_not_forgotten_with_a_damaged_snapshot() -> None:
    files = FaultyFiles()
    log = open_log(files)
    log.append(memoryview(batch(7, 1, 0, 3)))
    log.close()
    [name] = [name for name in files.names(FOLDER) if name.endswith(".snapshot")]
    files.open(FOLDER / name).write_at(12, b"\xff")
    log = open_log(files, clean=True, point=3)
    assert log.last_stable_offset == 0
    assert log.producers.producers[7].batches[-1].last_sequence == 2


def test_after_a_flush_that_failed_the_stop_is_not_clean(tmp_path: Path) -> None:
    files = FaultyFiles()
    directory = LogDirectory(tmp_path, 0, LogConfig(), files=files)
    good, bad = add_log(directory, "good", 0), add_log(directory, "bad", 0)
    for log in (good, bad):
        _append(log, 3)
    files.faults = Faults(fails=lambda operation, path: operation == "sync" and path.parent == bad.directory)
    with pytest.raises(OSError, match="Input/output"):
        bad.flush()
    files.faults = Faults()
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):  # a second fsync would prove nothing
            bad.flush()
    directory.close()
    assert CLEAN_STOP not in files.names(tmp_path)
    assert read_checkpoint(files, tmp_path / RECOVERY_POINT) == {("good", 0): 6, ("bad", 0): 0}


def test_checkpoints_that_cannot_be_written_make_the_stop_unclean(tmp_path: Path) -> None:
    files = FaultyFiles()
    directory = LogDirectory(tmp_path, 0, LogConfig(), files=files)
    _append(add_log(directory, "t", 0), 3)
    files.faults = Faults(fails=lambda operation, path: operation == "write" and path.name == RECOVERY_POINT)
    directory.close()
    assert CLEAN_STOP not in files.names(tmp_path)
    LogDirectory(tmp_path, 0, LogConfig()).close()  # the lock was released


def test_times_after_deleted_records() -> None:
    log = open_log(FaultyFiles(), LogConfig(retention_ms=-1))
    times = [*(NOW + offset for offset in range(50)), *[NOW + 1005] * 10, NOW]
    for first in range(0, 60, 10):
        pairs = [(b"k", b"v")] * 10
        log.append(memoryview(make_batch(pairs, times[first : first + 10])))
    log.append(memoryview(make_batch([(b"k", b"v")], [NOW])))
    for start in range(61):
        log.delete_records(start)
        live = list(enumerate(times))[start:]
        for timestamp in {*times, NOW + 1006}:
            expected = next(((time, offset) for offset, time in live if time >= timestamp), None)
            assert searched(log, timestamp) == expected, (start, timestamp)
        largest = max(time for _, time in live)
        assert searched(log, None) == next((time, offset) for offset, time in live if time == largest)


@pytest.mark.parametrize("operation", ["open", "write", "sync"])
def test_an_aborted_transaction_is_listed_though_its_entry_fails_to_be_written(operation: str) -> None:
    files = FaultyFiles()
    log = open_log(files)
    log.append(memoryview(batch(7, 1, 0, 3)))
    failed = []

    def fails(name: str, path: Path) -> bool:
        if name == operation and path.suffix == ".txnindex" and not failed:
            failed.append(path)
            return True
        return False

    files.faults = Faults(fails=fails)
    log.append(memoryview(marker(7, 1, ABORT)))
    assert [item[:3] for item in log.aborted_transactions(0, 4)] == [(7, 0, 3)]
    if operation == "sync":
        with pytest.raises(OSError, match="Input/output"):
            log.flush()
    assert failed or log.flush() is None
    for again in (open_log(files.after_crash(random.Random(seed), power=seed > 0)) for seed in range(8)):
        if again.end_offset == 4:
            assert [item[:3] for item in again.aborted_transactions(0, 4)] == [(7, 0, 3)]


@pytest.mark.parametrize("stops", [False, True])
def test_an_abort_that_a_power_failure_took_away_is_not_listed(stops: bool) -> None:
    """The marker is lost, its transaction index entry is not; a producer snapshot covers all remaining records."""
    files = FaultyFiles()
    log = open_log(files)
    log.append(memoryview(batch(7, 1, 0, 3)))
    if stops:
        log.close()
        log = open_log(files, clean=True, point=3)
    else:
        log._roll()
    point, size = log.recovery_point, log.segments[-1].size
    log.append(memoryview(marker(7, 1, ABORT)))
    assert log.aborted_transactions(0, 4)
    left = files.after_crash(random.Random(1), power=False)
    left.open(log.segments[-1].path).truncate(size)
    again = open_log(left, point=point)
    assert (again.end_offset, again.last_stable_offset) == (3, 0)
    assert again.aborted_transactions(0, 3) == []
    again.append(memoryview(marker(7, 1, COMMIT)))
    assert again.aborted_transactions(0, 4) == []


def test_a_first_segment_that_compaction_has_emptied_changes_no_epochs(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, 0, COMPACTED)
    log = add_log(directory, "t", 0)
    for number in range(40):
        log.append(memoryview(make_batch([(b"k", b"v" * 50)], [NOW + number])))
    compact(log, plan(log, None, NOW), OffsetMap(1 << 12), NOW)
    assert not log.segments[0].size
    path = tmp_path / "t-0" / "leader-epoch-checkpoint"
    path.unlink()
    log.append(memoryview(make_batch([(b"k", b"v")], [NOW])))
    assert not path.exists()
    assert log.end_of_epoch(0) == (0, 41)
    directory.close()


def test_a_roll_that_fails_leaves_no_segment_behind() -> None:
    """The next start would take its empty file for the active segment, and assign the same offsets again."""
    for failing in range(12):
        files = FaultyFiles()
        log = open_log(files)
        _append(log, 3)
        calls = [0]

        def fails(operation: str, path: Path, calls: list[int] = calls, failing: int = failing) -> bool:
            calls[0] += operation in ("open", "truncate", "write", "sync", "remove")
            return calls[0] == failing + 1

        files.faults = Faults(fails=fails)
        appended = 3
        for number in range(3, 9):
            try:
                log.append(memoryview(bytearray(batch_of(number, 2))))
            except OSError:
                continue
            appended += 1
        files.faults = Faults()
        expected = content(log)
        assert len(expected) == appended
        try:
            log.close()
        except OSError:
            pass
        assert content(open_log(files.after_crash(random.Random(1), power=False)))[:appended] == expected


def test_deleted_records_do_not_return_as_offsets_of_others(tmp_path: Path) -> None:
    """All records are deleted, the start offset is in the checkpoint, and power is lost before a flush."""
    files = FaultyFiles()
    directory = LogDirectory(tmp_path, 0, LogConfig(retention_ms=-1), files=files)
    log = add_log(directory, "t", 0)
    _append(log, 2)
    log.flush()
    _append(log, 3, 2)
    log.delete_records(9)
    directory.write_checkpoints()
    for seed in range(10):
        left = files.after_crash(random.Random(seed), power=True)
        points, starts = (read_checkpoint(left, tmp_path / name) or {} for name in (RECOVERY_POINT, LOG_START))
        again = PartitionLog(
            tmp_path / "t-0",
            LogConfig(retention_ms=-1),
            files=left,
            now_ms=Clock(),
            recovery_point=points["t", 0],
            start_offset=starts["t", 0],
        )
        assert again.start_offset == 9
        assert again.append(memoryview(bytearray(batch_of(9, 1)))).base_offset >= 9


def test_few_aborted_transactions_are_looked_at_for_a_small_range() -> None:
    """Of thousands, only those in the range and the few up to the next index entry are listed."""
    log = open_log(FaultyFiles(), LogConfig())
    for number in range(3000):
        log.append(memoryview(batch(number, 1, 0, 1)))
        log.append(memoryview(marker(number, 1, ABORT)))
    for offset in (0, 1, 2500, 5990):
        found = log.read(offset, 400, log.last_stable_offset)
        assert found is not None
        after = log.offset_after(offset, found)
        aborted = [item[:3] for item in log.aborted_transactions(offset, after)]
        assert aborted == [(at // 2, at, at + 1) for at in range(0, after, 2) if at + 1 >= offset]
        assert len(aborted) < 60


def test_index_memory_is_given_back() -> None:
    memory = IndexMemory(limit=600)
    files = FaultyFiles()
    config = LogConfig(segment_bytes=4000, index_interval_bytes=1, retention_ms=-1)
    log = PartitionLog(FOLDER, config, files=files, now_ms=Clock(), memory=memory)
    _append(log, 800)
    loaded = [index for segment in log.segments for index in (segment.offset_index, segment.time_index)]
    assert sum(index.size for index in loaded) > 5 * 600
    assert memory.used <= 600
    log.close()
    log = PartitionLog(FOLDER, config, files=files, now_ms=Clock(), memory=memory, clean=True)
    loaded = [index for segment in log.segments for index in (segment.offset_index, segment.time_index)]
    for offset in random.Random(1).sample(range(1600), 300):
        found = log.read(offset, 1)
        assert found is not None
        assert searched(log, NOW + offset // 2) == (NOW + offset // 2, offset - offset % 2)
        assert memory.used <= 600
        assert sum(len(index._data or b"") for index in loaded) <= 600
    _append(log, 3, 800)
    assert len(content(log)) == 803


def test_compaction_is_told_of_segments_that_go_meanwhile() -> None:
    """Deleted segments are not an error: the next round uses those that exist then."""
    for change in range(1, 12):
        log = PartitionLog(
            FOLDER, replace(COMPACTED, cleanup_policy="compact,delete"), files=FaultyFiles(), now_ms=Clock()
        )
        fill(log, random.Random(3), 40)
        steps = iter(range(1, 1000))

        def in_owner(function, log=log, steps=steps, change=change):  # type: ignore[no-untyped-def]
            if next(steps) == change:
                log.delete_records(log.segments[3].base_offset)
            return function()

        before = records(log)
        compact(log, plan(log, None, NOW), OffsetMap(1 << 12), NOW, in_owner)
        assert set(records(log)) <= set(before)
        assert COMPACT in log.config.cleanup_policy


def test_a_new_directory_has_had_no_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    for is_clean in (False, True, False):
        with caplog.at_level(logging.INFO, "spark_klog.log.directory"):
            directory = LogDirectory(tmp_path / "data", 0, LogConfig())
        told.append(caplog.messages[-1].removeprefix(f"{tmp_path / 'data'}: 0 partitions, "))
        directory.set_cluster_id("c")
        if is_clean:
            directory.close()
        else:
            os.close(directory._lock)  # as a kill leaves it
    assert told == ["new", "no clean stop before", "clean stop before"]


def test_deleted_records_stay_deleted_when_power_is_lost_after_a_clean_stop(tmp_path: Path) -> None:
    """Removed segments may reappear, so the checkpoint needs the start offset even if a segment begins there."""
    files = FaultyFiles()
    directory = LogDirectory(tmp_path, 0, SMALL, files=files)
    log = add_log(directory, "t", 0)
    _append(log, 60)
    log.flush()
    start = log.segments[2].base_offset
    assert log.delete_records(start) == start
    end = log.end_offset
    directory.close()
    for seed in range(20):
        again = LogDirectory(tmp_path, 0, SMALL, files=files.after_crash(random.Random(seed), power=True))
        log = again.logs["t", 0]
        assert (log.start_offset, log.end_offset) == (start, end)
        again.close()
