"""Two processes of one mirror: the later one goes on, the earlier one ends, and no record is copied twice."""

from __future__ import annotations

import re
import threading
import uuid
from typing import Any

import pytest

from spark_klog.client import Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import KlogError, MirrorFenced, ProducerFenced
from spark_klog.mirror import target as target_module
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.progress import OWNER
from spark_klog.mirror.settings import MirrorSettings
from tests.support.clients.mirrors import SECONDS, read_topic
from tests.support.clients.topics import make_topic
from tests.support.waiting import wait_until


class _Process(threading.Thread):
    def __init__(self, settings: MirrorSettings) -> None:
        super().__init__(daemon=True)
        self.mirror, self.error = Mirror(settings), None
        self.start()

    error: KlogError | None

    def run(self) -> None:
        try:
            self.mirror.run()
        except KlogError as error:
            self.error = error

    def wait_for(self, records: int) -> None:
        wait_until(lambda: self.error is not None or self.mirror.totals.records >= records, seconds=SECONDS)
        assert self.error is None


@pytest.mark.parametrize(
    ("first", "second"),
    [(False, False), (True, True)],
)
def test_the_later_process_goes_on(
    first: bool, second: bool, cluster: EmbeddedCluster, target: EmbeddedCluster
) -> None:
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(cluster.bootstrap_servers, topic, 1)
    sides = {"bootstrap.servers": cluster.bootstrap_servers}, {"bootstrap.servers": target.bootstrap_servers}

    def process(is_exact: bool) -> _Process:
        more: dict[str, Any] = {"exactly_once": is_exact, "commit_seconds": 0.3}
        return _Process(MirrorSettings(*sides, name=topic, topics=re.compile(topic), **more))

    values = [b"%d" % number for number in range(3000)]
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        old = process(first)
        for value in values[:1000]:
            producer.send(topic, value)
        producer.flush()
        old.wait_for(1000)
        new = process(second)
        for value in values[1000:2000]:
            producer.send(topic, value)
        producer.flush()
        old.join(SECONDS)
        assert isinstance(old.error, ProducerFenced if first and second else MirrorFenced)
        for value in values[2000:]:
            producer.send(topic, value)
        producer.flush()
    # records of an aborted transaction count as copied
    wait_until(lambda: len(read_topic(target.bootstrap_servers, topic, 1)[0]) >= len(values), seconds=SECONDS)
    new.mirror.stop()
    new.join(SECONDS)
    assert new.error is None
    assert [seen.value for seen in read_topic(target.bootstrap_servers, topic, 1)[0]] == values


def test_two_that_begin_at_the_same_moment(
    cluster: EmbeddedCluster, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one has looked before the other one claims, and claims when that one copies already."""
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(cluster.bootstrap_servers, topic, 1)
    sides = {"bootstrap.servers": cluster.bootstrap_servers}, {"bootstrap.servers": target.bootstrap_servers}
    settings = MirrorSettings(*sides, name=topic, topics=re.compile(topic), commit_seconds=0.3)
    real = target_module.note_record
    others: list[Any] = []

    def note_record(kind: int, text: str) -> tuple[bytes, bytes]:
        if kind == OWNER and not others:
            others.append(None)
            others[0] = _Process(settings)
            others[0].wait_for(1)
        return real(kind, text)

    monkeypatch.setattr(target_module, "note_record", note_record)
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        producer.send(topic, b"0").result(SECONDS)
        later = _Process(settings)
        wait_until(lambda: bool(others) and others[0] is not None, seconds=SECONDS)
        values = [b"0"]
        while others[0].is_alive() and len(values) < 10_000:
            values.append(b"%d" % len(values))
            producer.send(topic, values[-1]).result(SECONDS)
    assert isinstance(others[0].error, MirrorFenced)
    later.wait_for(1)
    wait_until(lambda: len(read_topic(target.bootstrap_servers, topic, 1)[0]) >= len(values), seconds=SECONDS)
    later.mirror.stop()
    later.join(SECONDS)
    assert later.error is None
    assert [seen.value for seen in read_topic(target.bootstrap_servers, topic, 1)[0]] == values
