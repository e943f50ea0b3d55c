"""Trees on a file system, and how URIs open them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from spark_klog.errors import ConfigError, DirectoryError
from spark_klog.trees.files import FileTree, LocalFiles
from spark_klog.trees.opening import open_tree
from spark_klog.trees.tree import NodeExists
from tests.support.trees import SECONDS, Background
from tests.support.waiting import wait_until


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
            from spark_klog.trees.opening import open_tree
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
            process.kill()  # the child lives until its standard input ends
            process.wait()
            wait_until(lambda: tree.get("/ids/1") is None, seconds=30)
            tree.close()

    def test_many_processes(self, tmp_path: Path) -> None:
        script = f"""
            from spark_klog.trees.opening import open_tree
            from spark_klog.trees.tree import NodeExists
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
        """A URI is taken literally, as by Hadoop's Path, which does not decode it."""
        for number, uri in enumerate((str(tmp_path), f"file://{tmp_path}", f"File:{tmp_path}")):
            tree = open_tree(f"{uri}/with space, %20, # and ?")
            tree.put("/a", b"%d" % number)
            tree.close()
            assert (tmp_path / "with space, %20, # and ?/a").read_text() == f"{number}"

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
            "file:x",
        ],
    )
    def test_what_names_no_directories(self, uri: str) -> None:
        with pytest.raises(ConfigError):
            open_tree(uri)

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DirectoryError, match="file"):
            open_tree(str(tmp_path / "file"))
