"""Checkpoints: a long history is read from one file, which no damage, kill or older program makes wrong."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.journal import checkpoint, paths
from spark_klog.load.journal.checkpoint import read_summary, write_checkpoint
from spark_klog.load.journal.history import last_committed, task_results
from spark_klog.load.journal.store import Store, open_store
from spark_klog.load.journal.summary import Summary
from tests.load.long_history import EACH, write_runs
from tests.load.support import Killed, die, failing
from tests.support.clients.klog import klog
from tests.support.runs.soak import in_soak


def _names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "_klog").glob("checkpoint-*"))


def _by_manifests(store: Store) -> Summary:
    """The sum of all runs, of the manifests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "checkpoints", lambda _: [])
        return read_summary(store, with_ranges=True)


@pytest.mark.parametrize("runs", [300, pytest.param(8760, marks=[pytest.mark.test_all("long"), in_soak])])
def test_a_year_of_hourly_runs(tmp_path: Path, runs: int) -> None:
    """A year takes a process two seconds, and no more files than a short history."""
    write_runs(tmp_path, range(1, runs + 1), partitions=1)
    store = open_store(str(tmp_path))
    write_checkpoint(store)
    assert _names(tmp_path) == [f"checkpoint-{runs:08}.json"]
    read: Counter[str] = Counter()
    real = LocalFolder.read

    def counted(self: LocalFolder, path: str) -> bytes | None:
        read[path] += 1
        return real(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFolder, "read", counted)
        started = time.process_time()
        found = status(str(tmp_path))
        assert time.process_time() - started < 2
        assert len(files(str(tmp_path))) == runs
    assert sum(read.values()) < 20
    assert (found.findings, len(found.runs), found.partitions[0]["records"]) == ([], runs, runs * EACH)
    assert sum(found.hours["t"].values()) == runs * EACH
    shown = klog("load", "status", str(tmp_path)).stdout
    assert f"{runs:08}  load  " in shown
    assert f"{runs - 20:08}" not in shown
    assert f"and {runs - 20:,} runs before: --runs {runs} lists all" in shown


def test_a_checkpoint_of_another_time(tmp_path: Path) -> None:
    """The folder was restored from a backup without its checkpoints, and another run has the number of the last one."""
    write_runs(tmp_path, range(1, 51), partitions=1)
    store = open_store(str(tmp_path))
    write_checkpoint(store)
    path = tmp_path / paths.manifest(50)
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"started": "2026-01-02T03:04:05.678+00:00"}))
    assert read_summary(store).runs == _by_manifests(store).runs
    assert read_summary(store).runs[-1]["started"].startswith("2026-01-02")


def test_random_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to checkpoints, what is read is what the manifests say."""
    monkeypatch.setattr(checkpoint, "EVERY", 4)
    chance = random.Random(7)
    output, backup = tmp_path / "out", tmp_path / "backup"
    store = open_store(str(output))
    number = 0
    for _ in range(30):
        step = chance.choice(["runs", "runs", "runs", "checkpoint", "killed", "damage", "lose", "back up", "restore"])
        there = _names(output)
        if step == "runs":
            new = chance.randint(1, 5)
            write_runs(output, range(number + 1, number + 1 + new), load="load")
            number += new
        elif step == "checkpoint":
            write_checkpoint(store)
        elif step == "killed":
            with suppress(Killed), failing(LocalFolder, chance.choice([1, -1, 2, 3]), die):
                write_checkpoint(store)
        elif step == "damage" and there:
            path = output / "_klog" / chance.choice(there)
            content = bytearray(path.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content[: chance.choice([len(content), len(content) // 2])])
        elif step == "lose" and there:
            (output / "_klog" / chance.choice(there)).unlink()
        elif step == "back up" and number:
            shutil.rmtree(backup, ignore_errors=True)
            shutil.copytree(output, backup)
        elif step == "restore" and backup.exists():  # of the runs, but not of the checkpoints, that came later
            for path in (output / "_klog" / "runs", output / "t"):
                shutil.rmtree(path)
            shutil.copytree(backup, output, dirs_exist_ok=True)
            number = last_committed(store)
            write_runs(output, [number + 1], partitions=3)  # another run than the one that was there
            number += 1
        if number:
            assert read_summary(store, with_ranges=True) == _by_manifests(store)
            assert status(str(output)).findings == []
            assert len(_names(output)) <= 4


def test_a_checkpoint_of_another_load(tmp_path: Path) -> None:
    """Somebody has removed the runs, and not all of the rest."""
    first, second = tmp_path / "first", tmp_path / "second"
    for output, load in ((first, "one"), (second, "other")):
        write_runs(output, range(1, 101), load=load)
        write_checkpoint(open_store(str(output)))
    shutil.copy(first / "_klog" / "checkpoint-00000100.json", second / "_klog" / "checkpoint-00000100.json")
    assert [line["records"] for line in status(str(second)).partitions] == [100 * EACH] * 2


def test_what_nobody_can_write_does_not_fail_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_runs(tmp_path, range(1, 61))
    (tmp_path / paths.manifest(7)).unlink()
    write_checkpoint(open_store(str(tmp_path)))
    assert "no new checkpoint" in caplog.text
    with pytest.raises(LoadError, match=r"00000007/manifest\.json is missing: restore it"):
        status(str(tmp_path))


def test_ranges_whose_files_are_gone(tmp_path: Path) -> None:
    """Without a checkpoint nobody knows the ranges of a run without its files of tasks; with one, all are known."""
    write_runs(tmp_path, range(1, 71))
    store = open_store(str(tmp_path))
    key = "t", 0, 0
    write_checkpoint(store)
    assert task_results(store, 70, 0)
    for path in tmp_path.glob("_klog/runs/*/offsets-*"):
        if int(path.parent.name) <= 30:
            path.unlink()
    found = read_summary(store, with_ranges=True)
    assert (len(found.known_ranges(key)), found.unranged) == (70, {})
    assert [item.path for each in found.known_ranges(key) for item in each.files] == [
        re.sub(".*/t/", "t/", item.path) for item in files(str(tmp_path)) if item.partition == 0
    ]
    (tmp_path / "_klog" / "checkpoint-00000070.json").unlink()
    found = read_summary(store, with_ranges=True)
    assert len(found.known_ranges(key)) == 40
    assert found.unranged == {key: (30 * EACH, 30), ("t", 1, 0): (30 * EACH, 30)}
    assert status(str(tmp_path)).findings == []
