"""Requests for many topics: their bounds, trees that fail or can't be synced, and offsets of topics that are away."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spark_klog.broker.handlers.topics import create_topics
from spark_klog.broker.metadata.registry import MAX_PARTITIONS
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.trees import files
from spark_klog.trees.files import FileTree
from tests.support.brokers.loop_broker import append, client_request, commit, offsets_of, running, running_as


def _asked(topics: int, partitions: int) -> dict[str, Any]:
    entry = {"num_partitions": partitions, "replication_factor": 1, "assignments": [], "configs": []}
    return {"topics": [{"name": f"t{number}", **entry} for number in range(topics)], "timeout_ms": 1000}


@pytest.mark.parametrize("validate_only", [True, False])
def test_a_request_has_as_many_partitions_as_in_kafka(tmp_path: Path, validate_only: bool) -> None:
    async def codes(topics: int, partitions: int) -> Counter[ErrorCode]:
        async with running(tmp_path) as broker:
            message = {**_asked(topics, partitions), "validate_only": validate_only}
            answer = await create_topics(broker, client_request(), message)
            assert not (validate_only and broker.registry.topics)
            return Counter(ErrorCode(entry["error_code"]) for entry in answer["topics"])

    half = MAX_PARTITIONS // 2
    assert asyncio.run(codes(3, half)) == {ErrorCode.POLICY_VIOLATION: 3}
    assert asyncio.run(codes(2, MAX_PARTITIONS + 1)) == {ErrorCode.INVALID_PARTITIONS: 2}
    assert asyncio.run(codes(2, half if validate_only else 2)) == {ErrorCode.NONE: 2}


def test_an_outage_of_the_tree_takes_the_time_of_one_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fail(self: FileTree, path: str) -> bytes:
        nonlocal calls
        calls += 1
        raise DirectoryError("out of reach")

    async def main() -> None:
        async with running_as(tmp_path, 0, True, watches=False) as broker:
            names = [f"t{number}" for number in range(40)]
            new = [broker.changes.new_topic(name, 1) for name in names]
            await broker.changes.create_topics(new[:20])
            with monkeypatch.context() as patched:
                patched.setattr(FileTree, "get", fail)
                made = await broker.changes.create_topics(new[20:])
                gone = await broker.changes.delete_topics(dict.fromkeys(names[:20]))
            assert all(isinstance(outcome, DirectoryError) for outcome in [*made, *gone.values()])
            assert calls < 10
            await broker.changes.delete_topics(dict.fromkeys(names[:20]))
            assert not broker.registry.topics
            await broker.changes.ended()

    asyncio.run(main())


def test_a_folder_that_can_not_be_synced_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")  # as some mounts do

    async def main() -> None:
        monkeypatch.setattr(files, "sync_folder", refuse)
        async with running_as(tmp_path, 0, True, watches=False) as broker:
            await broker.changes.create_topic("t", 1)
            append(broker.logs.logs["t", 0], 1)
            assert not any(map(isinstance, (await broker.changes.delete_topics({"t": None})).values(), [Exception]))
            assert not broker.registry.topics
            await broker.changes.ended()

    asyncio.run(main())


def test_a_creation_syncs_no_folders_of_consumers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = 0
    fsync = os.fsync

    def count(descriptor: int) -> None:
        nonlocal folders
        folders += os.path.isdir(f"/proc/self/fd/{descriptor}")
        fsync(descriptor)

    async def main() -> None:
        async with running_as(tmp_path, 0, True, watches=False) as broker:
            await broker.changes.create_topic("t", 1)
            for number in range(30):
                broker.registry.group_offsets(f"g{number}").commit({("t", 0): 1})
            monkeypatch.setattr(os, "fsync", count)
            await broker.changes.create_topic("u", 1)
            monkeypatch.undo()
            await broker.changes.ended()

    asyncio.run(main())
    assert 0 < folders < 20


def test_a_topic_that_is_away_for_one_start_keeps_its_offsets(tmp_path: Path) -> None:
    away = tmp_path / "away"

    async def main() -> dict[str, int]:
        async with running(tmp_path, offsets_partitions=1) as broker:
            await broker.coordinator.load()
            for name in "t", "u":
                await broker.changes.create_topic(name, 1)
                append(broker.logs.logs[name, 0], 3)
            await commit(broker, "t", "u", offset=2)
        shutil.move(tmp_path / "data" / "t-0", away)
        async with running(tmp_path, offsets_partitions=1) as broker:
            await broker.coordinator.load()
            assert "t" not in broker.registry.topics
        shutil.move(away, tmp_path / "data" / "t-0")
        async with running(tmp_path, offsets_partitions=1) as broker:
            await broker.coordinator.load()
            return offsets_of(broker.offsets)

    assert asyncio.run(main()) == {"t": 2, "u": 2}
