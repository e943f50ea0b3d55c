"""The producer of the documents: synchronous, or with a queue and a thread.

Source: 0.7 design and 0.10 implementation chapters, "Producer APIs".
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spark_klog.classic.group.membership import broker_addresses
from spark_klog.classic.producing.messages import (
    CallbackHandler,
    Encoder,
    EventHandler,
    KeyedMessage,
    Partitioner,
    ProducerData,
    default_encoder,
    hash_partitioner,
)
from spark_klog.classic.producing.queue import ProducerQueue
from spark_klog.classic.producing.settings import ProducerConfig, producer_config
from spark_klog.client import Producer as ClientProducer
from spark_klog.client.forks import Maker
from spark_klog.directories.paths import BROKER_IDS_PATH, BROKER_TOPICS_PATH
from spark_klog.directories.trees.opening import open_tree
from spark_klog.directories.trees.tree import Tree
from spark_klog.errors import ConfigError, ConnectionFailed, ProducerClosed

_log = logging.getLogger(__name__)


class Producer:
    """Send messages to partitions that a partitioner chooses.

        with Producer({"metadata.broker.list": "127.0.0.1:9092"}) as producer:
            producer.send(KeyedMessage("clicks", b"value", key=b"user 7"))

    Settings are those of Kafka 0.8 to 0.10, or of 0.7: producer.type (sync or async), metadata.broker.list
    (broker.list) or zookeeper.connect (zk.connect), request.required.acks (default -1), request.timeout.ms,
    message.send.max.retries, compression.codec, compressed.topics, and for async queue.buffering.max.ms (queue.time),
    batch.num.messages (batch.size), queue.buffering.max.messages (queue.size), queue.enqueue.timeout.ms (-1: block,
    0: drop); others are client settings, for example of TLS. Classes become functions: see `producing.messages`.

    Found by ZooKeeper, brokers and partitions that come and go are known at once.

    Thread-safe. `send` raises what the client's producer raises: `ProtocolError`, `ConnectionFailed`,
    `RequestTimedOut`; the producer is still usable. In a process forked since it raises `ProducerClosed`, and `close`
    does nothing: make a new producer there. `ConfigError` for wrong settings, `DirectoryError`.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        encoder: Encoder = default_encoder,
        key_encoder: Encoder | None = None,
        partitioner: Partitioner = hash_partitioner,
        event_handler: EventHandler | None = None,
        callback_handler: CallbackHandler | None = None,
    ) -> None:
        self._config = producer_config(settings)
        self._encoder, self._key_encoder = encoder, key_encoder or encoder
        self._partitioner, self._event_handler = partitioner, event_handler
        self._callbacks = callback_handler or CallbackHandler()
        self._maker = Maker("producer", ProducerClosed)
        self._lock = threading.Lock()
        self._is_closed = False
        self._brokers = _Brokers(self._config)
        self._queue: ProducerQueue | None = None
        if self._config.is_async:
            self._queue = ProducerQueue(self._config, self._callbacks, self._handle)

    @property
    def dropped(self) -> int:
        """Messages of an asynchronous producer that were dropped, as the queue was full."""
        return 0 if self._queue is None else self._queue.dropped

    @property
    def failed(self) -> int:
        """Messages of an asynchronous producer that could not be sent: each batch is an error in the log."""
        return 0 if self._queue is None else self._queue.failed

    def send(self, *messages: KeyedMessage | ProducerData) -> None:
        """Send messages and wait until they are confirmed, or (async) add them to the queue.

        `QueueFull` if the queue is full and queue.enqueue.timeout.ms is over: the message, and those after it in the
        call, are dropped and counted.
        """
        self._maker.check()
        if self._is_closed:
            raise ProducerClosed("send: the producer is closed")
        keyed = list(_keyed(messages))
        if self._queue is not None:
            self._queue.add(keyed)
        else:
            self._handle(keyed)

    def _handle(self, messages: Sequence[KeyedMessage]) -> None:
        if self._event_handler is not None:
            self._event_handler(messages, self._dispatch)
        else:
            self._dispatch(messages)

    def _dispatch(self, messages: Sequence[KeyedMessage]) -> None:
        """Write messages and wait until they are confirmed."""
        encoded = [(one, self._encoder(one.message), self._key_encoder(one.key)) for one in messages]
        with self._lock:
            self._brokers.refresh()
            used: dict[int, ClientProducer] = {}
            try:
                deliveries = []
                for one, value, key in encoded:
                    producer = self._brokers.producer(one.topic)
                    used[id(producer)] = producer
                    partition = self._partition(one, producer.partitions(one.topic))
                    deliveries.append(producer.send(one.topic, value, key, partition))
                for producer in used.values():
                    producer.flush()
                for delivery in deliveries:
                    delivery.result(0)
            except BaseException:
                self._brokers.forget()  # a client producer that has failed writes nothing more
                raise

    def _partition(self, message: KeyedMessage, partitions: int) -> int:
        key = message.key if message.part_key is None else message.part_key
        if key is None:
            return random.randrange(partitions)
        found = self._partitioner(key, partitions)
        if not 0 <= found < partitions:
            raise ConfigError(f"the partitioner gave {found} for topic {message.topic}: set 0 to {partitions - 1}")
        return found

    def close(self) -> None:
        """Send what is in the queue, and close the connections. A second call does nothing."""
        if self._is_closed or self._maker.is_forked:
            return  # a forked process has neither the thread nor the messages' connections
        self._is_closed = True
        try:
            if self._queue is not None:
                self._queue.close()
        finally:
            with self._lock:
                self._brokers.close()
            self._callbacks.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _keyed(messages: Sequence[KeyedMessage | ProducerData]) -> Iterator[KeyedMessage]:
    for one in messages:
        if isinstance(one, KeyedMessage):
            yield one
        elif isinstance(one, ProducerData):
            for data in one.data:
                yield KeyedMessage(one.topic, data, None, one.key)
        else:
            raise TypeError(f"send: {type(one).__name__} is neither a KeyedMessage nor ProducerData")


class _Brokers:
    """The client producers: one that compresses and one that does not, as compressed.topics says."""

    def __init__(self, config: ProducerConfig) -> None:
        self._config = config
        self._protocol = str(config.client.get("security.protocol", "PLAINTEXT")).upper()
        self._producers: dict[str, ClientProducer] = {}
        self._addresses: list[str] = []
        self._has_changed = threading.Event()
        self._tree: Tree | None = None
        if config.zookeeper_connect:
            self._tree = open_tree(f"zookeeper://{config.zookeeper_connect}", config.session_timeout_ms / 1000)
            self._tree.watch(BROKER_IDS_PATH, self._has_changed.set)
            self._tree.watch(BROKER_TOPICS_PATH, self._has_changed.set, values=True)

    def refresh(self) -> None:
        """See new brokers and partitions in ZooKeeper. Nothing may be under way."""
        if self._has_changed.is_set():
            self._has_changed.clear()
            self.forget()

    def producer(self, topic: str) -> ClientProducer:
        """The client producer for a topic's messages."""
        config = self._config
        codec = config.codec if not config.compressed_topics or topic in config.compressed_topics else "none"
        if codec not in self._producers:
            self._producers[codec] = ClientProducer(config.client_settings(self._servers(), codec))
        return self._producers[codec]

    def _servers(self) -> str | list[str]:
        if self._tree is None:
            return self._config.brokers
        found = broker_addresses(self._tree, self._protocol)
        if not found:
            raise ConnectionFailed(f"no broker is registered in ZooKeeper {self._config.zookeeper_connect}")
        return found

    def forget(self) -> None:
        """Make new client producers for the next messages. Nothing may be under way."""
        producers, self._producers = self._producers, {}
        for producer in producers.values():
            producer.abort()

    def close(self) -> None:
        self.forget()
        if self._tree is not None:
            self._tree.close()
