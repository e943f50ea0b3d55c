"""Writes to HDFS, where readers see unfinished files; a local file system stands in for HDFS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.load.journal import lease
from tests.load.support import Killed, by_duckdb, expected, is_renewal, run
from tests.spark.support import create_topic, produce, values

_MANY = 16
#: The name node does one after the other.
_renames = Lock()
pytestmark = pytest.mark.usefixtures("short_leases")


class _Stream:
    """Writes half of its first content, then raises an error."""

    def __init__(self, stream: Any, error: BaseException) -> None:
        self._stream, self._error = stream, error

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, content: bytes) -> None:
        self._stream.write(content[: len(content) // 2])
        raise self._error


class _Hdfs:
    """A local file system with the type name of HDFS; write number `fails` raises `error` halfway."""

    type_name = "hdfs"

    def __init__(self, fails: int = 0, error: BaseException | None = None) -> None:
        self._local = LocalFileSystem()
        self._left, self._error = fails, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def move(self, source: str, target: str) -> None:
        """As HDFS renames, and as pyarrow's HDFS file system calls it."""
        place = Path(target) / Path(source).name if Path(target).is_dir() else Path(target)
        with _renames:
            self._rename(source, target, place)

    def _rename(self, source: str, target: str, place: Path) -> None:
        if place.exists():
            if place != Path(target):
                raise OSError("rename returned false")
            self._local.delete_file(target)
        self._local.move(source, str(place))

    def open_output_stream(self, path: str, **options: Any) -> Any:
        stream = self._local.open_output_stream(path, **options)
        if is_renewal():
            return stream
        self._left -= 1
        return _Stream(stream, self._error) if self._error is not None and self._left == 0 else stream


@pytest.mark.parametrize("error", [Killed(), OSError("the name node is gone")], ids=["killed", "error"])
def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path, error: BaseException) -> None:
    store = ArrowFolder(_Hdfs(2, error), str(tmp_path), "hdfs:///out", LoadError)
    assert store.create("runs/1/plan.json", b'{"run": 1}')
    source = tmp_path / "source"
    source.write_bytes(b"x" * 1000)
    with pytest.raises(Killed if isinstance(error, Killed) else LoadError):
        store.put(source, "runs/1/file")
    assert store.size("runs/1/file") is None
    assert store.names("runs/1") == ["plan.json"]
    store.put(source, "runs/1/file")
    store.write("runs/1/plan.json", b"{}")
    assert (store.size("runs/1/file"), store.read("runs/1/plan.json")) == (1000, b"{}")
    assert not store.create("runs/1/plan.json", b"")


def test_one_of_many_creates_a_file(tmp_path: Path) -> None:
    barrier = Barrier(_MANY)

    def create(number: int) -> bool:
        barrier.wait()
        return ArrowFolder(_Hdfs(), str(tmp_path), "hdfs:///out", LoadError).create("runs/plan.json", b"%d" % number)

    with ThreadPoolExecutor(_MANY) as pool:
        made = list(pool.map(create, range(_MANY)))
    assert made.count(True) == 1
    assert (tmp_path / "runs/plan.json").read_bytes() == b"%d" % made.index(True)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["plan.json"]


def test_the_answer_to_a_rename_is_lost(tmp_path: Path) -> None:
    class Lost(_Hdfs):
        def move(self, source: str, target: str) -> None:
            super().move(source, target)
            raise OSError("the name node is gone")

    assert ArrowFolder(Lost(), str(tmp_path), "hdfs:///out", LoadError).create("runs/plan.json", b"own")
    assert not ArrowFolder(Lost(), str(tmp_path), "hdfs:///out", LoadError).create("runs/plan.json", b"another")
    assert (tmp_path / "runs/plan.json").read_bytes() == b"own"


def test_a_load_that_dies_within_any_write(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster.bootstrap_servers
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.6)  # one run at a time
    monkeypatch.setattr(lease, "MARGIN_SECONDS", 0.2)
    create_topic(servers, topic, 2)
    produce(servers, topic, values(60, partitions=2))
    number, died = 0, True
    while died:
        number += 1
        output = tmp_path / f"{number}"
        _use(monkeypatch, _Hdfs(number, Killed()), output)
        try:
            run(servers, output, topic, max_task_records=20)
            died = False
        except Killed:
            assert all(path.read_bytes().endswith(b"}\n") for path in output.rglob("*.json")), "half of a file"
        _use(monkeypatch, _Hdfs(), output)
        run(servers, output, topic, max_task_records=20)
        assert by_duckdb(output) == expected(topic, {0: 30, 1: 30})
    assert number > 8


def _use(monkeypatch: pytest.MonkeyPatch, filesystem: _Hdfs, output: Path) -> None:
    store = ArrowFolder(filesystem, str(output), "hdfs:///out", LoadError)
    for module in ("binding", "tasks.task"):
        monkeypatch.setattr(f"spark_klog.load.{module}.open_store", lambda *_, **__: store)
