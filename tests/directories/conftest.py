"""Every kind of tree, and a function that opens the same nodes again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from spark_klog.trees.files import FileTree
from spark_klog.trees.memory import MemoryTree
from spark_klog.trees.opening import open_tree
from spark_klog.trees.tree import Tree
from tests.support.servers.kafka import ZooKeeperServer
from tests.support.trees import ARROW_KINDS, EPHEMERAL_KINDS, FastArrowFiles, Open, RigidFileSystem


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper"), tick_ms=500) as server:
        yield server


@pytest.fixture(params=[*EPHEMERAL_KINDS, *ARROW_KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def open_another(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Return a function that opens trees over the same nodes."""
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
