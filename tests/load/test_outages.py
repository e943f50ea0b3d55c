"""A load survives full disks, a failing object store, dead brokers and killed processes: each record once.

SPARK_KLOG_KILLS sets the number of outages of each kind (default: a few), SPARK_KLOG_SEED the random choices.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from werkzeug.serving import make_server

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.load.audit import status
from spark_klog.load.journal.model import Range
from spark_klog.load.run import LoadOptions, load
from spark_klog.load.tasks.task import Job
from tests.jobs.support import (
    BATCH_LOAD,
    DONE,
    NOTHING_NEW,
    Load,
    Running,
    environment,
    rows_of,
    wait_for_the_moment,
)
from tests.jobs.truth import Truth, check_each_once
from tests.load.buckets import bucket, committed, seen
from tests.load.support import InProcess, Place, by_duckdb, by_pyarrow, expected, kills, run
from tests.load.tables import Kind, by_spark, check_each_once as check_places, make_lake
from tests.spark.support import Sent, create_topic, produce, values
from tests.support.processes import kill, named
from tests.support.runs.soak import in_soak

_SECONDS = 480
#: Picks the processes to kill from those of a run; the broker is not one of them.
_BROKER = "broker"
_TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "driver": lambda tree: tree[:1],
    "python driver": lambda tree: named(tree[1:], BATCH_LOAD.name),
    "an executor": lambda tree: named(tree[1:], "CoarseGrainedExecutorBackend")[-1:],
    "all executors": lambda tree: named(tree[1:], "CoarseGrainedExecutorBackend"),
    "a worker": lambda tree: named(tree[1:], "pyspark.daemon")[-1:],
    "all workers": lambda tree: named(tree[1:], "pyspark.daemon"),
    "everything": lambda tree: tree,
    _BROKER: lambda tree: [],
}
_SPARK = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.read.option("recursiveFileLookup", True).parquet(sys.argv[1])
rows = frame.select("topic", "partition", "offset").orderBy("topic", "partition", "offset").collect()
open(sys.argv[2], "w").write(json.dumps([list(row) for row in rows]))
"""


def _chance() -> random.Random:
    return random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))


def _failure(servers: str, output: Path | str, topic: str, task_records: int) -> str:
    """Run a load; return the message of its failure, or ""."""
    try:
        run(servers, output, topic, max_task_records=task_records)
    except LoadError as error:
        return str(error)
    return ""


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that mounts a file system of that many KiB; called again, it resizes the file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def resize(kib: int) -> Path:
        nonlocal mounted
        options = f"remount,size={kib}k" if mounted else f"size={kib}k"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode and not mounted:
            pytest.skip(f"a file system of its own takes root: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        mounted = True
        return folder

    yield resize
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full(
    cluster: EmbeddedCluster, topic: str, small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    """On a full disk the run fails with that reason and committed files stay; with more room the next run goes on."""
    servers, chance = cluster.bootstrap_servers, _chance()
    create_topic(servers, topic, 2)
    content = random.Random(1)
    produce(servers, topic, [Sent(content.randbytes(1000), None, n % 2, 1_700_000_000_000) for n in range(600)])
    whole = expected(topic, {0: 300, 1: 300})
    failures = 0
    for _ in range(kills() or 3):
        size = chance.randint(8, 200)
        output = small_disk(size) / "out"
        while True:
            said = _failure(servers, output, topic, 50)
            if not said:
                break
            failures += 1
            assert os.strerror(errno.ENOSPC) in said
            assert str(output) in said
            assert by_duckdb(output) in ([], whole)
            size += chance.randint(8, 200)
            small_disk(size)
        assert by_pyarrow(output) == by_duckdb(output) == whole
        assert status(str(output)).findings == []
        shutil.rmtree(output)
    assert failures > 2


# A failing object store


class _Store:
    """moto's S3 that answers some requests with an error, some of them after it has carried them out."""

    def __init__(self, chance: random.Random) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app  # half a second of each collection

        self._app = DomainDispatcherApplication(create_backend_app)
        self._chance = chance
        #: Failures per thousand requests, and their number by kind.
        self.per_mille = 0
        self.failed: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self._chance.randrange(1000) >= self.per_mille:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        when = self._chance.choice(("before", "after"))
        # the SDK retries after 503, but not after 403
        code = self._chance.choice(("503 Slow Down", "403 Forbidden"))
        if when == "after":
            list(self._app(environ, lambda *_: lambda data: None))
        self.failed[f"{code}, {when}"] += 1
        start_response(code, [("Content-Type", "application/xml"), ("Content-Length", "0"), ("Connection", "close")])
        return []


@pytest.fixture
def store() -> Iterator[tuple[str, _Store]]:
    """The address of a store, and the store."""
    made = _Store(_chance())
    server = make_server("127.0.0.1", 0, made, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}", made
    server.shutdown()
    thread.join()


@pytest.mark.test_all("long")
def test_a_store_that_answers_errors(cluster: EmbeddedCluster, topic: str, store: tuple[str, _Store]) -> None:
    servers, (address, faulty) = cluster.bootstrap_servers, store
    create_topic(servers, topic, 2)
    uri = bucket(address, "outages")
    count = failed = 0
    for faulty.per_mille in itertools.islice(itertools.cycle((50, 150, 300)), kills() or 6):
        produce(servers, topic, values(40, start=count, partitions=2))
        count += 40
        said = _failure(servers, uri, topic, 10)
        failed += said != ""
        assert "secret" not in said
        faulty.per_mille = 0
        whole = expected(topic, {0: count // 2, 1: count // 2})
        there = seen(uri)
        assert len(set(there)) == len(there)
        assert set(there) <= set(whole)
        if there:  # else the first run may have ended before the load began
            assert set(committed(uri)) <= set(there)
    run(servers, uri, topic)
    assert seen(uri) == committed(uri) == whole
    assert status(uri).findings == []
    assert failed
    assert len(faulty.failed) == 4, faulty.failed


# Killed brokers and processes


class _KillsTheBroker(InProcess):
    """Kills the broker `after` seconds into the tasks, and restarts it."""

    def __init__(self, cluster: EmbeddedCluster, after: float) -> None:
        super().__init__()
        self._cluster, self._after = cluster, after

    def run(self, tasks: dict[int, list[Range]], job: Job) -> None:
        thread = threading.Thread(target=self._outage)
        thread.start()
        try:
            super().run(tasks, job)
        finally:
            thread.join()

    def _outage(self) -> None:
        time.sleep(self._after)
        self._cluster.kill(0)
        self._cluster.restart(0)


def test_a_broker_that_is_killed(topic: str, server_dir: Path, tmp_path: Path) -> None:
    count, chance = 0, _chance()
    with EmbeddedCluster(data_dir=server_dir / "cluster") as cluster:
        servers = cluster.bootstrap_servers
        create_topic(servers, topic, 2)
        for _ in range(kills() or 2):
            produce(servers, topic, values(2000, start=count, partitions=2))
            count += 2000
            options = LoadOptions({"bootstrap.servers": servers}, [topic], str(tmp_path), max_task_records=100)
            load(options, _KillsTheBroker(cluster, chance.uniform(0, 0.3)))
            whole = expected(topic, {0: count // 2, 1: count // 2})
            assert by_duckdb(tmp_path) == by_pyarrow(tmp_path) == whole
    assert status(str(tmp_path)).findings == []


@pytest.mark.timeout(0)  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
@pytest.mark.test_all("kill")
@in_soak  # jobs/test_batch_load.py has the slice
@pytest.mark.parametrize("kind", ["files", "delta", "iceberg"])
def test_processes_of_a_cluster(
    topic: str, server_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind | Literal["files"]
) -> None:
    """Kill drivers, executors, workers of a local-cluster or the broker: all readers find each record once."""
    chance, wanted, targets = _chance(), kills() or len(_TARGETS), [*_TARGETS]
    outages: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    lake = None if kind == "files" else make_lake(kind, server_dir / "lake", monkeypatch)
    with EmbeddedCluster(data_dir=server_dir / "cluster") as cluster:
        truth = Truth(cluster.bootstrap_servers)
        truth.create(topic, 3)
        master, table = "local-cluster[2,1,1024]", "" if lake is None else lake.address
        made = Load(cluster.bootstrap_servers, topic, server_dir / "load", master=master, table=table)
        rounds = 0
        try:
            while outages.total() < wanted:
                rounds += 1
                assert rounds <= 3 * wanted, f"too many runs ended before they were killed: {outages}"
                truth.send(topic, chance.randint(600, 1_500), 3)
                target = targets[outages.total() % len(targets)]
                running = made.start("--json", "--max-file-records", "10")
                wait_for_the_moment(running, made, chance)
                hit = _end(cluster, running, target, chance)
                ran = running.result()
                outages[target] += hit
                codes[f"{target}: {'killed' if hit else 'ended before'}, exit code {ran.code}"] += 1
                if lake is None:
                    check_each_once(made)
                else:
                    check_places(lake, topic, len(truth.rows()))
        finally:
            made.stop()
            print(f"\n{outages.total()} outages in {rounds} runs: {json.dumps(codes, indent=1, sort_keys=True)}")  # noqa: T201
        for _ in range(2):  # the second one removes what attempts that went on have left
            ran = made.submit("--json")
            assert ran.code in (DONE, NOTHING_NEW), ran.stdout + ran.stderr
        rows = truth.rows()
    places: list[Place] = [(row[2], row[3], row[4]) for row in rows]
    if lake is None:
        assert by_duckdb(made.output) == _by_spark(made.output, server_dir) == places
    else:
        assert check_places(lake, topic, len(rows)) == len(rows)
        assert by_spark(lake, server_dir) == places
    assert rows_of(made.output) == rows  # a table's folder, too, has no other files
    assert status(made.address).findings == []


def _end(cluster: EmbeddedCluster, running: Running, target: str, chance: random.Random) -> bool:
    """Kill the processes of `target`; return False if they have already ended."""
    if running.ended:
        return False
    if target != _BROKER:
        return bool(kill(_TARGETS[target](running.tree())))
    cluster.kill(0)
    time.sleep(chance.uniform(0, 2))
    cluster.restart(0)
    return True


def _by_spark(output: Path, folder: Path) -> list[Place]:
    program, answer = folder / "read.py", folder / "read.json"
    program.write_text(_SPARK)
    command = [sys.executable, str(program), str(output), str(answer)]
    subprocess.run(command, env=environment(folder), cwd=folder, check=True, timeout=_SECONDS, capture_output=True)
    return [(topic, partition, offset) for topic, partition, offset in json.loads(answer.read_text())]
