"""Requests to any broker that are made step by step, so that nothing else waits for their answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from spark_klog.client.answers import check_code
from spark_klog.client.cluster import Cluster
from spark_klog.client.interrupts import closing_if_interrupted
from spark_klog.client.network.connection import Connection
from spark_klog.client.network.responses import Handle
from spark_klog.errors import ConnectionFailed, DecodeError, KlogError, RequestTimedOut
from spark_klog.protocol.apis import METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_Result = TypeVar("_Result")
#: Seconds between steps although no event came: another request may have read the answer from the connection.
_LONGEST_WAIT = 0.05


class AnyBrokerRequest(Generic[_Result]):
    """Ask any broker, as `Cluster.any_broker` does, but without waiting: call `step` until it returns the result.

    `message` makes the request for a version, `result` makes the result of an answer. The deadline is that of a request
    of the cluster which begins now. The brokers share the time that is left. With `node` only this broker is asked,
    once.
    """

    def __init__(
        self,
        cluster: Cluster,
        api: Api,
        message: Callable[[int], Message],
        result: Callable[[Message], _Result],
        node: int | None = None,
    ) -> None:
        self._cluster, self._deadline, self._backoff = cluster, cluster.deadline(), cluster.backoff()
        self._api, self._message, self._result = api, message, result
        self._is_of_any = node is None
        self._candidates = deque(cluster.candidates() if node is None else [cluster.address(node)])
        self._failures: list[str] = []
        self._connection: Connection | None = None
        self._handle: Handle | None = None
        #: When the next broker is asked, a reading of `time.monotonic`.
        self._until = 0.0

    @closing_if_interrupted
    def step(self) -> _Result | None:
        """Do what can be done without waiting; the result once a broker has answered, else None.

        Raises what `Cluster.any_broker` and `result` raise, `ConnectionFailed` if no broker answers.
        """
        while True:
            if self._connection is None and time.monotonic() < self._until:
                return None
            try:
                connection = self._connection or self._connect()
                answer = self._answer(connection)
                if answer is None and time.monotonic() < self._until:
                    return None
                if answer is None:
                    connection.close()
                    raise RequestTimedOut(f"broker {connection.address} did not answer in time")
                result = self._result(answer)
                self._cluster.answered(self._candidates[0])
                return result
            except (ConnectionFailed, RequestTimedOut, DecodeError) as error:
                self._give_up(error)

    def _connect(self) -> Connection:
        now = time.monotonic()
        until = now + max(0.0, self._deadline - now) / len(self._candidates)
        self._connection = self._cluster.begin_at(self._candidates[0], until)
        self._until = until  # last: without a connection `step` would do nothing until then
        return self._connection

    def _answer(self, connection: Connection) -> Message | None:
        if self._handle is None:
            if not connection.open_step() or connection.is_throttled:
                return None
            message = self._message(connection.version_of(self._api))
            self._handle = connection.send(self._api, message, deadline=self._until, wait=False)
            assert self._handle is not None  # it is answered
        return connection.receive(self._handle) if connection.poll(self._handle) else None

    def _give_up(self, error: KlogError) -> None:
        """Go on with the next broker; after the last one begin again after a pause, or raise at the deadline."""
        self._failures.append(str(error))
        self._connection = self._handle = None
        self._cluster.unanswered(self._candidates.popleft())
        self._until = 0.0
        if not self._is_of_any:
            raise error
        if self._candidates:
            return
        failure = ConnectionFailed("; ".join(self._failures))
        if self._cluster.none_answered():
            raise failure
        self._until = time.monotonic() + self._backoff.seconds(failure)
        self._failures.clear()
        self._candidates.extend(self._cluster.candidates())

    @property
    def connections(self) -> list[Connection]:
        """The connection of which an event makes the next step possible, if any."""
        connection = self._connection
        return [] if connection is None or (self._handle is None and connection.is_throttled) else [connection]

    @property
    def look_at(self) -> float:
        """When to call `step` if no event comes, a reading of `time.monotonic`."""
        if self._connection is None:
            return self._until
        if self._handle is None and self._connection.is_throttled:
            return min(self._until, self._connection.throttled_until)
        return min(self._until, time.monotonic() + _LONGEST_WAIT)

    def close(self) -> None:
        """Close the connection: an interrupt may have dropped the answer, for which the next step asks again."""
        if self._connection is not None:
            self._connection.close()

    def cancel(self) -> None:
        """Drop the answer, which is not needed any more."""
        if self._connection is not None and self._handle is not None and not self._connection.closed:
            self._connection.forget(self._handle)


class MetadataRequest(AnyBrokerRequest[dict[str, Message]]):
    """A request for the metadata of topics, see `Cluster.metadata`. The result has the topics by name."""

    def __init__(self, cluster: Cluster, topics: Collection[str], *, create: bool = False) -> None:
        self.topics = frozenset(topics)
        super().__init__(
            cluster, METADATA, lambda version: cluster.metadata_message(version, self.topics, create), self._learn
        )

    def _learn(self, answer: Message) -> dict[str, Message]:
        check_code(METADATA, answer["error_code"], "metadata")
        if not answer["brokers"]:  # the broker has just started
            host, port = self._candidates[0]
            raise ConnectionFailed(f"broker {host}:{port} lists no brokers in its metadata")
        return self._cluster.learn(answer, self.topics)
