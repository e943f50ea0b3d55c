"""Kafka Streams 4.4 at our broker: exactly once while it and the broker are killed, and its own group protocol."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.clients.streams import APPLICATION, WordCount
from tests.support.servers.broker import KlogBroker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]

_PARTITIONS = 2
_EXACTLY_ONCE = {
    "processing_guarantee": "exactly_once_v2",
    "commit_interval_ms": 100,
    "statestore_cache_max_bytes": 0,  # so that each count is written
    "consumer_session_timeout_ms": 6000,
    "heartbeat_interval_ms": 300,
}
_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(server_dir) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap_servers})
        for made in admin.create_topics([NewTopic(name, _PARTITIONS, 1) for name in ("lines", "counts")]).values():
            made.result(30)
        yield running


@pytest.fixture
def started(broker: KlogBroker, server_dir: Path) -> Iterator[Callable[..., WordCount]]:
    running: list[WordCount] = []

    def start(name: str, **settings: object) -> WordCount:
        servers, log = broker.bootstrap_servers, server_dir / f"{name}.log"
        application = WordCount(servers, server_dir / name, log, **settings)
        running.append(application)
        application.start()
        return application

    yield start
    for application in running:
        application.close()


class Lines:
    """The input: lines of some words each."""

    def __init__(self, servers: str) -> None:
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
        self._seed = random.Random(44)
        self.words: Counter[str] = Counter()

    def add(self, count: int) -> None:
        for number in range(count):
            words = self._seed.choices(_WORDS, k=5)
            self.words.update(words)
            self._producer.produce("lines", " ".join(words), partition=number % _PARTITIONS)
        assert self._producer.flush(30) == 0


class Counts:
    """What read_committed consumers see of the output: for each word its counts, in order."""

    def __init__(self, servers: str) -> None:
        settings = {"group.id": "reader", "isolation.level": "read_committed", "enable.auto.commit": False}
        self._consumer = Consumer({"bootstrap.servers": servers, "log_level": 0, **settings})
        self._consumer.assign([TopicPartition("counts", number, 0) for number in range(_PARTITIONS)])
        self.seen: dict[str, list[int]] = defaultdict(list)

    def total(self) -> int:
        for message in self._consumer.consume(1000, 0.1):
            if message.error() is None:
                self.seen[(message.key() or b"").decode()].append(int(message.value() or b""))
        return sum(map(len, self.seen.values()))

    def close(self) -> None:
        self._consumer.close()


def test_each_word_is_counted_once_whatever_is_killed(broker: KlogBroker, started: Callable[..., WordCount]) -> None:
    """The counts of a word are 1, 2, 3 and so on, without a gap or a repetition."""
    lines, counts = Lines(broker.bootstrap_servers), Counts(broker.bootstrap_servers)

    def wait_for(total: int) -> None:
        wait_until(lambda: counts.total() >= total, f"{total} counts", seconds=90)

    application = started("first", **_EXACTLY_ONCE)
    lines.add(200)
    wait_for(300)
    application.kill()
    lines.add(200)
    application.start()
    wait_for(1200)
    broker.kill()
    broker.start()
    lines.add(200)
    other = started("other", **_EXACTLY_ONCE)
    wait_until(lambda: "RUNNING" in other.states, "the second instance", seconds=60)
    lines.add(200)
    wait_for(3500)
    application.kill()
    wait_for(lines.words.total())
    wait_until(lambda: counts.total() >= lines.words.total(), "the last counts", seconds=10)
    assert {word: seen[-1] for word, seen in counts.seen.items()} == lines.words
    assert all(seen == list(range(1, len(seen) + 1)) for seen in counts.seen.values())
    assert not [state for state in application.states + other.states if state.startswith("FAILED")]
    counts.close()
    names = AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=30).topics
    assert {name.rpartition("-")[2] for name in names if name.startswith(APPLICATION)} == {"changelog", "repartition"}


def test_the_protocol_of_streams_is_refused_by_name(broker: KlogBroker, started: Callable[..., WordCount]) -> None:
    """group.protocol=streams (KIP-1071) needs an API that the broker does not report: the application says so."""
    application = started("streams", group_protocol="streams")
    wait_until(lambda: application.states[-1:] == ["ERROR"], "the refusal", seconds=60)
    (failure,) = {state for state in application.states if state.startswith("FAILED")}
    assert "UnsupportedVersion" in failure
