"""Compacted segments replace others while the log's owner works on, and never waits for the disk."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from spark_klog.errors import LogRetired
from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.config import COMPACT, DELETE
from spark_klog.log.file_system import FileSystem, Folder
from spark_klog.log.partition_log import PartitionLog
from tests.log.compacted_logs import CONFIG, fill, records
from tests.log.faulty_logs import NOW
from tests.support.checker.log_model import ABORT, CONTROL, TRANSACTIONAL, encoded, marker_pair

_Result = TypeVar("_Result")


class _Between(FileSystem):
    """Calls `then` once, between the two steps of a swap."""

    def __init__(self) -> None:
        self.then: Callable[[], object] | None = None

    def open_folder(self, path: Path) -> Folder:
        between = self

        class Between(Folder):
            def sync(self) -> None:
                then = between.then
                if then is not None and list(path.glob("*.log.swap")):
                    between.then = None
                    then()
                super().sync()

        return Between(path)


def test_the_owner_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _made(tmp_path, FileSystem())
    is_owner, count = False, 0

    def in_owner(function: Callable[[], _Result], /) -> _Result:
        nonlocal is_owner
        is_owner = True
        try:
            return function()
        finally:
            is_owner = False

    def sync(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        nonlocal count
        assert not is_owner
        count += 1
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW, in_owner)
    assert count
    assert any(segment.transaction_index.path.exists() for segment in log.segments[:-1])  # it was rewritten, too
    log.close()


def test_segments_are_not_deleted_during_a_swap(tmp_path: Path) -> None:
    files = _Between()
    log = _made(tmp_path, files)
    start = log.segments[2].base_offset
    files.then = lambda: log.delete_records(start)
    compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW)
    assert log.start_offset == start
    left = records(log)
    assert left
    assert all(offset >= start for offset, *_ in left)
    log.delete_expired()
    assert records(log) == left
    log.close()
    again = PartitionLog(log.directory, log.config, clean=True, recovery_point=log.end_offset, start_offset=start)
    assert records(again) == left
    again.close()


def test_a_log_that_is_closed_during_a_swap_is_compacted_at_the_next_start(tmp_path: Path) -> None:
    files = _Between()
    log = _made(tmp_path, files)
    before = records(log)
    files.then = log.close
    compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW)
    again = PartitionLog(log.directory, log.config, clean=True, recovery_point=log.end_offset)
    after = records(again)
    assert _last(after) == _last(before)
    assert len(after) < len(before)
    again.close()


def test_a_new_log_of_that_name_is_left_alone(tmp_path: Path) -> None:
    files = _Between()
    log = _made(tmp_path, files)

    def make_anew() -> None:
        log.retire("delete")
        new = PartitionLog(log.directory, log.config, files=files)
        fill(new, random.Random(3), 100)
        new.close()

    files.then = make_anew
    compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW)
    with pytest.raises(LogRetired):
        log.roll()
    again = PartitionLog(log.directory, log.config, clean=True)
    assert _last(records(again)) == fill(PartitionLog(tmp_path / "same-0", CONFIG), random.Random(3), 100)
    assert not [path for path in log.directory.iterdir() if path.suffix in (".swap", ".cleaned", ".deleted")]
    again.close()


def _made(tmp_path: Path, files: FileSystem) -> PartitionLog:
    config = replace(CONFIG, cleanup_policy=f"{COMPACT},{DELETE}")
    log = PartitionLog(tmp_path / "t-0", config, files=files, now_ms=lambda: NOW)
    for attributes, pair in ((TRANSACTIONAL, (b"key 1", b"gone")), (TRANSACTIONAL | CONTROL, marker_pair(ABORT))):
        log.append(memoryview(bytearray(encoded([pair], [NOW], producer=1, epoch=0, attributes=attributes))))
    fill(log, random.Random(7), 300)
    log.flush()
    assert len(log.segments) > 4
    return log


def _last(found: list[tuple[int, bytes, bytes | None]]) -> dict[bytes, tuple[int, bytes | None]]:
    return {key: (offset, value) for offset, key, value in found}
