"""A folder is read as it is between any two changes of files during a compaction: no record that must stay is missing.

A broker that is killed leaves such a folder, a copy may show it, and a reader may list it while the broker runs.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spark_klog.files.folder import Entry
from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.stored.partition import StoredPartition
from spark_klog.records.reading.reader import AbortedTransactions
from tests.log.compacted_logs import CONFIG, Survivors, fill
from tests.log.faulty_logs import NOW
from tests.log.memory_files import MemoryFiles
from tests.support.brokers.batches import read_records
from tests.support.checker.log_model import ABORT, CONTROL, TRANSACTIONAL, encoded, marker_pair


class _Recording(FileSystem):
    """Keeps the folder's files as they are after each change of a name."""

    def __init__(self) -> None:
        self.seen: list[MemoryFiles] = []

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.seen.append(MemoryFiles.of(new.parent))

    def replace(self, path: Path, content: bytes) -> None:
        super().replace(path, content)
        self.seen.append(MemoryFiles.of(path.parent))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.seen.append(MemoryFiles.of(path.parent))


def _compacted(folder: Path) -> tuple[Survivors, list[MemoryFiles]]:
    """The last record of each key, and the files after each step of a compaction of several groups of segments."""
    files = _Recording()
    log = PartitionLog(folder, CONFIG, files=files, now_ms=lambda: NOW)
    for attributes, pair in ((TRANSACTIONAL, (b"key 1", b"gone")), (TRANSACTIONAL | CONTROL, marker_pair(ABORT))):
        log.append(memoryview(bytearray(encoded([pair], [NOW], producer=1, epoch=0, attributes=attributes))))
    last = fill(log, random.Random(7), 60)
    log.flush()
    files.seen.clear()
    compact(log, plan(log, None, NOW), OffsetMap(1 << 16), NOW)
    log.deleted_files.remove_due()
    log.close()
    return last, files.seen


def _read(stored: StoredPartition) -> Survivors:
    found: Survivors = {}
    for batches in stored.read(stored.start_offset, stored.end_offset):
        for record in read_records(bytes(batches.data), AbortedTransactions(batches.aborted)):
            assert record.key is not None
            found[record.key] = record.offset, record.value
    return found


@pytest.mark.parametrize("read_committed", [False, True])
def test_a_folder_between_any_two_steps(tmp_path: Path, read_committed: bool) -> None:
    last, seen = _compacted(tmp_path / "t-0")
    # an old segment is gone, and the compacted one does not have its name yet
    folders = [{path.rpartition("/")[2] for path in files.files} for files in seen]
    assert any(f"{0:020d}.log.swap" in names and f"{0:020d}.log" not in names for names in folders)
    for files in seen:
        stored = StoredPartition(files, str(tmp_path / "t-0"), "t", 0, read_committed=read_committed)
        found = _read(stored)
        # a tombstone may be gone, with all of its key
        assert {key: found.get(key, last[key]) for key in last} == last, sorted(files.files)
        assert stored.start_offset == 0


class _Changing(MemoryFiles):
    """Files of a folder that take a further step each time the folder was listed."""

    def __init__(self, steps: list[MemoryFiles]) -> None:
        super().__init__(steps[0].files)
        self._steps = steps[1:]

    def entries(self, folder: str) -> list[Entry]:
        found = super().entries(folder)
        if self._steps:
            self.files = self._steps.pop(0).files
        return found


def test_a_folder_that_changes_after_each_listing(tmp_path: Path) -> None:
    last, seen = _compacted(tmp_path / "t-0")
    for start in range(len(seen) - 1):
        stored = StoredPartition(_Changing(seen[start:]), str(tmp_path / "t-0"), "t", 0)
        found = _read(stored)
        assert {key: found.get(key, last[key]) for key in last} == last, start
