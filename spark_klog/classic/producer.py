"""The producer of the documents: synchronous, or with a queue and a thread.

Source: 0.7 design and 0.10 implementation chapters, "Producer APIs".
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spark_klog.classic.member import broker_addresses
from spark_klog.classic.settings import ProducerConfig, producer_config
from spark_klog.client import Producer as ClientProducer
from spark_klog.client.forks import Maker
from spark_klog.errors import ConfigError, ConnectionFailed, ProducerClosed, QueueFull
from spark_klog.trees.opening import open_tree
from spark_klog.trees.paths import BROKER_IDS_PATH, BROKER_TOPICS_PATH
from spark_klog.trees.tree import Tree

_log = logging.getLogger(__name__)
#: Seconds.
_LONGEST_WAIT = 1.0


class KeyedMessage(NamedTuple):
    """A message for a topic; `part_key`, if given, chooses the partition in place of `key` and is not sent."""

    topic: str
    message: Any
    key: Any = None
    part_key: Any = None


class ProducerData(NamedTuple):
    """Kafka 0.7: several messages for a topic; `key` chooses the partition of all of them, and is not sent."""

    topic: str
    data: Sequence[Any]
    key: Any = None


#: Makes the bytes of a message or key; None is sent as null.
Encoder = Callable[[Any], bytes | None]
#: Chooses a partition from 0 to below the number of partitions; not called without a key.
Partitioner = Callable[[Any, int], int]
#: Gets a batch, and the function that sends messages; may change, split or leave out what it sends.
EventHandler = Callable[[Sequence[KeyedMessage], Callable[[Sequence[KeyedMessage]], None]], None]


def default_encoder(data: Any) -> bytes | None:
    """The default: bytes stay as they are. TypeError for anything else."""
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    raise TypeError(f"a message or key is {type(data).__name__}, not bytes: pass encoder or key_encoder")


def string_encoder(data: Any) -> bytes | None:
    """Text in UTF-8, as kafka.serializer.StringEncoder."""
    return None if data is None else str(data).encode()


def hash_partitioner(key: Any, partitions: int) -> int:
    """The default: hash(key) % partitions, with the hash of Java's strings, byte arrays and integers.

    So text and bytes go where Kafka's DefaultPartitioner and ByteArrayPartitioner sent them.
    """
    if isinstance(key, int):
        digest = (key ^ (key >> 32)) & 0xFFFFFFFF if not -(2**31) <= key < 2**31 else key & 0xFFFFFFFF
    elif isinstance(key, (bytes, bytearray)):
        digest = 1
        for byte in key:
            digest = (31 * digest + (byte - 256 if byte > 127 else byte)) & 0xFFFFFFFF
    else:
        digest = 0
        units = str(key).encode("utf-16-be", "surrogatepass")
        for at in range(0, len(units), 2):
            digest = (31 * digest + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    signed = digest - 2**32 if digest >= 2**31 else digest
    return (0 if signed == -(2**31) else abs(signed)) % partitions


def random_partitioner(key: Any, partitions: int) -> int:
    """Any partition, whatever the key."""
    return random.randrange(partitions)


class CallbackHandler:
    """Hooks around the queue of an asynchronous producer (0.7: kafka.producer.async.CallbackHandler).

    `before_enqueue` and `after_enqueue` are called in the thread that sends, the others in the producer's.
    """

    def before_enqueue(self, message: KeyedMessage) -> KeyedMessage:
        """Return the message to add to the queue."""
        return message

    def after_enqueue(self, message: KeyedMessage, added: bool) -> None:
        """Called with whether the message was added, or dropped as the queue was full."""

    def after_dequeuing_existing_data(self, messages: Sequence[KeyedMessage]) -> Sequence[KeyedMessage]:
        """Return the messages to add to the batch, for those that were taken from the queue."""
        return messages

    def before_sending_data(self, messages: Sequence[KeyedMessage]) -> Sequence[KeyedMessage]:
        """Return the messages to send for a batch."""
        return messages

    def last_batch_before_close(self) -> Sequence[KeyedMessage]:
        """Return messages to send at the very end."""
        return ()

    def close(self) -> None:
        """Called when the producer is closed."""


class ProducerQueue:
    """A queue of at most queue.size messages; `handle` gets batch.size of them, or fewer after queue.time."""

    def __init__(
        self, config: ProducerConfig, callbacks: CallbackHandler, handle: Callable[[Sequence[KeyedMessage]], None]
    ) -> None:
        self._config, self._callbacks, self._handle = config, callbacks, handle
        #: To enter and leave by itself: an interrupt may keep the lock of a `Condition` that is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._messages: deque[KeyedMessage] = deque()
        #: When the batch is sent even if it is not full, a reading of `time.monotonic`.
        self._due = 0.0
        self._is_closed = False
        self.dropped = self.failed = 0
        self._thread = threading.Thread(target=self._run, name="klog-classic-producer", daemon=True)
        self._thread.start()

    def add(self, messages: Sequence[KeyedMessage]) -> None:
        """Add messages; `QueueFull` for the first one that does not fit in time."""
        for number, message in enumerate(messages):
            changed = self._callbacks.before_enqueue(message)
            added = self._add(changed)
            self._callbacks.after_enqueue(changed, added)
            if not added:
                rest = len(messages) - number
                with self._lock:
                    self.dropped += rest
                raise QueueFull(
                    f"{rest} messages for {message.topic} are dropped ({self.dropped} so far): "
                    f"{self._config.queue_size} wait (queue.size), and none left the queue within "
                    f"{self._config.enqueue_timeout_ms} ms (queue.enqueueTimeout.ms)"
                )

    def _add(self, message: KeyedMessage) -> bool:
        config = self._config
        with self._lock:
            seconds = None if config.enqueue_timeout_ms < 0 else config.enqueue_timeout_ms / 1000
            self._changed.wait_for(lambda: self._is_closed or len(self._messages) < config.queue_size, seconds)
            if self._is_closed:
                raise ProducerClosed("send: the producer is closed")
            if len(self._messages) >= config.queue_size:
                return False
            if not self._messages:
                self._due = time.monotonic() + config.queue_ms / 1000
            self._messages.append(message)
            if len(self._messages) in (1, config.batch_size):
                self._changed.notify_all()
            return True

    def _next(self) -> list[KeyedMessage] | None:
        """Wait for a batch; None if the queue is closed and empty."""
        size = self._config.batch_size
        with self._lock:
            while not self._is_closed and len(self._messages) < size:
                # an interrupt may end `_add` before it has notified
                left = self._due - time.monotonic() if self._messages else _LONGEST_WAIT
                if left <= 0:
                    break
                self._changed.wait(left)
            if not self._messages:
                return None
            batch = [self._messages.popleft() for _ in range(min(size, len(self._messages)))]
            self._changed.notify_all()
            return batch

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._send(batch)
        try:
            last = self._callbacks.last_batch_before_close()
        except Exception:
            _log.exception("last_batch_before_close failed")
        else:
            if last:
                self._send(last)

    def _send(self, batch: Sequence[KeyedMessage]) -> None:
        try:
            batch = self._callbacks.after_dequeuing_existing_data(batch)
            self._handle(self._callbacks.before_sending_data(batch))
        except Exception as error:
            self.failed += len(batch)
            _log.error("%d messages are not sent (%d so far): %s", len(batch), self.failed, error)

    def close(self) -> None:
        """Send what is in the queue; returns when that is done, at most after the timeouts of its requests."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()


class Producer:
    """Send messages to partitions that a partitioner chooses.

        with Producer({"metadata.broker.list": "127.0.0.1:9092"}) as producer:
            producer.send(KeyedMessage("clicks", b"value", key=b"user 7"))

    Settings are those of Kafka 0.8 to 0.10, or of 0.7: producer.type (sync or async), metadata.broker.list
    (broker.list) or zookeeper.connect (zk.connect), request.required.acks (default -1), request.timeout.ms,
    message.send.max.retries, compression.codec, compressed.topics, and for async queue.buffering.max.ms (queue.time),
    batch.num.messages (batch.size), queue.buffering.max.messages (queue.size), queue.enqueue.timeout.ms (-1: block,
    0: drop); others are client settings, for example of TLS. Classes become functions: see `Encoder`,
    `Partitioner`, `EventHandler` and `CallbackHandler`.

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
        self._protocol = str(self._config.client.get("security.protocol", "PLAINTEXT")).upper()
        #: The client producers by codec: as compressed.topics says, one compresses and one does not.
        self._producers: dict[str, ClientProducer] = {}
        self._has_changed = threading.Event()
        self._tree: Tree | None = None
        if self._config.zookeeper_connect:
            self._tree = open_tree(
                f"zookeeper://{self._config.zookeeper_connect}", self._config.session_timeout_ms / 1000
            )
            self._tree.watch(BROKER_IDS_PATH, self._has_changed.set)
            self._tree.watch(BROKER_TOPICS_PATH, self._has_changed.set, values=True)
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
        encoded = [(message, self._encoder(message.message), self._key_encoder(message.key)) for message in messages]
        with self._lock:
            if self._has_changed.is_set():  # new brokers or partitions in ZooKeeper; nothing is under way
                self._has_changed.clear()
                self._forget()
            used: dict[int, ClientProducer] = {}
            try:
                deliveries = []
                for message, value, key in encoded:
                    producer = self._producer(message.topic)
                    used[id(producer)] = producer
                    partition = self._partition(message, producer.partitions(message.topic))
                    deliveries.append(producer.send(message.topic, value, key, partition))
                for producer in used.values():
                    producer.flush()
                for delivery in deliveries:
                    delivery.result(0)
            except BaseException:
                self._forget()  # a client producer that has failed writes nothing more
                raise

    def _partition(self, message: KeyedMessage, partitions: int) -> int:
        key = message.key if message.part_key is None else message.part_key
        if key is None:
            return random.randrange(partitions)
        chosen = self._partitioner(key, partitions)
        if not 0 <= chosen < partitions:
            raise ConfigError(f"the partitioner gave {chosen} for topic {message.topic}: set 0 to {partitions - 1}")
        return chosen

    def _producer(self, topic: str) -> ClientProducer:
        """The client producer for a topic's messages."""
        config = self._config
        codec = config.codec if not config.compressed_topics or topic in config.compressed_topics else "none"
        if codec not in self._producers:
            servers = config.brokers if self._tree is None else broker_addresses(self._tree, self._protocol)
            if not servers:
                raise ConnectionFailed(f"no broker is registered in ZooKeeper {config.zookeeper_connect}")
            self._producers[codec] = ClientProducer(config.client_settings(servers, codec))
        return self._producers[codec]

    def _forget(self) -> None:
        """Make new client producers for the next messages. Nothing may be under way."""
        producers, self._producers = self._producers, {}
        for producer in producers.values():
            producer.abort()

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
                self._forget()
                if self._tree is not None:
                    self._tree.close()
            self._callbacks.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _keyed(messages: Sequence[KeyedMessage | ProducerData]) -> Iterator[KeyedMessage]:
    for given in messages:
        if isinstance(given, KeyedMessage):
            yield given
        elif isinstance(given, ProducerData):
            for data in given.data:
                yield KeyedMessage(given.topic, data, None, given.key)
        else:
            raise TypeError(f"send: {type(given).__name__} is neither a KeyedMessage nor ProducerData")
