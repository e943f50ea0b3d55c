"""Delivery of batches to partitions' leaders: who has what, what is sent again, and when a batch is given up.

A partition has one batch under way at most, and a broker one request, so that a partition keeps its order whatever is
sent again. A batch stays at the head of its partition's queue until its leader has confirmed it; an answer is taken
partition by partition:

    no error, DUPLICATE_SEQUENCE_NUMBER     confirmed
    a retriable error                       sent again after a pause, to the leader that fresh metadata names
    no answer: a lost connection, a
    timeout, a partition left out           the same; a broker that has the batch drops it, if it is numbered
    OUT_OF_ORDER_SEQUENCE_NUMBER,
    UNKNOWN_PRODUCER_ID                     numbered anew from 0 in the next epoch and sent again; final if not numbered
    any other error                         final: the producer fails

There is no thread: batches leave and answers are taken within calls, and only time spent within calls counts against
delivery.timeout.ms. Connecting, sending and receiving go on step by step for all brokers together, so that one that is
silent holds up no other.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from spark_klog.client.answers import answer_error
from spark_klog.client.backoff import pause_seconds
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.connection import Connection, Handle, wait_until_ready
from spark_klog.client.producer_id import Numbering, ProducerIds
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    KlogError,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import METADATA, PRODUCE
from spark_klog.protocol.codec import Message
from spark_klog.records.batch_v2 import build_batch, set_producer
from spark_klog.records.conversion import down_convert

_log = logging.getLogger(__name__)
#: The first version of Produce that takes magic 2, and the one that takes magic 1.
_FIRST_MAGIC_2, _MAGIC_1 = 3, 2
#: A broker that takes longer for a request does not hold up records for others.
_SLOW_SECONDS = 1.0
_CONFIRMED = frozenset({ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER})
_RENUMBERED = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID})
_UNREACHABLE = (ConnectionFailed, RequestTimedOut, DecodeError)


class _Batch:
    """A finished batch; `deadline` is a reading of the sender's clock."""

    __slots__ = ("count", "data", "deadline")

    def __init__(self, data: bytes | bytearray, count: int, deadline: float) -> None:
        self.data = data
        self.count = count
        self.deadline = deadline


class _Queue:
    """A partition's batches that are not confirmed, oldest first. `not_before` is a reading of `time.monotonic`."""

    __slots__ = ("attempts", "batches", "failure", "is_under_way", "key", "not_before", "numbering", "size")

    def __init__(self, key: TopicPartition, numbering: Numbering | None) -> None:
        self.key = key
        self.numbering = numbering
        self.batches: deque[_Batch] = deque()
        self.size = 0
        self.is_under_way = False
        self.attempts = 0
        self.not_before = 0.0
        self.failure: Exception | None = None

    @property
    def name(self) -> str:
        return f"{self.key[0]}-{self.key[1]}"

    def renumber(self, numbering: Numbering) -> None:
        self.numbering = numbering
        for batch in self.batches:
            batch.data = bytearray(batch.data)
            sequence = numbering.take(batch.count)
            set_producer(memoryview(batch.data), numbering.producer_id, numbering.epoch, sequence)


class _Request:
    """A Produce request whose response has not come; without a handle (acks=0) one that is being sent.

    `slow_at`, when it no longer holds up records of other brokers, and `deadline` are readings of the sender's clock.
    """

    __slots__ = ("connection", "deadline", "handle", "queues", "slow_at")

    def __init__(
        self, connection: Connection, handle: Handle | None, queues: list[_Queue], now: float, timeout: float
    ) -> None:
        self.connection = connection
        self.handle = handle
        self.queues = queues
        self.slow_at = now + _SLOW_SECONDS
        self.deadline = now + timeout


class _CallClock:
    """Seconds spent within calls: nothing is delivered between them."""

    def __init__(self) -> None:
        self._left_at = time.monotonic()
        self._between = 0.0
        self._is_within = False

    def __enter__(self) -> None:
        self._between += time.monotonic() - self._left_at
        self._is_within = True

    def __exit__(self, *_: object) -> None:
        self._is_within = False
        self._left_at = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() if self._is_within else self._left_at) - self._between


class Sender:
    """Queues, sends and confirms batches. Not for several threads at once.

    After its first error a sender raises that error from every call, and sends nothing any more.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._config = cluster.config
        self._codec, self._level = self._config.codec, self._config.compression_level
        self._enough = max(1, self._config.max_request_size)
        self._producer_ids = ProducerIds(cluster)
        self._queues: dict[TopicPartition, _Queue] = {}
        self._under_way: dict[int, _Request] = {}
        #: Connections that are being made to brokers that there are batches for.
        self._opening: dict[int, Connection] = {}
        self._throttled_until: dict[int, float] = {}
        self._clock = _CallClock()
        #: Bytes of all batches, and of those under way.
        self._bytes = self._bytes_under_way = 0
        self._failure: KlogError | None = None

    def check(self) -> None:
        """Raise the error that the sender has failed with, if any."""
        if self._failure is not None:
            raise self._failure

    def add(
        self, key: TopicPartition, body: bytes | bytearray, count: int, base_timestamp: int, max_timestamp: int
    ) -> None:
        """Queue `count` encoded records as one batch, and send if max.request.size has gathered.

        Waits while unsent batches whose leaders take some exceed max.request.size, and while all exceed buffer.memory.
        Errors as of `flush`.
        """
        self.check()
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(key, self._numbering())
        numbering = queue.numbering
        data = build_batch(
            body,
            count,
            base_timestamp=base_timestamp,
            max_timestamp=max_timestamp,
            codec=self._codec,
            level=self._level,
            producer_id=numbering.producer_id if numbering else -1,
            producer_epoch=numbering.epoch if numbering else -1,
            base_sequence=numbering.take(count) if numbering else -1,
        )
        queue.batches.append(_Batch(data, count, self._clock.now() + self._config.delivery_timeout_ms / 1000))
        queue.size += len(data)
        self._bytes += len(data)
        if self._may_be_enough():
            self._deliver(lambda: not self._is_enough())

    def _numbering(self) -> Numbering | None:
        try:
            return self._producer_ids.numbering()
        except KlogError as error:
            self._failure = error
            raise

    def _may_be_enough(self) -> bool:
        """Whether it is time to send."""
        waiting = self._bytes - self._bytes_under_way
        return waiting >= self._enough or self._bytes > self._config.buffer_memory

    def _is_enough(self) -> bool:
        """Whether batches must leave before more are taken."""
        if not self._may_be_enough() or self._bytes > self._config.buffer_memory:
            return self._may_be_enough()
        unsent = (
            queue.size - (len(queue.batches[0].data) if queue.is_under_way else 0)
            for queue in self._queues.values()
            if self._is_taken_from(queue)
        )
        return sum(unsent) >= self._enough

    def _is_taken_from(self, queue: _Queue) -> bool:
        """False while the partition waits for another attempt, or its leader is slow: silent, away or throttled."""
        now, node = time.monotonic(), self._cluster.last_leader(*queue.key)
        if queue.not_before > now or node is None:
            return queue.not_before <= now
        request = self._under_way.get(node)
        is_slow = request is not None and request.slow_at <= self._clock.now()
        return not is_slow and node not in self._opening and self._throttled_until.get(node, 0) <= now

    def flush(self) -> None:
        """Send everything and wait until it is confirmed.

        `ProtocolError` for a final error, `RequestTimedOut` for a batch that was not confirmed within
        delivery.timeout.ms, `UnsupportedVersionError` for headers to a broker before 0.11.
        """
        self.check()
        self._deliver(lambda: not self._bytes)

    def _deliver(self, is_done: Callable[[], bool]) -> None:
        """Do what can be done without waiting, then wait until `is_done`."""
        with self._clock:
            try:
                while True:
                    self._take_answers(0)
                    now = time.monotonic()
                    self._send(now)
                    self._expire()
                    if is_done():
                        break
                    self._take_answers(self._pause(now))
            except KlogError as error:
                self._failure = error
                raise

    def _send(self, now: float) -> None:
        """Give each broker that has no request under way one, if there is anything for it."""
        self._opening.clear()
        ready = [
            queue
            for queue in self._queues.values()
            if queue.batches and not queue.is_under_way and queue.not_before <= now
        ]
        if not ready:
            return
        remaining = min(queue.batches[0].deadline for queue in ready) - self._clock.now()
        with self._cluster.within(max(1, 1000 * remaining)):
            by_leader: dict[int, list[_Queue]] = {}
            for queue in self._with_leaders(ready):
                node = self._cluster.last_leader(*queue.key)
                assert node is not None
                by_leader.setdefault(node, []).append(queue)
            for node, queues in by_leader.items():
                if node not in self._under_way and self._throttled_until.get(node, 0) <= now:
                    self._send_request(node, queues)

    def _with_leaders(self, queues: list[_Queue]) -> Iterable[_Queue]:
        """Those of the queues that have a leader; the others wait until they are asked for again."""
        unknown = [queue for queue in queues if self._cluster.last_leader(*queue.key) is None]
        if not unknown:
            return queues
        try:
            found = self._cluster.metadata({queue.key[0] for queue in unknown})
        except _UNREACHABLE as error:
            self._put_off(unknown, error)
            return [queue for queue in queues if queue not in unknown]
        without: dict[int, list[_Queue]] = {}
        for queue in unknown:
            if self._cluster.last_leader(*queue.key) is None:
                topic = found.get(queue.key[0])
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic["error_code"]
                without.setdefault(code or ErrorCode.LEADER_NOT_AVAILABLE, []).append(queue)
        for code, group in without.items():
            refusal = answer_error(METADATA, code, f"partition {group[0].name}")
            if not refusal.retriable:
                raise refusal
            self._put_off(group, refusal)
        return [queue for queue in queues if self._cluster.last_leader(*queue.key) is not None]

    def _send_request(self, node: int, queues: list[_Queue]) -> None:
        """Send one batch of each partition, as many as fit into max.request.size, once the connection is open."""
        try:
            connection = self._cluster.begin_connection(node)
            if not connection.open_step():
                self._opening[node] = connection
                return
        except _UNREACHABLE as error:
            self._put_off_silent(node, queues, error)
            return
        chosen: list[_Queue] = []
        size = 0
        for queue in queues:
            batch_size = len(queue.batches[0].data)
            if chosen and size + batch_size > self._config.max_request_size:
                break
            chosen.append(queue)
            size += batch_size
        for queue in chosen:  # the others come first next time
            self._queues[queue.key] = self._queues.pop(queue.key)
        try:
            message = self._message(chosen, connection.version_of(PRODUCE))
            is_answered = self._config.acks != 0
            deadline = self._cluster.deadline()
            handle = connection.send(PRODUCE, message, answered=is_answered, deadline=deadline, wait=False)
        except _UNREACHABLE as error:
            self._put_off(chosen, error)
            return
        timeout = self._config.request_timeout_ms / 1000
        self._under_way[node] = _Request(connection, handle, chosen, self._clock.now(), timeout)
        for queue in chosen:
            queue.is_under_way = True
        self._bytes_under_way += size
        if handle is None:
            self._take_answers(0)

    def _message(self, queues: list[_Queue], version: int) -> Message:
        topics: dict[str, list[Message]] = {}
        for queue in queues:
            data = queue.batches[0].data
            records = data if version >= _FIRST_MAGIC_2 else _as_message_set(bytes(data), version, queue.name)
            topics.setdefault(queue.key[0], []).append({"index": queue.key[1], "records": records})
        return {
            "acks": self._config.acks,
            "timeout_ms": self._config.request_timeout_ms,
            "topic_data": [{"name": topic, "partition_data": data} for topic, data in topics.items()],
        }

    def _take_answers(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for what brings a request on, and take all responses that have come."""
        if timeout > 0:
            waited = [*(request.connection for request in self._under_way.values()), *self._opening.values()]
            if waited:
                wait_until_ready(waited, timeout)
            else:
                time.sleep(timeout)
        final: ProtocolError | None = None
        for node, request in list(self._under_way.items()):
            try:
                if request.connection.poll(request.handle):
                    final = self._take_answer(node) or final
                elif request.deadline <= self._clock.now():
                    request.connection.close()
                    seconds, limit = self._config.request_timeout_ms / 1000, self._config.named("request.timeout.ms")
                    raise RequestTimedOut(
                        f"broker {request.connection.address} did not answer within {seconds:g} s ({limit})"
                    )
            except _UNREACHABLE as error:
                self._put_off_silent(node, self._end_request(node), error)
        if final is not None:
            raise final

    def _take_answer(self, node: int) -> ProtocolError | None:
        """Take a broker's response; returns a final error, after everything that was confirmed is off the queues."""
        request = self._under_way[node]
        response = None if request.handle is None else request.connection.receive(request.handle)
        queues = self._end_request(node)
        if response is None:
            for queue in queues:
                self._confirm(queue)
            return None
        self._throttled_until[node] = request.connection.throttled_until
        asked = {queue.key: queue for queue in queues}
        final: ProtocolError | None = None
        for topic in response["responses"]:
            for entry in topic["partition_responses"]:
                key = topic["name"], entry["index"]
                if key in asked:
                    final = self._settle(asked.pop(key), entry) or final
        if asked:
            left_out = ConnectionFailed(f"broker {node} left partitions out of its answer")
            self._put_off(list(asked.values()), left_out)
        return final

    def _end_request(self, node: int) -> list[_Queue]:
        """Nothing is under way at a broker any more; the queues whose batches were."""
        queues = self._under_way.pop(node).queues
        for queue in queues:
            queue.is_under_way = False
            self._bytes_under_way -= len(queue.batches[0].data)
        return queues

    def _settle(self, queue: _Queue, entry: Message) -> ProtocolError | None:
        """Take the answer for one partition; returns a final error."""
        code = entry["error_code"]
        if code in _CONFIRMED:
            self._confirm(queue)
            return None
        reason = f" ({entry['error_message']})" if entry["error_message"] else ""
        error = answer_error(PRODUCE, code, f"produce to {queue.name}{reason}")
        if code in _RENUMBERED and queue.numbering is not None:
            try:
                queue.renumber(self._producer_ids.renewed(queue.numbering))
            except _UNREACHABLE as unreachable:  # the next attempt is refused as this one was, and asks again
                self._put_off([queue], unreachable)
                return None
        elif not error.retriable:
            return error
        self._put_off([queue], error)
        return None

    def _confirm(self, queue: _Queue) -> None:
        size = len(queue.batches.popleft().data)
        queue.size -= size
        self._bytes -= size
        queue.attempts = 0
        queue.failure = None

    def _put_off(self, queues: Collection[_Queue], error: Exception) -> None:
        """Send the partitions' batches again after a pause, to the leaders that fresh metadata names."""
        for queue in queues:
            queue.attempts += 1
            queue.failure = error
            self._cluster.forget_leader(*queue.key)
        # one pause for all, so that they ask for metadata together
        pause = pause_seconds(self._config, max(queue.attempts for queue in queues))
        not_before = time.monotonic() + pause
        for queue in queues:
            queue.not_before = not_before
        names = ", ".join(sorted(queue.name for queue in queues))
        _log.warning("records for %s are sent again in %.1f s: %s", names, pause, error)

    def _put_off_silent(self, node: int, queues: Collection[_Queue], error: Exception) -> None:
        """Put off partitions of a broker that does not answer; others are asked for metadata first."""
        self._cluster.suspect(node)
        self._put_off(queues, error)

    def _expire(self) -> None:
        for queue in self._queues.values():
            if queue.batches and queue.batches[0].deadline <= self._clock.now():
                seconds, limit = self._config.delivery_timeout_ms / 1000, self._config.named("delivery.timeout.ms")
                reason = f": {queue.failure}" if queue.failure else ""
                raise RequestTimedOut(
                    f"records for {queue.name} were not written within {seconds:g} s ({limit}){reason}"
                ) from queue.failure

    def _may_leave(self, queue: _Queue, sent_at: float) -> bool:
        node = self._cluster.last_leader(*queue.key)
        return bool(queue.size) and queue.not_before <= sent_at and not {node} & {*self._under_way, *self._opening}

    def _pause(self, sent_at: float) -> float:
        """Seconds until something is to be done if no response comes, after `_send` at that time."""
        if not self._config.acks and any(self._may_leave(queue, sent_at) for queue in self._queues.values()):
            return 0.0  # no response says when to send the next batch
        moments = [connection.look_at for connection in self._opening.values()]
        moments += [moment for moment in self._throttled_until.values() if moment > sent_at]
        now = self._clock.now()
        expiry = math.inf
        for request in self._under_way.values():
            expiry = min(expiry, request.slow_at if request.slow_at > now else request.deadline)
        for queue in self._queues.values():
            if queue.batches:
                expiry = min(expiry, queue.batches[0].deadline)
                if queue.not_before > sent_at:
                    moments.append(queue.not_before)
        until_expiry = expiry - now
        return max(0.0, min(until_expiry, min(moments, default=math.inf) - time.monotonic()))


def _as_message_set(batch: bytes, version: int, where: str) -> bytearray:
    """A batch for a broker before 0.11; `UnsupportedVersionError` if the records have headers, which it can't hold."""
    converted = down_convert(batch, 1 if version == _MAGIC_1 else 0)
    if converted.lost_headers:
        raise UnsupportedVersionError(
            f"records for {where} have headers, the broker speaks Produce {version}, which has none: leave them out"
        )
    return converted.data
