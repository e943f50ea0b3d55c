"""The tree in a real ZooKeeper."""

from __future__ import annotations

import logging
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from spark_klog.errors import DirectoryError
from spark_klog.trees import zookeeper as zookeeper_module
from spark_klog.trees.zookeeper import Operation, ZooKeeperTree
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.servers.kafka import HOST, ZooKeeperServer, free_port
from tests.support.trees import SECONDS, expire
from tests.support.waiting import wait_until


class TestZooKeeper:
    def test_no_server(self, capfd: pytest.CaptureFixture[str]) -> None:
        address = f"127.0.0.1:{free_port()}"
        start = time.monotonic()
        with pytest.raises(DirectoryError, match=f"no ZooKeeper answers at {address}/x"):
            ZooKeeperTree(f"{address}/x", session_timeout=1.0)
        assert time.monotonic() - start < 10
        assert "Traceback" not in "".join(capfd.readouterr())

    def test_a_handshake_without_an_answer(self, zookeeper: ZooKeeperServer) -> None:
        """A server that has just started may swallow it; kazoo awaits it for the session timeout, and tries again."""
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((HOST, 0)))
            port = listener.getsockname()[1]

            def swallow() -> None:
                stack.enter_context(listener.accept()[0])
                listener.close()
                stack.enter_context(TcpProxy(port, int(zookeeper.connect.rpartition(":")[2]), seed=1))

            swallowing = threading.Thread(target=swallow)
            swallowing.start()
            tree = ZooKeeperTree(f"{HOST}:{port}/swallowed", session_timeout=1.0)
            swallowing.join()
            tree.put("/a", b"1")
            tree.close()

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
        wait_until(lambda: other.children("/ids") == ["1", "2"], seconds=30)
        assert (other.get("/ids/1"), other.get("/ids/2")) == (b"one", b"changed")
        assert tree._client.client_id[0] != before
        while calls.acquire(blocking=False):
            pass
        other.put("/w/a", b"")  # the new session has the watch
        assert calls.acquire(timeout=SECONDS)
        tree.close()
        assert other.children("/ids") == []
        other.close()

    def test_lease(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It holds while ZooKeeper answers and the clock goes on evenly, for the timeout that the server grants."""
        with ZooKeeperServer(tmp_path, tick_ms=100) as server:
            tree = ZooKeeperTree(server.connect, session_timeout=1000.0)
            lease = tree.lease()
            assert tree.lease() is lease
            wait_until(lambda: lease.holds)
            assert tree._session.timeout_seconds == pytest.approx(2.0)
            first = lease.session
            clocks = zookeeper_module._clocks
            with monkeypatch.context() as patch:  # as if the process had stood still
                patch.setattr(zookeeper_module, "_clocks", lambda: tuple(clock + 2 for clock in clocks()))
                patch.setattr(tree._client, "exists_async", lambda _: tree._client.handler.async_result())
                assert not lease.holds
                assert not lease.is_cut_off
            tree.close()

            tree = ZooKeeperTree(server.connect, session_timeout=2.0)
            lease = tree.lease()
            wait_until(lambda: lease.holds)
            assert lease.session != first
            session = lease.session
            expire(tree, server)
            wait_until(lambda: lease.session not in (None, session) and lease.holds)
            server.kill()
            wait_until(lambda: lease.is_cut_off and not lease.holds)
            server.start()
            wait_until(lambda: lease.holds and not lease.is_cut_off)
            tree.close()

    def test_a_beat_that_is_lost(self, zookeeper: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """kazoo has a moment in which it forgets a request: the lease goes on with the next one."""
        tree = ZooKeeperTree(f"{zookeeper.connect}/beats", session_timeout=1.0)
        exists, lost = tree._client.exists_async, []

        def exists_async(path: str) -> Any:
            lost.append(path)
            return tree._client.handler.async_result() if len(lost) == 1 else exists(path)

        monkeypatch.setattr(tree._client, "exists_async", exists_async)
        lease = tree.lease()
        wait_until(lambda: lease.holds)
        assert len(lost) > 1
        tree.close()

    def test_operations_during_session_expiry(self, zookeeper: ZooKeeperServer) -> None:
        tree = ZooKeeperTree(f"{zookeeper.connect}/expiry2")
        tree.create("/ids/1", b"0", ephemeral=True)
        expire(tree, zookeeper)
        tree.put("/ids/1", b"1")  # the node stays ephemeral, whether this or its restoration comes first
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
        with tree._ephemeral_lock:  # delays the restoration
            expire(tree, zookeeper)
            other.create("/ids/1", b"other", ephemeral=True)
        wait_until(lambda: "another process has created /ids/1" in caplog.text, seconds=30)
        assert tree.get("/ids/1") == b"other"
        tree.close()
        other.close()

    def test_a_server_that_starts_again_and_stays_away(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        with ZooKeeperServer(tmp_path) as server:
            tree = ZooKeeperTree(f"{server.connect}/x", session_timeout=SECONDS)
            calls = threading.Semaphore(0)
            tree.put("/a", b"1")
            tree.create("/ids/1", b"one", ephemeral=True)
            tree.watch("/a", calls.release)
            server.kill()
            wait_until(lambda: not tree._client.connected, seconds=30)
            waiting = threading.Thread(target=tree.put, args=("/a", b"2"))
            waiting.start()
            server.start()
            # a server that starts may swallow the handshake, which kazoo then awaits for the session timeout
            waiting.join(tree._session.operation_seconds)
            assert not waiting.is_alive()
            assert tree.get("/a") == b"2"
            assert tree.get("/ids/1") == b"one"
            assert calls.acquire(timeout=SECONDS)
            while calls.acquire(blocking=False):
                pass
            tree.put("/a/child", b"")
            assert calls.acquire(timeout=SECONDS)
            assert "Traceback" not in caplog.text
            tree._session.operation_seconds = 1.0
        with pytest.raises(DirectoryError, match=f"/a: no answer from ZooKeeper {server.connect}/x in 1 s"):
            tree.get("/a")
        tree.close()


class TestWhatAnotherDoesMeanwhile:
    """Another session changes nodes between the comparison of a value and the change that depends on it."""

    @pytest.fixture
    def trees(self, zookeeper: ZooKeeperServer) -> Iterator[tuple[ZooKeeperTree, ZooKeeperTree]]:
        chroot = f"{zookeeper.connect}/{uuid4().hex}"
        tree, other = ZooKeeperTree(chroot), ZooKeeperTree(chroot)
        for number in range(3):
            tree.put(f"/t/p/{number}/state", b"leader")
        assert tree.swap("/t", b"", b"1")
        yield tree, other
        tree.close()
        other.close()

    @staticmethod
    def _before_commit(tree: ZooKeeperTree, act: Callable[[], object]) -> None:
        """Call `act` once, before the first transaction is sent."""
        acts = [act]
        transact = tree._session.transact

        def late(path: str, operations: Sequence[Operation]) -> bool:
            if acts:
                acts.pop()()
            return transact(path, operations)

        tree._session.transact = late  # type: ignore[method-assign]

    @staticmethod
    def _make_again(other: ZooKeeperTree) -> None:
        other.delete("/t")
        other.create("/t", b"2")
        for number in range(3):
            other.put(f"/t/p/{number}/state", b"another's")

    @pytest.mark.parametrize(
        "change", [lambda tree: tree.delete_if("/t", b"1"), lambda tree: tree.swap("/t", b"1", b"3")]
    )
    @pytest.mark.parametrize("is_new", [False, True])
    def test_another_value(
        self, trees: tuple[ZooKeeperTree, ZooKeeperTree], is_new: bool, change: Callable[[ZooKeeperTree], bool]
    ) -> None:
        """Nothing changes if the value has changed, or if the node was created again with the same data version."""
        tree, other = trees
        if is_new:
            tree.delete("/t")
            tree.put("/t", b"1")
            tree.put_many({f"/t/p/{number}/state": b"leader" for number in range(3)})
        self._before_commit(tree, lambda: self._make_again(other) if is_new else other.swap("/t", b"1", b"2"))
        assert not change(tree)
        assert (other.get("/t"), other.children("/t"), other.children("/t/p")) == (b"2", ["p"], ["0", "1", "2"])
        assert other.get("/t/p/2/state") == (b"another's" if is_new else b"leader")

    def test_another_child(self, trees: tuple[ZooKeeperTree, ZooKeeperTree]) -> None:
        tree, other = trees
        self._before_commit(tree, lambda: other.put("/t/p/3/state", b""))
        assert tree.delete_if("/t", b"1")
        assert other.children("/") == []

    def test_another_deletion(self, trees: tuple[ZooKeeperTree, ZooKeeperTree]) -> None:
        tree, other = trees
        self._before_commit(tree, lambda: other.delete_if("/t", b"1"))
        tree.delete_if("/t", b"1")
        assert other.children("/") == []

    @pytest.mark.parametrize(
        "change", [lambda tree: tree.delete_if("/t", b"1"), lambda tree: tree.swap("/t", b"1", b"3")]
    )
    def test_a_lost_answer(
        self, trees: tuple[ZooKeeperTree, ZooKeeperTree], change: Callable[[ZooKeeperTree], bool]
    ) -> None:
        tree, other = trees
        transact = tree._session.transact
        tree._session.transact = lambda *args: not transact(*args)  # type: ignore[method-assign]
        assert change(tree)
        assert other.children("/t") == ([] if other.get("/t") is None else ["p"])

    def test_more_than_a_transaction_takes(
        self, trees: tuple[ZooKeeperTree, ZooKeeperTree], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree, other = trees
        monkeypatch.setattr(zookeeper_module, "_MAX_TRANSACTION_BYTES", 100)
        self._before_commit(tree, lambda: other.swap("/t", b"1", b"2"))
        assert not tree.delete_if("/t", b"1")
        assert other.children("/t/p") == ["0", "1", "2"]
        assert tree.delete_if("/t", b"2")
        assert other.children("/") == []

    def test_more_than_a_request_takes(self, trees: tuple[ZooKeeperTree, ZooKeeperTree]) -> None:
        """ZooKeeper rejects requests of more than 1 MiB; in one request these deletions would take 1.5 MB."""
        tree, other = trees
        tree.put_many({f"/t/{'n' * 10_000}/{number}": b"" for number in range(150)})
        assert tree.delete_if("/t", b"1")
        assert other.children("/") == []
