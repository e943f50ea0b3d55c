"""Members of classic groups that are busy for longer than session.timeout.ms while their group rebalances."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from spark_klog.client import Consumer
from spark_klog.client.consumer.classic_group import ClassicGroup
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CommitFailed
from tests.support.clients.consumers import SECONDS, Heard, Server, running, short
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")
STRATEGIES = ["cooperative-sticky", "range"]
#: Milliseconds of a session at our broker, and seconds for which a member is busy then.
SESSION, BUSY = 500, 1.0
_COUNT = 60


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = {"group.min.session.timeout.ms": "100", "group.initial.rebalance.delay.ms": "0"}
    with EmbeddedCluster(settings=settings) as cluster:
        yield Server(cluster.bootstrap_servers, None)


def _filled(server: Server) -> str:
    topic = server.topic(2)
    for partition in range(2):
        server.send(topic, short(_COUNT // 2, partition * _COUNT // 2), partition)
    return topic


def _member(server: Server, topic: str, strategy: str, heard: Heard, **more: Any) -> Consumer:
    given = {"auto_offset_reset": "earliest", "heartbeat_interval_ms": 100, "session_timeout_ms": SESSION, **more}
    consumer = server.consumer(group_id=f"g-{topic}", partition_assignment_strategy=strategy, **given)
    consumer.subscribe([topic], heard)
    return consumer


def _values(consumer: Consumer, timeout: float) -> list[int]:
    return [int(record.value or b"") for record in consumer.poll(timeout)]


@contextmanager
def _polling(consumer: Consumer) -> Iterator[list[int]]:
    """Have a thread poll the consumer, and close it at the end of the block; what it reads."""
    found: list[int] = []
    over = threading.Event()

    def poll() -> None:
        with consumer:
            while not over.is_set():
                found.extend(_values(consumer, 0.05))

    with ThreadPoolExecutor() as pool:
        polling = pool.submit(poll)
        try:
            yield found
        finally:
            over.set()
        polling.result()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _share(server: Server, strategy: str, session_ms: int, busy: float) -> None:
    """A member that polls between busy times alone hands partitions over to one that joins; both read all once."""
    topic, heard = _filled(server), Heard()
    more = {"session_timeout_ms": session_ms, "enable_auto_commit": False, "max_poll_records": 5}
    deadline = time.monotonic() + SECONDS + 10 * busy
    with _member(server, topic, strategy, heard, **more) as first:
        found: list[int] = []
        while not found:
            assert time.monotonic() < deadline
            found += _values(first, 0.1)
        first.commit()
        with _polling(_member(server, topic, strategy, Heard(), session_timeout_ms=session_ms)) as theirs:
            while len(first.assignment()) != 1 or len(found) + len(theirs) < _COUNT:
                assert time.monotonic() < deadline, (heard.calls, len(found), len(theirs))
                is_busy = len(first.assignment()) != 1
                records = _values(first, 0.0 if is_busy else 0.1)
                time.sleep(busy if is_busy else 0)
                if records:
                    first.commit()
                found += records
            assert sorted(found + theirs) == list(range(_COUNT))
    assert [call for call, _ in heard.calls if call == "lost"] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_busy_member_stays(server: Server, strategy: str) -> None:
    _share(server, strategy, SESSION, BUSY)


@pytest.mark.peer
@pytest.mark.test_all("long")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_busy_member_stays_at_kafka(strategy: str, module_server_dir: Path, shared_kafkas: SharedKafkas) -> None:
    with running(NEWEST, module_server_dir, shared_kafkas) as kafka:
        _share(kafka, strategy, 6000, 8.0)


@pytest.mark.parametrize("ends", ["closes", "unsubscribes", "is late"])
def test_a_busy_member_ends(server: Server, ends: str) -> None:
    """Others rebalance twice while it is busy; it commits in the newest generation, unless it polls too late."""
    topic, heard = _filled(server), Heard()
    more = {"max_poll_records": 5, "max_poll_interval_ms": 1500 if ends == "is late" else 300_000}
    with _member(server, topic, "cooperative-sticky", heard, **more) as first:
        found: list[int] = []
        while not found:
            found += _values(first, 0.1)
        heard_second = Heard()
        with _polling(_member(server, topic, "cooperative-sticky", heard_second)) as second:
            heartbeats = cast("ClassicGroup", first._group)._heartbeats
            _until(lambda: heartbeats._news is not None)
            found += _values(first, 0.0)
            assert heartbeats.is_joining
            _until(lambda: bool(heard_second.calls))
            with _polling(_member(server, topic, "cooperative-sticky", Heard())) as third:
                time.sleep(BUSY)
                assert [call for call, _ in heard.calls] == ["assigned"], heard.calls
                if ends == "closes":
                    first.close()
                elif ends == "unsubscribes":
                    first.unsubscribe()
                _until(lambda: len(set(found + second + third)) == _COUNT)
                if ends != "is late":
                    assert sorted(found + second + third) == list(range(_COUNT))
                    assert [call for call, _ in heard.calls] == ["assigned", "revoked"]
                else:
                    first.poll(0.0)
                    assert [call for call, _ in heard.calls] == ["assigned", "lost"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_commit_before_the_new_assignment_is_known(server: Server, strategy: str) -> None:
    """A cooperative member still has all its partitions; others may read those of an eager one."""
    topic = _filled(server)
    offsets = {(topic, partition): 1 for partition in range(2)}
    with _member(server, topic, strategy, Heard(), enable_auto_commit=False) as first:
        while not first.assignment():
            first.poll(0.1)
        heard = Heard()
        with _polling(_member(server, topic, strategy, heard)):
            heartbeats = cast("ClassicGroup", first._group)._heartbeats
            _until(lambda: heartbeats._news is not None)
            first.poll(0.0)
            _until(lambda: bool(heard.calls))
            if strategy == "range":
                with pytest.raises(CommitFailed, match="the group has rebalanced"):
                    first.commit(offsets)
            else:
                first.commit(offsets)


def test_a_member_that_joins_is_closed_at_once(server: Server) -> None:
    """While the group waits for another one, which does not poll."""
    topic = _filled(server)
    with _member(server, topic, "range", Heard()) as silent:
        while not silent.assignment():
            silent.poll(0.1)
        member = _member(server, topic, "range", Heard())
        member.poll(0.3)
        begin = time.monotonic()
        member.close()
        assert time.monotonic() < begin + 2
