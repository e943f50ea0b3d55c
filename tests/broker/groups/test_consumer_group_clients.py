"""Members of four clients in one group of KIP-848: Java 4.4, librdkafka, franz-go and ours.

The server assigns, so all must agree with it: each record comes once, while members come, leave and are killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupType, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from spark_klog.client import Consumer
from tests.support.clients import Member
from tests.support.clients.confluent import Confluent
from tests.support.clients.franz_go import FranzGo
from tests.support.clients.java import Java41, Java44
from tests.support.clients.process import ProcessMember
from tests.support.servers.broker import KlogBroker

pytestmark = pytest.mark.peer

_PARTITIONS = 8
_SECONDS = 90
#: A description that does not come is asked for anew.
_DESCRIBE_SECONDS = 10
#: A client that a busy machine keeps from its heartbeats for longer than a session loses its partitions: what it has
#: read and not committed comes again.
_SETTINGS = {"group.consumer.heartbeat.interval.ms": 300, "group.consumer.session.timeout.ms": 10_000}


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    settings = [word for name, value in _SETTINGS.items() for word in ("--set", f"{name}={value}")]
    with KlogBroker(module_server_dir, *settings) as running:
        yield running


@pytest.fixture(scope="module")
def admin(broker: KlogBroker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers})


class Ours(Member):
    """The package's consumer."""

    def __init__(self, servers: str, topic: str, protocol: str = "consumer") -> None:
        settings = {"bootstrap.servers": servers, "group.id": topic, "client.id": "ours", "group.protocol": protocol}
        self._consumer = Consumer(settings | {"auto.offset.reset": "earliest", "enable.auto.commit": False})
        self._consumer.subscribe([topic])

    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        records = self._consumer.poll(seconds)
        owned = {partition for _, partition in self._consumer.assignment()}
        return owned, [(record.partition, record.offset) for record in records]

    def commit(self) -> None:
        self._consumer.commit()

    def leave(self) -> None:
        self._consumer.close()


class Group:
    """Members of a group that is named as its topic, by name, with what they own and have read."""

    def __init__(self, servers: str, admin: AdminClient, topic: str) -> None:
        self._servers, self._admin, self._topic = servers, admin, topic
        self.members: dict[str, Member] = {}
        self._owned: dict[str, set[int]] = {}
        self._read: list[tuple[int, int]] = []
        #: The end of each partition.
        self._end = 0

    def add(self, name: str, member: Member) -> None:
        self.members[name], self._owned[name] = member, set()

    def remove(self, name: str) -> Member:
        del self._owned[name]
        return self.members.pop(name)

    def poll_until(self, condition: Callable[[], bool]) -> None:
        """Poll each member in a thread of its own: a poll may last."""
        deadline = time.monotonic() + _SECONDS

        def poll(name: str) -> None:
            while not condition() and time.monotonic() < deadline:
                self._owned[name], records = self.members[name].poll(0.1)
                self._read += records

        with ThreadPoolExecutor(len(self.members)) as threads:
            list(threads.map(poll, self.members))
        assert condition(), (self._owned, len(self._read))

    def settle(self) -> None:
        """Poll until each partition has one owner, and members' numbers of partitions differ by one at most."""

        def is_shared() -> bool:
            shares = list(self._owned.values())
            sizes = [len(share) for share in shares]
            return sorted(one for share in shares for one in share) == list(range(_PARTITIONS)) and (
                max(sizes) - min(sizes) <= 1
            )

        self.poll_until(is_shared)

    def check(self) -> None:
        """All agree with the coordinator on who has what; each new record comes once; commit."""
        self.poll_until(lambda: self._described() == sorted(map(sorted, self._owned.values())))
        producer = Producer({"bootstrap.servers": self._servers})
        for number in range(10 * _PARTITIONS):
            producer.produce(self._topic, b"value", partition=number % _PARTITIONS)
        assert producer.flush(_SECONDS) == 0
        self.poll_until(lambda: len(self._read) >= 10 * _PARTITIONS)
        expected = [(one, self._end + offset) for one in range(_PARTITIONS) for offset in range(10)]
        assert sorted(self._read) == expected
        self._end += 10
        self._read.clear()
        for member in self.members.values():
            member.commit()

    def _described(self) -> list[list[int]]:
        described = self._admin.describe_consumer_groups([self._topic], request_timeout=_DESCRIBE_SECONDS)
        try:
            group = described[self._topic].result(_SECONDS)
        except KafkaException:  # of librdkafka, which may wait in vain for a coordinator that was killed meanwhile
            return []
        if group.state != ConsumerGroupState.STABLE:
            return []
        assert group.type == ConsumerGroupType.CONSUMER
        return sorted(sorted(one.partition for one in member.assignment.topic_partitions) for member in group.members)

    def close(self) -> None:
        for member in self.members.values():
            member.leave()


@pytest.fixture
def group(broker: KlogBroker, admin: AdminClient, topic: str) -> Iterator[Group]:
    admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])[topic].result(_SECONDS)
    made = Group(broker.bootstrap_servers, admin, topic)
    yield made
    made.close()


@pytest.mark.test_all("client")
def test_four_clients_share_a_topic(broker: KlogBroker, group: Group, topic: str) -> None:
    servers = broker.bootstrap_servers
    group.add("ours", Ours(servers, topic))
    for name, kind in (("java", Java44), ("franz-go", FranzGo), ("librdkafka", Confluent)):
        group.add(name, kind(servers).consumer_member(topic, topic))
    group.settle()
    group.check()
    killed = group.remove("java")
    assert isinstance(killed, ProcessMember)
    killed.kill()
    group.settle()
    group.check()
    group.remove("franz-go").leave()
    group.settle()
    group.check()


@pytest.mark.test_all("client")
def test_clients_come_and_go_by_turns(broker: KlogBroker, group: Group, topic: str) -> None:
    """Each of the processes is killed, each client leaves once and comes back; a broker's kill is among it."""
    servers = broker.bootstrap_servers
    made: dict[str, Callable[[], Member]] = {
        "ours": lambda: Ours(servers, topic),
        "java": lambda: Java44(servers).consumer_member(topic, topic),
        "older-java": lambda: Java41(servers).consumer_member(topic, topic),
        "franz-go": lambda: FranzGo(servers).consumer_member(topic, topic),
        "librdkafka": lambda: Confluent(servers).consumer_member(topic, topic),
    }
    for name, make in made.items():
        group.add(name, make())
    group.settle()
    group.check()
    for number, (name, make) in enumerate(made.items()):
        gone = group.remove(name)
        if isinstance(gone, ProcessMember) and number % 2:
            gone.kill()
        else:
            gone.leave()
        group.settle()
        group.check()
        if name == "java":
            broker.kill()
            broker.start()
            group.check()
        group.add(name, make())
        group.settle()
        group.check()


@pytest.mark.test_all("client")
def test_members_of_both_protocols(broker: KlogBroker, group: Group, topic: str) -> None:
    """A classic group of Java's, with its default assignors, gets members of the consumer protocol and loses them."""
    servers = broker.bootstrap_servers
    for name in ("classic", "other"):
        group.add(name, Java44(servers).member(topic, topic))
    group.settle()
    group.add("java", Java44(servers).consumer_member(topic, topic))
    group.settle()
    group.check()
    group.add("franz-go", FranzGo(servers).consumer_member(topic, topic))
    group.add("ours", Ours(servers, topic, "classic"))
    group.settle()
    group.check()
    group.remove("classic").leave()
    group.settle()
    group.check()
    for name in ("java", "franz-go"):
        group.remove(name).leave()
    group.settle()
