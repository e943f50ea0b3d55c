"""A load into an object store, moto's S3 server; runs die at each change that they make there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from spark_klog.columns import decode
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.compaction import compact
from spark_klog.load.journal import lease, paths
from spark_klog.load.journal.model import Range
from spark_klog.load.journal.store import locked, open_store
from spark_klog.load.run import LoadOptions, load
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks import task
from spark_klog.load.tasks.task import Job
from tests.load.buckets import bucket, committed, seen
from tests.load.support import (
    DiesLate,
    Frozen,
    InProcess,
    Killed,
    TwinFails,
    die,
    expected,
    failing,
    kills,
    run,
    send_batch,
)
from tests.spark.support import create_topic, delete_records, produce, values
from tests.support.servers.kafka import free_port

_HOST = "127.0.0.1"
pytestmark = pytest.mark.usefixtures("short_leases")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server, in the form that pyarrow's URIs take."""
    from moto.server import ThreadedMotoServer  # half a second of each collection

    port = free_port()
    server = ThreadedMotoServer(ip_address=_HOST, port=port, verbose=False)
    server.start()
    yield f"{_HOST}:{port}"
    server.stop()


@pytest.mark.test_all("kill")  # test_kills.py has it with a local store
@pytest.mark.parametrize("side", [1, -1], ids=["before", "after"])
def test_killed_at_each_change(cluster: EmbeddedCluster, topic: str, s3: str, side: int) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(120, partitions=2))
    whole = expected(topic, {0: 60, 1: 60})
    number, died, size = 0, True, 40 if kills() or side < 0 else 60
    while died:
        number += 1 if kills() else 9 if side < 0 else 23
        uri = bucket(s3, f"b{number}{'ab'[side > 0]}")
        try:
            with failing(ArrowFolder, side * number, die):
                run(servers, uri, topic, max_task_records=size)
            died = False
        except Killed:
            pass
        there = seen(uri)
        assert len(set(there)) == len(there)
        assert set(there) <= set(whole)
        run(servers, uri, topic, max_task_records=size)
        assert seen(uri) == committed(uri) == whole
        assert status(uri).findings == []
    assert number > 8


@pytest.mark.test_all("kill")
@pytest.mark.parametrize("side", [1, -1], ids=["before", "after"])
def test_a_compaction_killed_at_each_change(cluster: EmbeddedCluster, topic: str, s3: str, side: int) -> None:
    """A run follows, which may have nothing to load, and another one; then a compaction: no record is there twice."""
    servers, number, died, count = cluster.bootstrap_servers, 0, True, 0
    create_topic(servers, topic)
    while died:
        number += 1 if kills() else 11 if side < 0 else 23
        uri = bucket(s3, f"c{number}{'ab'[side > 0]}")
        for _ in range(3):
            produce(servers, topic, values(10, start=count))
            count += 10
            run(servers, uri, topic)
        try:
            with failing(ArrowFolder, side * number, die):
                compact(uri)
            died = False
        except Killed:
            pass
        assert committed(uri) == expected(topic, {0: count})
        for new in (number % 2, 1):
            produce(servers, topic, values(new, start=count))
            count += new
            run(servers, uri, topic)
            assert committed(uri) == expected(topic, {0: count})
        compact(uri)
        assert seen(uri) == committed(uri) == expected(topic, {0: count})
        assert len(files(uri)) == 1
        assert status(uri).findings == []
    assert number > 8


def test_a_compaction_beside_a_run(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    """The one that comes second is refused; a compaction that stands still loses its lease, and changes nothing."""
    servers, uri = cluster.bootstrap_servers, bucket(s3, "beside")
    create_topic(servers, topic)
    for number in range(2):
        produce(servers, topic, values(10, start=10 * number))
        run(servers, uri, topic)
    with locked(open_store(uri)), pytest.raises(LoadError, match="is under way"):
        compact(uri)
    real, produced = ArrowFolder.create, []

    def stands_still(self: ArrowFolder, path: str, content: bytes) -> bool:
        if path.endswith("manifest.json") and not produced:
            produced.append(path)
            self.guard = lambda: None  # its commit is on its way when another process takes the lease over
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lease, "_is_dead_process", lambda _: True)
                produce(servers, topic, values(10, start=20))
                run(servers, uri, topic)
        return real(self, path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrowFolder, "create", stands_still)
        with pytest.raises(LoadError):
            compact(uri)
    assert produced
    run(servers, uri, topic)
    assert committed(uri) == expected(topic, {0: 30})
    compact(uri)
    assert seen(uri) == committed(uri) == expected(topic, {0: 30})
    assert status(uri).findings == []


def test_a_store_that_fails(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    with pytest.raises(LoadError, match="can't be") as found:
        run(servers, bucket(s3, "there").replace("@there", "@missing").replace("allow_bucket_creation=true", ""), topic)
    assert "secret" not in str(found.value)


def test_an_attempt_that_fails_beside_one_that_is_done(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    """Files that the first attempt has put do not stay beside those of the second one."""
    servers, uri = cluster.bootstrap_servers, bucket(s3, "twins")
    create_topic(servers, topic)
    for start in range(0, 200, 50):
        send_batch(servers, topic, 50, start)
    settings = WriteSettings(row_group_rows=1, file_bytes=1)  # one file per Arrow batch, put before the failure
    options = LoadOptions({"bootstrap.servers": servers}, [topic], uri, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "ROWS", 50)
        assert load(options, TwinFails()).failed == []
    assert seen(uri) == committed(uri) == expected(topic, {0: 200})
    assert len(files(uri)) == 4
    assert status(uri).findings == []


def test_a_run_that_began_before_the_plan_of_another(
    cluster: EmbeddedCluster, topic: str, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the files of the other one's tasks, which may be about to commit: a take-over at this very moment."""
    servers, uri = cluster.bootstrap_servers, bucket(s3, "overlap")
    monkeypatch.setattr("spark_klog.load.run.locked", lambda _: nullcontext())
    create_topic(servers, topic, 2)
    produce(servers, topic, values(120, partitions=2))
    options = LoadOptions({"bootstrap.servers": servers}, [topic], uri)

    class DiesBeforeItsCommit(InProcess):
        def run(self, tasks: dict[int, list[Range]], job: Job) -> None:
            super().run(tasks, job)
            raise Killed

    class Overtaken(InProcess):
        def cores(self) -> int:
            with pytest.raises(Killed):
                load(options, DiesBeforeItsCommit())
            return super().cores()

    with pytest.raises(LoadError, match="another run of this load has begun run 00000001"):
        load(options, Overtaken())
    last = InProcess()
    load(options, last)
    assert last.ran == []
    assert seen(uri) == committed(uri) == expected(topic, {0: 60, 1: 60})


def test_an_attempt_that_goes_on_after_the_commit(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    """It reads what retention has left: its file does not replace the committed one, and is removed."""
    servers, uri = cluster.bootstrap_servers, bucket(s3, "late-put")
    create_topic(servers, topic)
    produce(servers, topic, values(100))
    late = Frozen(ArrowFolder, "put")
    load(LoadOptions({"bootstrap.servers": servers}, [topic], uri, fail_on_loss=False), late)
    assert seen(uri) == committed(uri) == expected(topic, {0: 100})
    delete_records(servers, topic, {0: 60})
    late.thaw()
    assert seen(uri) == committed(uri) == expected(topic, {0: 100})
    assert status(uri).findings == []


def test_an_attempt_that_dies_after_the_commit(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    """Its upload was under way at the commit, and then it is killed: the next run removes the file, and no other."""
    servers, uri = cluster.bootstrap_servers, bucket(s3, "late-dead")
    create_topic(servers, topic)
    produce(servers, topic, values(100))

    late = DiesLate(ArrowFolder)
    load(LoadOptions({"bootstrap.servers": servers}, [topic], uri, fail_on_loss=False), late)
    late.thaw()
    assert len(seen(uri)) == 200
    for count in (100, 110):
        run(servers, uri, topic)
        assert seen(uri) == committed(uri) == expected(topic, {0: count})
        produce(servers, topic, values(10, start=count))
    store = open_store(uri)
    assert store.names(paths.ATTEMPTS) == []


def test_files_of_an_attempt_that_read_less(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    """An attempt runs out of time, writes a file with fewer records, and dies; the next attempt reads everything."""
    servers, uri = cluster.bootstrap_servers, bucket(s3, "times")
    create_topic(servers, topic)
    for start in (0, 100):
        send_batch(servers, topic, 100, start)

    def create(store: ArrowFolder, path: str, content: bytes) -> bool:
        if "offsets-" in path:
            die()
        return real(store, path, content)

    real = ArrowFolder.create
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrowFolder, "create", create)
        patch.setattr(task._RangeLoad, "fetched", _out_of_time)
        client = {"bootstrap.servers": servers, "max.partition.fetch.bytes": "100"}  # a batch at a time
        with pytest.raises(Killed):
            load(LoadOptions(client, [topic], uri, max_seconds=1000), InProcess())
    assert seen(uri) == expected(topic, {0: 100})
    run(servers, uri, topic)
    assert seen(uri) == committed(uri) == expected(topic, {0: 200})


_FETCHED = task._RangeLoad.fetched


def _out_of_time(observer: task._RangeLoad, batches: Any, start: int, records: int) -> bool:
    _FETCHED(observer, batches, start, records)
    return False


def test_ranges_after_one_that_failed(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    """Ranges after one that failed are not part of the run; the commit removes their files."""
    servers, uri = cluster.bootstrap_servers, bucket(s3, "failed")
    create_topic(servers, topic)
    produce(servers, topic, values(200))

    class Late(InProcess):
        def run(self, tasks: Any, job: Any) -> None:
            delete_records(servers, topic, {0: 20})
            super().run({number: tasks[number] for number in sorted(tasks, reverse=True)}, job)

    options = LoadOptions({"bootstrap.servers": servers}, [topic], uri, max_task_records=50)
    assert [item.until for item in load(options, Late()).partitions] == [0]
    assert seen(uri) == []
    run(servers, uri, topic, fail_on_loss=False)
    assert seen(uri) == committed(uri) == expected(topic, {0: 200})[20:]
