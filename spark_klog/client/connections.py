"""Connections to the brokers of a cluster, requests over them, and the deadlines of calls.

Each broker has at most two connections: one for records (Fetch, Produce), whose requests may wait at the broker, and
one for everything else, so that metadata, offsets and coordinators never wait behind records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from spark_klog.client.backoff import shown_seconds
from spark_klog.client.config import ClientConfig
from spark_klog.client.forks import Maker
from spark_klog.client.network.connection import Connection
from spark_klog.client.network.readiness import wait_until_ready
from spark_klog.client.network.responses import Handle
from spark_klog.errors import ConnectionFailed, ForkedClient, KlogError, RequestTimedOut
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_Self = TypeVar("_Self", bound="Connections")
_Request = TypeVar("_Request", bound=Hashable)
_Key = TypeVar("_Key", tuple[str, int], tuple[str, int, int])


@contextmanager
def _unsent() -> Iterator[None]:
    """Note in errors of the block, which opens a connection, that the request was not sent."""
    try:
        yield
    except (ConnectionFailed, RequestTimedOut) as error:
        error.is_unsent = True
        raise


class Connections:
    """The base of `Cluster`, which fetches the metadata that name the brokers."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._maker = Maker("cluster client", ForkedClient)
        self._connections: dict[tuple[str, int], Connection] = {}
        #: By address and node id: an answer's records stay in the connection's buffer, so nodes at one address (a port
        #: forward, a load balancer) must not share one.
        self._record_connections: dict[tuple[str, int, int], Connection] = {}
        self._brokers: dict[int, tuple[str, int]] = {}
        #: Addresses that did not answer their last request; `any_broker` asks them last.
        self._silent: set[tuple[str, int]] = set()
        #: Addresses where a broker has answered.
        self._reached: set[tuple[str, int]] = set()
        #: The broker that has answered last, from which the metadata come.
        self._described_by: tuple[str, int] | None = None
        self._deadline = math.inf
        self._limit = "request.timeout.ms"

    @property
    def nodes(self) -> list[int]:
        """The node ids of the brokers in the last metadata, sorted."""
        return sorted(self._brokers)

    def _open(self, connections: dict[_Key, Connection], key: _Key) -> Connection:
        """The open connection of a key, which begins with host and port; connect if there is none or it is closed."""
        there = self._begin(connections, key)
        there.finish_opening()
        return there

    def _begin(self, connections: dict[_Key, Connection], key: _Key) -> Connection:
        """Like `_open`, but the connection may not be open yet."""
        self._maker.check()
        there = connections.get(key)
        if there is None or not there.is_usable():
            if there is not None and there.was_open:
                self._reached.add(key[:2])
            source = self._source(key[:2])
            there = connections[key] = Connection(
                key[0], key[1], self.config, self.deadline(), wait=False, source=source
            )
            there.is_proven = bool(self._brokers)
        else:
            there.renew(self.deadline())
        return there

    def _source(self, address: tuple[str, int]) -> str:
        """Where the address comes from, for errors: from a broker, if none has ever answered there."""
        open_ones = (*self._connections.items(), *self._record_connections.items())
        is_reached = address in self._reached or any(
            key[:2] == address and connection.was_open for key, connection in open_ones
        )
        node = next((node for node, there in self._brokers.items() if there == address), None)
        if is_reached or node is None or self._described_by is None or address in self.config.bootstrap_servers:
            return ""
        host, port = self._described_by
        return f"the address of broker {node} as {host}:{port} advertises it, check advertised.listeners"

    def address(self, node: int) -> tuple[str, int]:
        """A broker's host and port in the last metadata; `ConnectionFailed` if it is not there."""
        if node not in self._brokers:
            raise ConnectionFailed(f"broker {node} is not part of the cluster")
        return self._brokers[node]

    def connection(self, node: int) -> Connection:
        """The connection to a broker for records; `ConnectionFailed` if it is unknown or can't be reached."""
        return self._open(self._record_connections, (*self.address(node), node))

    def begin_connection(self, node: int) -> Connection:
        """Like `connection`, but without waiting: it may not be open yet, see `Connection.open_step`."""
        return self._begin(self._record_connections, (*self.address(node), node))

    def plain_connection(self, node: int) -> Connection:
        """The connection to a broker for everything but records; several requests may be in flight on it."""
        return self._open(self._connections, self.address(node))

    def suspect(self, node: int) -> None:
        """Note that this broker did not answer a request; `any_broker` asks it last."""
        if node in self._brokers:
            self._silent.add(self._brokers[node])

    def request(self, node: int, api: Api, message: Message) -> Message:
        """Send a broker a request for anything but records; raises what `Connection` raises."""
        with _unsent():
            connection = self.plain_connection(node)
        return connection.request(api, message, deadline=self.deadline())

    def request_each(self, api: Api, messages: Mapping[int, Message]) -> dict[int, Message | KlogError]:
        """Ask several brokers at once, see `request_all`; `messages` by node id."""
        return self.request_all(api, {node: (node, message) for node, message in messages.items()})

    def request_all(
        self, api: Api, requests: Mapping[_Request, tuple[int, Message]]
    ) -> dict[_Request, Message | KlogError]:
        """Send requests, each to a node id, and wait for all; each gets its answer or its error.

        A broker that is silent, or that throttles this client, does not delay the others. Requests to the same broker
        follow each other without waiting.
        """
        result: dict[_Request, Message | KlogError] = {}
        opening: dict[_Request, Connection] = {}
        under_way: dict[_Request, tuple[Connection, Handle]] = {}
        begin, deadline = time.monotonic(), self.deadline()
        for key, (node, _) in requests.items():
            try:
                with _unsent():
                    opening[key] = self._begin(self._connections, self.address(node))
            except KlogError as error:
                result[key] = error
        while True:
            waited: list[Connection] = []
            look_at = deadline
            for key, connection in list(opening.items()):
                try:
                    with _unsent():
                        is_open = connection.open_step()
                    if not is_open:
                        waited.append(connection)
                        look_at = min(look_at, connection.look_at)
                    elif connection.is_throttled and connection.throttled_until <= deadline:
                        look_at = min(look_at, connection.throttled_until)
                    else:
                        handle = connection.send(api, requests[key][1], deadline=deadline, wait=False)
                        assert handle is not None  # it is answered
                        under_way[key] = connection, handle
                        del opening[key]
                except KlogError as error:
                    result[key] = error
                    del opening[key]
            now = time.monotonic()
            for key, (connection, handle) in list(under_way.items()):
                try:
                    if connection.poll(handle):
                        result[key] = connection.receive(handle)
                    elif now < deadline:
                        continue
                    else:
                        connection.close()
                        late = f"broker {connection.address} did not answer within {shown_seconds(now - begin)} s"
                        result[key] = RequestTimedOut(late)
                except KlogError as error:
                    result[key] = error
                del under_way[key]
            if not opening and not under_way:
                return result
            if any(connection.has_arrived(handle) for connection, handle in under_way.values()):
                continue  # it came with the response to a later request: no event would tell
            waited += [connection for connection, _ in under_way.values()]
            wait_until_ready(waited, look_at - time.monotonic())

    def version_of(self, node: int, api: Api) -> int:
        """The API version that `request` uses with a broker; raises what `Connection` raises."""
        return self._open(self._connections, self.address(node)).version_of(api)

    def deadline(self) -> float:
        """The deadline of a request that begins now, a reading of `time.monotonic`."""
        return min(self._deadline, time.monotonic() + self.config.request_timeout_ms / 1000)

    @contextmanager
    def within(self, timeout_ms: float, limit: str = "request.timeout.ms") -> Iterator[float]:
        """Bound all requests of the block by one deadline, and yield it: this one or an earlier one of an outer block.

        `limit` is the name of the setting that the time comes from.
        """
        outer = self._deadline, self._limit
        own = time.monotonic() + timeout_ms / 1000
        if own < self._deadline:
            self._deadline, self._limit = own, limit
        try:
            yield self._deadline
        finally:
            self._deadline, self._limit = outer

    def end_deadlines(self) -> None:
        """Free later requests of deadlines whose block an interrupt has ended halfway."""
        self._deadline, self._limit = math.inf, "request.timeout.ms"

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Free the requests of the block from the deadlines of outer blocks, and put those off by the time it takes."""
        deadline, limit = self._deadline, self._limit
        begin = time.monotonic()
        self._deadline, self._limit = math.inf, "request.timeout.ms"
        try:
            yield
        finally:
            self._deadline, self._limit = deadline + time.monotonic() - begin, limit

    def close(self) -> None:
        for connection in (*self._connections.values(), *self._record_connections.values()):
            connection.close()
        self._connections.clear()
        self._record_connections.clear()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
