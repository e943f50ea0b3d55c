"""The Produce requests in flight, broker by broker."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from spark_klog.client.any_broker import AnyBrokerRequest
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.config import ClientConfig
from spark_klog.client.delivery.coordinator_request import CoordinatorRequest
from spark_klog.client.delivery.queues import CallClock, Queue, Request
from spark_klog.client.network.connection import Connection
from spark_klog.errors import KlogError, RequestTimedOut

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
