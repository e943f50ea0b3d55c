"""Our client against our broker and Kafka's, checked by confluent-kafka."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer as ConfluentProducer, TopicPartition
from confluent_kafka.admin import AdminClient

from spark_klog.client.answers import by_key
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import GroupOffsets, list_offsets, offset_range
from spark_klog.client.producer.producer import Producer
from spark_klog.errors import ConfigError, ErrorCode, OffsetOutOfRange, ProtocolError
from spark_klog.protocol.apis import LIST_OFFSETS
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.records.reading.reader import AbortedTransactions
from tests.support.brokers.batches import read_records
from tests.support.clients.topics import create_topic, delete_topic, list_topics
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST, OTHERS_OF_KRAFT, Kafka
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.waiting import wait_until

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NOW = 1_700_000_000_000
#: (offset, timestamp, key, value, headers)
Line = tuple[int, int, "bytes | None", "bytes | None", "tuple[tuple[str, bytes | None], ...]"]


@dataclass
class Server:
    """A running broker, ours or Kafka's."""

    broker: KlogBroker | Kafka

    @property
    def servers(self) -> str:
        return self.broker.bootstrap_servers

    def crash(self) -> None:
        """Kill the broker and start it again on the same port and data."""
        self.broker.kill()
        self.broker.start()

    def connect(self, **settings: str) -> Cluster:
        given = {name.replace("_", "."): value for name, value in settings.items()}
        return Cluster.connect({"bootstrap.servers": self.servers, **given})


_REAL = [
    pytest.param(NEWEST, marks=pytest.mark.peer),
    *(
        pytest.param(version, marks=[pytest.mark.peer, pytest.mark.test_all("version")])
        for version in ("3.9.1", *OTHERS_OF_KRAFT)
    ),
]
#: Brokers that may be killed.
may_be_killed = pytest.mark.parametrize(
    "server",
    [
        "klog",
        *(
            pytest.param((version,), marks=[pytest.mark.peer, pytest.mark.test_all("kill")])
            for version in (NEWEST, "3.9.1")
        ),
    ],
    indirect=True,
    ids=lambda one: one if isinstance(one, str) else f"{one[0]} of its own",
)


@pytest.fixture(scope="module", params=["klog", *_REAL])
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    """Ours, or the shared Kafka of a version, or in a tuple of the version a Kafka of its own."""
    if request.param == "klog":
        with KlogBroker(module_server_dir / "klog") as broker:
            yield Server(broker)
    elif isinstance(request.param, tuple):
        (version,) = request.param
        with Kafka(version, module_server_dir / version) as kafka:
            yield Server(kafka)
    else:
        yield Server(shared_kafkas.get(request.param))


@pytest.fixture
def cluster(server: Server) -> Iterator[Cluster]:
    with server.connect() as connected:
        yield connected


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic of one partition."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    create_topic(cluster, name)
    return name


def _lines(count: int = 40) -> list[Line]:
    keys = [None, b"", b"key", bytes(range(256))]
    values = [None, b"", b"value", b"\x00\xff" * 400, b"text " * 3000]
    headers: list[tuple[tuple[str, bytes | None], ...]] = [(), (("a", b"1"),), (("a", b"1"), ("a", None), ("ü", b""))]
    return [
        (number, NOW + 7 * (number ^ 3), keys[number % 4], values[number % 5], headers[number % 3])
        for number in range(count)
    ]


def _send(cluster: Cluster, topic: str, lines: list[Line], partition: int | None = 0) -> None:
    producer = Producer.of_cluster(cluster)
    for _, timestamp, key, value, headers in lines:
        producer.send(topic, value, key, partition, timestamp, headers)
    producer.flush()


def _read(cluster: Cluster, topic: str, start: int, end: int, partition: int = 0) -> list[Line]:
    lines: list[Line] = []
    for fetched in fetch_range(cluster, topic, partition, start, end):
        aborted = AbortedTransactions(fetched.aborted) if cluster.config.isolation_level else None
        for record in read_records(bytes(fetched.data), aborted):
            if start <= record.offset < end:
                lines.append((record.offset, record.timestamp, record.key, record.value, record.headers))
    return lines


def _confluent_send(servers: str, topic: str, lines: list[Line], **settings: Any) -> None:
    producer = ConfluentProducer({"bootstrap.servers": servers, "linger.ms": 20, "log_level": 0, **settings})
    for _, timestamp, key, value, headers in lines:
        producer.produce(topic, value, key, 0, timestamp=timestamp, headers=list(headers) or None)
    assert producer.flush(30) == 0


def _confluent_read(servers: str, topic: str, count: int, partition: int = 0, **settings: Any) -> list[Line]:
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "none", "enable.auto.commit": False, "log_level": 0, **settings}
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    lines: list[Line] = []
    for message in consumer.consume(count, 30):
        assert message.error() is None, message.error()
        headers = tuple((name, value) for name, value in message.headers() or [])
        lines.append((message.offset(), message.timestamp()[1], message.key(), message.value(), headers))
    consumer.close()
    return lines


@pytest.mark.parametrize("codec", CODECS)
def test_what_we_produce(server: Server, topic: str, codec: str) -> None:
    with server.connect(compression_type=codec, batch_size="4000") as cluster:
        _send(cluster, topic, _lines())
        assert _confluent_read(server.servers, topic, len(_lines())) == _lines()
        assert _read(cluster, topic, 0, len(_lines())) == _lines()


@pytest.mark.parametrize("codec", CODECS)
def test_what_confluent_produces(server: Server, cluster: Cluster, topic: str, codec: str) -> None:
    _confluent_send(server.servers, topic, _lines(), **{"compression.type": codec, "batch.num.messages": 7})
    assert _read(cluster, topic, 0, len(_lines())) == _lines()
    assert _read(cluster, topic, 5, 30) == _lines()[5:30]
    assert _read(cluster, topic, 7, 7) == []


def test_small_fetches(server: Server, topic: str) -> None:
    with server.connect(fetch_max_bytes="1000", max_partition_fetch_bytes="500", batch_size="300") as cluster:
        _send(cluster, topic, _lines(200))
        assert _read(cluster, topic, 0, 200) == _lines(200)


def test_a_key_has_the_partition_that_others_give_it(server: Server, cluster: Cluster) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    create_topic(cluster, name, 7)
    keys = [f"key-{number}".encode() for number in range(200)]
    _send(cluster, name, [(0, NOW, key, b"ours", ()) for key in keys], partition=None)
    placed: dict[bytes, int] = {}
    producer = ConfluentProducer({"bootstrap.servers": server.servers, "partitioner": "murmur2"})
    for key in keys:
        producer.produce(name, b"theirs", key, on_delivery=lambda _, m: placed.update({m.key(): m.partition()}))
    assert producer.flush(20) == 0
    ends = list_offsets(cluster, {(name, partition): LATEST for partition in range(7)})
    assert sum(ends.values()) == 400
    for (_, partition), end in ends.items():
        lines = _read(cluster, name, 0, end, partition)
        ours = [line[2] for line in lines if line[3] == b"ours"]
        assert ours == [key for key in keys if placed[key] == partition]


def test_offsets_by_time(cluster: Cluster, topic: str) -> None:
    key = topic, 0
    assert offset_range(cluster, topic, 0) == (0, 0)
    times = [NOW + step for step in (0, 10, 10, 5, 30, 20, 40)]
    for timestamp in times:
        _send(cluster, topic, [(0, timestamp, None, b"v", ())])
    for wanted in range(NOW - 1, NOW + 42, 3):
        expected = next((offset for offset, timestamp in enumerate(times) if timestamp >= wanted), -1)
        assert list_offsets(cluster, {key: wanted}) == {key: expected}
    assert list_offsets(cluster, {key: EARLIEST}) == {key: 0}
    assert list_offsets(cluster, {key: LATEST}) == {key: 7}


def test_unknown_topics_and_partitions_are_named(server: Server, cluster: Cluster, topic: str) -> None:
    with server.connect(request_timeout_ms="2000") as hasty:
        with pytest.raises(ProtocolError, match=r"no-such-topic.*UNKNOWN_TOPIC_OR_PARTITION"):
            list_offsets(hasty, {("no-such-topic", 0): LATEST})
        with pytest.raises(ProtocolError, match=rf"{topic}-9.*UNKNOWN_TOPIC_OR_PARTITION"):
            list_offsets(hasty, {(topic, 9): LATEST})
        with pytest.raises(ProtocolError, match="topic bad name: INVALID_TOPIC_EXCEPTION"):
            Producer.of_cluster(hasty).send("bad name", b"v")
        with pytest.raises(ConfigError, match=f"{topic} has only partition 0, not 3"):
            Producer.of_cluster(hasty).send(topic, b"v", partition=3)
    assert "no-such-topic" not in list_topics(cluster)


def test_a_topic_is_made_when_we_write_to_it(server: Server, cluster: Cluster) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    _send(cluster, name, _lines(3))
    assert _confluent_read(server.servers, name, 3) == _lines(3)


def test_topics(server: Server, cluster: Cluster) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    assert name not in list_topics(cluster)
    create_topic(cluster, name, 3, {"max.message.bytes": "2000"})
    assert name in list_topics(cluster)
    assert cluster.partitions([name]) == {name: [0, 1, 2]}
    admin = AdminClient({"bootstrap.servers": server.servers, "log_level": 0})
    assert sorted(admin.list_topics(timeout=60).topics[name].partitions) == [0, 1, 2]
    with pytest.raises(ProtocolError, match="TOPIC_ALREADY_EXISTS") as failed:
        create_topic(cluster, name)
    assert failed.value.code == ErrorCode.TOPIC_ALREADY_EXISTS
    with pytest.raises(ProtocolError, match=rf"produce to {name}-0.*MESSAGE_TOO_LARGE"):
        _send(cluster, name, [(0, NOW, None, bytes(5000), ())])
    many: list[Line] = [(number, NOW + number, b"k", b"%d" % number * 30, ()) for number in range(300)]
    _send(cluster, name, many)  # one batch, which the producer splits until its parts fit
    assert _confluent_read(server.servers, name, len(many)) == many
    delete_topic(cluster, name)
    wait_until(lambda: name not in list_topics(cluster), f"{name} is deleted")
    with server.connect(request_timeout_ms="2000") as hasty, pytest.raises(ProtocolError, match="UNKNOWN_TOPIC"):
        delete_topic(hasty, name)


def test_group_offsets(server: Server, cluster: Cluster, topic: str) -> None:
    group = f"group-{uuid.uuid4().hex[:10]}"
    key = topic, 0
    ours = GroupOffsets(cluster, group)
    assert ours.fetch([key]) == {}
    settings = {"bootstrap.servers": server.servers, "group.id": group, "enable.auto.commit": False, "log_level": 0}
    consumer = Consumer(settings)
    for offset in (5, 3):
        ours.commit({key: offset})
        assert ours.fetch([key]) == {key: offset}
        assert consumer.committed([TopicPartition(topic, 0)], 20)[0].offset == offset
    consumer.commit(offsets=[TopicPartition(topic, 0, 42)], asynchronous=False)
    assert ours.fetch([key, (topic, 1)]) == {key: 42}
    consumer.close()


def test_offsets_that_are_not_there_are_named(server: Server, cluster: Cluster, topic: str) -> None:
    _send(cluster, topic, _lines(10))
    with pytest.raises(OffsetOutOfRange) as failed:
        _read(cluster, topic, 5, 20)
    assert (failed.value.requested, failed.value.available) == ((10, 20), (0, 10))
    with pytest.raises(OffsetOutOfRange) as failed:
        _read(cluster, topic, 15, 20)
    assert (failed.value.requested, failed.value.available) == ((15, 20), (0, 10))
    assert (
        str(failed.value)
        == f"[KLOG_OFFSET_OUT_OF_RANGE] offsets [15, 20) of {topic}-0 are not available: the log holds [0, 10)"
    )
    if isinstance(server.broker, Kafka):
        admin = AdminClient({"bootstrap.servers": server.servers})
        wanted = TopicPartition(topic, 0, 4)
        next(iter(admin.delete_records([wanted]).values())).result(20)
        with pytest.raises(OffsetOutOfRange) as failed:
            _read(cluster, topic, 2, 8)
        assert (failed.value.requested, failed.value.available) == ((2, 8), (4, 10))
        assert _read(cluster, topic, 4, 10) == _lines(10)[4:]


def _in_background(action: Callable[[], None]) -> Callable[[], None]:
    """Start `action`; the result waits for it and raises what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(120)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


@may_be_killed
def test_a_restart_while_we_produce(server: Server, cluster: Cluster, topic: str) -> None:
    acknowledged: list[int] = []
    done = threading.Event()

    def write() -> None:
        settings = {"bootstrap.servers": server.servers, "batch.size": "500", "request.timeout.ms": "5000"}
        with Producer(settings) as producer:
            number = 0
            while not done.is_set():
                for number in range(number, number + 50):  # noqa: B020
                    producer.send(topic, str(number).encode(), partition=0)
                producer.flush()
                acknowledged.append(number)
                number += 1

    join = _in_background(write)
    try:
        for _ in range(2 if isinstance(server.broker, KlogBroker) else 1):
            wanted, deadline = len(acknowledged) + 5, time.monotonic() + 60
            while len(acknowledged) < wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            server.crash()
    finally:
        done.set()
        join()
    end = offset_range(cluster, topic, 0)[1]
    numbers = [int(line[3] or b"") for line in _read(cluster, topic, 0, end)]
    firsts = list(dict.fromkeys(numbers))
    assert firsts == list(range(acknowledged[-1] + 1))
    assert [int(line[3] or b"") for line in _confluent_read(server.servers, topic, end)] == numbers


@may_be_killed
def test_a_restart_while_we_fetch(server: Server, topic: str) -> None:
    with server.connect(batch_size="500", fetch_max_bytes="2000", request_timeout_ms="60000") as cluster:
        _send(cluster, topic, _lines(300))
        found: list[Line] = []
        has_crashed = False
        for fetched in fetch_range(cluster, topic, 0, 0, 300):
            found += [
                (record.offset, record.timestamp, record.key, record.value, record.headers)
                for record in read_records(bytes(fetched.data))
            ]
            if len(found) > 100 and not has_crashed:
                has_crashed = True
                server.crash()
        assert has_crashed
        assert found == _lines(300)
        assert offset_range(cluster, topic, 0) == (0, 300)  # with the client from before the crash


# test_consumer.py has a test of the same name that includes our broker.
@pytest.mark.parametrize("server", _REAL, indirect=True)
def test_read_committed(server: Server) -> None:
    topic = f"transactional-{uuid.uuid4().hex[:10]}"
    with server.connect() as cluster:
        create_topic(cluster, topic)
    producers = [
        ConfluentProducer({"bootstrap.servers": server.servers, "transactional.id": name, "log_level": 0})
        for name in (f"{topic}-one", f"{topic}-two")
    ]
    for producer in producers:
        producer.init_transactions(30)
    for round_ in range(6):
        for producer in producers:
            producer.begin_transaction()
        for number in range(5):
            for place, producer in enumerate(producers):
                producer.produce(topic, f"{round_}-{place}-{number}", partition=0, timestamp=NOW)
                producer.flush(20)
        for place, producer in enumerate(producers):
            if (round_ + place) % 3 == 0:
                producer.abort_transaction(30)
            else:
                producer.commit_transaction(30)
    _confluent_send(server.servers, topic, [(0, NOW, None, b"plain", ())])
    with server.connect() as cluster:
        end = offset_range(cluster, topic, 0)[1]
        everything = _read(cluster, topic, 0, end)
        assert [line[3] for line in everything if line[3] != b"plain"] == [
            f"{round_}-{place}-{number}".encode() for round_ in range(6) for number in range(5) for place in range(2)
        ]
    for small in ("500", "5000000"):
        with server.connect(isolation_level="read_committed", max_partition_fetch_bytes=small) as cluster:
            committed = _read(cluster, topic, 0, end)
            assert 0 < len(committed) < len(everything)
            assert committed == _confluent_read(
                server.servers, topic, len(committed), **{"isolation.level": "read_committed"}
            )
            expected = [
                line
                for line in everything
                if line[3] == b"plain" or sum(map(int, (line[3] or b"").split(b"-")[:2])) % 3
            ]
            assert committed == expected
            # start within a transaction, as a Spark task may
            for start in range(0, end, 7):
                assert _read(cluster, topic, start, end) == [line for line in expected if line[0] >= start]

    # only read_uncommitted sees the records of an open transaction
    producers[0].begin_transaction()
    producers[0].produce(topic, b"open", partition=0)
    producers[0].flush(20)
    with server.connect() as cluster, server.connect(isolation_level="read_committed") as careful:
        assert offset_range(cluster, topic, 0)[1] == offset_range(careful, topic, 0)[1] == end + 1
        assert list_offsets(careful, {(topic, 0): LATEST}) == {(topic, 0): end}
    producers[0].abort_transaction(30)


def test_an_answer_with_many_partitions_is_not_compared_with_each_of_them() -> None:
    compared = 0

    class Key(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    keys = [Key(number) for number in range(2000)]
    found = by_key(LIST_OFFSETS, {}, ((Key(number), {"offset": number}) for number in reversed(range(2000))), keys)
    assert len(found) == 2000
    assert compared < 10 * 2000
