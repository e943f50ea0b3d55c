"""A load's files: when they are on disk, and what mounts without hard links or without locks change."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.journal.store import locked, open_store
from tests.load.support import by_duckdb, expected, in_child, run
from tests.spark.support import create_topic, produce, values

_MANY = 16


def _refuse_links(patch: pytest.MonkeyPatch, number: int = errno.EPERM) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(os, "link", link)


@pytest.mark.parametrize("name", ["EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK"])
def test_a_file_is_created_once_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _refuse_links(monkeypatch, getattr(errno, name))
    store = LocalFolder(tmp_path, LoadError)
    assert [store.create("runs/plan.json", content) for content in (b"first", b"second")] == [True, False]
    assert (store.read("runs/plan.json"), store.names("runs")) == (b"first", ["plan.json"])


def test_one_of_many_creates_a_file_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_links(monkeypatch)
    barrier = Barrier(_MANY)

    def create(number: int) -> bool:
        barrier.wait()
        return LocalFolder(tmp_path, LoadError).create("plan.json", b"%d" % number)

    with ThreadPoolExecutor(_MANY) as pool:
        made = list(pool.map(create, range(_MANY)))
    assert [number for number, is_made in enumerate(made) if is_made] == [int((tmp_path / "plan.json").read_bytes())]


@pytest.mark.parametrize("is_before", [True, False])
def test_a_kill_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool) -> None:
    _refuse_links(monkeypatch)
    store, real = LocalFolder(tmp_path, LoadError), os.replace

    def die(source: Path, target: Path) -> None:
        if not is_before:
            real(source, target)
        os._exit(9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", die)
        assert in_child(lambda: store.create("plan.json", b"whole")) == 9
    assert store.read("plan.json") == (None if is_before else b"whole")
    assert store.create("plan.json", b"next") == is_before


def test_files_are_on_disk_before_they_are_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power failure could leave the file of a task's offsets, and none of the records that it names."""
    store = LocalFolder(tmp_path, LoadError)
    fsync, replace = os.fsync, os.replace
    done: list[str] = []

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        done.append("sync " + os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])

    def move(source: str, target: str) -> None:
        replace(source, target)
        done.append("move " + target.rpartition("/")[2])

    with store.scratch("staging") as folder:
        (folder / "part").write_bytes(b"records")
        store.put(folder / "part", "topic/part-0")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync)
            patch.setattr(os, "replace", move)
            store.settle()
    assert done == ["sync part", "move part-0", "sync topic"]
    assert store.read("topic/part-0") == b"records"


def test_another_error_of_links_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_links(monkeypatch, errno.EIO)
    with pytest.raises(LoadError, match=r"plan.json can't be written: Input/output error"):
        LocalFolder(tmp_path, LoadError).create("plan.json", b"{}")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_is_created_once_and_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("it is synced"))
    folder = LocalFolder(tmp_path, LoadError)
    assert [folder.create("attempts/marker", b"") for _ in range(2)] == [True, False]
    assert folder.names("attempts") == ["marker"]


def test_an_error_of_pyarrow_that_is_no_os_error() -> None:
    """pyarrow's Azure file system raises such an error if it has no credentials."""

    class Azure:
        def open_input_file(self, _: str) -> None:
            raise pa.ArrowException("Unknown error: no credentials")

        open_input_stream = get_file_info = open_input_file

    with pytest.raises(LoadError, match=r"abfss://c/x/load.json can't be read: Unknown error: no credentials"):
        ArrowFolder(Azure(), "c/x", "abfss://c/x", LoadError).read("load.json")


@pytest.mark.parametrize("scheme", ["s3a", "s3n", "S3"])
def test_hadoops_names_of_s3(scheme: str) -> None:
    with pytest.raises(ConfigError, match="write s3://BUCKET/FOLDER"):
        open_store(f"{scheme}://bucket/x")


def test_a_mount_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    output = tmp_path / "out"
    with pytest.raises(LoadError, match=r"out can't be locked \(No locks available\): use a mount with flock"):
        locked(LocalFolder(output, LoadError)).__enter__()
    assert not output.exists()


def test_a_run_that_is_refused_leaves_the_lock_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected run does not remove the lock of the run that holds it: a third run is rejected too."""
    store, real = LocalFolder(tmp_path / "out", LoadError), fcntl.flock
    with ExitStack() as first:

        def flock(file: int, kind: int) -> None:
            monkeypatch.setattr(fcntl, "flock", real)
            first.enter_context(locked(store))
            real(file, kind)

        monkeypatch.setattr(fcntl, "flock", flock)
        for _ in range(2):
            with pytest.raises(LoadError, match="is under way"), locked(store):
                pytest.fail("two runs have the lock")


def test_a_lock_that_a_run_has_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run locks a file that another run has just removed; others would lock a new file, so the run must stop."""
    store, real = LocalFolder(tmp_path / "out", LoadError), fcntl.flock
    with ExitStack() as third:

        def flock(file: int, kind: int) -> None:
            monkeypatch.setattr(fcntl, "flock", real)
            (tmp_path / "out/_klog/lock").unlink()
            third.enter_context(locked(store))
            real(file, kind)

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(LoadError, match="is under way"), locked(store):
            pytest.fail("two runs have the lock")


def test_loads_without_hard_links(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_links(monkeypatch)
    create_topic(cluster.bootstrap_servers, topic, 2)
    for start in (0, 40):
        produce(cluster.bootstrap_servers, topic, values(40, start=start, partitions=2))
        run(cluster.bootstrap_servers, tmp_path, topic)
    assert by_duckdb(tmp_path) == expected(topic, {0: 40, 1: 40})
    assert status(str(tmp_path)).findings == []
