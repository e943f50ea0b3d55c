"""One contract for every tree, and what is special to each."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from spark_klog.directories.arrow_files import ArrowFiles
from spark_klog.directories.files import FileTree
from spark_klog.directories.local_files import LocalFiles
from spark_klog.directories.memory import MemoryTree
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.tree import NodeExists, Tree, open_tree
from spark_klog.directories.zookeeper import ZooKeeperTree
from spark_klog.errors import ConfigError, DirectoryError
from tests.support.kafka import ZooKeeperServer, free_port

SECONDS = 30.0
Open = Callable[[], Tree]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


class Background:
    """Runs `step` over and over in a thread until the block ends, which then raises what `step` raised."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.steps = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                self._step()
                self.steps += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Background:
        self._thread.start()
        wait_until(lambda: self.steps or self.error)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


class FastArrowFiles(ArrowFiles):
    poll_seconds = 0.05


class RigidFileSystem:
    """A local file system whose move goes over no file, as that of HDFS."""

    type_name = "rigid"

    def __init__(self) -> None:
        self._fs = fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def move(self, source: str, target: str) -> None:
        if self._fs.get_file_info(target).type != fs.FileType.NotFound:
            raise OSError(errno.EEXIST, "target exists", target)
        self._fs.move(source, target)


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(params=["memory", "local", "arrow-local", "arrow-subtree", "arrow-mock", "arrow-rigid", "zookeeper"])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def open_another(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens trees with the same nodes."""
    opened: list[Tree] = []
    memory = MemoryTree()
    mock, _ = fs.FileSystem.from_uri("mock://")
    chroot = f"/{tmp_path.name}/{kind}"

    def open_one() -> Tree:
        tree: Tree
        if kind == "memory":
            tree = memory.session()
        elif kind == "local":
            tree = open_tree(str(tmp_path))
        elif kind == "arrow-local":
            tree = FileTree(FastArrowFiles(fs.LocalFileSystem(), str(tmp_path / "base")))
        elif kind == "arrow-subtree":
            sub = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
            tree = FileTree(FastArrowFiles(sub, "base"))
        elif kind == "arrow-mock":
            tree = FileTree(FastArrowFiles(mock, ""))
        elif kind == "arrow-rigid":
            tree = FileTree(FastArrowFiles(RigidFileSystem(), str(tmp_path / "base")))
        else:
            server: ZooKeeperServer = request.getfixturevalue("zookeeper")
            tree = open_tree(f"zookeeper://{server.connect}{chroot}")
        opened.append(tree)
        return tree

    yield open_one
    for tree in opened:
        tree.close()


@pytest.fixture
def tree(open_another: Open) -> Tree:
    return open_another()


def skip_without_ephemerals(kind: str) -> None:
    if kind.startswith("arrow"):
        pytest.skip("has no ephemeral nodes")


class TestContract:
    def test_what_is_not_there(self, tree: Tree) -> None:
        assert tree.get("/a") is None
        assert tree.get("/a/b") is None
        assert tree.children("/a") == []
        tree.delete("/a/b")
        tree.put("/a", b"leaf")
        assert tree.get("/a/b") is None
        assert tree.children("/a") == []
        tree.delete("/a/b")
        assert tree.get("/a") == b"leaf"

    def test_put_and_get(self, tree: Tree) -> None:
        tree.put("/a/b/c", b"1")
        assert tree.get("/a/b/c") == b"1"
        tree.put("/a/b/c", b"")
        assert tree.get("/a/b/c") == b""
        big = bytes(range(256)) * 1000
        tree.put("/a/b/c", big)
        assert tree.get("/a/b/c") == big

    def test_parents_are_nodes(self, tree: Tree) -> None:
        tree.put("/a/b/c", b"1")
        assert tree.get("/a") == b""
        assert tree.get("/a/b") == b""
        with pytest.raises(NodeExists, match="/a/b"):
            tree.create("/a/b", b"x")
        tree.put("/a/b", b"2")
        assert (tree.get("/a/b"), tree.get("/a/b/c")) == (b"2", b"1")
        tree.delete("/a/b/c")
        assert (tree.get("/a/b"), tree.children("/a/b")) == (b"2", [])
        tree.put("/a/b", b"3")
        assert tree.get("/a/b") == b"3"

    def test_a_leaf_with_a_value_gets_children(self, tree: Tree) -> None:
        tree.put("/topics/t", b"assignment")
        tree.put("/topics/t/partitions/0/state", b"leader")
        assert tree.get("/topics/t") == b"assignment"
        tree.put("/topics/t", b"other")
        tree.create("/topics/t/partitions/1/state", b"leader")
        assert tree.get("/topics/t") == b"other"
        assert tree.children("/topics") == ["t"]
        assert tree.children("/topics/t") == ["partitions"]
        assert tree.children("/topics/t/partitions") == ["0", "1"]
        with pytest.raises(NodeExists):
            tree.create("/topics/t", b"")

    def test_create(self, tree: Tree) -> None:
        tree.create("/x/y", b"1")
        with pytest.raises(NodeExists, match="/x/y"):
            tree.create("/x/y", b"2")
        assert tree.get("/x/y") == b"1"
        tree.delete("/x/y")
        tree.create("/x/y", b"3")
        assert tree.get("/x/y") == b"3"

    def test_delete_is_recursive(self, tree: Tree) -> None:
        for path in ("/a/b/c/d", "/a/b", "/a/b/e", "/a/bb"):
            tree.put(path, path.encode())
        tree.delete("/a/b")
        for path in ("/a/b", "/a/b/c", "/a/b/c/d", "/a/b/e"):
            assert tree.get(path) is None
        assert tree.children("/a") == ["bb"]
        tree.put("/a/b", b"again")
        assert tree.get("/a/b") == b"again"
        assert tree.children("/a/b") == []

    def test_children_are_sorted(self, tree: Tree) -> None:
        for name in ("10", "9", "b", "B", "a-"):
            tree.put(f"/n/{name}", b"")
        assert tree.children("/n") == ["10", "9", "B", "a-", "b"]
        tree.put("/m", b"")
        assert {"m", "n"} <= set(tree.children("/"))

    def test_names(self, tree: Tree) -> None:
        names = [
            ".hidden", "a.value", "a.ephemeral", "a", ".value", "%2E", "100%", "x.gz", "host:uuid", "a b",
            "ü-日本", "...", "*?", "back\\slash", "t" * 200, "-", "~", "#", "a.value.value",
        ]  # fmt: skip
        for name in names:
            tree.put(f"/names/{name}", name.encode())
        assert tree.children("/names") == sorted(names)
        for name in names:
            assert tree.get(f"/names/{name}") == name.encode()
            tree.put(f"/names/{name}/child", b"1")
        assert tree.children("/names") == sorted(names)
        for name in names:
            assert tree.get(f"/names/{name}") == name.encode()
            assert tree.get(f"/names/{name}/child") == b"1"
            tree.delete(f"/names/{name}")
        assert tree.children("/names") == []

    @pytest.mark.parametrize("path", ["", "a", "/a/", "//", "/a//b", "/..", "/a/./b", "/a/../b", "/a\0", "/\ud800"])
    def test_what_is_no_path(self, tree: Tree, path: str) -> None:
        for operation in (
            lambda: tree.get(path),
            lambda: tree.put(path, b""),
            lambda: tree.create(path, b""),
            lambda: tree.delete(path),
            lambda: tree.children(path),
            lambda: tree.watch(path, lambda: None),
        ):
            with pytest.raises(ConfigError, match="path"):
                operation()

    def test_the_root_is_not_written(self, tree: Tree) -> None:
        for operation in (
            lambda: tree.put("/", b""),
            lambda: tree.create("/", b""),
            lambda: tree.delete("/"),
        ):
            with pytest.raises(ConfigError, match="root"):
                operation()
        assert tree.get("/") == b""

    def test_closed(self, tree: Tree) -> None:
        tree.close()
        tree.close()
        for operation in (
            lambda: tree.get("/a"),
            lambda: tree.put("/a", b""),
            lambda: tree.create("/a", b"", ephemeral=True),
            lambda: tree.delete("/a"),
            lambda: tree.children("/a"),
            lambda: tree.watch("/a", lambda: None),
        ):
            with pytest.raises(DirectoryError, match="closed"):
                operation()

    def test_nodes_outlive_the_tree(self, tree: Tree, open_another: Open) -> None:
        tree.put("/a/b", b"1")
        tree.close()
        assert open_another().get("/a/b") == b"1"

    def test_offsets(self, tree: Tree) -> None:
        offsets = {("flights", partition): 10 * partition for partition in range(3)}
        directory = OffsetDirectory(tree, "g")
        directory.commit(offsets)
        assert directory.fetch([*offsets, ("flights", 3)]) == offsets
        assert tree.children("/consumers/g/offsets/flights") == ["0", "1", "2"]

    @pytest.mark.parametrize("path", ["/a/leaf", "/a/inner"])
    def test_readers_see_old_or_new(self, kind: str, tree: Tree, open_another: Open, path: str) -> None:
        if kind == "arrow-rigid" and path == "/a/inner":
            pytest.skip("the value of a folder is absent for a moment (see ArrowFiles)")
        values = {bytes([65 + n]) * (1 + 20_000 * n) for n in range(4)}
        tree.put(path, min(values))
        if path == "/a/inner":
            tree.put("/a/inner/child", b"")
        reader = open_another()

        def read() -> None:
            value = reader.get(path)
            assert value in values, value and value[:10]

        with Background(read) as reading:
            writes = 0
            until = time.monotonic() + SECONDS
            while (writes < 60 or reading.steps < 60) and not reading.error and time.monotonic() < until:
                for value in values:
                    tree.put(path, value)
                    writes += 1
        assert reading.steps >= 60

    def test_readers_see_the_value_while_a_leaf_becomes_a_folder(self, tree: Tree, open_another: Open) -> None:
        reader = open_another()
        for number in range(20):
            path = f"/a/{number}"
            tree.put(path, b"value")

            def read(path: str = path) -> None:
                assert reader.get(path) == b"value"

            with Background(read):
                tree.put(f"{path}/child", b"")

    def test_many_threads(self, tree: Tree) -> None:
        failed: list[Exception] = []
        created: list[int] = []

        def work(worker: int) -> None:
            try:
                for number in range(10):
                    tree.put(f"/shared/{worker}/{number}", b"%d" % number)
                    tree.put("/shared", b"%d" % worker)
                    try:
                        tree.create(f"/once/{number}", b"")
                        created.append(number)
                    except NodeExists:
                        pass
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert tree.children("/shared") == ["0", "1", "2", "3"]
        assert sorted(created) == list(range(10))

    def test_watch(self, tree: Tree, open_another: Open) -> None:
        calls = threading.Semaphore(0)
        tree.watch("/w/later", calls.release)  # it does not exist yet
        other = open_another()
        other.put("/w/later/a", b"")
        assert calls.acquire(timeout=SECONDS)
        wait_until(lambda: tree.children("/w/later") == ["a"])
        for change in (
            lambda: other.put("/w/later/b", b""),
            lambda: other.delete("/w/later/a"),
            lambda: other.delete("/w/later"),
            lambda: other.put("/w/later/c", b""),
        ):
            while calls.acquire(blocking=False):
                pass
            change()
            assert calls.acquire(timeout=SECONDS)

    def test_a_watch_that_fails_goes_on(self, tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
        calls = threading.Semaphore(0)

        def fail() -> None:
            calls.release()
            raise ValueError("from the test")

        tree.watch("/w", fail)
        tree.put("/w/a", b"")
        assert calls.acquire(timeout=SECONDS)
        wait_until(lambda: "from the test" in caplog.text)
        while calls.acquire(blocking=False):
            pass
        tree.put("/w/b", b"")
        assert calls.acquire(timeout=SECONDS)

    def test_a_watch_may_use_and_close_its_tree(self, tree: Tree) -> None:
        seen: list[list[str]] = []
        closed = threading.Event()

        def look() -> None:
            seen.append(tree.children("/w"))
            tree.close()
            closed.set()

        tree.watch("/w", look)
        tree.put("/w/a", b"")
        assert closed.wait(SECONDS)
        assert seen == [["a"]]

    def test_ephemeral(self, kind: str, tree: Tree, open_another: Open) -> None:
        skip_without_ephemerals(kind)
        other = open_another()
        tree.create("/ids/1", b"one", ephemeral=True)
        other.create("/ids/2", b"two", ephemeral=True)
        for one in (tree, other):
            assert one.children("/ids") == ["1", "2"]
            assert (one.get("/ids/1"), one.get("/ids/2")) == (b"one", b"two")
            for again in (True, False):
                with pytest.raises(NodeExists, match="/ids/1"):
                    one.create("/ids/1", b"", ephemeral=again)
            with pytest.raises(DirectoryError, match="ephemeral"):
                one.put("/ids/1/below", b"")
        tree.put("/ids/1", b"changed")
        assert other.get("/ids/1") == b"changed"
        calls = threading.Semaphore(0)
        other.watch("/ids", calls.release)
        tree.close()
        assert calls.acquire(timeout=SECONDS)
        wait_until(lambda: other.children("/ids") == ["2"])
        assert other.get("/ids/1") is None
        other.create("/ids/1", b"mine", ephemeral=True)
        other.delete("/ids/1")
        assert other.children("/ids") == ["2"]
        other.put("/ids/1", b"for good")
        other.close()
        assert open_another().children("/ids") == ["1"]

    def test_no_ephemerals(self, kind: str, tree: Tree) -> None:
        if not kind.startswith("arrow"):
            pytest.skip("has ephemeral nodes")
        with pytest.raises(DirectoryError, match="ephemeral"):
            tree.create("/ids/1", b"", ephemeral=True)
        assert tree.get("/ids/1") is None

    def test_an_ephemeral_node_ends_with_a_killed_process(
        self, kind: str, tree: Tree, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        skip_without_ephemerals(kind)
        if kind == "memory":
            pytest.skip("is of one process")
        uri = str(tmp_path)
        if kind == "zookeeper":
            uri = f"zookeeper://{request.getfixturevalue('zookeeper').connect}/{tmp_path.name}/{kind}"
        calls = threading.Semaphore(0)
        with creator(uri, "/ids/1") as process:
            assert tree.get("/ids/1") == b"child"
            with pytest.raises(NodeExists):
                tree.create("/ids/1", b"mine", ephemeral=True)
            if kind == "local":
                with pytest.raises(DirectoryError, match="another process"):
                    tree.put("/ids/1", b"mine")
            tree.watch("/ids", calls.release)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert calls.acquire(timeout=SECONDS)
        wait_until(lambda: tree.get("/ids/1") is None)
        assert tree.children("/ids") == []
        tree.create("/ids/1", b"mine", ephemeral=True)
        assert tree.get("/ids/1") == b"mine"


def creator(uri: str, path: str) -> subprocess.Popen[bytes]:
    """A process that has made the ephemeral node `path` and holds it."""
    script = f"""
        import sys
        from spark_klog.directories.tree import open_tree
        tree = open_tree({uri!r})
        tree.create({path!r}, b"child", ephemeral=True)
        print("made", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"made\n"
    return process


class TestFiles:
    def test_layout(self, tmp_path: Path) -> None:
        tree = FileTree(LocalFiles(tmp_path))
        tree.put("/consumers/g/offsets/flights/0", b"1234")
        tree.put("/brokers/topics/flights", b"{}")
        tree.create("/brokers/ids/0", b"{}", ephemeral=True)
        assert (tmp_path / "consumers/g/offsets/flights/0").read_text() == "1234"
        assert (tmp_path / "brokers/topics/flights").read_text() == "{}"
        assert (tmp_path / "brokers/ids/0.ephemeral").read_text() == "{}"
        tree.put("/brokers/topics/flights/partitions/0/state", b"s")
        assert (tmp_path / "brokers/topics/flights.value").read_text() == "{}"
        assert (tmp_path / "brokers/topics/flights/partitions/0/state").read_text() == "s"
        tree.close()
        assert sorted(os.listdir(tmp_path)) == [".lock", "brokers", "consumers"]
        assert not (tmp_path / "brokers/ids/0.ephemeral").exists()

    def test_files_that_people_put_there(self, tmp_path: Path) -> None:
        tree = FileTree(LocalFiles(tmp_path))
        (tmp_path / "consumers").mkdir()
        (tmp_path / "consumers/x").write_text("7\n")
        (tmp_path / "consumers/.DS_Store").write_text("")
        assert tree.children("/consumers") == ["x"]
        assert tree.get("/consumers/x") == b"7\n"
        tree.close()

    def test_a_writer_killed_between_the_two_steps(self, tmp_path: Path) -> None:
        (tmp_path / "t.value").write_text("moved")
        tree = FileTree(LocalFiles(tmp_path))
        assert tree.get("/t") == b"moved"
        assert tree.children("/") == ["t"]
        with pytest.raises(NodeExists):
            tree.create("/t", b"")
        tree.put("/t", b"newer")
        assert tree.get("/t") == b"newer"
        tree.put("/t/child", b"")
        assert tree.get("/t") == b"newer"
        tree.delete("/t")
        assert (tree.get("/t"), tree.children("/")) == (None, [])
        tree.close()

    def test_left_temporary_files(self, tmp_path: Path) -> None:
        (tmp_path / ".tmp-0").write_text("half")
        tree = FileTree(LocalFiles(tmp_path))
        assert tree.children("/") == []
        assert not (tmp_path / ".tmp-0").exists()
        tree.close()

    def test_a_failed_write_leaves_the_old_value(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tree = FileTree(LocalFiles(tmp_path))
        tree.put("/a", b"old")

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(DirectoryError, match=r"cannot write /a under .*no space left"):
                tree.put("/a", b"new")
        assert tree.get("/a") == b"old"
        assert sorted(os.listdir(tmp_path)) == [".lock", "a"]
        tree.close()

    def test_a_forked_child_does_not_keep_nodes_alive(self, tmp_path: Path) -> None:
        script = f"""
            import os, sys
            from spark_klog.directories.tree import open_tree
            tree = open_tree({str(tmp_path)!r})
            tree.create("/ids/1", b"x", ephemeral=True)
            if os.fork() == 0:
                tree.close()  # takes nothing from the parent
                assert open_tree({str(tmp_path)!r}).get("/ids/1") == b"x"
                print("made", flush=True)
                sys.stdin.read()
                os._exit(0)
            os.wait()
        """
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"made\n"
            tree = open_tree(str(tmp_path))
            assert tree.get("/ids/1") == b"x"
            process.kill()  # the child lives on until its standard input ends
            process.wait()
            wait_until(lambda: tree.get("/ids/1") is None)
            tree.close()

    def test_many_processes(self, tmp_path: Path) -> None:
        script = f"""
            from spark_klog.directories.tree import NodeExists, open_tree
            tree = open_tree({str(tmp_path)!r})
            for number in range(50):
                tree.put(f"/n/{{number % 5}}/deep/{{number}}", b"x")
                tree.put(f"/n/{{number % 5}}", b"value")
                try:
                    tree.create(f"/once/{{number}}", b"")
                    print(number)
                except NodeExists:
                    pass
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        created = [line for one in processes for line in one.communicate(timeout=SECONDS)[0].split()]
        assert [one.returncode for one in processes] == [0, 0, 0]
        assert sorted(map(int, created)) == list(range(50))
        tree = open_tree(tmp_path.as_uri())
        assert [tree.get(f"/n/{number}") for number in range(5)] == [b"value"] * 5
        tree.close()

    def test_a_reader_that_reads_ephemerals_while_they_are_rewritten(self, tmp_path: Path) -> None:
        tree, reader = open_tree(str(tmp_path)), open_tree(str(tmp_path))
        tree.create("/ids/1", b"0", ephemeral=True)

        def read() -> None:
            assert reader.get("/ids/1") is not None
            assert reader.children("/ids") == ["1"]

        with Background(read):
            for number in range(100):
                tree.put("/ids/1", b"%d" % number)
        tree.close()
        reader.close()


class TestOpen:
    def test_local(self, tmp_path: Path) -> None:
        for uri in (str(tmp_path), tmp_path.as_uri(), f"file:{tmp_path}"):
            tree = open_tree(f"{uri}/with space" if ":" not in uri else f"{uri}/with%20space")
            tree.put("/a", b"1")
            tree.close()
        assert (tmp_path / "with space/a").read_text() == "1"

    def test_arrow(self) -> None:
        tree = open_tree("mock:///some/base")
        tree.put("/a/b", b"1")
        assert tree.get("/a/b") == b"1"
        tree.close()

    @pytest.mark.parametrize(
        "uri",
        [
            "",
            "bogus://x",
            "zookeeper:",
            "zookeeper://",
            "zookeeper:///x",
            "zookeeper://h:port",
            "file://host/x",
        ],
    )
    def test_what_names_no_directories(self, uri: str) -> None:
        with pytest.raises(ConfigError):
            open_tree(uri)

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DirectoryError, match="file"):
            open_tree(str(tmp_path / "file"))


class TestZooKeeper:
    def test_no_server(self, capfd: pytest.CaptureFixture[str]) -> None:
        address = f"127.0.0.1:{free_port()}"
        start = time.monotonic()
        with pytest.raises(DirectoryError, match=f"no ZooKeeper answers at {address}/x"):
            ZooKeeperTree(f"{address}/x", session_timeout=1.0)
        assert time.monotonic() - start < 10
        assert "Traceback" not in "".join(capfd.readouterr())

    def test_chroot(self, zookeeper: ZooKeeperServer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            inner = ZooKeeperTree(f"{zookeeper.connect}/chroot/of/test/")
            outer = ZooKeeperTree(zookeeper.connect)
        inner.put("/a", b"1")
        assert outer.get("/chroot/of/test/a") == b"1"
        assert inner.children("/") == ["a"]
        outer.delete("/chroot")
        inner.close()
        outer.close()

    def test_a_node_with_null(self, zookeeper: ZooKeeperServer) -> None:
        from kazoo.client import KazooClient

        client = KazooClient(zookeeper.connect)
        client.start()
        client.create("/null", None)
        tree = ZooKeeperTree(zookeeper.connect)
        assert tree.get("/null") == b""
        tree.close()
        client.stop()
        client.close()

    def test_session_expiry(self, zookeeper: ZooKeeperServer) -> None:
        tree, other = (
            ZooKeeperTree(f"{zookeeper.connect}/expiry"),
            ZooKeeperTree(f"{zookeeper.connect}/expiry"),
        )
        calls = threading.Semaphore(0)
        tree.create("/ids/1", b"one", ephemeral=True)
        tree.create("/ids/2", b"two", ephemeral=True)
        tree.put("/ids/2", b"changed")
        tree.create("/ids/3", b"three", ephemeral=True)
        tree.delete("/ids/3")
        tree.watch("/w", calls.release)
        before = expire(tree, zookeeper)
        assert calls.acquire(timeout=SECONDS)
        wait_until(lambda: other.children("/ids") == ["1", "2"])
        assert (other.get("/ids/1"), other.get("/ids/2")) == (b"one", b"changed")
        assert tree._client.client_id[0] != before
        while calls.acquire(blocking=False):
            pass
        other.put("/w/a", b"")  # the watch is set in the new session
        assert calls.acquire(timeout=SECONDS)
        tree.close()
        assert other.children("/ids") == []
        other.close()

    def test_operations_during_session_expiry(self, zookeeper: ZooKeeperServer) -> None:
        tree = ZooKeeperTree(f"{zookeeper.connect}/expiry2")
        tree.create("/ids/1", b"0", ephemeral=True)
        expire(tree, zookeeper)
        tree.put("/ids/1", b"1")  # whoever comes first, this or the restoring: it stays ephemeral
        tree.put("/a", b"1")
        assert tree.get("/ids/1") == b"1"
        tree.close()
        other = ZooKeeperTree(f"{zookeeper.connect}/expiry2")
        assert other.get("/ids/1") is None
        assert other.get("/a") == b"1"
        other.close()

    def test_another_takes_the_node_meanwhile(
        self, zookeeper: ZooKeeperServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        tree, other = ZooKeeperTree(f"{zookeeper.connect}/taken"), ZooKeeperTree(f"{zookeeper.connect}/taken")
        tree.create("/ids/1", b"one", ephemeral=True)
        with tree._ephemeral_lock:  # holds up the restoring
            expire(tree, zookeeper)
            other.create("/ids/1", b"other", ephemeral=True)
        wait_until(lambda: "another has taken /ids/1" in caplog.text)
        assert tree.get("/ids/1") == b"other"
        tree.close()
        other.close()

    def test_restart_of_the_server(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        with ZooKeeperServer(tmp_path) as server:
            tree = ZooKeeperTree(f"{server.connect}/x", session_timeout=SECONDS)
            calls = threading.Semaphore(0)
            tree.put("/a", b"1")
            tree.create("/ids/1", b"one", ephemeral=True)
            tree.watch("/a", calls.release)
            server.kill()
            wait_until(lambda: not tree._client.connected)
            waiting = threading.Thread(target=tree.put, args=("/a", b"2"))
            waiting.start()
            server.start()
            waiting.join(SECONDS)
            assert not waiting.is_alive()
            assert tree.get("/a") == b"2"
            assert tree.get("/ids/1") == b"one"
            assert calls.acquire(timeout=SECONDS)
            while calls.acquire(blocking=False):
                pass
            tree.put("/a/child", b"")
            assert calls.acquire(timeout=SECONDS)
            tree.close()
        assert "Traceback" not in caplog.text

    def test_a_server_that_stays_away(self, tmp_path: Path) -> None:
        with ZooKeeperServer(tmp_path) as server:
            tree = ZooKeeperTree(server.connect)
            tree.put("/a", b"1")
            tree._operation_seconds = 1.0
        with pytest.raises(DirectoryError, match=f"/a: no answer from ZooKeeper {server.connect} in 1 s"):
            tree.get("/a")
        tree.close()


def expire(tree: ZooKeeperTree, server: ZooKeeperServer) -> int:
    """End the session of `tree` on the server: a second connection takes the session over and closes it."""
    from kazoo.client import KazooClient

    identity = tree._client.client_id
    thief = KazooClient(server.connect, client_id=identity)
    thief.start()
    thief.stop()
    thief.close()
    session: int = identity[0]
    wait_until(lambda: tree._client.client_id is not None and tree._client.client_id[0] not in (None, session))
    return session
