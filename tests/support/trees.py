"""Support for tests of trees: waiting, a background thread, processes and file systems."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

from pyarrow import fs

from spark_klog.trees.arrow_files import ArrowFiles
from spark_klog.trees.tree import Tree
from spark_klog.trees.zookeeper import ZooKeeperTree
from tests.support.servers.kafka import ZooKeeperServer
from tests.support.waiting import wait_until

SECONDS = 30.0
#: Kinds of trees that tests/directories/conftest.py opens: with ephemeral nodes, and those of Arrow's file systems.
EPHEMERAL_KINDS = ["memory", "local", "zookeeper"]
#: The clock of the last one stands still.
ARROW_KINDS = ["arrow-local", "arrow-rigid", "arrow-mock"]
Open = Callable[[], Tree]


class Background:
    """Call `step` repeatedly in a thread until the block ends; the block then raises what `step` raised."""

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
        wait_until(lambda: self.steps or self.error, seconds=SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


class FastArrowFiles(ArrowFiles):
    poll_seconds = 0.05


class RigidFileSystem:
    """A local file system whose move does not overwrite a file, as in HDFS."""

    type_name = "rigid"

    def __init__(self) -> None:
        self._fs = fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def move(self, source: str, target: str) -> None:
        if self._fs.get_file_info(target).type != fs.FileType.NotFound:
            raise OSError(errno.EEXIST, "target exists", target)
        self._fs.move(source, target)


def creator(uri: str, path: str) -> subprocess.Popen[bytes]:
    """Start a process that creates the ephemeral node `path` and holds it."""
    script = f"""
        import sys
        from spark_klog.trees.opening import open_tree
        tree = open_tree({uri!r}, session_timeout=3.0)
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


def expire(tree: ZooKeeperTree, server: ZooKeeperServer) -> int:
    """Expire the session of `tree` (a second connection takes it over and closes it); return its id."""
    from kazoo.client import KazooClient

    identity = tree._client.client_id
    thief = KazooClient(server.connect, client_id=identity)
    thief.start()
    thief.stop()
    thief.close()
    session: int = identity[0]
    wait_until(
        lambda: tree._client.client_id is not None and tree._client.client_id[0] not in (None, session), seconds=SECONDS
    )
    return session
