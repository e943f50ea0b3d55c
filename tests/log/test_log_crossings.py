"""A failing disk in combination with other changes of a log."""

from __future__ import annotations

import os
import random
import re
import threading
from io import FileIO
from pathlib import Path
from uuid import uuid4

import pytest

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log import file_system
from spark_klog.log.config import LogConfig
from spark_klog.log.directory import LogDirectory
from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_files import (
    OVERRIDES,
    PARTITION_METADATA,
    is_unfinished,
    read_overrides,
    read_topic_id,
    write_overrides,
    write_topic_id,
)
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.segment import segment_name
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.log.tools.verify import repair
from spark_klog.records.reading.reader import ABORT
from tests.log.faulty_files import Faults, FaultyFiles
from tests.log.faulty_logs import FOLDER, SMALL, Clock, batch_of, content, open_log
from tests.support.brokers.producer_batches import batch, marker
from tests.support.checker.log_model import stored


@pytest.mark.parametrize("seed", range(6))
def test_a_transaction_index_made_while_a_flush_runs_is_on_the_disk_after_the_next(seed: int) -> None:
    files = FaultyFiles()
    log = open_log(files)
    log.append(memoryview(batch(1, 0, 0, 1)))
    flush = log.begin_flush(with_snapshot=False)
    flush.run()
    log.append(memoryview(marker(1, 0, ABORT)))
    log.end_flush(flush)
    flush = log.begin_flush(with_snapshot=True)
    flush.run()
    log.end_flush(flush)
    left = files.after_crash(random.Random(seed), power=True)
    expected = [AbortedTransaction(1, 0, 1, 2)]
    assert open_log(left, point=log.recovery_point).aborted_transactions(0, 2) == expected


def test_a_transaction_index_is_flushed_once_beside_the_appends() -> None:
    """A flushed index can be read again, so it may be released from memory."""
    files = FaultyFiles()
    log = open_log(files)
    for number in range(2):
        log.append(memoryview(batch(1, 0, number, 1)))
        log.append(memoryview(marker(1, 0, ABORT)))
        flush = log.begin_flush(with_snapshot=False)
        flush.run()
        log.end_flush(flush)
    index = log.segments[-1].transaction_index
    assert index.unsynced_file() is None
    assert len(log.aborted_transactions(0, 4)) == 2
    index.release()
    assert len(log.aborted_transactions(0, 4)) == 2
    flush = log.begin_flush(with_snapshot=False)
    log.append(memoryview(batch(1, 0, 2, 1)))
    log.append(memoryview(marker(1, 0, ABORT)))
    flush.run()
    log.end_flush(flush)
    assert index.unsynced_file() is not None  # an entry was added while the flush ran


def test_an_index_that_cannot_be_read_takes_no_marker() -> None:
    """An abort reads a released index again; if that fails, the marker is not appended, and can be retried."""
    files = FaultyFiles()
    log = open_log(files)
    for producer in (1, 2):
        log.append(memoryview(batch(producer, 0, 0, 1)))
    log.append(memoryview(marker(1, 0, ABORT)))
    log.close()
    log = open_log(files, clean=True, point=3)
    assert len(log.aborted_transactions(0, 3)) == 1
    log.segments[-1].transaction_index.release()  # other logs need the memory
    files.faults = Faults(fails=lambda operation, path: operation == "read" and path.suffix == ".txnindex")
    with pytest.raises(OSError, match="Input/output error"):
        log.append(memoryview(marker(2, 0, ABORT)))
    assert log.end_offset == 3
    files.faults = Faults()
    log.append(memoryview(marker(2, 0, ABORT)))
    assert {item.producer_id for item in log.aborted_transactions(0, 4)} == {1, 2}


def test_checkpoints_that_were_half_written_are_not_a_new_topics(tmp_path: Path) -> None:
    files = FaultyFiles()
    config = LogConfig(**{**SMALL.__dict__, "segment_bytes": 1 << 20})
    logs = LogDirectory(tmp_path, 0, config, files=files, now_ms=Clock())
    log = logs.logs["t", 0] = logs.make("t", 0)
    for number in range(5):
        log.append(memoryview(bytearray(batch_of(number, 1))))
    log.delete_records(4)
    files.faults = Faults(fails=lambda operation, path: operation == "write" and path.name.startswith("recovery"))
    with pytest.raises(OSError, match="Input/output error"):
        logs.write_checkpoints()
    files.faults = Faults()
    rename = logs.take("t", 0)
    assert rename is not None
    files.remove_folder(rename())
    log = logs.logs["t", 0] = logs.make("t", 0)
    for number in range(3):
        log.append(memoryview(bytearray(batch_of(number, 1))))
    os.close(logs._lock)  # killed
    left = files.after_crash(random.Random(0), power=False)
    assert LogDirectory(tmp_path, 0, config, files=left, now_ms=Clock()).logs["t", 0].end_offset == 3


def test_a_file_that_another_thread_lets_go_of_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments hold their files by weak references, and share them with the log cleaner and readers."""
    log = PartitionLog(tmp_path / "t-0", LogConfig(**{**SMALL.__dict__, "segment_bytes": 1}))
    for number in range(2):
        log.append(memoryview(bytearray(batch_of(number, 1))))
    sealed = log.segments[0]
    closes, goes_on = threading.Event(), threading.Event()

    def slow_close(handle: FileIO) -> None:
        closes.set()
        assert goes_on.wait(60)
        FileIO.close(handle)

    with monkeypatch.context() as patch:
        patch.setattr(file_system._Handle, "close", slow_close)
        thread = threading.Thread(target=lambda: sealed.file and None)
        thread.start()
        assert closes.wait(60)
        file = sealed.file
        goes_on.set()
        thread.join()
    assert len(file.read_at(0, 8)) == 8
    log.close()


def test_settings_of_a_creation_that_failed_are_not_those_of_the_next(tmp_path: Path) -> None:
    files = FaultyFiles()
    directory = LogDirectory(tmp_path, 0, LogConfig(), files=files)
    files.faults = Faults(fails=lambda operation, path: operation == "write" and path.name == PARTITION_METADATA)
    with pytest.raises(OSError, match="Input/output"):
        directory.make("t", 0, uuid4(), {"retention_ms": 5})
    files.faults = Faults()
    log = directory.make("t", 0, uuid4(), {})
    assert log.overrides == {}
    assert log.config == LogConfig()
    directory.logs["t", 0] = log
    directory.close()
    again = LogDirectory(tmp_path, 0, LogConfig(), files=files)
    assert again.logs["t", 0].overrides == {}
    again.close()


def _by_hand(*segments: tuple[int, int]) -> FaultyFiles:
    """A log without indexes; `segments` are (base offset, number of batches of one record)."""
    files = FaultyFiles()
    open_log(files).close()
    for base, count in segments:
        file = files.create(FOLDER / (segment_name(base) + ".log"))
        data = b"".join(stored(batch_of(base + number, 1), base + number) for number in range(count))
        file.write_at(0, data)
        file.sync()
    return files


def _logs(files: FaultyFiles) -> dict[str, bytes]:
    return {name: files.read(FOLDER / name) for name in files.names(FOLDER) if name.endswith(".log")}


@pytest.mark.parametrize(
    ("segments", "point", "kept"),
    [
        (((0, 4), (2, 3)), 0, 4),
        (((0, 4), (2, 3)), 2, 4),
        (((0, 4), (2, 0)), 2, 4),  # a failed roll's segment, whose removal a power failure has undone
        (((0, 4), (3, 1), (4, 5)), 1, 4),
        (((0, 2), (2, 4), (5, 1), (6, 1)), 4, 6),
    ],
)
def test_what_follows_a_segment_that_reaches_beyond_its_end_is_cut(
    segments: tuple[tuple[int, int], ...], point: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = _by_hand(*segments)
    log = open_log(files, point=point)
    assert [offset for offset, _ in content(log)] == list(range(kept))
    place = next(i for i, (base, count) in enumerate(segments) if base + count == kept)
    first, following = (segment_name(base) for base, _ in segments[place : place + 2])
    assert re.search(rf"{first}.log reaches to offset {kept}, but .*{following}.log begins", caplog.text), caplog.text
    log.append(memoryview(bytearray(batch_of(9, 1))))
    log.close()
    assert [offset for offset, _ in content(open_log(files, clean=True))] == list(range(kept + 1))


@pytest.mark.parametrize(
    ("segments", "point"),
    [(((0, 4), (2, 3)), 3), (((0, 4), (2, 3)), 5), (((0, 4), (2, 0)), 4), (((0, 2), (2, 4), (5, 2)), 6)],
)
def test_flushed_segments_that_overlap_are_refused(segments: tuple[tuple[int, int], ...], point: int) -> None:
    files = _by_hand(*segments)
    before = _logs(files)
    with pytest.raises(LogCorrupted, match=r"reaches to offset \d, but .*begins at offset \d.*klog log repair"):
        open_log(files, point=point)
    assert _logs(files) == before


def test_repair_takes_out_what_follows_a_segment_that_reaches_beyond_its_end(tmp_path: Path) -> None:
    folder, files = tmp_path / "t-0", _by_hand((0, 4), (2, 3), (5, 1))
    folder.mkdir()
    for name, data in _logs(files).items():
        (folder / name).write_bytes(data)
    (tmp_path / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 6\n")
    repaired = repair(folder)
    assert repaired is not None
    assert repaired.end_offset == 4
    assert "reaches to offset 4" in repaired.reason
    later = [folder / (segment_name(base) + ".log.damaged") for base in (2, 5)]
    assert repaired.kept == later
    assert [path.read_bytes() for path in later] == [_logs(files)[segment_name(base) + ".log"] for base in (2, 5)]
    again = PartitionLog(folder, SMALL, recovery_point=4, now_ms=Clock())
    assert [offset for offset, _ in content(again)] == list(range(4))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("damage", [b"\xff", b"short"])
def test_a_transaction_index_that_is_damaged_is_built_anew_at_the_start(clean: bool, damage: bytes) -> None:
    """Without its entries read_committed consumers would get aborted records."""
    files = FaultyFiles()
    log = open_log(files)
    for number in range(3):
        log.append(memoryview(batch(1, 0, number, 1)))
        if number:
            log.roll()
        log.append(memoryview(marker(1, 0, ABORT)))
    expected = log.aborted_transactions(0, 6)
    assert len(expected) == 3
    log.close()
    path = log.segments[-1].transaction_index.path
    if damage == b"short":
        files.open(path).truncate(20)
    else:
        files.open(path).write_at(0, damage)
    for _ in range(2):
        log = open_log(files, clean=clean, point=6)
        assert log.aborted_transactions(0, 6) == expected
        log.close()


@pytest.mark.parametrize("seed", range(6))
def test_leader_epochs_made_while_a_flush_runs_are_on_the_disk_after_the_next(seed: int) -> None:
    files = FaultyFiles()
    log = open_log(files)
    flush = log.begin_flush(with_snapshot=False)
    log.append(memoryview(bytearray(batch_of(0, 3))))
    flush.run()
    log.end_flush(flush)
    log.flush()
    left = files.after_crash(random.Random(seed), power=True)
    assert left.read(FOLDER / "leader-epoch-checkpoint") == b"0\n1\n0 0\n"


@pytest.mark.parametrize("left", [b"", b"0\n1\n0", bytes(8), None])
def test_leader_epochs_that_a_power_failure_before_the_first_flush_has_torn(left: bytes | None) -> None:
    """They are written anew, as Kafka does not start with them."""
    files = FaultyFiles()
    open_log(files).append(memoryview(bytearray(batch_of(0, 3))))
    path = FOLDER / "leader-epoch-checkpoint"
    files.remove(path)
    if left is not None:
        files.create(path).write_at(0, left)
    again = open_log(files)
    assert (again.end_offset, again.end_of_epoch(0)) == (3, (0, 3))
    assert left is None or files.read(path) == b"0\n1\n0 0\n"


def test_small_files_that_a_power_failure_has_torn_and_damaged_ones(tmp_path: Path) -> None:
    """Of a whole file each beginning counts as missing, and each changed byte is told or changes the value."""
    files = FileSystem()
    known = {"retention_ms": 5, "cleanup_policy": "compact"}
    write_topic_id(files, tmp_path, topic_id := uuid4())
    write_overrides(files, tmp_path, known)
    for name, read, value, nothing in (
        (PARTITION_METADATA, read_topic_id, topic_id, None),
        (OVERRIDES, read_overrides, known, {}),
    ):
        path = tmp_path / name
        whole = path.read_bytes()
        for size in range(len(whole)):
            for left in (whole[:size], whole[:size] + bytes(len(whole) - size)):
                path.write_bytes(left)
                if name == OVERRIDES or not is_unfinished(files, tmp_path):
                    assert read(files, tmp_path) in (value, nothing), left
        for position in range(len(whole)):
            for mask in (1, 0x80, 0xFF):
                path.write_bytes(whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
                try:
                    assert read(files, tmp_path) != nothing or name == OVERRIDES, path.read_bytes()
                    assert not is_unfinished(files, tmp_path)
                except (DecodeError, LogCorrupted):
                    pass
