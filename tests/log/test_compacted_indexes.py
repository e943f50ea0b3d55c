"""Indexes of compacted segments: the cleaner builds and syncs them, so the log's owner never waits for the disk."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.file_system import File
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.segment import Segment
from tests.log.compacted_logs import CONFIG, fill, records
from tests.log.faulty_logs import NOW

_Result = TypeVar("_Result")


def test_the_owner_of_the_log_neither_rebuilds_nor_syncs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = PartitionLog(tmp_path / "t-0", CONFIG, clean=True)
    fill(log, random.Random(7), 300)
    log.flush()
    is_owner, synced = False, []

    def in_owner(function: Callable[[], _Result], /) -> _Result:
        nonlocal is_owner
        is_owner = True
        try:
            return function()
        finally:
            is_owner = False

    def sync(file: File, original: Callable[[File], None] = File.sync) -> None:
        assert not is_owner
        synced.append(Path(f"/proc/self/fd/{file.fileno()}").resolve().suffix)
        original(file)

    def fail(_: Segment) -> None:
        pytest.fail("the indexes are rebuilt")

    found = plan(log, None, NOW)
    with monkeypatch.context() as patch:
        patch.setattr(File, "sync", sync)
        patch.setattr(Segment, "rebuild_indexes", fail)
        compact(log, found, OffsetMap(1 << 16), NOW, in_owner)
        compacted = [segment for segment in log.segments[:-1] if segment.size]
        assert compacted
        assert [segment.max_timestamp for segment in compacted]
        assert synced.count(".index") == synced.count(".timeindex") == len(compacted)
        assert plan(log, None, NOW)
        for offset, *_ in records(log):
            assert log.read(offset, 1) is not None
    written = [_indexes(segment) for segment in compacted]
    assert any(offsets for offsets, _ in written)
    for segment in compacted:
        segment.rebuild_indexes()
    assert [_indexes(segment) for segment in compacted] == written
    log.close()


def _indexes(segment: Segment) -> tuple[bytes, bytes]:
    return segment.path.with_suffix(".index").read_bytes(), segment.path.with_suffix(".timeindex").read_bytes()


def test_without_room_for_them_the_log_is_compacted_and_they_are_rebuilt_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = PartitionLog(tmp_path / "t-0", CONFIG, clean=True)
    last = fill(log, random.Random(7), 300)

    def fail(*_: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "set_indexes", fail)
        end = compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW)
    assert log.failure is None
    left = {key: (offset, value) for offset, key, value in records(log)}
    assert left == last
    assert sum(offset < end for offset, *_ in records(log)) <= len(last)
    log.close()
