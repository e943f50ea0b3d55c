"""ConsumerConnector with a real ZooKeeper and our brokers; kazoo and confluent-kafka check the results."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kazoo.client import KazooClient

from spark_klog.classic import (
    LATEST_TIME,
    Blacklist,
    ConsumerConnector,
    ConsumerRebalanceListener,
    KafkaStream,
    KeyedMessage,
    Producer as ClassicProducer,
    SimpleConsumer,
    Whitelist,
)
from spark_klog.errors import (
    ConfigError,
    ConsumerClosed,
    ConsumerTimeout,
    DirectoryError,
    ErrorCode,
    NoOffsetForPartition,
    ProtocolError,
)
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST, ZooKeeperServer, free_port
from tests.support.servers.shared_tree import create_topic, expire_session, leaders, node
from tests.support.waiting import wait_until

# kazoo warns if the chroot does not exist yet; the broker creates it
pytestmark = pytest.mark.filterwarnings("ignore:No chroot path exists")

_SOON = {"zookeeper.session.timeout.ms": 4000, "rebalance.backoff.ms": 5000, "fetch.wait.max.ms": 50}


@pytest.fixture(scope="module")
def broker(zookeeper: ZooKeeperServer, module_server_dir: Any) -> Iterator[KlogBroker]:
    """A broker that the module's tests share: use your own topics and groups."""
    arguments = ["--broker-id", "0", "--zookeeper", f"{zookeeper.connect}/shared"]
    with KlogBroker(module_server_dir, *arguments, "--set", "auto.create.topics.enable=false") as running:
        yield running


@pytest.fixture
def shared(zookeeper: ZooKeeperServer, broker: KlogBroker) -> Iterator[KazooClient]:
    client = KazooClient(f"{zookeeper.connect}/shared", timeout=10)
    client.start(20)
    yield client
    client.stop()
    client.close()


@pytest.fixture
def connect(zookeeper: ZooKeeperServer, broker: KlogBroker, topic: str) -> Iterator[Callable[..., ConsumerConnector]]:
    """Create connectors in a group named after the test; they are shut down at its end."""
    with ExitStack() as stack:

        def make(settings: Mapping[str, Any] | None = None, **more: bool) -> ConsumerConnector:
            own = {"zookeeper.connect": f"{zookeeper.connect}/shared", "group.id": topic, **_SOON}
            connector = ConsumerConnector({**own, "auto.offset.reset": "smallest", **(settings or {})}, **more)
            stack.callback(connector.shutdown)
            return connector

        yield make


def make_topic(broker: KlogBroker, topic: str, partitions: int) -> None:
    create_topic(broker.bootstrap_servers, topic, partitions)
    wait_until(lambda: len(leaders(broker.bootstrap_servers, topic)) == partitions)


def produce(broker: KlogBroker, topic: str, partitions: int, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all", "log_level": 0})
    for number in numbers:
        producer.produce(topic, b"%d" % number, b"k%d" % number, partition=number % partitions)
    assert producer.flush(20) == 0


class Reader:
    """Reads each stream in a thread; `read` has (topic, partition, offset, value) of all messages."""

    def __init__(self, streams: list[KafkaStream]) -> None:
        self.read: list[tuple[str, int, int, bytes | None]] = []
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, args=(stream,), daemon=True) for stream in streams]
        for thread in self._threads:
            thread.start()

    def _run(self, stream: KafkaStream) -> None:
        try:
            for message in stream:
                self.read.append((message.topic, message.partition, message.offset, message.value))
        except Exception as error:
            self.errors.put(error)

    def numbers(self) -> list[int]:
        return sorted(int(value or b"") for *_, value in list(self.read))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


def owners(shared: KazooClient, group: str, topic: str) -> dict[int, str]:
    top = f"/consumers/{group}/owners/{topic}"
    found = {}
    for name in shared.get_children(top) if shared.exists(top) else []:
        try:
            found[int(name)] = shared.get(f"{top}/{name}")[0].decode()
        except Exception:  # released in the meantime
            continue
    return found


def test_nodes_of_a_member(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    make_topic(broker, topic, 3)
    connector = connect()
    streams = connector.create_message_streams({topic: 2})
    assert list(map(len, streams.values())) == [2]
    assert shared.get_children(f"/consumers/{topic}/ids") == [connector.consumer_id]
    assert connector.consumer_id.startswith(f"{topic}_")
    path = f"/consumers/{topic}/ids/{connector.consumer_id}"
    registered = node(shared, path)
    assert int(registered.pop("timestamp")) > 1_000_000_000_000
    assert registered == {"version": 1, "subscription": {topic: 2}, "pattern": "static"}
    assert shared.get(path)[1].ephemeralOwner
    name = connector.consumer_id
    assert owners(shared, topic, topic) == {0: f"{name}-0", 1: f"{name}-0", 2: f"{name}-1"}
    assert shared.get(f"/consumers/{topic}/owners/{topic}/0")[1].ephemeralOwner
    with pytest.raises(ConfigError, match="has its streams"):
        connector.create_message_streams({topic: 1})
    connector.shutdown()
    connector.shutdown()
    assert shared.get_children(f"/consumers/{topic}/ids") == []
    assert owners(shared, topic, topic) == {}
    assert list(streams[topic][0]) == []
    with pytest.raises(ConsumerClosed):
        connector.create_message_streams({topic: 1})


def test_messages_decoders_and_offsets(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    make_topic(broker, topic, 1)
    produce(broker, topic, 1, range(10))
    connector = connect()
    (stream,) = connector.create_message_streams({topic: 1}, lambda key: key.decode(), int)[topic]
    messages: list[Any] = list(itertools.islice(stream, 4))
    assert [(m.topic, m.partition, m.offset, m.key, m.value) for m in messages] == [
        (topic, 0, number, f"k{number}", number) for number in range(4)
    ]
    path = f"/consumers/{topic}/offsets/{topic}/0"
    # a commit by its own thread includes the message just returned, a commit by another thread does not
    other = threading.Thread(target=connector.commit_offsets)
    other.start()
    other.join(20)
    assert shared.get(path)[0] == b"3"
    connector.commit_offsets()
    assert shared.get(path)[0] == b"4"
    assert next(stream).offset == 4
    connector.shutdown()
    assert shared.get(path)[0] == b"5"
    # the next member goes on there; after an exception the message just returned stays uncommitted
    with suppress(ZeroDivisionError), connect() as second:
        (stream,) = second.create_message_streams({topic: 1})[topic]
        assert [next(stream).offset, next(stream).offset] == [5, 6]
        raise ZeroDivisionError
    assert shared.get(path)[0] == b"6"


def test_reset_and_timeout(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    make_topic(broker, topic, 1)
    produce(broker, topic, 1, range(3))
    largest = connect({"auto.offset.reset": "largest", "consumer.timeout.ms": 100})
    (stream,) = largest.create_message_streams({topic: 1})[topic]
    with pytest.raises(ConsumerTimeout, match=r"no message for 0\.1 s \(consumer\.timeout\.ms\)"):
        next(stream)
    largest.shutdown()
    # as with Kafka's consumers, the position is committed, so the next member skips no later messages
    assert shared.get(f"/consumers/{topic}/offsets/{topic}/0")[0] == b"3"
    fails = connect({"auto.offset.reset": "fail", "group.id": f"{topic}-fails"})
    (stream,) = fails.create_message_streams({topic: 1})[topic]
    with pytest.raises(NoOffsetForPartition):
        next(stream)
    fails.shutdown()
    smallest = connect({"auto.offset.reset": "smallest", "group.id": f"{topic}-s", "auto.commit.enable": "false"})
    (stream,) = smallest.create_message_streams({topic: 1})[topic]
    assert [next(stream).offset for _ in range(3)] == [0, 1, 2]
    smallest.shutdown()
    assert not shared.exists(f"/consumers/{topic}-s/offsets/{topic}/0")


def test_members_share_and_take_over(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    """Ten partitions; three members join and one leaves: every number is read, in order per partition and owner."""
    make_topic(broker, topic, 10)
    members: list[ConsumerConnector] = []
    readers: list[Reader] = []
    for number in range(3):
        connector = connect()
        members.append(connector)
        readers.append(Reader(connector.create_message_streams({topic: 1})[topic]))
        produce(broker, topic, 10, range(100 * number, 100 * number + 100))
        wait_until(lambda: len(set(owners(shared, topic, topic).values())) == len(members))
        wait_until(lambda: sorted(Counter(owners(shared, topic, topic).values()).values()) == shares(len(members)))
    wait_until(lambda: len({n for reader in readers for n in reader.numbers()}) == 300)
    members[0].shutdown()
    readers[0].join()
    wait_until(lambda: sorted(Counter(owners(shared, topic, topic).values()).values()) == [5, 5])
    produce(broker, topic, 10, range(300, 400))
    wait_until(lambda: {n for reader in readers for n in reader.numbers()} == set(range(400)))
    for connector in members[1:]:
        connector.shutdown()
    stored = {n: int(shared.get(f"/consumers/{topic}/offsets/{topic}/{n}")[0]) for n in range(10)}
    assert stored == dict.fromkeys(range(10), 40)
    # at most the message in progress of a stream is read again when partitions move
    repeated = sum(len(reader.read) for reader in readers) - 400
    assert repeated <= 20
    # each owner gets a partition's messages in order
    for reader in readers:
        for partition in range(10):
            offsets = [offset for _, number, offset, _ in reader.read if number == partition]
            assert offsets == sorted(offsets)


def shares(members: int) -> list[int]:
    each, more = divmod(10, members)
    return sorted([each + 1] * more + [each] * (members - more))


def test_filters_and_new_topics_and_partitions(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    make_topic(broker, f"{topic}.a", 2)
    white, black = connect(), connect({"group.id": f"{topic}-black"})
    reader = Reader(white.create_message_streams_by_filter(Whitelist(f"{topic}[.].*"), 2))
    others = Reader(black.create_message_streams_by_filter(Blacklist(f"(?!{topic}).*|.*[.]b")))
    registered = node(shared, f"/consumers/{topic}/ids/{white.consumer_id}")
    assert (registered["pattern"], registered["subscription"]) == ("white_list", {f"{topic}[.].*": 2})
    produce(broker, f"{topic}.a", 2, range(10))
    make_topic(broker, f"{topic}.b", 1)
    produce(broker, f"{topic}.b", 1, range(10, 20))
    create_topic(broker.bootstrap_servers, f"{topic}x", 1)
    wait_until(lambda: reader.numbers() == list(range(20)))
    wait_until(lambda: others.numbers() == list(range(10)))
    shared.set(
        f"/brokers/topics/{topic}.b",
        json.dumps(node(shared, f"/brokers/topics/{topic}.b") | {"partitions": {"0": [0], "1": [0]}}).encode(),
    )
    wait_until(lambda: len(leaders(broker.bootstrap_servers, f"{topic}.b")) == 2)
    produce(broker, f"{topic}.b", 2, range(21, 22))  # to the new partition
    wait_until(lambda: 21 in reader.numbers())


def test_sessions_that_expire(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    make_topic(broker, topic, 4)
    first, second = connect(), connect()
    readers = [Reader(member.create_message_streams({topic: 1})[topic]) for member in (first, second)]
    wait_until(lambda: sorted(Counter(owners(shared, topic, topic).values()).values()) == [2, 2])
    before = owners(shared, topic, topic)
    produce(broker, topic, 4, range(40))
    wait_until(lambda: {n for reader in readers for n in reader.numbers()} == set(range(40)))
    path = f"/consumers/{topic}/ids/{first.consumer_id}"
    session = shared.get(path)[1].ephemeralOwner
    expire_session(shared, path)
    wait_until(lambda: shared.exists(path) and shared.get(path)[1].ephemeralOwner not in (0, session))
    wait_until(lambda: owners(shared, topic, topic) == before)
    produce(broker, topic, 4, range(40, 80))
    wait_until(lambda: {n for reader in readers for n in reader.numbers()} == set(range(80)))
    for partition in range(4):  # each partition is still owned by the member that owned it before
        stored = shared.get(f"/consumers/{topic}/owners/{topic}/{partition}")
        assert stored[1].ephemeralOwner
        assert stored[0].decode() == before[partition]


@pytest.mark.parametrize("storage", ["kafka", "dual"])
def test_offsets_in_kafka(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str, storage: str
) -> None:
    """The steps of the documented migration: ZooKeeper, both, Kafka."""
    make_topic(broker, topic, 1)
    produce(broker, topic, 1, range(9))
    path = f"/consumers/{topic}/offsets/{topic}/0"
    with connect() as connector:
        (stream,) = connector.create_message_streams({topic: 1})[topic]
        assert [next(stream).offset for _ in range(3)] == [0, 1, 2]
    assert shared.get(path)[0] == b"3"
    with connect({"offsets.storage": "kafka"}) as connector:
        (stream,) = connector.create_message_streams({topic: 1})[topic]
        assert [next(stream).offset for _ in range(2)] == [3, 4]
    assert shared.get(path)[0] == b"5"
    assert committed(broker, topic) == 5
    if storage == "kafka":
        with connect({"offsets.storage": "kafka", "dual.commit.enabled": "false"}) as connector:
            (stream,) = connector.create_message_streams({topic: 1})[topic]
            assert next(stream).offset == 5
        assert (shared.get(path)[0], committed(broker, topic)) == (b"5", 6)
    else:
        shared.set(path, b"7")
        with connect({"offsets.storage": "kafka", "dual.commit.enabled": "true"}) as connector:
            (stream,) = connector.create_message_streams({topic: 1})[topic]
            assert next(stream).offset == 7
        assert (shared.get(path)[0], committed(broker, topic)) == (b"8", 8)


def committed(broker: KlogBroker, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "log_level": 0})
    try:
        return int(consumer.committed([TopicPartition(topic, 0)], 20)[0].offset)
    finally:
        consumer.close()


def test_auto_commit_and_at_most_once(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    make_topic(broker, topic, 1)
    produce(broker, topic, 1, range(5))
    path = f"/consumers/{topic}/offsets/{topic}/0"
    connector = connect({"autocommit.interval.ms": 50})
    (stream,) = connector.create_message_streams({topic: 1})[topic]
    assert [next(stream).offset for _ in range(3)] == [0, 1, 2]
    wait_until(lambda: shared.exists(path) and shared.get(path)[0] == b"2")  # the third message is in progress
    connector.shutdown()
    assert shared.get(path)[0] == b"3"
    with connect(at_most_once=True) as connector:
        (stream,) = connector.create_message_streams({topic: 1})[topic]
        assert next(stream).offset == 3
        assert shared.get(path)[0] == b"5"
    assert shared.get(path)[0] == b"5"


class Listener(ConsumerRebalanceListener):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def before_releasing_partitions(self, partitions: Mapping[str, list[int]]) -> None:
        self.calls.append(("release", dict(partitions)))

    def before_starting_fetchers(self, consumer_id: str, assignment: Mapping[str, Mapping[int, str]]) -> None:
        self.calls.append(("start", {topic: sorted(numbers) for topic, numbers in assignment.items()}))
        raise RuntimeError("a listener's error ends nothing")


def test_a_listener_and_a_slow_stream(
    broker: KlogBroker, shared: KazooClient, connect: Callable[..., ConsumerConnector], topic: str
) -> None:
    """A stream that nobody reads does not block another one."""
    make_topic(broker, topic, 3)
    produce(broker, topic, 3, range(90))
    connector, listener = connect({"queued.max.message.chunks": 1, "fetch.message.max.bytes": 100}), Listener()
    connector.set_consumer_rebalance_listener(listener)
    idle, busy = connector.create_message_streams({topic: 2})[topic]
    assert [next(busy).offset for _ in range(30)] == list(range(30))
    read = [(message.partition, message.offset) for message in itertools.islice(idle, 60)]
    assert sorted(read) == [(partition, offset) for partition in range(2) for offset in range(30)]
    assert listener.calls == [("start", {topic: [0, 1, 2]})]
    # the second connector's id sorts last, so it gets the last partition, and each stream of the first keeps one
    connect().create_message_streams({topic: 1})
    wait_until(lambda: len(listener.calls) > 2)
    assert listener.calls[1:] == [("release", {topic: [1, 2]}), ("start", {topic: [0, 1]})]
    connector.shutdown()
    assert listener.calls[3:] == [("release", {topic: [0, 1]})]


def test_no_zookeeper() -> None:
    nowhere = f"{HOST}:{free_port()}"
    with pytest.raises(DirectoryError, match=f"no ZooKeeper answers at {nowhere}"):
        ConsumerConnector({"zookeeper.connect": nowhere, "group.id": "g", "zookeeper.session.timeout.ms": 500})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"group.id": "g"}, "zookeeper.connect is required"),
        ({"zk.connect": "h:1"}, "group.id is required"),
        ({"zk.connect": "h:1", "zookeeper.connect": "h:1", "groupid": "g"}, "are the same setting"),
        ({"zk.connect": "h:1", "groupid": "g", "auto.offset.reset": "first"}, "auto.offset.reset=first"),
        ({"zk.connect": "h:1", "groupid": "g", "offsets.storage": "disk"}, "offsets.storage=disk: set zookeeper or"),
        ({"zk.connect": "h:1", "groupid": "g", "bootstrap.servers": "h:1"}, "set zookeeper.connect instead"),
        ({"zk.connect": "h:1", "groupid": "g", "partition.assignment.strategy": "roundrobin"}, "set range"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ConsumerConnector(settings)


def test_a_producer_follows_brokers_and_partitions(
    tree: KazooClient, chroot: str, make_broker: Callable[..., KlogBroker]
) -> None:
    """The classic producer with ZooKeeper follows a broker to a new address, and uses new partitions."""
    broker = make_broker(0)
    make_topic(broker, "t", 1)
    with ClassicProducer({"zk.connect": chroot}, partitioner=lambda key, partitions: partitions - 1) as producer:
        producer.send(KeyedMessage("t", b"0", b"k"))
        topic = json.dumps(node(tree, "/brokers/topics/t") | {"partitions": {"0": [0], "1": [0]}})
        tree.set("/brokers/topics/t", topic.encode())
        wait_until(lambda: len(leaders(broker.bootstrap_servers, "t")) == 2)

        def reaches_the_new_partition() -> bool:
            producer.send(KeyedMessage("t", b"1", b"k"))
            try:
                return end_of(broker, "t", 1) > 0
            except ProtocolError as error:  # the broker makes the log a moment after it leads the partition
                if error.code != ErrorCode.LEADER_NOT_AVAILABLE:
                    raise
                return False

        wait_until(reaches_the_new_partition)
        broker.stop()
        broker.port = free_port()
        broker.start()
        before = end_of(broker, "t", 1)
        producer.send(KeyedMessage("t", b"2", b"k"))
        assert end_of(broker, "t", 1) == before + 1


def end_of(broker: KlogBroker, topic: str, partition: int) -> int:
    with SimpleConsumer(HOST, broker.port) as consumer:
        return consumer.get_offsets_before(topic, partition, LATEST_TIME)[0]
