"""Writes to HDFS, where readers see unfinished files; a local file system stands in for HDFS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.arrow import ArrowFolder
from tests.load.support import Killed, by_duckdb, expected, run
from tests.spark.support import create_topic, produce, values


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

    def open_output_stream(self, path: str, **options: Any) -> Any:
        stream = self._local.open_output_stream(path, **options)
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


def test_a_load_that_dies_within_any_write(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster.bootstrap_servers
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
    for module in ("run", "tasks.task"):
        monkeypatch.setattr(f"spark_klog.load.{module}.open_store", lambda *_, **__: store)
