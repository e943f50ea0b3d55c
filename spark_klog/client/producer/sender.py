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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spark_klog.base.interrupts import WAIT
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.net.connection import Connection
from spark_klog.client.net.waiting import wait_until_ready
from spark_klog.client.producer.numbering import ProducerIds
from spark_klog.client.producer.outcomes import UNREACHABLE, Outcomes, Retries
from spark_klog.client.producer.queues import (
    Batch,
    CallClock,
    Queue,
    Request,
    encode_batch,
    expired,
    next_batches,
    produce_message,
)
from spark_klog.client.producer.receipts import Receipt, fresh
from spark_klog.client.producer.transactions import Transactions
from spark_klog.client.requests import AnyBrokerRequest, CoordinatorRequest
from spark_klog.client.settings import ClientConfig
from spark_klog.errors import ConnectionFailed, KlogError, ProducerClosed, RequestTimedOut
from spark_klog.protocol.apis import PRODUCE
from spark_klog.records.formats.batch_v2 import set_produced
from spark_klog.wire.primitives import Buffer

_log = logging.getLogger(__name__)


class InFlight:
    """Each broker's requests in flight, its connection while that is being opened, and its throttling.

    `now` in arguments is a reading of `time.monotonic`.
    """

    def __init__(self, config: ClientConfig, clock: CallClock) -> None:
        self._config, self._clock = config, clock
        #: Requests by node id, oldest first; an interrupt may leave a broker without any.
        self._requests: dict[int, deque[Request]] = {}
        #: Connections being opened, by node id.
        self.opening: dict[int, Connection] = {}
        #: The requests that partitions wait for, see `Retries.asking` and `Transactions.asking`.
        self.asking: Sequence[AnyBrokerRequest[Any] | CoordinatorRequest[Any]] = ()
        self._throttled_until: dict[int, float] = {}
        #: Bytes of the batches in flight.
        self.bytes = 0

    @property
    def nodes(self) -> list[int]:
        """The brokers with requests in flight."""
        return [node for node, requests in self._requests.items() if requests]

    def oldest(self, node: int) -> Request | None:
        """A broker's oldest request, if any."""
        requests = self._requests.get(node)
        return requests[0] if requests else None

    def may_have_more(self, node: int, now: float) -> bool:
        """Whether a request may be sent to a broker now."""
        is_full = len(self._requests.get(node, ())) >= self._config.max_in_flight
        return not is_full and self._is_responsive(node, now)

    def _is_responsive(self, node: int, now: float) -> bool:
        return node not in self.opening and self._throttled_until.get(node, 0) <= now

    def is_slow(self, node: int, now: float) -> bool:
        """Whether a broker is being connected to, throttles, or takes long for its oldest request."""
        oldest = self.oldest(node)
        return (oldest is not None and oldest.slow_at <= self._clock.now()) or not self._is_responsive(node, now)

    def add(self, node: int, request: Request) -> None:
        """Note a request that was sent to a broker."""
        self._requests.setdefault(node, deque()).append(request)
        for queue, batch in request.batches:
            queue.sent(batch, node)
            self.bytes += len(batch.data)

    def end(self, node: int) -> Request:
        """Remove a broker's oldest request."""
        requests = self._requests[node]
        request = requests.popleft()
        if not requests:
            del self._requests[node]
        for queue, batch in request.batches:
            queue.answered(batch)
            self.bytes -= len(batch.data)
        return request

    def end_all(self, node: int) -> list[Queue]:
        """Remove all requests of a broker, whose connection is lost; returns their partitions' queues."""
        lost: dict[TopicPartition, Queue] = {}
        while self.oldest(node) is not None:
            lost |= {queue.key: queue for queue, _ in self.end(node).batches}
        return list(lost.values())

    def stop_waiting(self) -> None:
        """Wait for no connection to open and for no `asking`: what still needs them says so again."""
        self.opening.clear()
        self.asking = ()

    def throttled(self, node: int, until: float) -> None:
        """Note until when a broker throttles this client, a reading of `time.monotonic`."""
        self._throttled_until[node] = until

    def has_answer(self, request: Request) -> bool:
        """Whether the response has arrived; `RequestTimedOut` if it is late, after closing the connection."""
        if request.connection.poll(request.handle):
            return True
        if request.deadline > self._clock.now():
            return False
        request.connection.close()
        seconds, limit = self._config.request_timeout_ms / 1000, self._config.named("request.timeout.ms")
        raise RequestTimedOut(f"broker {request.connection.address} did not answer within {seconds:g} s ({limit})")

    def connections(self) -> list[Connection]:
        """The connections with requests in flight, those being opened, and those of `asking`."""
        asking = [connection for request in self.asking for connection in request.connections]
        oldest = [requests[0].connection for requests in self._requests.values() if requests]
        return [*oldest, *self.opening.values(), *asking]

    def next_expiry(self) -> float:
        """When the next request is slow or late, by the sender's clock."""
        now, expiry = self._clock.now(), math.inf
        for requests in filter(None, self._requests.values()):
            oldest = requests[0]
            expiry = min(expiry, oldest.slow_at if oldest.slow_at > now else oldest.deadline)
        return expiry

    def look_at(self, after: float) -> Iterator[float]:
        """When connections being opened or `asking` need a step, and when throttling ends, if after `after`."""
        yield from (request.look_at for request in self.asking)
        yield from (connection.look_at for connection in self.opening.values())
        yield from (moment for moment in self._throttled_until.values() if moment > after)

    def drain(self, deadline: float) -> None:
        """Receive and drop all responses until the deadline, a reading of `time.monotonic`."""
        for node in self.nodes:
            while (request := self.oldest(node)) is not None:
                self.end(node)  # first, in case this is interrupted
                try:
                    if request.handle is not None:
                        request.connection.receive(request.handle, deadline)
                except (KlogError, ValueError) as error:  # ValueError: received, but an interrupt came after that
                    _log.info("records that are dropped may be written: %s", error)
                    request.connection.close()
        self.stop_waiting()


#: The last version of Produce that expects the producer to add partitions to the transaction (KIP-890).
_LAST_TRANSACTIONAL = 11
#: Seconds between looks whether another thread has called `stop`.
_LONGEST_WAIT = 0.25


class Sender:
    """Queue, send and confirm batches. Not thread-safe, and after an interrupt in a call only `fail` or `stop` it.

    After an error every call raises it again and nothing is sent until `reset`. With `transactions`, batches are part
    of the open transaction.
    """

    def __init__(self, cluster: Cluster, transactions: Transactions | None = None) -> None:
        self._cluster = cluster
        self._transactions = transactions
        self._config = cluster.config
        self._enough = max(1, self._config.max_request_size)
        self._producer_ids = ProducerIds(cluster)
        self._queues: dict[TopicPartition, Queue] = {}
        self._clock = CallClock()
        self._in_flight = InFlight(self._config, self._clock)
        self._retries = Retries(cluster, self._producer_ids)
        self._outcomes = Outcomes(self._config, self._retries, is_transactional=transactions is not None)
        self.receipts = self._outcomes.receipts
        self._failure: KlogError | None = None
        self._is_stopped = False

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return self._outcomes.bytes

    @property
    def unconfirmed(self) -> int:
        """Records that `add` was given and no leader has confirmed."""
        return self._outcomes.unconfirmed

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

    def add(
        self,
        key: TopicPartition,
        body: Buffer,
        count: int,
        base_timestamp: int,
        max_timestamp: int,
        receipt: Receipt | None = None,
    ) -> None:
        """Queue `count` encoded records as one batch; call `make_room` after it. Raises the sender's earlier error."""
        numbering = self._admit(key, count).numbering
        is_transactional = self._transactions is not None
        data = encode_batch(body, count, base_timestamp, max_timestamp, self._config, numbering, is_transactional)
        self._add(key, data, count, receipt)

    def add_batch(self, key: TopicPartition, batch: bytearray, count: int, receipt: Receipt | None = None) -> None:
        """Queue a batch of magic 2 of another log: its header becomes this producer's, its records stay as they are.

        `count` is the number of its records, whose offset deltas must be 0, 1, 2 and so on. It is never split, so that
        these are its offsets in the log, too. Else like `add`.
        """
        numbering = self._admit(key, count).numbering
        producer = (-1, -1, -1)
        if numbering is not None:
            producer = numbering.producer_id, numbering.epoch, numbering.take(count)
        set_produced(memoryview(batch), *producer, is_transactional=self._transactions is not None)
        self._add(key, batch, count, receipt, first=None)

    def _admit(self, key: TopicPartition, count: int) -> Queue:
        """The queue for a batch of `count` records; raises the sender's earlier error."""
        self._outcomes.unconfirmed += count
        self.check()
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._new_queue(key)
        return queue

    def _add(
        self,
        key: TopicPartition,
        data: bytes | bytearray,
        count: int,
        receipt: Receipt | None,
        first: int | None = 0,
    ) -> None:
        deadline = self._clock.now() + self._config.delivery_timeout_ms / 1000
        self._queues[key].add(Batch(data, count, deadline, receipt, first))
        self._outcomes.bytes += len(data)

    def make_room(self, until: float = math.inf) -> None:
        """Send if max.request.size is reached.

        Waits while unsent batches for responsive leaders exceed max.request.size, or all batches exceed buffer.memory,
        but not beyond `until`, a reading of `time.monotonic`. Raises what `flush` raises.
        """
        if self._may_be_enough():
            self._deliver(lambda: not self._is_enough(), until)

    def has_room(self, size: int) -> bool:
        """Whether `add` of a batch of this size does not have to wait."""
        unsent = self.size - self._in_flight.bytes
        return not unsent or (unsent + size < self._enough and self.size + size <= self._config.buffer_memory)

    def await_room(self, until: float) -> None:
        """Deliver until all batches take less than buffer.memory, up to `until`, a reading of `time.monotonic`."""
        self._deliver(lambda: not self.size or self.size < self._config.buffer_memory, until)

    def step(self) -> tuple[float, list[Connection]]:
        """Do what can be done without waiting; return seconds and connections to wait for until the next step."""
        self.check()
        now = time.monotonic()
        self._deliver(lambda: True)
        return self._pause(now), self._in_flight.connections()

    def _new_queue(self, key: TopicPartition) -> Queue:
        if self._transactions is not None:
            return Queue(key, self._transactions.numbering())
        queue = Queue(key, self._producer_ids.renewed(None))
        queue.must_renumber = self._producer_ids.must_wait(None)  # batches are numbered when the producer id has come
        return queue

    def _may_be_enough(self) -> bool:
        """Whether enough has gathered to send."""
        waiting = self.size - self._in_flight.bytes
        return waiting >= self._enough or self.size > self._config.buffer_memory

    def _is_enough(self) -> bool:
        """Whether `add` must wait until batches are sent."""
        if not self._may_be_enough() or self.size > self._config.buffer_memory:
            return self._may_be_enough()
        unsent = (queue.size - queue.in_flight_size for queue in self._queues.values() if self._is_taken_from(queue))
        return sum(unsent) >= self._enough

    def _is_taken_from(self, queue: Queue) -> bool:
        """False while it waits for a retry, a coordinator or a leader, or this is slow, unreachable or throttling."""
        now, node = time.monotonic(), self._cluster.last_leader(*queue.key)
        is_waiting = queue.must_renumber or queue.not_before > now
        if self._transactions is not None:
            is_waiting |= self._transactions.must_add(queue.key)
        return not is_waiting and node is not None and not self._in_flight.is_slow(node, now)

    def flush(self, until: float = math.inf) -> None:
        """Send all batches and wait until they are confirmed, but not beyond `until`, a reading of `time.monotonic`.

        `ProtocolError` for a final error, `RequestTimedOut` if a batch was not confirmed within delivery.timeout.ms,
        `UnsupportedVersionError` for records with headers to a broker before 0.11.
        """
        self.check()
        self._deliver(lambda: not self.size, until)

    @property
    def is_idle(self) -> bool:
        """Whether all batches are confirmed and there was no error."""
        return not self.size and self._failure is None

    def reset(self) -> None:
        """Drop all batches and the failure, after requests in flight are answered or request.timeout.ms is over.

        It waits because a batch that arrives after its transaction's end would begin a new transaction that never ends.
        """
        self._in_flight.drain(self._cluster.deadline())
        self._queues.clear()
        self._outcomes.clear()
        self._failure = None

    def _deliver(self, is_done: Callable[[], bool], until: float = math.inf) -> None:
        """Do what can be done without waiting, then wait until `is_done`, but not beyond `until`."""
        with self._clock:
            try:
                while True:
                    if self._is_stopped:
                        raise ProducerClosed("the producer was closed by another thread")
                    self._take_answers(0)
                    now = time.monotonic()
                    self._send(now)
                    self._expire()
                    if is_done() or now >= until:
                        break
                    pause = min(self._pause(now), until - now)
                    if pause == math.inf:
                        raise KlogError(
                            "records wait, but no request is under way: this is a bug of the producer, report it"
                        )
                    self._take_answers(min(pause, _LONGEST_WAIT))
            except KlogError as error:
                self.fail(error)
                raise

    def _send(self, now: float) -> None:
        """Send requests to each broker that may have more in flight, as long as there are batches for it."""
        self._in_flight.stop_waiting()
        most = self._config.max_in_flight
        while True:
            ready = [queue for queue in self._queues.values() if queue.next(now, most) is not None]
            if not ready:
                return
            remaining = min(queue.batches[0].deadline for queue in ready) - self._clock.now()
            with self._cluster.within(max(1, 1000 * remaining), "delivery.timeout.ms"):
                added = ready if self._transactions is None else self._added(self._transactions, ready)
                by_leader: dict[int, list[Queue]] = {}
                led = self._retries.with_leaders(self._retries.with_numbers(added))
                adding = None if self._transactions is None else self._transactions.asking
                self._in_flight.asking = [*self._retries.asking, *([] if adding is None else [adding])]
                for queue in led:
                    node = self._cluster.last_leader(*queue.key)
                    assert node is not None
                    if not queue.in_flight or queue.node == node:
                        by_leader.setdefault(node, []).append(queue)
                can_have = [node for node in by_leader if self._in_flight.may_have_more(node, now)]
                if not sum(self._send_request(node, by_leader[node], now) for node in can_have):
                    return

    def _added(self, transactions: Transactions, queues: list[Queue]) -> list[Queue]:
        """The queues whose partitions are in the transaction; others wait for its coordinator."""
        transactions.add([queue.key for queue in queues])
        return [queue for queue in queues if not transactions.must_add(queue.key)]

    def _send_request(self, node: int, queues: list[Queue], now: float) -> bool:
        """Send one batch per partition, as many as fit into max.request.size; return whether a request was sent."""
        try:
            connection = self._cluster.begin_connection(node)
            if not connection.open_step():
                self._in_flight.opening[node] = connection
                return False
        except UNREACHABLE as error:
            self._cluster.suspect(node)  # ask it for metadata last
            self._retries.put_off(queues, error)
            return False
        oldest = self._in_flight.oldest(node)
        if oldest is not None and (connection.must_renew or connection is not oldest.connection):
            return False  # it authenticates again, or the closed one's requests are put off, before anything else
        chosen = next_batches(queues, now, self._config)
        if not chosen:
            return False
        for queue, _ in chosen:  # to the end, so that the others come first next time
            self._queues[queue.key] = self._queues.pop(queue.key)
        try:
            version = connection.version_of(PRODUCE)
            if self._transactions is not None:
                version = min(version, _LAST_TRANSACTIONAL)
            name = None if self._transactions is None else self._transactions.transactional_id
            message = produce_message(chosen, version, self._config, name)
            is_answered = self._config.acks != 0
            deadline = self._cluster.deadline()
            handle = connection.send(
                PRODUCE, message, version=version, answered=is_answered, deadline=deadline, wait=False
            )
        except UNREACHABLE as error:
            alone = [queue for queue, _ in chosen if not queue.in_flight]  # else its requests in flight are lost, too
            if (spent := self._retries.resend(alone, error)) is not None:
                raise spent from None
            return False
        timeout = self._config.request_timeout_ms / 1000
        self._in_flight.add(node, Request(connection, handle, chosen, self._clock.now(), timeout))
        if handle is None:
            self._take_answers(0)
        return True

    def _take_answers(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for events, and process all responses that have arrived."""
        if timeout > 0:
            if connections := self._in_flight.connections():
                wait_until_ready(connections, timeout)
            else:
                with WAIT:
                    time.sleep(timeout)
        final: KlogError | None = None
        for node in self._in_flight.nodes:
            try:
                while (oldest := self._in_flight.oldest(node)) is not None and self._in_flight.has_answer(oldest):
                    final = self._take_answer(node, oldest) or final
            except UNREACHABLE as error:
                self._cluster.suspect(node)
                final = self._retries.resend(self._in_flight.end_all(node), error) or final
        if final is not None:
            raise final

    def _take_answer(self, node: int, request: Request) -> KlogError | None:
        """Process the response to a broker's oldest request; return a final error, if any."""
        response = None if request.handle is None else request.connection.receive(request.handle)
        self._in_flight.end(node)
        if response is None:
            for queue, batch in request.batches:
                self._outcomes.confirm(queue, batch)
            return None
        self._in_flight.throttled(node, request.connection.throttled_until)
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
            final = self._retries.resend(oldest, left_out) or final
        return final

    def _expire(self) -> None:
        for queue in self._queues.values():
            if queue.batches and queue.batches[0].deadline <= self._clock.now():
                raise expired(queue, self._config) from queue.failure

    def _may_leave(self, queue: Queue, sent_at: float) -> bool:
        node = self._cluster.last_leader(*queue.key)
        is_ready = queue.next(sent_at, self._config.max_in_flight) is not None
        return is_ready and (node is None or self._in_flight.may_have_more(node, sent_at))

    def _pause(self, sent_at: float) -> float:
        """Seconds until the sender must act if no response comes; `sent_at` is the time of the last `_send`."""
        if not self._config.acks and any(self._may_leave(queue, sent_at) for queue in self._queues.values()):
            return 0.0  # acks=0: no response to wait for before the next batch
        moments = list(self._in_flight.look_at(sent_at))
        expiry = self._in_flight.next_expiry()
        for queue in self._queues.values():
            if queue.batches:
                expiry = min(expiry, queue.batches[0].deadline)
                if queue.not_before > sent_at:
                    moments.append(queue.not_before)
        until_expiry = expiry - self._clock.now()
        return max(0.0, min(until_expiry, min(moments, default=math.inf) - time.monotonic()))
