"""Brokers that die during a transaction of the mirror, and a target that aborts it."""

from __future__ import annotations

import re
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import KlogError
from spark_klog.mirror import mirror as mirror_module
from spark_klog.mirror.mirror import Mirror, Session
from spark_klog.mirror.progress import progress_topic
from spark_klog.mirror.settings import MirrorSettings
from tests.support.clients.mirrors import SECONDS, read_topic
from tests.support.clients.topics import make_topic
from tests.support.waiting import wait_until

_PARTITIONS = 2
_PART = 200


@pytest.fixture
def source(server_dir: Path) -> Iterator[EmbeddedCluster]:
    """A source broker that the test may kill."""
    with EmbeddedCluster(data_dir=server_dir / "source") as running:
        yield running


@pytest.fixture
def target(server_dir: Path) -> Iterator[EmbeddedCluster]:
    """A target broker that the test may kill, and which aborts late transactions at once."""
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "100"}
    with EmbeddedCluster(data_dir=server_dir / "target", settings=settings) as running:
        yield running


def _send(servers: str, topic: str, first: int) -> None:
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(first, first + _PART):
            producer.send(topic, b"%d" % number, partition=number % _PARTITIONS)


class _Running(threading.Thread):
    """A mirror in a thread; `has` and `finish` raise its error."""

    def __init__(self, settings: MirrorSettings) -> None:
        super().__init__(daemon=True)
        self.mirror = Mirror(settings)
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self.mirror.run()
        except BaseException as error:
            self._error = error

    def has(self, records: int) -> bool:
        if self._error is not None:
            raise self._error
        return self.mirror.totals.records >= records

    def finish(self) -> None:
        self.mirror.stop()
        self.join(SECONDS)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error


def test_brokers_that_die_in_the_middle_of_a_transaction(source: EmbeddedCluster, target: EmbeddedCluster) -> None:
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(source.bootstrap_servers, topic, _PARTITIONS)
    _send(source.bootstrap_servers, topic, 0)
    first, second = ({"bootstrap.servers": side.bootstrap_servers} for side in (source, target))
    # the first commit is due long after the outage
    settings = MirrorSettings(
        first, second, name=topic, topics=re.compile(topic), exactly_once=True, commit_seconds=20.0
    )
    running = _Running(settings)
    running.start()
    sent = _PART
    for side in (target, source):
        wait_until(lambda: running.has(sent), seconds=SECONDS)  # noqa: B023 - called at once
        side.kill(0)
        side.restart(0)
        _send(source.bootstrap_servers, topic, sent)
        sent += _PART
    wait_until(lambda: running.has(sent), seconds=SECONDS)
    running.finish()
    before = read_topic(source.bootstrap_servers, topic, _PARTITIONS)
    assert sum(map(len, before)) == sent
    assert read_topic(target.bootstrap_servers, topic, _PARTITIONS) == before


def test_a_partition_without_a_leader_when_the_mirror_begins(
    server_dir: Path, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other partitions are copied meanwhile, and this one once its broker is back; nobody waits for a timeout."""
    monkeypatch.setattr(mirror_module, "_LAG_SECONDS", 0.2)
    topic = f"t-{uuid.uuid4().hex[:8]}"
    with EmbeddedCluster(brokers=2, data_dir=server_dir / "two") as two:
        servers = two.bootstrap_servers
        make_topic(servers, topic, _PARTITIONS)
        _send(servers, topic, 0)
        with Admin({"bootstrap.servers": servers}) as admin:
            leaders = {one.partition: one.leader for one in admin.describe_topic(topic).partitions}
        assert set(leaders.values()) == {0, 1}
        two.kill(1)
        first = {"bootstrap.servers": servers, "default.api.timeout.ms": "600000"}
        second = {"bootstrap.servers": target.bootstrap_servers}
        running = _Running(MirrorSettings(first, second, name=topic, topics=re.compile(topic), refresh_seconds=3600))
        running.start()
        wait_until(lambda: running.has(_PART // 2), seconds=SECONDS)
        assert running.mirror.totals.partitions == 1
        two.restart(1)
        wait_until(lambda: running.has(_PART), seconds=SECONDS)
        running.finish()
        assert running.mirror.totals.restarts == 0
        before = read_topic(servers, topic, _PARTITIONS)
    assert sum(map(len, before)) == _PART
    assert read_topic(target.bootstrap_servers, topic, _PARTITIONS) == before


def test_a_transaction_that_lasted_too_long(
    source: EmbeddedCluster, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target aborts it and fences the producer; the mirror restarts from its last commit."""
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(source.bootstrap_servers, topic, _PARTITIONS)
    _send(source.bootstrap_servers, topic, 0)
    first = {"bootstrap.servers": source.bootstrap_servers}
    second = {"bootstrap.servers": target.bootstrap_servers, "transaction.timeout.ms": "2000"}
    settings = MirrorSettings(
        first, second, name=topic, topics=re.compile(topic), exactly_once=True, commit_seconds=0.5
    )
    real, was_late = Session._commit, threading.Event()
    transaction = f"{progress_topic(topic)}-0"

    def commit_late(session: Session) -> None:
        if not was_late.is_set() and session.totals.records:
            with Admin({"bootstrap.servers": target.bootstrap_servers}) as admin:
                wait_until(
                    lambda: admin.describe_transactions([transaction]).check()[transaction].state == "CompleteAbort",
                    seconds=SECONDS,
                )
            was_late.set()
        real(session)

    monkeypatch.setattr(Session, "_commit", commit_late)
    running = _Running(settings)
    running.start()
    wait_until(lambda: running.has(2 * _PART), seconds=SECONDS)  # the count includes aborted records
    running.finish()
    assert running.mirror.totals.restarts
    assert read_topic(target.bootstrap_servers, topic, _PARTITIONS) == read_topic(
        source.bootstrap_servers, topic, _PARTITIONS
    )


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_cluster_that_does_not_answer_at_the_start(side: str, cluster: EmbeddedCluster) -> None:
    """The mirror fails, as other commands do: it does not wait for an address that may be a wrong one."""
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        absent = {"bootstrap.servers": f"127.0.0.1:{bound.getsockname()[1]}"}
        absent["socket.connection.setup.timeout.ms"] = "100"
        sides = {"source": {"bootstrap.servers": cluster.bootstrap_servers}, "target": absent}
        if side == "source":
            sides = {"source": absent, "target": sides["source"]}
        running = _Running(MirrorSettings(**sides, topics=re.compile("none")))
        running.start()
        running.join(SECONDS)
        running.mirror.stop()
        with pytest.raises(KlogError, match="no broker answers at 127"):
            running.finish()
        assert running.mirror.totals.restarts == 2
