"""The cluster as a client sees it: brokers, leaders, and a connection to each broker that is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar
from uuid import UUID

from spark_klog.client.config import ClientConfig, client_config
from spark_klog.client.connection import Connection
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    ProtocolError,
    RequestTimedOut,
)
from spark_klog.protocol.apis import METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_log = logging.getLogger(__name__)
_MAX_PAUSE = 1.0
_T = TypeVar("_T")
TopicPartition = tuple[str, int]
#: What is answered for a topic that does not exist.
UNKNOWN_TOPIC = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION)


class Cluster:
    """Metadata and connections. Not for several threads at once.

    `attempt` is the way to talk to leaders: it asks for fresh metadata and tries again while the error is one that
    passes, and gives the last error when `request.timeout.ms` is over.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._connections: dict[int, Connection] = {}
        self._brokers: dict[int, tuple[str, int]] = {}
        self._leaders: dict[TopicPartition, int] = {}
        self.controller_id = -1
        #: Ids of the topics, as of the last metadata; brokers before 2.8 give none.
        self.topic_ids: dict[str, UUID] = {}

    @classmethod
    def connect(cls, settings: Mapping[str, str]) -> Cluster:
        """A cluster of settings by Kafka's names, reached once; `ConfigError`, `ConnectionFailed`."""
        cluster = cls(client_config(settings))
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
        self.controller_id = answer["controller_id"]
        for topic in answer["topics"]:
            if not topic["error_code"] and topic["topic_id"].int:
                self.topic_ids[topic["name"]] = topic["topic_id"]
            for partition in topic["partitions"]:
                self._leaders[topic["name"], partition["partition_index"]] = partition["leader_id"]
        return {topic["name"]: topic for topic in answer["topics"]}

    def _metadata_with_brokers(self, request: Message) -> Message:
        """A broker that has just started knows of no broker yet, nor of any topic: it is asked again."""
        deadline = time.monotonic() + self.config.request_timeout_ms / 1000
        while not (answer := self._any_broker(METADATA, request))["brokers"]:
            if time.monotonic() >= deadline:
                raise ConnectionFailed("a broker answers, but knows of no broker")
            time.sleep(self.config.retry_backoff_ms / 1000)
        return answer

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
                raise ProtocolError(code, f"topic {name}")
            result[name] = sorted(entry["partition_index"] for entry in found[name]["partitions"])
        return result

    def _any_broker(self, api: Api, message: Message) -> Message:
        """Ask any broker, the connected ones first, then known ones, then those of bootstrap.servers."""
        for node in list(self._connections):
            try:
                return self.connection(node).request(api, message)
            except (ConnectionFailed, RequestTimedOut):
                self._drop(node)
        failures: list[str] = []
        # a cluster that was there may come back; one that never was is rather a wrong address
        patience = self.config.request_timeout_ms if self._brokers else self.config.connect_timeout_ms
        deadline = time.monotonic() + patience / 1000
        while True:
            failures.clear()
            stranger: DecodeError | None = None
            for host, port in dict.fromkeys([*self._brokers.values(), *self.config.bootstrap_servers]):
                try:
                    with Connection(host, port, self.config) as connection:
                        return connection.request(api, message)
                except (ConnectionFailed, RequestTimedOut) as error:
                    failures.append(str(error))
                except DecodeError as error:  # another kind of server: the next address may be a broker's
                    stranger = error
            if stranger is not None and (not failures or time.monotonic() >= deadline):
                raise stranger
            if time.monotonic() >= deadline:
                raise ConnectionFailed("; ".join(failures))
            time.sleep(self.config.retry_backoff_ms / 1000)

    def leader(self, topic: str, partition: int) -> int:
        """The leader's node id; `ProtocolError` where the partition is unknown or has no leader now."""
        if self._leaders.get((topic, partition), -1) < 0:
            found = self.metadata([topic]).get(topic)
            if found is None or found["error_code"]:
                code = found["error_code"] if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                raise ProtocolError(code, f"topic {topic}")
        node = self._leaders.get((topic, partition))
        if node is None:
            raise ProtocolError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"partition {topic}-{partition}")
        if node < 0:
            raise ProtocolError(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {topic}-{partition}")
        return node

    def by_leader(self, partitions: Iterable[TopicPartition]) -> dict[int, dict[str, list[int]]]:
        """Group partitions by leader and topic."""
        result: dict[int, dict[str, list[int]]] = {}
        for topic, partition in partitions:
            result.setdefault(self.leader(topic, partition), {}).setdefault(topic, []).append(partition)
        return result

    def connection(self, node: int) -> Connection:
        """The connection to a broker, made at first use; `ConnectionFailed` where it is not known or not there."""
        there = self._connections.get(node)
        if there is not None and not there.closed:
            return there
        if node not in self._brokers:
            raise ConnectionFailed(f"broker {node} is not part of the cluster")
        host, port = self._brokers[node]
        self._connections[node] = Connection(host, port, self.config)
        return self._connections[node]

    def _drop(self, node: int) -> None:
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()

    def forget_leaders(self) -> None:
        """Ask anew who leads at the next use, and drop connections with requests under way."""
        self._leaders.clear()
        self.controller_id = -1
        for node, connection in list(self._connections.items()):
            if connection.closed or connection.pending:
                self._drop(node)

    def attempt(self, action: Callable[[], _T], timeout_ms: int | None = None) -> _T:
        """Run `action` until it succeeds or the time is over: errors that may pass are retried with fresh metadata."""
        deadline = time.monotonic() + (timeout_ms or self.config.request_timeout_ms) / 1000
        pause = self.config.retry_backoff_ms / 1000
        while True:
            try:
                return action()
            except (ConnectionFailed, RequestTimedOut) as error:
                failure: Exception = error
            except ProtocolError as error:
                if not error.retriable:
                    raise
                failure = error
            if time.monotonic() >= deadline:
                raise failure
            _log.info("trying again: %s", failure)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
            self.forget_leaders()

    def controller(self, api: Api, message: Message) -> Message:
        """Ask the broker that changes topics."""
        if self.controller_id not in self._brokers:
            self.metadata([])
        try:
            return self.connection(self.controller_id).request(api, message)
        except (ConnectionFailed, RequestTimedOut):
            self.controller_id = -1
            raise

    def close(self) -> None:
        for node in list(self._connections):
            self._drop(node)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
