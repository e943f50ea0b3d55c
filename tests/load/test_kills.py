"""A load dies before or after each change to its output; readers always see each record once.

jobs/test_batch_load.py kills the processes of Spark. Here a run dies at every step, one after the other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConnectionFailed
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import read_manifest
from spark_klog.load.journal.store import open_store
from spark_klog.load.planning import Limits
from spark_klog.load.run import LoadOptions, load
from spark_klog.load.tasks import task
from tests.load.support import InProcess, Killed, by_duckdb, by_pyarrow, expected, failing, in_child, run
from tests.spark.support import create_topic, delete_topic, produce, values

_FIRST, _MORE = 400, 60
_DIED = 9


def _dies(servers: str, output: Path, topic: str, number: int) -> bool:
    """Run a load in a child that dies at change `number`; return False if the run made fewer changes."""

    def action() -> None:
        with failing(LocalFolder, number, lambda: os._exit(_DIED)):
            run(servers, output, topic, max_task_records=70)

    code = in_child(action)
    assert code in (0, _DIED)
    return code == _DIED


@pytest.mark.parametrize("side", ["before", pytest.param("after", marks=pytest.mark.test_all("kill"))])
def test_killed_at_each_change(cluster: EmbeddedCluster, topic: str, tmp_path: Path, side: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(_FIRST, partitions=2))
    first = expected(topic, {0: _FIRST // 2, 1: _FIRST // 2})
    number, died = 0, True
    while died:
        number += 1 if side == "after" else 2
        output = tmp_path / f"{number}"
        died = _dies(servers, output, topic, number if side == "before" else -number)
        seen = by_pyarrow(output)
        assert seen == by_duckdb(output)
        assert len(set(seen)) == len(seen)
        committed = (output / "_klog/runs/00000001/manifest.json").exists()
        assert set(seen) <= set(first) if committed else not seen, "plain readers see what is not committed"
        if (output / "_klog/load.json").exists():
            assert by_pyarrow([item.path for item in files(str(output))]) == (first if committed else [])
        run(servers, output, topic, max_task_records=70)
        assert by_pyarrow(output) == by_duckdb(output) == first
        assert [item.path for item in files(str(output))] == sorted(map(str, output.rglob("*.parquet")))
        found = status(str(output))
        assert (found.findings, found.unfinished) == ([], "")
        assert not (output / paths.staging(1)).exists()
    assert number > 20


def test_killed_again_and_again(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Each run dies two changes later than the one before it, on top of what the earlier runs left."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 3)
    count = 0
    for number in range(1, 24, 2):
        produce(servers, topic, values(_MORE, start=count, partitions=3))
        count += _MORE
        _dies(servers, tmp_path, topic, number)
        seen = by_duckdb(tmp_path)
        assert len(set(seen)) == len(seen)
    run(servers, tmp_path, topic)
    whole = expected(topic, dict.fromkeys(range(3), count // 3))
    assert by_duckdb(tmp_path) == by_pyarrow(tmp_path) == whole
    assert status(str(tmp_path)).findings == []


def test_the_same_files_whether_killed_or_not(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(_FIRST, partitions=2))
    run(servers, tmp_path / "whole", topic, max_task_records=70)
    assert _dies(servers, tmp_path / "killed", topic, 9)
    run(servers, tmp_path / "killed", topic, max_task_records=70)
    whole, killed = (
        {path.name.rpartition("-")[0]: path.read_bytes() for path in (tmp_path / name).rglob("*.parquet")}
        for name in ("whole", "killed")
    )
    assert whole == killed


def test_tasks_that_are_complete_do_not_run_again(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 1)
    produce(servers, topic, values(100))
    # the changes: load.json, plan.json, then a file and its offsets for each task
    assert _dies(servers, tmp_path, topic, 7)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "_klog/runs/00000001").glob("offsets-*")}
    run(servers, tmp_path, topic, max_task_records=70)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert kept
    assert by_pyarrow(tmp_path) == expected(topic, {0: 100})


@pytest.mark.parametrize("limits", [Limits(max_records=60), Limits(max_bytes=1)], ids=["records", "bytes"])
def test_a_bound_is_of_the_call(cluster: EmbeddedCluster, topic: str, tmp_path: Path, limits: Limits) -> None:
    """A bound applies to the call: it finishes a killed run, and plans another one with the rest of the bound only."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 1)
    produce(servers, topic, values(40))
    assert _dies(servers, tmp_path, topic, 3)
    produce(servers, topic, values(100, start=40))
    left = 20 if limits.max_records else 0
    loaded = run(servers, tmp_path, topic, limits=limits)
    assert [item.records for item in loaded.partitions] == [40 + left]
    assert loaded.runs == ([1, 2] if left else [1])
    run(servers, tmp_path, topic)
    assert by_duckdb(tmp_path) == expected(topic, {0: 140})


def test_the_pointer_is_a_run_behind(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 1)
    for start in range(2):
        produce(servers, topic, values(10, start=start * 10))
        run(servers, tmp_path, topic)
    pointer = tmp_path / paths.LATEST
    pointer.write_text(pointer.read_text().replace("00000002", "00000001"))
    produce(servers, topic, values(10, start=20))
    run(servers, tmp_path, topic)
    assert by_duckdb(tmp_path) == expected(topic, {0: 30})
    manifest = read_manifest(open_store(str(tmp_path)), 3)
    assert manifest is not None
    assert [(item.start, item.until) for item in manifest.partitions] == [(20, 30)]


def test_a_topic_that_was_created_again_since(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """The killed run's ranges belong to the deleted topic; the run that finishes it does not try to read them."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 8)
    produce(servers, topic, values(80, partitions=8))
    assert _dies(servers, tmp_path, topic, 3)  # dies after the plan is written
    delete_topic(servers, topic)
    create_topic(servers, topic, 8)
    produce(servers, topic, values(16, partitions=8))
    asked: list[set[str]] = []
    real = task.read_ranges

    def read_ranges(*arguments: Any) -> Any:
        asked.append({str(one) for one in arguments[3].values()})
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "read_ranges", read_ranges)
        loaded = run(servers, tmp_path, topic)
    assert len(asked) == 8, "only the new topic is read"
    assert by_duckdb(tmp_path) == expected(topic, dict.fromkeys(range(8), 2))
    assert {"a new topic has its name" in item.error for item in loaded.failed} == {True}


def test_killed_while_it_gives_up_a_run(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it removes the folder of a run that could read nothing: the plan is gone, other files are left."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(100, partitions=2))

    def unreadable(*_: Any) -> Any:
        raise ConnectionFailed("the broker is gone")

    def removed_in_part(store: LocalFolder, path: str) -> None:
        Path(store.uri(path), "plan.json").unlink()
        raise Killed

    options = LoadOptions({"bootstrap.servers": servers}, [topic], str(tmp_path), max_task_records=50)
    with monkeypatch.context() as patch:
        patch.setattr(task, "read_ranges", unreadable)
        patch.setattr(LocalFolder, "remove", removed_in_part)
        with pytest.raises(Killed):
            load(options, InProcess())
    produce(servers, topic, values(20, partitions=2))
    loaded = run(servers, tmp_path, topic)
    assert loaded.failed == []
    assert by_duckdb(tmp_path) == expected(topic, {0: 60, 1: 60})
