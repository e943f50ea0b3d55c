"""Delivery of batches to partitions' leaders: requests, retries and timeouts.

Each broker has up to max.in.flight.requests.per.connection requests in flight. So has each partition with idempotence,
else one, so that retries keep its order. A batch stays in its partition's queue until the leader confirms it. The
sender handles responses in the order of the requests; `outcomes` says what becomes of each batch.

A partition's failed batch and those after it are sent again in order, with the same sequences, when none of them is in
flight any more (see `Queue`); other partitions go on. A broker recognises duplicates among a producer's last five
batches in a partition, so no more may be in flight.

The sender works only during calls, and only their time counts against delivery.timeout.ms until `work_on` says that a
thread makes them. It connects, sends and receives step by step for all brokers together, so that a silent broker does
not delay the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.net.waiting import Waited, wait_until_ready
from spark_klog.client.producer.outcomes import UNREACHABLE, Outcomes
from spark_klog.client.producer.queues import Batch, Queue
from spark_klog.client.producer.receipts import Receipt, fresh
from spark_klog.client.producer.transactions import Transactions
from spark_klog.client.requests import PendingRequest, Steps, Wait, received, run
from spark_klog.errors import (
    ConnectionFailed,
    KlogError,
    ProducerClosed,
    ProducerFenced,
    RequestTimedOut,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import API_VERSIONS, PRODUCE
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import PRODUCE_WITH_MAGIC_2
from spark_klog.records.building.conversion import down_convert
from spark_klog.records.formats.batch_v2 import TRANSACTIONAL_BIT, build_batch, set_produced
from spark_klog.wire.codecs import NONE
from spark_klog.wire.primitives import Buffer

_log = logging.getLogger(__name__)
#: Bytes of records that a codec compresses in about a millisecond, on a slow machine.
_QUICKLY_COMPRESSED = {"gzip": 16 * 1024, "zstd": 64 * 1024, "lz4": 128 * 1024}
#: The version of Produce with magic 1.
_MAGIC_1 = 2
#: Seconds. A broker that takes longer for a request no longer delays records for other brokers.
_SLOW_SECONDS = 1.0
#: Seconds between looks whether another thread has called `stop`.
_LONGEST_WAIT = 0.25


class _CallClock:
    """A clock that runs only during calls, since nothing is delivered between them; after `run_on` always."""

    def __init__(self) -> None:
        self._left_at = time.monotonic()
        self._between = 0.0
        self._is_within = self._runs_on = False

    def run_on(self) -> None:
        if not self._runs_on:
            self.__enter__()
            self._runs_on = True

    def __enter__(self) -> None:
        if not self._runs_on:
            self._between += time.monotonic() - self._left_at
            self._is_within = True

    def __exit__(self, *_: object) -> None:
        if not self._runs_on:
            self._is_within = False
            self._left_at = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() if self._is_within else self._left_at) - self._between


@dataclass(slots=True)
class _Request:
    """A Produce request in flight; without a handle (acks=0) one that is being sent.

    From `slow_at` on it no longer delays records for other brokers. `slow_at` and `deadline` are readings of the
    sender's clock.
    """

    connection: Connection
    handle: Handle | None
    batches: list[tuple[Queue, Batch]]
    slow_at: float
    deadline: float


@dataclass(slots=True)
class _Broker:
    """A broker's requests in flight, oldest first, its connection while that is being opened, and its throttling."""

    requests: deque[_Request] = field(default_factory=deque)
    opening: Connection | None = None
    #: A reading of `time.monotonic`.
    throttled_until: float = 0.0


class Sender:
    """Queue, send and confirm batches. Not thread-safe, and after an interrupt in a call only `fail` or `stop` it.

    After an error every call raises it again and nothing is sent until `reset`. With `transactions`, batches are part
    of the open transaction.
    """

    def __init__(self, cluster: Cluster, transactions: Transactions | None = None) -> None:
        self._cluster = cluster
        self._transactions = transactions
        self._config = config = cluster.config
        self._enough = max(1, config.max_request_size)
        self._codec, self._level = config.codec, config.compression_level
        #: The codec for records that it has compressed already.
        self._as_it_is = replace(self._codec, _compress=lambda data, _: data)
        self._attributes = 0 if transactions is None else TRANSACTIONAL_BIT
        self._queues: dict[TopicPartition, Queue] = {}
        self._clock = _CallClock()
        #: By node id.
        self._brokers: dict[int, _Broker] = {}
        self._bytes_in_flight = 0
        #: Connections over TLS that have had records without an answer since the last flush.
        self._unanswered: set[Connection] = set()
        #: The requests that partitions wait for: for their leaders, a producer id, or to be part of the transaction.
        self._asking: list[PendingRequest[Any]] = []
        fenced = None if transactions is None else ProducerFenced(transactions.transactional_id)
        self._outcomes = Outcomes(cluster, fenced)
        self.receipts = self._outcomes.receipts
        self._failure: KlogError | None = None
        self._is_stopped = False

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return self._outcomes.bytes

    @property
    def unconfirmed(self) -> int:
        """Records that `add_records` was given and no leader has confirmed."""
        return self._outcomes.unconfirmed

    @property
    def is_idle(self) -> bool:
        """Whether all batches are confirmed and there was no error."""
        return not self.size and self._failure is None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def work_on(self) -> None:
        """Count all time against delivery.timeout.ms from now on."""
        self._clock.run_on()

    def fail(self, error: KlogError) -> None:
        """Write nothing more until `reset`: unconfirmed records get the error, and each call raises it."""
        self._failure = fresh(error)
        self.receipts.fail_all(self._failure)
        if self._transactions is not None:
            self._transactions.fail()

    def stop(self) -> None:
        """Write nothing more; any thread may call it."""
        self._is_stopped = True

    def check(self) -> None:
        """Raise the sender's earlier error, if any."""
        if self._failure is not None:
            raise fresh(self._failure)

    def add_records(
        self,
        key: TopicPartition,
        body: Buffer,
        count: int,
        base_timestamp: int,
        max_timestamp: int,
        receipt: Receipt | None = None,
        *,
        is_compressed: bool = False,
    ) -> None:
        """Queue `count` encoded records as one batch; call `make_room` after it. Raises the sender's earlier error.

        `is_compressed`: `body` is what `compressed` has returned.
        """
        queue = self._admit(key, count)
        numbering = queue.numbering
        data = build_batch(
            body,
            count,
            base_timestamp=base_timestamp,
            max_timestamp=max_timestamp,
            codec=self._as_it_is if is_compressed else self._codec,
            level=None if is_compressed else self._level,
            attributes=self._attributes,
            producer_id=numbering.producer_id if numbering else -1,
            producer_epoch=numbering.epoch if numbering else -1,
            base_sequence=numbering.take_sequences(count) if numbering else -1,
        )
        queue.append(Batch(data, count, self._deadline(), receipt))
        self._outcomes.bytes += len(data)

    def compresses_long(self, size: int) -> bool:
        """Whether the compression of so many bytes takes more than about a millisecond."""
        return size > _QUICKLY_COMPRESSED.get(self._codec.name, _QUICKLY_COMPRESSED["lz4"]) and self._codec is not NONE

    def compressed(self, body: Buffer) -> Buffer:
        """The records as they are in a batch. Any thread may compress."""
        return self._codec.compress(body, self._level)

    def add_batch(self, key: TopicPartition, batch: bytearray, count: int, receipt: Receipt | None = None) -> None:
        """Queue a batch of magic 2 of another log: its header becomes this producer's, its records stay as they are.

        `count` is the number of its records, whose offset deltas must be 0, 1, 2 and so on. It is never split, so that
        these are its offsets in the log, too. Else like `add_records`.
        """
        queue = self._admit(key, count)
        numbering, producer = queue.numbering, (-1, -1, -1)
        if numbering is not None:
            producer = numbering.producer_id, numbering.epoch, numbering.take_sequences(count)
        set_produced(memoryview(batch), *producer, is_transactional=self._transactions is not None)
        queue.append(Batch(batch, count, self._deadline(), receipt, first=None))
        self._outcomes.bytes += len(batch)

    def _admit(self, key: TopicPartition, count: int) -> Queue:
        """The queue for a batch of `count` records; raises the sender's earlier error."""
        self._outcomes.unconfirmed += count
        self.check()
        queue, transactions = self._queues.get(key), self._transactions
        if transactions is not None and queue is not None and not transactions.is_of_epoch(queue.numbering):
            queue = None  # it is empty, since a transaction ends without records in flight
        if queue is None:
            queue = self._outcomes.new_queue(key) if transactions is None else Queue(key, transactions.numbering())
            self._queues[key] = queue
        return queue

    def _deadline(self) -> float:
        return self._clock.now() + self._config.delivery_timeout_ms / 1000

    def make_room(self, until: float = math.inf) -> None:
        """Send if max.request.size is reached.

        Waits while unsent batches for responsive leaders exceed max.request.size, or all batches exceed buffer.memory,
        but not beyond `until`, a reading of `time.monotonic`. Raises what `flush` raises.
        """
        if self._may_be_enough():
            self._deliver(lambda: not self._is_enough(), until)

    def has_room(self, size: int) -> bool:
        """Whether `add_batch` of a batch of this size does not have to wait."""
        unsent = self.size - self._bytes_in_flight
        return not unsent or (unsent + size < self._enough and self.size + size <= self._config.buffer_memory)

    def has_unsent(self, key: TopicPartition) -> bool:
        """Whether a batch of the partition waits to be sent, for the first time or again."""
        queue = self._queues.get(key)
        return queue is not None and len(queue.batches) > queue.in_flight

    def await_room(self, until: float) -> None:
        """Deliver until all batches take less than buffer.memory, up to `until`, a reading of `time.monotonic`."""
        self._deliver(lambda: not self.size or self.size < self._config.buffer_memory, until)

    def step(self) -> tuple[float, list[Waited]]:
        """Do what can be done without waiting; return seconds and connections to wait for until the next step."""
        self.check()
        now = time.monotonic()
        self._deliver(lambda: True)
        return self._pause(now), self._connections()

    def _may_be_enough(self) -> bool:
        size = self._outcomes.bytes
        return size - self._bytes_in_flight >= self._enough or size > self._config.buffer_memory

    def _is_enough(self) -> bool:
        """Whether `make_room` must wait until batches are sent."""
        if self.size > self._config.buffer_memory or not self._may_be_enough():
            return self.size > self._config.buffer_memory
        unsent = (queue.size - queue.in_flight_size for queue in self._queues.values() if self._is_taken_from(queue))
        return sum(unsent) >= self._enough

    def _is_taken_from(self, queue: Queue) -> bool:
        """False while it waits for a retry, a coordinator or a leader, or this is slow, unreachable or throttling."""
        now, node = time.monotonic(), self._cluster.last_leader(*queue.key)
        if node is None or queue.must_renumber or queue.not_before > now:
            return False
        if self._transactions is not None and self._transactions.must_add(queue.key):
            return False
        broker = self._brokers.get(node)
        if broker is None:
            return True
        is_slow = bool(broker.requests) and broker.requests[0].slow_at <= self._clock.now()
        return not is_slow and broker.opening is None and broker.throttled_until <= now

    def flush(self, until: float = math.inf) -> None:
        """Send all batches and wait until they are confirmed, but not beyond `until`, a reading of `time.monotonic`.

        `ProtocolError` for a final error, `RequestTimedOut` if a batch was not confirmed within delivery.timeout.ms,
        `UnsupportedVersionError` for records with headers to a broker before 0.11.
        """
        self.check()
        self._deliver(lambda: not self._outcomes.bytes, until)
        if self._unanswered:
            run(self.flushing_unanswered(until))

    def flushing_unanswered(self, until: float) -> Steps[None]:
        """The last steps of `flush`: brokers have read the records with acks=0, if they go by TLS."""
        deadline = min(until, self._cluster.deadline())
        while self._unanswered:
            try:
                yield from self._behind_records(self._unanswered.pop(), deadline)
            except (ConnectionFailed, RequestTimedOut) as error:
                _log.info("records with acks=0 may be lost: %s", error)
        self._check_stopped()

    def _behind_records(self, connection: Connection, until: float) -> Steps[Message]:
        """Have a request answered behind the records: over TLS a broker may lose what came right before the end."""
        begin = time.monotonic()
        handle = connection.send(API_VERSIONS, {}, version=0, deadline=until)
        while not connection.poll(handle):
            self._check_stopped()
            connection.check_time(begin, until)
            yield Wait(connection, min(until, time.monotonic() + _LONGEST_WAIT), handle)
        return connection.receive(handle)

    def _check_stopped(self) -> None:
        if self._is_stopped:
            raise ProducerClosed("the producer was closed by another thread")

    def reset(self) -> Steps[None]:
        """Drop all batches and the failure, after requests in flight are answered or request.timeout.ms is over.

        It waits because a batch that arrives after its transaction's end would begin a new transaction that never ends.
        """
        deadline = self._cluster.deadline()
        for broker in self._brokers.values():
            while broker.requests:
                request = self._end(broker)  # first, in case this is interrupted
                try:
                    if request.handle is not None:
                        yield from received(request.connection, request.handle, time.monotonic(), deadline)
                except (KlogError, ValueError) as error:  # ValueError: received, but an interrupt came after that
                    _log.info("records that are dropped may be written: %s", error)
                    request.connection.close()
        self._stop_waiting()
        self._queues.clear()
        self._outcomes.bytes = self._outcomes.unconfirmed = 0
        self._failure = None

    def _deliver(self, is_done: Callable[[], bool], until: float = math.inf) -> None:
        """Do what can be done without waiting, then wait until `is_done`, but not beyond `until`."""
        with self._clock:
            try:
                while True:
                    self._check_stopped()
                    self._take_answers()
                    now = time.monotonic()
                    self._stop_waiting()
                    if self._outcomes.bytes:
                        self._send(now)
                        self._expire()
                    if is_done() or now >= until:
                        break
                    pause = min(self._pause(now), until - now)
                    if pause == math.inf:
                        raise KlogError(
                            "records wait, but no request is under way: this is a bug of the producer, report it"
                        )
                    if pause > 0:
                        wait_until_ready(self._connections(), min(pause, _LONGEST_WAIT))
            except KlogError as error:
                self.fail(error)
                raise

    def _stop_waiting(self) -> None:
        """Wait for no connection to open and no request's answer: what still needs them says so again."""
        for broker in self._brokers.values():
            broker.opening = None
        self._asking = []

    def _send(self, now: float) -> None:
        """Send requests to each broker that may have more in flight, as long as there are batches for it."""
        most, is_sent = self._config.max_in_flight, True
        while is_sent:
            ready = [queue for queue in self._queues.values() if queue.next(now, most) is not None]
            if not ready:
                return
            is_sent = False
            remaining = min([queue.batches[0].deadline for queue in ready]) - self._clock.now()
            with self._cluster.within(max(1, 1000 * remaining), "delivery.timeout.ms"):
                asking: list[PendingRequest[Any]] = []
                if self._transactions is not None:  # partitions that are not in it wait for its coordinator
                    self._transactions.add([queue.key for queue in ready])
                    ready = [queue for queue in ready if not self._transactions.must_add(queue.key)]
                    asking = [self._transactions.asking]
                by_leader = self._outcomes.by_leader(ready)
                self._asking = [request for request in (*self._outcomes.asking, *asking) if request.under_way]
                for node, queues in by_leader.items():
                    broker = self._brokers.get(node)
                    if broker is None:
                        broker = self._brokers[node] = _Broker()
                    if self._may_have_more(broker, now):
                        is_sent |= self._send_request(node, broker, queues, now)

    def _may_have_more(self, broker: _Broker, now: float) -> bool:
        is_full = len(broker.requests) >= self._config.max_in_flight
        return not is_full and broker.opening is None and broker.throttled_until <= now

    def _send_request(self, node: int, broker: _Broker, queues: list[Queue], now: float) -> bool:
        """Send one batch per partition, as many as fit into max.request.size; return whether a request was sent."""
        try:
            connection = self._cluster.begin_connection(node)
            if not connection.open_step():
                broker.opening = connection
                return False
        except UNREACHABLE as error:
            self._cluster.suspect(node)  # ask it for metadata last
            self._outcomes.put_off(queues, error)
            return False
        if broker.requests and (connection.must_renew or connection is not broker.requests[0].connection):
            return False  # it authenticates again, or the closed one's requests are put off, before anything else
        chosen: list[tuple[Queue, Batch]] = []
        size = 0
        for queue in queues:
            batch = queue.next(now, self._config.max_in_flight)
            if batch is None:
                continue
            if chosen and size + len(batch.data) > self._config.max_request_size:
                break
            chosen.append((queue, batch))
            size += len(batch.data)
        if not chosen:
            return False
        for queue, _ in chosen:  # to the end, so that the others come first next time
            self._queues[queue.key] = self._queues.pop(queue.key)
        try:
            version = connection.version_of(PRODUCE)
            if self._transactions is not None:
                version = min(version, self._transactions.last_produce)
            message = self._message(chosen, version)
            is_answered = self._config.acks != 0
            deadline = self._cluster.deadline()
            sent = connection.send(PRODUCE, message, version=version, answered=is_answered, deadline=deadline)
        except UNREACHABLE as error:
            alone = [queue for queue, _ in chosen if not queue.in_flight]  # else its requests in flight are lost, too
            if (spent := self._outcomes.resend(alone, error)) is not None:
                raise spent from None
            return False
        if not is_answered and self._config.security.tls is not None:
            self._unanswered.add(connection)
        begin = self._clock.now()
        timeout = self._config.request_timeout_ms / 1000
        handle = sent if is_answered else None
        broker.requests.append(_Request(connection, handle, chosen, begin + _SLOW_SECONDS, begin + timeout))
        for queue, batch in chosen:
            queue.sent(batch, node)
            self._bytes_in_flight += len(batch.data)
        if not is_answered:
            self._take_answers()
        return True

    def _message(self, batches: list[tuple[Queue, Batch]], version: int) -> Message:
        """The request of a batch per partition; `UnsupportedVersionError` if a broker before 0.11 can't have them."""
        topics: dict[str, list[Message]] = {}
        for queue, batch in batches:
            records: Buffer = batch.data
            if version < PRODUCE_WITH_MAGIC_2:
                converted = down_convert(bytes(batch.data), 1 if version == _MAGIC_1 else 0)
                if converted.lost_headers:
                    raise UnsupportedVersionError(
                        f"records for {queue.name} have headers, but the broker supports only Produce {version}, "
                        "which has none: leave them out"
                    )
                records = converted.data
            topics.setdefault(queue.key[0], []).append({"index": queue.key[1], "records": records})
        return {
            "transactional_id": None if self._transactions is None else self._transactions.transactional_id,
            "acks": self._config.acks,
            "timeout_ms": self._config.request_timeout_ms,
            "topic_data": [{"name": topic, "partition_data": data} for topic, data in topics.items()],
        }

    def _connections(self) -> list[Waited]:
        """The connections with requests in flight, those being opened, and those that partitions wait for."""
        connections = [connection for request in self._asking for connection in request.connections]
        for broker in self._brokers.values():
            if broker.requests:
                connections.append(broker.requests[0].connection)
            if broker.opening is not None:
                connections.append(broker.opening)
        return connections

    def _take_answers(self) -> None:
        final: KlogError | None = None
        for node, broker in self._brokers.items():
            try:
                while broker.requests and self._has_answer(broker.requests[0]):
                    final = self._take_answer(node, broker) or final
            except UNREACHABLE as error:
                self._cluster.suspect(node)
                lost: dict[TopicPartition, Queue] = {}
                while broker.requests:
                    lost |= {queue.key: queue for queue, _ in self._end(broker).batches}
                final = self._outcomes.resend(lost.values(), error) or final
        if final is not None:
            raise final

    def _has_answer(self, request: _Request) -> bool:
        """Whether the response has arrived; `RequestTimedOut` if it is late, after closing the connection."""
        if request.connection.poll(request.handle):
            return True
        if request.deadline > self._clock.now():
            return False
        request.connection.close()
        seconds, limit = self._config.request_timeout_ms / 1000, self._config.named("request.timeout.ms")
        raise RequestTimedOut(f"broker {request.connection.address} did not answer within {seconds:g} s ({limit})")

    def _end(self, broker: _Broker) -> _Request:
        """Remove a broker's oldest request, which is no longer in flight."""
        request = broker.requests.popleft()
        for queue, batch in request.batches:
            queue.answered(batch)
            self._bytes_in_flight -= len(batch.data)
        return request

    def _take_answer(self, node: int, broker: _Broker) -> KlogError | None:
        """Process the response to a broker's oldest request; return a final error, if any."""
        request = broker.requests[0]
        response = None if request.handle is None else request.connection.receive(request.handle)
        self._end(broker)
        if response is None:
            for queue, batch in request.batches:
                self._outcomes.confirm(queue, batch)
            return None
        broker.throttled_until = request.connection.throttled_until
        requested = {queue.key: (queue, batch) for queue, batch in request.batches}
        final: KlogError | None = None
        for topic in response["responses"]:
            for entry in topic["partition_responses"]:
                key = topic["name"], entry["index"]
                if key in requested:
                    final = self._outcomes.settle(*requested.pop(key), entry) or final
        if requested:
            left_out = ConnectionFailed(f"broker {node} left partitions out of its answer")
            oldest = [queue for queue, batch in requested.values() if batch is queue.batches[0]]
            final = self._outcomes.resend(oldest, left_out) or final
        return final

    def _expire(self) -> None:
        now = self._clock.now()
        for queue in self._queues.values():
            if queue.batches and queue.batches[0].deadline <= now:
                seconds, limit = self._config.delivery_timeout_ms / 1000, self._config.named("delivery.timeout.ms")
                reason = f": {queue.failure}" if queue.failure else ""
                late = f"records for {queue.name} were not written within {seconds:g} s ({limit}){reason}"
                raise RequestTimedOut(late) from queue.failure

    def _may_leave(self, queue: Queue, sent_at: float) -> bool:
        if queue.next(sent_at, self._config.max_in_flight) is None:
            return False
        node = self._cluster.last_leader(*queue.key)
        broker = None if node is None else self._brokers.get(node)
        return broker is None or self._may_have_more(broker, sent_at)

    def _pause(self, sent_at: float) -> float:
        """Seconds until the sender must act if no response comes; `sent_at` is the time of the last `_send`."""
        if not self._config.acks and any(self._may_leave(queue, sent_at) for queue in self._queues.values()):
            return 0.0  # acks=0: no response to wait for before the next batch
        now = self._clock.now()
        expiry = look_at = math.inf
        for broker in self._brokers.values():
            if broker.requests:  # it is slow or late then
                oldest = broker.requests[0]
                expiry = min(expiry, oldest.slow_at if oldest.slow_at > now else oldest.deadline)
            if broker.opening is not None:
                look_at = min(look_at, broker.opening.look_at)
            if broker.throttled_until > sent_at:
                look_at = min(look_at, broker.throttled_until)
        for request in self._asking:
            look_at = min(look_at, request.look_at)
        for queue in self._queues.values():
            if queue.batches:
                expiry = min(expiry, queue.batches[0].deadline)
                if queue.not_before > sent_at:
                    look_at = min(look_at, queue.not_before)
        return max(0.0, min(expiry - now, look_at - time.monotonic()))
