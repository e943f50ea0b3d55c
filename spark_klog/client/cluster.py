"""The cluster as a client sees it: brokers, leaders, and connections to the brokers that are used.

A broker has two connections at most: one for records (Fetch, Produce), where a request may wait for as long as it asks
to, and one for everything else, so that metadata, offsets and coordinators never wait behind records.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID

from spark_klog.client.answers import answer_error, check_code
from spark_klog.client.backoff import Backoff
from spark_klog.client.config import ClientConfig, client_config
from spark_klog.client.connection import Connection, Handle, wait_until_ready
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    KlogError,
    ProtocolError,
    Remedy,
    RequestTimedOut,
)
from spark_klog.protocol.apis import METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
TopicPartition = tuple[str, int]
#: What is answered for a topic that does not exist.
UNKNOWN_TOPIC = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION)


class Cluster:
    """Metadata and connections. Not for several threads at once.

    `attempt` is the way to talk to leaders: it asks for fresh metadata and tries again while the error is one that
    passes, and gives the last error when `request.timeout.ms` is over. No call lasts longer than that, whatever it
    asks, of however many brokers; `within` bounds several calls together.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._connections: dict[tuple[str, int], Connection] = {}
        self._record_connections: dict[tuple[str, int], Connection] = {}
        self._brokers: dict[int, tuple[str, int]] = {}
        self._leaders: dict[TopicPartition, int] = {}
        #: Addresses whose last request, of any connection, got no answer: they are asked last.
        self._silent: set[tuple[str, int]] = set()
        self._deadline = math.inf
        self.controller_id = -1
        #: As of the last metadata; brokers before 0.10.1 give none.
        self.cluster_id: str | None = None
        #: Ids of the topics, as of the last metadata; brokers before 2.8 give none.
        self.topic_ids: dict[str, UUID] = {}

    @classmethod
    def connect(cls, settings: Mapping[str, str], prefix: str = "") -> Cluster:
        """A cluster of settings by Kafka's names, reached once; `ConfigError`, `ConnectionFailed`.

        `prefix` as of `client_config`.
        """
        cluster = cls(client_config(settings, prefix))
        try:
            cluster.metadata([])
        except BaseException:
            cluster.close()
            raise
        return cluster

    def metadata(self, topics: Collection[str] | None, *, create: bool = False) -> dict[str, Message]:
        """Fresh metadata of the topics (None: of all) by name, unknown ones with their error code.

        With `create` a broker that is set so makes missing topics, as it does for any Kafka producer.
        """
        request = {
            "topics": None if topics is None else [{"name": topic} for topic in topics],
            "allow_auto_topic_creation": create,
        }
        answer = self._metadata_with_brokers(request)
        self._brokers = {entry["node_id"]: (entry["host"], entry["port"]) for entry in answer["brokers"]}
        addresses = {*self._brokers.values(), *self.config.bootstrap_servers}
        self._silent &= addresses
        self._close_connections(keep=addresses)
        self.controller_id = answer["controller_id"]
        self.cluster_id = answer["cluster_id"]
        for topic in answer["topics"]:
            if not topic["error_code"] and topic["topic_id"].int:
                self.topic_ids[topic["name"]] = topic["topic_id"]
            for partition in topic["partitions"]:
                self._leaders[topic["name"], partition["partition_index"]] = partition["leader_id"]
        return {topic["name"]: topic for topic in answer["topics"]}

    def _metadata_with_brokers(self, request: Message) -> Message:
        """A broker that has just started knows of no broker yet, nor of any topic: it is asked again."""
        with self.within(self.config.request_timeout_ms) as deadline:
            backoff = Backoff(self.config, deadline)
            while True:
                answer = self.any_broker(METADATA, lambda _: request)
                check_code(METADATA, answer["error_code"], "metadata")
                if answer["brokers"]:
                    return answer
                backoff.pause(ConnectionFailed("a broker answers, but knows of no broker"))

    @property
    def nodes(self) -> list[int]:
        """The brokers of the last metadata, by node id."""
        return sorted(self._brokers)

    def partitions(
        self, topics: Collection[str], *, create: bool = False, missing_ok: bool = False
    ) -> dict[str, list[int]]:
        """Partition numbers of each topic; `ProtocolError` for one that does not exist, unless that is `missing_ok`."""
        found = self.metadata(topics, create=create)
        result = {}
        for name in topics:
            code = found[name]["error_code"] if name in found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if missing_ok and code in UNKNOWN_TOPIC:
                continue
            if code and not (code == ErrorCode.LEADER_NOT_AVAILABLE and found[name]["partitions"]):
                raise answer_error(METADATA, code, f"topic {name}")
            result[name] = sorted(entry["partition_index"] for entry in found[name]["partitions"])
        return result

    def any_broker(self, api: Api, message: Callable[[int], Message]) -> Message:
        """Ask any broker: the connected ones first, then known ones, then those of bootstrap.servers.

        Those that have not answered the last time come after all others.

        `message` gives the request in a version; errors as of `Connection`, once request.timeout.ms is over.
        """
        with self.within(self.config.request_timeout_ms) as deadline:
            # a cluster that was there may come back; one that never was is rather a wrong address
            patience = math.inf if self._brokers else time.monotonic() + self.config.connect_timeout_ms / 1000
            limit = "request.timeout.ms" if deadline <= patience else "socket.connection.setup.timeout.ms"
            backoff = Backoff(self.config, min(deadline, patience), limit)
            while True:
                addresses = [*self._connections, *self._brokers.values(), *self.config.bootstrap_servers]
                candidates = sorted(dict.fromkeys(addresses), key=self._silent.__contains__)
                failures: list[str] = []
                stranger: DecodeError | None = None
                for number, address in enumerate(candidates):
                    left = max(0, deadline - time.monotonic())
                    try:
                        # one that does not answer leaves time for the others
                        with self.within(1000 * left / (len(candidates) - number)) as share:
                            connection = self._open(self._connections, address)
                            answer = connection.request(api, message(connection.version_of(api)), deadline=share)
                            self._silent.discard(address)
                            return answer
                    except (ConnectionFailed, RequestTimedOut) as error:
                        self._silent.add(address)
                        failures.append(str(error))
                    except DecodeError as error:  # another kind of server: the next address may be a broker's
                        stranger = error
                if stranger is not None and not failures:
                    raise stranger
                backoff.pause(stranger or ConnectionFailed("; ".join(failures)))

    def leader(self, topic: str, partition: int) -> int:
        """The leader's node id; `ProtocolError` if the partition is unknown or has no leader now."""
        leaders, failures = self.by_leader([(topic, partition)])
        for failure in failures.values():
            raise failure
        return next(iter(leaders))

    def last_leader(self, topic: str, partition: int) -> int | None:
        """The leader's node id as of the last metadata; None without a leader, or without such metadata."""
        node = self._leaders.get((topic, partition), -1)
        return None if node < 0 else node

    def forget_leader(self, topic: str, partition: int) -> None:
        """Ask anew who leads this partition at the next use."""
        self._leaders.pop((topic, partition), None)

    def by_leader(
        self, partitions: Iterable[TopicPartition]
    ) -> tuple[dict[int, dict[str, list[int]]], dict[TopicPartition, ProtocolError]]:
        """Partitions grouped by leader and topic, and the error of each that is unknown or has no leader now."""
        wanted = list(partitions)
        unknown = {topic for topic, partition in wanted if self._leaders.get((topic, partition), -1) < 0}
        found = self.metadata(unknown) if unknown else {}
        groups: dict[int, dict[str, list[int]]] = {}
        failures: dict[TopicPartition, ProtocolError] = {}
        for topic, partition in wanted:
            failure = self._leader_error(topic, partition, found)
            if failure is None:
                groups.setdefault(self._leaders[topic, partition], {}).setdefault(topic, []).append(partition)
            else:
                failures[topic, partition] = failure
        return groups, failures

    def _leader_error(self, topic: str, partition: int, found: Mapping[str, Message]) -> ProtocolError | None:
        """Why a partition can't be asked for, after the metadata of topics with unknown leaders was `found`."""
        if topic in found and (code := found[topic]["error_code"]) not in (0, ErrorCode.LEADER_NOT_AVAILABLE):
            return answer_error(METADATA, code, f"topic {topic}")
        node = self._leaders.get((topic, partition))
        if node is not None and node >= 0:
            return None
        if topic not in found or not found[topic]["partitions"]:
            code = found[topic]["error_code"] if topic in found else 0
            return answer_error(METADATA, code or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic}")
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if node is None else ErrorCode.LEADER_NOT_AVAILABLE
        return answer_error(METADATA, code, f"partition {topic}-{partition}")

    def _open(self, connections: dict[tuple[str, int], Connection], address: tuple[str, int]) -> Connection:
        """The connection to an address, made at first use and when the one before is closed."""
        there = self._begin(connections, address)
        there.finish_opening()
        return there

    def _begin(self, connections: dict[tuple[str, int], Connection], address: tuple[str, int]) -> Connection:
        """As `_open`, but the connection may not be open yet."""
        there = connections.get(address)
        if there is None or not there.is_usable():
            there = connections[address] = Connection(*address, self.config, self.deadline(), wait=False)
        return there

    def _address(self, node: int) -> tuple[str, int]:
        if node not in self._brokers:
            raise ConnectionFailed(f"broker {node} is not part of the cluster")
        return self._brokers[node]

    def connection(self, node: int) -> Connection:
        """The connection to a broker for records; `ConnectionFailed` if it is not known or not there."""
        return self._open(self._record_connections, self._address(node))

    def begin_connection(self, node: int) -> Connection:
        """As `connection`, but without waiting: it may not be open yet, see `Connection.open_step`."""
        return self._begin(self._record_connections, self._address(node))

    def suspect(self, node: int) -> None:
        """Ask this broker last when any broker will do: it has left a request without an answer."""
        if node in self._brokers:
            self._silent.add(self._brokers[node])

    def request(self, node: int, api: Api, message: Message) -> Message:
        """Ask a broker for anything but records; errors as of `Connection`."""
        return self._open(self._connections, self._address(node)).request(api, message, deadline=self.deadline())

    def request_each(self, api: Api, messages: Mapping[int, Message]) -> dict[int, Message | KlogError]:
        """Ask several brokers at once. Each has its answer or its error: one that is away keeps up no other."""
        result: dict[int, Message | KlogError] = {}
        opening: dict[int, Connection] = {}
        under_way: dict[int, tuple[Connection, Handle]] = {}
        begin, deadline = time.monotonic(), self.deadline()
        for node in messages:
            try:
                opening[node] = self._begin(self._connections, self._address(node))
            except KlogError as error:
                result[node] = error
        while True:
            for node, connection in list(opening.items()):
                try:
                    if connection.open_step():
                        handle = connection.send(api, messages[node], deadline=deadline, wait=False)
                        assert handle is not None  # it is answered
                        under_way[node] = connection, handle
                        del opening[node]
                except KlogError as error:
                    result[node] = error
                    del opening[node]
            now = time.monotonic()
            for node, (connection, handle) in list(under_way.items()):
                try:
                    if connection.poll(handle):
                        result[node] = connection.receive(handle)
                    elif now < deadline:
                        continue
                    else:
                        connection.close()
                        late = f"broker {connection.address} did not answer within {now - begin:.1f} s"
                        result[node] = RequestTimedOut(late)
                except KlogError as error:
                    result[node] = error
                del under_way[node]
            waited = [*opening.values(), *(connection for connection, _ in under_way.values())]
            if not waited:
                return result
            look_at = min([deadline, *(connection.look_at for connection in opening.values())])
            wait_until_ready(waited, look_at - time.monotonic())

    def version_of(self, node: int, api: Api) -> int:
        """The version in which `request` asks a broker; errors as of `Connection`."""
        return self._open(self._connections, self._address(node)).version_of(api)

    def _close_connections(self, keep: Collection[tuple[str, int]] = ()) -> None:
        for connections in (self._connections, self._record_connections):
            for address in [address for address in connections if address not in keep]:
                connections.pop(address).close()

    def forget_leaders(self) -> None:
        """Ask anew who leads at the next use."""
        self._leaders.clear()
        self.controller_id = -1

    def refresh_after(self, failure: KlogError) -> None:
        """Forget what a failure shows to be outdated; call it before another attempt."""
        if not isinstance(failure, ProtocolError) or failure.remedy is Remedy.REFRESH:
            self.forget_leaders()

    def deadline(self) -> float:
        """When a request that begins now has to have its answer, a reading of `time.monotonic`."""
        return min(self._deadline, time.monotonic() + self.config.request_timeout_ms / 1000)

    @contextmanager
    def within(self, timeout_ms: float) -> Iterator[float]:
        """Bound all requests of the block by one deadline, which it gives: this one or that of a block around it."""
        outer = self._deadline
        self._deadline = min(outer, time.monotonic() + timeout_ms / 1000)
        try:
            yield self._deadline
        finally:
            self._deadline = outer

    def attempt(self, action: Callable[[], _T], timeout_ms: int | None = None) -> _T:
        """Run `action` until it succeeds or the time is over: errors that may pass are retried with fresh metadata."""
        with self.within(timeout_ms or self.config.request_timeout_ms) as deadline:
            backoff = Backoff(self.config, deadline)
            while True:
                try:
                    return action()
                except (ConnectionFailed, RequestTimedOut) as error:
                    failure: KlogError = error
                except ProtocolError as error:
                    if not error.retriable:
                        raise
                    failure = error
                backoff.pause(failure)
                _log.info("trying again: %s", failure)
                self.refresh_after(failure)

    def controller(self) -> int:
        """The broker that changes topics, with a connection to it."""
        if self.controller_id not in self._brokers:
            self.metadata([])
        self._open(self._connections, self._address(self.controller_id))
        return self.controller_id

    def close(self) -> None:
        self._close_connections()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
