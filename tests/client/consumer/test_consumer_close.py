"""Duration and log messages of `Consumer.close` if the broker is gone or silent."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from spark_klog.base.names import TopicPartition
from spark_klog.client import Consumer, RebalanceListener
from spark_klog.errors import ConsumerClosed, KlogError
from tests.support.clients.consumers import SECONDS, Server, short
from tests.support.servers.broker import KlogBroker

pytestmark = pytest.mark.usefixtures("driver")

#: Seconds: well above the time that close should take, and below its timeout.
_MIDDLE = 20.0


def _member(server: Server, **settings: bool) -> Consumer:
    """A group member, with heartbeats, that has read a record."""
    topic = server.topic()
    server.send(topic, short(1))
    consumer = server.consumer(group_id=topic, auto_offset_reset="earliest", **settings)
    consumer.subscribe([topic])
    deadline = time.monotonic() + SECONDS
    while not consumer.poll(1.0):
        assert time.monotonic() < deadline
    return consumer


@pytest.mark.parametrize("commits", [True, False])
def test_a_broker_that_is_gone_is_not_waited_for(
    commits: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with KlogBroker(tmp_path) as broker:
        consumer = _member(Server(broker.bootstrap_servers, None), enable_auto_commit=commits)
        broker.kill()
        begin = time.monotonic()
        consumer.close()
        assert time.monotonic() - begin < _MIDDLE  # the timeout is 30 s
    said = [text for text in caplog.messages if "not committed" in text]
    assert len(said) == commits
    assert all(broker.bootstrap_servers in text for text in said)


def test_a_broker_that_comes_back_gets_the_commit(tmp_path: Path) -> None:
    """Close connects again to commit."""
    with KlogBroker(tmp_path) as broker:
        server = Server(broker.bootstrap_servers, None)
        consumer = _member(server)
        ((topic, _),) = consumer.assignment()
        broker.kill()
        broker.start()
        consumer.close()
        with server.consumer(group_id=topic) as another:
            assert another.committed([(topic, 0)])[topic, 0].offset == 1


def test_a_silent_broker_is_waited_for_up_to_the_timeout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with KlogBroker(tmp_path) as broker:
        consumer = _member(Server(broker.bootstrap_servers, None))
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            consumer.close(0.5)
            assert time.monotonic() - begin < _MIDDLE
        finally:
            os.kill(broker.pid, signal.SIGCONT)
    said = [text for text in caplog.messages if "not committed" in text or "leaving group" in text]
    assert said
    assert not any("(request.timeout.ms)" in text for text in said)
    assert any("the timeout of close" in text for text in said)


def test_a_commit_by_the_listener_of_the_close_is_told(tmp_path: Path) -> None:
    """Though it is begun after all others have been waited for."""
    told: list[KlogError | None] = []

    class Listener(RebalanceListener):
        def on_revoked(self, partitions: list[TopicPartition]) -> None:
            consumer.commit_async(None, lambda _, error: told.append(error))

    with KlogBroker(tmp_path) as broker:
        consumer = _member(Server(broker.bootstrap_servers, None), enable_auto_commit=False)
        consumer.subscribe([consumer.assignment()[0][0]], Listener())
        consumer.close()
    assert told == [None]


@pytest.mark.parametrize("driver", ["thread"], indirect=True)
def test_two_threads_may_close_at_once(tmp_path: Path) -> None:
    """The end of a block closes the consumer while another thread's `close`, which ended the block, has just begun."""
    failures: list[BaseException] = []

    def close(consumer: Consumer) -> None:
        try:
            consumer.close()
        except BaseException as error:
            failures.append(error)

    def poll_until_closed(consumer: Consumer) -> None:
        closer = threading.Thread(target=close, args=(consumer,))
        try:
            with consumer:
                consumer.assign([])
                closer.start()
                while True:
                    consumer.poll(1.0)
        finally:
            closer.join(_MIDDLE)
            assert not closer.is_alive()

    with KlogBroker(tmp_path) as broker:
        for _ in range(20):
            consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers})
            with pytest.raises(ConsumerClosed):
                poll_until_closed(consumer)
    assert not failures
