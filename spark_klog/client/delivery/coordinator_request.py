"""A request to the coordinator of a transactional id that is made step by step, so that nothing else waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from spark_klog.client.any_broker import AnyBrokerRequest, MetadataRequest
from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import Coordinators, question
from spark_klog.client.network.connection import Connection
from spark_klog.errors import ConnectionFailed, ProtocolError, RequestTimedOut, is_retriable
from spark_klog.protocol.apis import FIND_COORDINATOR
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.coordinator import TRANSACTION

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


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
