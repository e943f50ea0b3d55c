"""The classic Producer with our broker; confluent-kafka reads what it wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from spark_klog.classic import CallbackHandler, KeyedMessage, Producer, ProducerData, SimpleConsumer
from spark_klog.classic.producer import hash_partitioner, random_partitioner, string_encoder
from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ConnectionFailed, ProducerClosed, QueueFull
from tests.support.servers.kafka import HOST, free_port
from tests.support.waiting import wait_until


def make(cluster: EmbeddedCluster, topic: str, partitions: int) -> None:
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(topic, partitions)


def read(cluster: EmbeddedCluster, topic: str, count: int) -> list[tuple[int, bytes | None, bytes | None]]:
    """Read `count` messages; return (partition, key, value)."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "log_level": 0})
    partitions = consumer.list_topics(topic, 10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    found: list[Any] = []
    while len(found) < count:
        batch = consumer.consume(count - len(found), 20)
        assert batch, f"{len(found)} of {count}"
        found += [(message.partition(), message.key(), message.value()) for message in batch]
    consumer.close()
    return found


def test_sync(cluster: EmbeddedCluster, topic: str) -> None:
    make(cluster, topic, 3)
    with Producer({"broker.list": f"0:{cluster.bootstrap_servers}"}, encoder=string_encoder) as producer:
        producer.send(KeyedMessage(topic, "one", "a"), KeyedMessage(topic, "two", "b"), KeyedMessage(topic, None, "c"))
        producer.send(ProducerData(topic, ["three", "four"], "a"))
        producer.send(KeyedMessage(topic, "five", None, "b"))
        assert sorted(read(cluster, topic, 6), key=str) == sorted(
            [
                (97 % 3, b"a", b"one"),
                (98 % 3, b"b", b"two"),
                (99 % 3, b"c", None),
                (97 % 3, None, b"three"),
                (97 % 3, None, b"four"),
                (98 % 3, None, b"five"),
            ],
            key=str,
        )
        wrong = Producer({"broker.list": cluster.bootstrap_servers}, partitioner=lambda key, partitions: 7)
        with wrong, pytest.raises(ConfigError, match="the partitioner gave 7"):
            wrong.send(KeyedMessage(topic, b"", b"k"))
        with pytest.raises(TypeError, match="str is neither a KeyedMessage nor ProducerData"):
            producer.send("text")  # type: ignore[arg-type]
    with pytest.raises(ProducerClosed):
        producer.send(KeyedMessage(topic, "six"))


def test_partitioners() -> None:
    """Hashes as in Java: "hello".hashCode() = 99162322, Arrays.hashCode of {1, -2, 3} = 30694, Long 2^40 + 5: 261."""
    assert hash_partitioner("hello", 1 << 31) == 99162322
    assert hash_partitioner("polygenelubricants", 10) == 0  # its hash is the smallest int
    assert hash_partitioner(bytes([1, 254, 3]), 1 << 31) == ((31 + 1) * 31 - 2) * 31 + 3
    assert hash_partitioner((1 << 40) + 5, 1 << 31) == 261
    assert hash_partitioner(-7, 100) == 7
    assert {random_partitioner("k", 3) for _ in range(200)} == {0, 1, 2}


class Hooks(CallbackHandler):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_enqueue(self, message: KeyedMessage) -> KeyedMessage:
        return message._replace(message=message.message + b"!")

    def after_enqueue(self, message: KeyedMessage, added: bool) -> None:
        self.calls.append(f"{message.message.decode()} {added}")

    def before_sending_data(self, messages: Sequence[KeyedMessage]) -> Sequence[KeyedMessage]:
        self.calls.append(f"send {len(messages)}")
        return messages

    def last_batch_before_close(self) -> Sequence[KeyedMessage]:
        return [KeyedMessage(messages_topic, b"last")]

    def close(self) -> None:
        self.calls.append("close")


messages_topic = "async-hooks"


def test_async_batches_and_callbacks(cluster: EmbeddedCluster) -> None:
    make(cluster, messages_topic, 1)
    hooks = Hooks()
    settings = {"producer.type": "async", "broker.list": cluster.bootstrap_servers, "batch.size": 3}
    with Producer({**settings, "queue.time": 600_000}, callback_handler=hooks) as producer:
        for number in range(7):
            producer.send(KeyedMessage(messages_topic, b"%d" % number))
        wait_until(lambda: hooks.calls.count("send 3") == 2)
        assert [value for _, _, value in read(cluster, messages_topic, 6)] == [b"%d!" % n for n in range(6)]
    assert [value for _, _, value in read(cluster, messages_topic, 8)][6:] == [b"6!", b"last"]
    assert [call for call in hooks.calls if call[0].isdigit()] == [f"{n}! True" for n in range(7)]
    assert hooks.calls[-3:] == ["send 1", "send 1", "close"]
    with Producer({**settings, "queue.time": 20}) as producer:
        producer.send(KeyedMessage(messages_topic, b"soon"))
        assert read(cluster, messages_topic, 9)[8][2] == b"soon"


def test_a_full_queue_blocks_or_drops(cluster: EmbeddedCluster, topic: str) -> None:
    make(cluster, topic, 1)
    gate, entered = threading.Event(), threading.Event()

    def held(messages: Sequence[KeyedMessage], send: Callable[[Sequence[KeyedMessage]], None]) -> None:
        entered.set()
        assert gate.wait(60)
        send(messages)

    settings = {"producer.type": "async", "broker.list": cluster.bootstrap_servers, "batch.size": 1, "queue.size": 2}
    dropping = Producer({**settings, "queue.enqueueTimeout.ms": 0}, event_handler=held)
    dropping.send(KeyedMessage(topic, b"0"))
    assert entered.wait(20)
    dropping.send(KeyedMessage(topic, b"1"), KeyedMessage(topic, b"2"))
    with pytest.raises(QueueFull, match=r"3 messages .* are dropped \(3 so far\): 2 wait \(queue\.size\)"):
        dropping.send(*[KeyedMessage(topic, b"x")] * 3)
    assert dropping.dropped == 3
    blocking = Producer(settings, event_handler=held)
    blocked = threading.Thread(target=lambda: blocking.send(*[KeyedMessage(topic, b"b")] * 5))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    gate.set()
    blocked.join(20)
    assert not blocked.is_alive()
    dropping.close()
    blocking.close()
    assert sorted(value or b"" for _, _, value in read(cluster, topic, 8)) == [b"0", b"1", b"2", *[b"b"] * 5]
    assert (blocking.dropped, blocking.failed) == (0, 0)


def codec(cluster: EmbeddedCluster, topic: str) -> int:
    """The codec of the first batch, from its attributes: INT16 at byte 21."""
    host, _, port = cluster.bootstrap_servers.partition(":")
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 100_000}
    request = {"max_wait_ms": 0, "min_bytes": 0, "topics": [{"topic": topic, "partitions": [partition]}]}
    with SimpleConsumer(host, int(port)) as consumer:
        answer = consumer.send("Fetch", request, version=4)
        return int(bytes(answer["responses"][0]["partitions"][0]["records"])[22] & 7)


def test_compressed_topics(cluster: EmbeddedCluster, topic: str) -> None:
    make(cluster, topic, 1)
    make(cluster, f"{topic}-plain", 1)
    settings = {"broker.list": cluster.bootstrap_servers, "compression.codec": "1", "compressed.topics": topic}
    with Producer(settings) as producer:
        for name in (topic, f"{topic}-plain"):
            producer.send(*[KeyedMessage(name, b"value" * 100)] * 20)
    assert (codec(cluster, topic), codec(cluster, f"{topic}-plain")) == (1, 0)


def test_a_broker_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"broker.list": f"{HOST}:{free_port()}", "request.timeout.ms": 300, "message.send.max.retries": 0}
    with Producer(settings) as producer, pytest.raises(ConnectionFailed, match="no broker answers at"):
        producer.send(KeyedMessage("t", b"v"))
    with Producer({**settings, "producer.type": "async", "batch.size": 2}) as producer:
        producer.send(KeyedMessage("t", b"v"), KeyedMessage("t", b"w"))
        wait_until(lambda: producer.failed == 2)
    assert "2 messages are not sent (2 so far)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "set one of metadata.broker.list"),
        ({"broker.list": "h:1", "zk.connect": "h:1"}, "set one of metadata.broker.list"),
        ({"broker.list": "h:1", "producer.type": "both"}, "producer.type=both: set sync or async"),
        ({"broker.list": "h:1", "compression.codec": "7"}, "compression.codec=7: set one of none, gzip"),
        ({"broker.list": "h:1", "serializer.class": "kafka.serializer.StringEncoder"}, "pass encoder=FUNCTION"),
        ({"broker.list": "h:1", "queue.size": 0}, "queue.size=0: set a number from 1"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Producer(settings)
