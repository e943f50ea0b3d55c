"""The cluster as a client sees it: brokers, leaders, and requests that are tried again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar
from uuid import UUID

from spark_klog.client.answers import answer_error, check_code
from spark_klog.client.backoff import Backoff
from spark_klog.client.config import ClientConfig, client_config
from spark_klog.client.connections import Connections
from spark_klog.client.network.connection import Connection
from spark_klog.client.security.settings.config import PLAINTEXT
from spark_klog.error_codes import Remedy
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    HandshakeInterrupted,
    KlogError,
    ProtocolError,
    RequestTimedOut,
)
from spark_klog.protocol.apis import METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_log = logging.getLogger(__name__)
#: A cluster never reached before: fail after this many rounds in which all brokers closed the connection during the
#: handshake. A restarting broker does so too, but usually the settings do not fit the port. Without TLS and SASL a
#: round counts only if the brokers have answered ApiVersions: a proxy whose broker is not up yet closes, too.
_INTERRUPTED_ROUNDS = 5
#: The first version of Metadata that does not create missing topics unless it is asked to.
_FIRST_NOT_CREATING = 4
_T = TypeVar("_T")
TopicPartition = tuple[str, int]
#: The errors of a topic that does not exist.
UNKNOWN_TOPIC = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION)


class Cluster(Connections):
    """Metadata and connections. Not thread-safe.

    Use `attempt` for requests to leaders: it refreshes metadata and retries while the error is retriable, and raises
    the last error when `request.timeout.ms` is over. No call lasts longer than that, however many brokers it asks;
    `within` bounds several calls together.
    """

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self._leaders: dict[TopicPartition, int] = {}
        #: Seconds without an answer of any broker after which calls give up, whatever time they have left; a thread
        #: other than the cluster's may lower it.
        self.patience = math.inf
        #: When brokers stopped answering, a reading of `time.monotonic`; None while one answers.
        self._unreached_since: float | None = None
        self.controller_id = -1
        #: From the last metadata; None from brokers before 0.10.1.
        self.cluster_id: str | None = None
        #: Topic ids from metadata, by name; brokers before 2.8 have none.
        self.topic_ids: dict[str, UUID] = {}

    @classmethod
    def connect(cls, settings: Mapping[str, Any], prefix: str = "") -> Cluster:
        """Make a cluster from settings by Kafka's names and connect to it once; `ConfigError`, `ConnectionFailed`.

        `prefix`: see `client_config`.
        """
        cluster = cls(client_config(settings, prefix))
        try:
            cluster.metadata([])
        except BaseException:
            cluster.close()
            raise
        return cluster

    def metadata(
        self, topics: Collection[str] | None, *, create: bool = False, is_retried: bool = False
    ) -> dict[str, Message]:
        """Fetch metadata of the topics (None: all topics), by name; unknown topics have their error code.

        With `create`, brokers with auto.create.topics.enable create missing topics. `is_retried`: see `any_broker`.
        """

        answer = self._metadata_with_brokers(lambda version: self.metadata_message(version, topics, create), is_retried)
        return self.learn(answer, topics)

    @staticmethod
    def metadata_message(version: int, topics: Collection[str] | None, create: bool) -> Message:
        """A Metadata request; arguments as of `metadata`."""
        # before version 4 naming a topic creates it
        is_all = topics is None or bool(topics and not create and version < _FIRST_NOT_CREATING)
        every: list[Message] | None = [] if version == 0 else None
        names = every if is_all else [{"name": topic} for topic in topics or ()]
        return {"topics": names, "allow_auto_topic_creation": create}

    def learn(self, answer: Message, topics: Collection[str] | None) -> dict[str, Message]:
        """Take over a Metadata response; the result of `metadata`."""
        self._brokers = {entry["node_id"]: (entry["host"], entry["port"]) for entry in answer["brokers"]}
        addresses = {*self._brokers.values(), *self.config.bootstrap_servers}
        self._silent &= addresses
        self._reached &= addresses
        for address in self._connections.keys() - addresses:
            self._connections.pop(address).close()
        for key in self._record_connections.keys() - {(*address, node) for node, address in self._brokers.items()}:
            self._record_connections.pop(key).close()
        self.controller_id = answer["controller_id"]
        self.cluster_id = answer["cluster_id"]
        for topic in answer["topics"]:
            if not topic["error_code"] and topic["topic_id"].int:
                self.topic_ids[topic["name"]] = topic["topic_id"]
            for partition in topic["partitions"]:
                self._leaders[topic["name"], partition["partition_index"]] = partition["leader_id"]
        found = {topic["name"]: topic for topic in answer["topics"]}
        return found if topics is None else {name: found[name] for name in topics if name in found}

    def _metadata_with_brokers(self, request: Callable[[int], Message], is_retried: bool) -> Message:
        """Fetch metadata, and retry while it names no broker: a broker that has just started knows none yet."""
        with self.within(self.config.request_timeout_ms) as deadline:
            backoff = Backoff(self.config, deadline, self._limit)
            while True:
                answer = self.any_broker(METADATA, request, is_retried=is_retried)
                check_code(METADATA, answer["error_code"], "metadata")
                if answer["brokers"]:
                    return answer
                backoff.pause(ConnectionFailed("a broker answers, but its metadata lists no brokers"))

    def partitions(
        self, topics: Collection[str], *, create: bool = False, missing_ok: bool = False
    ) -> dict[str, list[int]]:
        """Partition numbers by topic. A missing topic is a `ProtocolError`, or is left out with `missing_ok`."""
        return numbers_of(self.metadata(topics, create=create), topics, missing_ok=missing_ok)

    def candidates(self) -> list[tuple[str, int]]:
        """Addresses for a request to any broker, in this order: connected ones, known ones, bootstrap.servers.

        Brokers that did not answer their last request come after all others.
        """
        addresses = [*self._connections, *self._brokers.values(), *self.config.bootstrap_servers]
        return sorted(dict.fromkeys(addresses), key=self._silent.__contains__)

    def begin_at(self, address: tuple[str, int], deadline: float) -> Connection:
        """The connection for everything but records, which may not be open yet: see `begin_connection`."""
        with self.within(1000 * max(0.0, deadline - time.monotonic())):
            return self._begin(self._connections, address)

    def answered(self, address: tuple[str, int]) -> None:
        """Note that the broker there has answered."""
        self._silent.discard(address)
        self._described_by = address
        self._unreached_since = None

    def unanswered(self, address: tuple[str, int]) -> None:
        """Note that the broker there did not answer: it is asked last."""
        self._silent.add(address)

    def any_broker(self, api: Api, message: Callable[[int], Message], *, is_retried: bool = False) -> Message:
        """Send a request to any broker, see `candidates`. `message` makes the request for a version.

        Raises what `Connection` raises, when request.timeout.ms is over; with `is_retried` after each broker was asked
        once, as the caller pauses and retries.
        """
        with self.within(self.config.request_timeout_ms) as deadline:
            # a cluster that was reached before may come back; otherwise the address is probably wrong
            patience = math.inf if self._brokers else time.monotonic() + self.config.connect_timeout_ms / 1000
            backoff = Backoff(self.config, deadline, self._limit, patience)
            rounds = 0
            while True:
                candidates = self.candidates()
                failures: list[str] = []
                stranger: DecodeError | None = None
                interrupted = 0
                for number, address in enumerate(candidates):
                    left = max(0, deadline - time.monotonic())
                    try:
                        # each address gets a share of the time, so that a silent one leaves time for the others
                        with self.within(1000 * left / (len(candidates) - number)) as share:
                            connection = self._open(self._connections, address)
                            answer = connection.request(api, message(connection.version_of(api)), deadline=share)
                            self.answered(address)
                            return answer
                    except (ConnectionFailed, RequestTimedOut) as error:
                        self.unanswered(address)
                        failures.append(str(error))
                        if isinstance(error, HandshakeInterrupted):
                            interrupted += error.is_by_broker or self.config.security.protocol != PLAINTEXT
                    except DecodeError as error:  # not a broker; the next address may be one
                        stranger = error
                if stranger is not None and not failures:
                    raise stranger
                rounds += interrupted == len(candidates)
                if rounds == _INTERRUPTED_ROUNDS and not self._brokers:
                    raise HandshakeInterrupted("; ".join(failures))
                failure: KlogError = ConnectionFailed("; ".join(failures))
                if stranger is not None and not self._brokers:  # else brokers that were reached are down for a while
                    failure = stranger
                if self.none_answered() or is_retried:
                    raise failure
                backoff.pause(failure)

    def none_answered(self) -> bool:
        """Note that no broker has answered; return whether none has for `patience`."""
        self._unreached_since = self._unreached_since or time.monotonic()
        return self._has_no_patience()

    def backoff(self, timeout_ms: int | None = None) -> Backoff:
        """The pauses between attempts of a request that begins now, until its deadline."""
        with self.within(timeout_ms or self.config.request_timeout_ms) as deadline:
            return Backoff(self.config, deadline, self._limit)

    def _has_no_patience(self) -> bool:
        """Whether no broker has answered for `patience`."""
        since = self._unreached_since
        return since is not None and time.monotonic() >= since + self.patience

    def leader(self, topic: str, partition: int) -> int:
        """The leader's node id; `ProtocolError` if the partition is unknown or has no leader now."""
        leaders, failures = self.by_leader([(topic, partition)])
        for failure in failures.values():
            raise failure
        return next(iter(leaders))

    def last_leader(self, topic: str, partition: int) -> int | None:
        """The leader's node id in the last metadata; None if there is no leader or no such metadata."""
        node = self._leaders.get((topic, partition), -1)
        return None if node < 0 else node

    def forget_leader(self, topic: str, partition: int) -> None:
        """Forget this partition's leader; the next use fetches metadata."""
        self._leaders.pop((topic, partition), None)

    def by_leader(
        self, partitions: Iterable[TopicPartition]
    ) -> tuple[dict[int, dict[str, list[int]]], dict[TopicPartition, ProtocolError]]:
        """Partitions by leader and topic, and the errors of partitions that are unknown or have no leader now."""
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
        """Why a partition has no leader; `found` is the metadata fetched for topics with unknown leaders."""
        if topic in found and (code := found[topic]["error_code"]) not in (0, ErrorCode.LEADER_NOT_AVAILABLE):
            return answer_error(METADATA, code, f"topic {topic}")
        node = self._leaders.get((topic, partition))
        if node is not None and node >= 0:
            return None
        if topic not in found or not found[topic]["partitions"]:
            code = found[topic]["error_code"] if topic in found else 0
            return answer_error(METADATA, code or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic}")
        if node is None:
            advice = f"topic {topic} has {len(found[topic]['partitions'])} partitions, numbered from 0"
            what = f"partition {topic}-{partition}"
            return ProtocolError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, what, advice=advice)
        return answer_error(METADATA, ErrorCode.LEADER_NOT_AVAILABLE, f"partition {topic}-{partition}")

    def forget_leaders(self) -> None:
        """Forget all leaders and the controller; the next use fetches metadata."""
        self._leaders.clear()
        self.controller_id = -1

    def refresh_after(self, failure: KlogError) -> None:
        """Forget leaders if the failure shows that they may be outdated; call it before a retry."""
        if not isinstance(failure, ProtocolError) or failure.remedy is Remedy.REFRESH:
            self.forget_leaders()

    def attempt(self, action: Callable[[], _T], timeout_ms: int | None = None, limit: str = "request.timeout.ms") -> _T:
        """Run `action` until it succeeds or the time is over; retriable errors are retried with fresh metadata.

        `limit`: see `within`.
        """
        with self.within(timeout_ms or self.config.request_timeout_ms, limit) as deadline:
            backoff = Backoff(self.config, deadline, self._limit)
            is_first = True
            while True:
                try:
                    return action()
                except (ConnectionFailed, RequestTimedOut) as error:
                    if self._has_no_patience():
                        raise
                    failure: KlogError = error
                except ProtocolError as error:
                    if not error.retriable:
                        raise
                    failure = error
                backoff.pause(failure)
                # what lasts is told by the back-off, at intervals that double
                _log.log(logging.INFO if is_first else logging.DEBUG, "trying again: %s", failure)
                is_first = False
                self.refresh_after(failure)

    def controller(self) -> int:
        """The node id of the controller, after connecting to it."""
        if self.controller_id not in self._brokers:
            self.metadata([])
        self._open(self._connections, self.address(self.controller_id))
        return self.controller_id


def numbers_of(
    found: Mapping[str, Message], topics: Collection[str], *, missing_ok: bool = False
) -> dict[str, list[int]]:
    """Partition numbers by topic, of metadata: see `Cluster.partitions`."""
    result = {}
    for name in topics:
        code = found[name]["error_code"] if name in found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if missing_ok and code in UNKNOWN_TOPIC:
            continue
        if code and not (code == ErrorCode.LEADER_NOT_AVAILABLE and found[name]["partitions"]):
            raise answer_error(METADATA, code, f"topic {name}")
        result[name] = sorted(entry["partition_index"] for entry in found[name]["partitions"])
    return result
