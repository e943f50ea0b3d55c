"""Requests to any broker that are made step by step, so that nothing else waits for their answers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, TypeVar

from spark_klog.base.interrupts import closing_if_interrupted
from spark_klog.client.answers import check_code
from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import Coordinators, question
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.errors import ConnectionFailed, DecodeError, KlogError, ProtocolError, RequestTimedOut, is_retriable
from spark_klog.protocol.apis import FIND_COORDINATOR, METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import TRANSACTION

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


_log = logging.getLogger(__name__)


class CoordinatorRequest(Generic[_Result]):
    """Ask the coordinator of a transactional id, and try again up to max.block.ms: call `step` until it has a result.

    `result` makes the result of an answer. The coordinator is looked up if it is not known, and after any failure.
    """

    def __init__(
        self,
        cluster: Cluster,
        coordinators: Coordinators,
        transactional_id: str,
        api: Api,
        message: Message,
        result: Callable[[Message], _Result],
    ) -> None:
        self._cluster, self._coordinators, self._id = cluster, coordinators, transactional_id
        self._api, self._message, self._result = api, message, result
        most = cluster.config.max_block_ms
        with cluster.within(most, "max.block.ms") as self._deadline:
            self._backoff = cluster.backoff(most)
        #: The request under way, and those that follow it.
        self._asking: AnyBrokerRequest[Any] | None = None
        self._following: Iterator[AnyBrokerRequest[Any]] = iter(())
        #: When the next attempt begins, a reading of `time.monotonic`.
        self._until = 0.0

    def step(self) -> _Result | None:
        """Do what can be done without waiting; the result once the coordinator has answered, else None.

        Raises what `result` raises; if that can be retried, or if there is no answer, only at the deadline.
        """
        while time.monotonic() >= self._until:
            left = max(0.0, self._deadline - time.monotonic())
            try:
                with self._coordinators.forgotten_on_error(), self._cluster.within(1000 * left, "max.block.ms"):
                    return self._step()
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                if not is_retriable(error):
                    raise
                self._asking = None
                self._until = time.monotonic() + self._backoff.seconds(error)
                _log.debug("trying again: %s", error)
        return None

    def _step(self) -> _Result | None:
        if self._asking is None:
            self._following = self._requests()
            self._asking = next(self._following)
        while (found := self._asking.step()) is not None:
            following = next(self._following, None)
            if following is None:
                result: _Result = found
                return result
            self._asking = following
        return None

    def _requests(self) -> Iterator[AnyBrokerRequest[Any]]:
        """The requests of an attempt; each is made after the answer to the one before."""
        if self._coordinators.known(self._id, TRANSACTION) is None:
            message, found = question([self._id], TRANSACTION)

            def learn(answer: Message) -> int:
                return self._coordinators.learn(self._id, found(answer)[self._id], TRANSACTION)

            yield AnyBrokerRequest(self._cluster, FIND_COORDINATOR, message, learn)
            yield MetadataRequest(self._cluster, [])  # the brokers' addresses
        node = self._coordinators.known(self._id, TRANSACTION)
        yield AnyBrokerRequest(self._cluster, self._api, lambda _: self._message, self._result, node)

    @property
    def connections(self) -> list[Connection]:
        """The connection of which an event makes the next step possible, if any."""
        return [] if self._asking is None else self._asking.connections

    @property
    def look_at(self) -> float:
        """When to call `step` if no event comes, a reading of `time.monotonic`."""
        return self._until if self._asking is None else self._asking.look_at

    def cancel(self) -> None:
        """Drop the answer, which is not needed any more."""
        if self._asking is not None:
            self._asking.cancel()
