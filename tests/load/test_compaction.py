"""`klog load compact`: fewer files, the same records, whatever ends it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.compaction import compact
from spark_klog.load.journal import checkpoint
from spark_klog.load.journal.history import last_committed
from spark_klog.load.journal.store import locked, open_store
from spark_klog.load.places import AtRun, offsets_of_run
from spark_klog.load.planning import Limits
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.load.verify import verify
from tests.load.support import Killed, by_duckdb, by_pyarrow, die, expected, failing, kills, run
from tests.spark.support import Sent, create_topic, delete_topic, produce, values
from tests.support.clients.klog import klog
from tests.support.runs.soak import SOAK

_TIME = 1_700_002_800_000
_HOUR_MS = 3_600_000


def _load(servers: str, topic: str, output: Path, count: int, each: int = 20, **options: Any) -> None:
    """Load `count` runs, each with `each` records of each of two partitions, a quarter of an hour apart."""
    for _ in range(count):
        start = len(by_pyarrow(output))
        sent = [
            Sent(b"value %d" % number, b"%d" % (number * 7 % 13), number % 2, _TIME + number // each * _HOUR_MS // 4)
            for number in range(start, start + 2 * each)
        ]
        produce(servers, topic, sent)
        run(servers, output, topic, **options)


def _told(output: Path) -> Any:
    """What a status says that a compaction does not change."""
    found = status(str(output))
    runs = [line for line in found.runs if line["kind"] == "load"]
    return found.partitions, found.hours, found.findings, runs, found.idle


def test_fewer_files(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    _load(servers, topic, tmp_path, 5)
    run(servers, tmp_path, topic)
    told, whole = _told(tmp_path), expected(topic, {0: 100, 1: 100})
    done = json.loads(klog("load", "compact", str(tmp_path), "--json").stdout)
    assert (done["runs"], done["files_before"], done["files_after"]) == ([6], 10, 2)
    assert _told(tmp_path) == told
    assert len(list(tmp_path.rglob("*.parquet"))) == len(files(str(tmp_path))) == 2
    assert by_pyarrow(tmp_path) == by_duckdb(tmp_path) == whole
    for item in files(str(tmp_path)):
        table = pq.read_table(item.path)
        assert table["offset"].to_pylist() == [*range(100)]
        assert (item.first, item.last, item.records, item.size) == (0, 99, 100, Path(item.path).stat().st_size)
        numbers = [number for number in range(200) if number % 2 == item.partition]
        assert table["value"].to_pylist() == [b"value %d" % number for number in numbers]
    assert klog("load", "compact", str(tmp_path)).stdout == "there is nothing to compact\n"
    shown = klog("load", "status", str(tmp_path)).stdout
    assert "00000006  compaction  " in shown
    # a run goes on, and begins where it would have begun
    _load(servers, topic, tmp_path, 1)
    store = open_store(str(tmp_path))
    assert {key: item.offset for key, item in offsets_of_run(store, 6).items()} == {(topic, 0): 100, (topic, 1): 100}
    run(servers, tmp_path, topic, start=AtRun(3))
    assert by_pyarrow(tmp_path) == by_duckdb(tmp_path) == expected(topic, {0: 120, 1: 120})
    assert status(str(tmp_path)).findings == []


def test_what_is_large_enough_stays(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Files of about the target are made once; only what has come since is merged later."""
    servers, chance = cluster.bootstrap_servers, random.Random(2)
    create_topic(servers, topic)
    for runs in (7, 2):
        for _ in range(runs):
            produce(servers, topic, [Sent(chance.randbytes(2000), None, 0, _TIME) for _ in range(20)])
            run(servers, tmp_path, topic, max_task_records=10)
        before = {item.path for item in files(str(tmp_path))}
        compact(str(tmp_path), 100_000)
        assert compact(str(tmp_path), 100_000).runs == []
        found = files(str(tmp_path))
        assert {item.size > 50_000 for item in found[:-1]} == {True}
        assert max(item.size for item in found) < 120_000
        assert (len(before & {item.path for item in found}) >= 3) is (runs == 2)
    assert by_pyarrow(tmp_path) == by_duckdb(tmp_path) == expected(topic, {0: 180})


def test_folders_and_order(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Files of a folder are merged, and each row group is sorted by key, as its footer says."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    settings = WriteSettings(layout="hour", sort_by="key", row_group_rows=16)
    _load(servers, topic, tmp_path, 6, settings=settings)
    for is_compacted in (False, True):
        if is_compacted:
            before = Counter(str(path.parent) for path in tmp_path.rglob("*.parquet"))
            told = _told(tmp_path)
            compact(str(tmp_path))
            after = Counter(str(path.parent) for path in tmp_path.rglob("*.parquet"))
            assert after.keys() == before.keys()
            assert max(before.values()) > max(after.values()) == 2
            assert _told(tmp_path) == told
        for path in tmp_path.rglob("*.parquet"):
            file = pq.ParquetFile(path)
            for number in range(file.num_row_groups):
                rows = file.read_row_group(number).select(["key", "offset"]).to_pylist()
                assert rows == sorted(rows, key=lambda row: (row["key"], row["offset"]))
                order = pq.SortingColumn.to_ordering(file.schema_arrow, file.metadata.row_group(number).sorting_columns)
                assert order[0] == (("key", "ascending"), ("offset", "ascending"))
        assert by_pyarrow(tmp_path) == by_duckdb(tmp_path) == expected(topic, {0: 120, 1: 120})


@pytest.mark.parametrize("side", [1, pytest.param(-1, marks=pytest.mark.test_all("kill"))], ids=["before", "after"])
def test_killed_at_each_change(cluster: EmbeddedCluster, topic: str, tmp_path: Path, side: int) -> None:
    """Then a run, another compaction, or both go on; an earlier program would finish it by its plan without tasks."""
    servers, number, died = cluster.bootstrap_servers, 0, True
    create_topic(servers, topic, 2)
    chance = random.Random(side)
    _load(servers, topic, tmp_path / "first", 2)
    while died:
        number += 6 if side > 0 else 1 if SOAK else 4
        output = tmp_path / str(number)
        run(servers, output, topic, limits=Limits(max_records=40), max_task_records=10)
        run(servers, output, topic, max_task_records=10)
        told = _told(output)
        try:
            with failing(LocalFolder, side * number, die):
                compact(str(output))
            died = False
        except Killed:
            pass
        whole = expected(topic, {0: 40, 1: 40})
        assert by_pyarrow([item.path for item in files(str(output))]) == whole
        assert _told(output) == told
        seen = by_pyarrow(output)
        assert len(set(seen)) == len(seen)
        for action in chance.sample(["compact", "run"], 2):
            if action == "run":
                run(servers, output, topic)
            else:
                compact(str(output))
        assert by_pyarrow(output) == by_duckdb(output) == whole
        assert _told(output)[:3] == told[:3]
        assert len(files(str(output))) == 2
        assert {path.name for path in output.rglob("*.part")} == set()
    assert number > 8


@pytest.mark.test_all("kill")
def test_killed_at_any_time(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """A process that compacts gets SIGKILL; runs of the load go on, and what it has left does no harm."""
    servers, chance, count = cluster.bootstrap_servers, random.Random(5), 0
    create_topic(servers, topic, 2)
    killed, longest = 0, 0.2
    while killed < (20 if SOAK else 4):
        for _ in range(2):
            produce(servers, topic, values(40, partitions=2, start=count))
            count += 40
            run(servers, tmp_path, topic, max_task_records=5)
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                compact(str(tmp_path))
            os._exit(0)
        time.sleep(chance.random() * longest)
        os.kill(child, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0:
            killed += 1
        else:  # it was done before
            longest *= 0.8
        whole = expected(topic, {0: count // 2, 1: count // 2})
        assert by_pyarrow([item.path for item in files(str(tmp_path))]) == whole
    run(servers, tmp_path, topic)
    compact(str(tmp_path))
    assert by_pyarrow(tmp_path) == by_duckdb(tmp_path) == whole
    assert verify(str(tmp_path), {"bootstrap.servers": servers}, with_hash=True).findings == []


def test_neither_beside_a_run_nor_after_a_kill(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    _load(servers, topic, tmp_path, 3)
    with locked(open_store(str(tmp_path))), pytest.raises(LoadError, match=r"another run of the load .* is under way"):
        compact(str(tmp_path))
    produce(servers, topic, [Sent(b"v", None, 0, _TIME)] * 5)
    with pytest.raises(Killed), failing(LocalFolder, -1, die):  # after the plan
        run(servers, tmp_path, topic)
    with pytest.raises(LoadError, match="run 00000004 failed or was killed: compact after the next run"):
        compact(str(tmp_path))
    run(servers, tmp_path, topic)
    assert compact(str(tmp_path)).files_after == 2
    assert by_duckdb(tmp_path) == expected(topic, {0: 65, 1: 60})


def test_a_lost_file_is_named_and_nothing_changes(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    _load(servers, topic, tmp_path, 3)
    first, second, _ = (Path(item.path) for item in files(str(tmp_path)) if item.partition == 0)
    content = second.read_bytes()
    second.unlink()
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(LoadError, match=second.name.replace("+", r"\+")):
        compact(str(tmp_path))
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    second.write_bytes(content)
    compact(str(tmp_path))
    assert by_duckdb(tmp_path) == expected(topic, {0: 60, 1: 60})
    assert not first.exists()


def test_bad_values_and_a_topic_created_again(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """The dead letters stay where they are; files of the old topic are not merged with those of the new one."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    options: dict[str, Any] = {
        "settings": WriteSettings(schema="a bigint"),
        "max_bad": MaxBad(9),
        "fail_on_loss": False,
    }
    for number in range(6):
        if number == 3:
            delete_topic(servers, topic)
            create_topic(servers, topic)
        produce(servers, topic, [Sent(b'{"a": %d}' % number), Sent(b"no"), Sent(b"nor this")])
        run(servers, tmp_path, topic, **options)
    told, letters = _told(tmp_path), {path.name for path in (tmp_path / "_klog" / "dead-letters").iterdir()}
    assert compact(str(tmp_path)).files_after == 1
    assert _told(tmp_path) == told
    assert {path.name for path in (tmp_path / "_klog" / "dead-letters").iterdir()} == letters
    assert sorted(item.records for item in files(str(tmp_path))) == [1, 1, 1, 3]
    run(servers, tmp_path, topic, start=AtRun(5), **options)
    assert [line["bad"] for line in status(str(tmp_path)).partitions] == [12]
    assert status(str(tmp_path)).findings[1:] == []
    rows = by_pyarrow(tmp_path)
    assert rows == sorted([(topic, 0, 0), (topic, 0, 3), (topic, 0, 6)] * 2)


def test_random_orders(cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, kills, loads from an earlier run and compactions in any order: each record once, all is explained."""
    monkeypatch.setattr(checkpoint, "EVERY", 3)
    servers, chance, count = cluster.bootstrap_servers, random.Random(3), 0
    create_topic(servers, topic)
    for _ in range(25 if kills() else 12):
        step = chance.choice(["run", "run", "compact", "killed run", "killed compaction", "again"])
        if "run" in step:
            new = chance.randint(1, 20)
            produce(servers, topic, [Sent(b"%d" % number, None, 0, _TIME) for number in range(count, count + new)])
            count += new
        options: dict[str, Any] = {"max_task_records": chance.randint(3, 20)}
        last = last_committed(open_store(str(tmp_path)))
        if step == "again" and last:
            options["start"] = AtRun(chance.randint(1, last))
        at = chance.choice([1, -1]) * chance.randint(1, 12)
        try:
            with failing(LocalFolder, at if "killed" in step else 10**6, die):
                if "compact" in step:
                    if last and not status(str(tmp_path)).unfinished:
                        compact(str(tmp_path), chance.choice([10_000, 100_000]))
                else:
                    run(servers, tmp_path, topic, **options)
        except Killed:
            if chance.random() < 0.5:
                continue
        run(servers, tmp_path, topic)
        whole = expected(topic, {0: count})
        assert by_pyarrow([item.path for item in files(str(tmp_path))]) == by_pyarrow(tmp_path) == whole
        assert status(str(tmp_path)).findings == []
        assert sum(line["records"] for line in status(str(tmp_path)).partitions) == count
