"""The cluster as a client sees it: brokers, leaders, and requests that are tried again."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from spark_klog.base.names import PLAINTEXT, TopicPartition
from spark_klog.base.settings import some_of
from spark_klog.client.answers import answer_error, check_code
from spark_klog.client.forks import Maker
from spark_klog.client.net.connection import SOFTWARE, BrokerIdentity, Connection
from spark_klog.client.requests import Steps, Wait, answered, at_once, each, opened, retried, run, unsent
from spark_klog.client.retry import Retry
from spark_klog.client.settings import ClientConfig, client_config
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    ForkedClient,
    HandshakeInterrupted,
    KlogError,
    ProtocolError,
    Remedy,
    RequestTimedOut,
)
from spark_klog.protocol.apis import API_VERSIONS, METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.metadata import FIRST_WITH_FEATURES, WITH_IDENTITY

_log = logging.getLogger(__name__)
#: A cluster never reached before: fail after this many rounds in which all brokers closed the connection during the
#: handshake. A restarting broker does so too, but usually the settings do not fit the port. Without TLS and SASL a
#: round counts only if the brokers have answered ApiVersions: a proxy whose broker is not up yet closes, too.
_INTERRUPTED_ROUNDS = 5
#: Of the time that is left, brokers get this part at least to answer what any broker may be asked: so many of them
#: alone, later ones together with others.
_SHARES = 4
#: Seconds that each has at least, while others may be asked, too.
_LEAST_SHARE = 1.0
#: The first version of Metadata that does not create missing topics unless it is asked to.
_FIRST_NOT_CREATING = 4
#: Brokers that were silent so many seconds ago, or earlier, are asked before one whose metadata were wrong just now.
_DOUBT_SECONDS = 10.0
_T = TypeVar("_T")
_Request = TypeVar("_Request", bound=Hashable)
_Error = TypeVar("_Error", bound=KlogError)
#: The host and port of a connection; for records also the node id, else None.
_Key = tuple[str, int, int | None]
#: The errors of a topic that does not exist.
UNKNOWN_TOPIC = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION)


class Bounds(NamedTuple):
    """A deadline, a reading of `time.monotonic`, and the setting that it comes from."""

    deadline: float = math.inf
    limit: str = "request.timeout.ms"


def shuffled(addresses: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The addresses in random order, which tests fix."""
    result = list(addresses)
    random.shuffle(result)
    return result


class Cluster:
    """Metadata, and connections to the brokers. Not thread-safe.

    Each broker has at most two connections: one for records (Fetch, Produce), whose requests may wait at the broker,
    and one for everything else, so that metadata, offsets and coordinators never wait behind records.

    Use `attempt` for requests to leaders: it refreshes metadata and retries while the error is retriable, and raises
    the last error when `request.timeout.ms` is over. No call lasts longer than that, however many brokers it asks, but
    for `LEAST_ANSWER`; `within` bounds several calls together.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._maker = Maker("cluster client", ForkedClient)
        #: Those for records by node id, too: an answer's records stay in the buffer, so nodes at one address
        #: (a port forward, a load balancer) must not share one.
        self._connections: dict[_Key, Connection] = {}
        self._brokers: dict[int, tuple[str, int]] = {}
        #: Addresses that did not answer their last request, with its time, a reading of `time.monotonic`, and those of
        #: `doubt`; `asking_any` asks them last, first the one with the earliest time.
        self._silent: dict[tuple[str, int], float] = {}
        #: Addresses where a broker has answered.
        self._reached: set[tuple[str, int]] = set()
        #: The broker that has answered last, from which the metadata come.
        self._described_by: tuple[str, int] | None = None
        self._bounds = Bounds()
        self._leaders: dict[TopicPartition, int] = {}
        #: The largest leader epoch that metadata have told of each partition.
        self._epochs: dict[TopicPartition, int] = {}
        #: Seconds without an answer of any broker after which calls give up, whatever time they have left; a thread
        #: other than the cluster's may lower it.
        self.patience = math.inf
        #: When brokers stopped answering, a reading of `time.monotonic`; None while one answers.
        self._unreached_since: float | None = None
        self.controller_id = -1
        #: Whether there were metadata before.
        self._is_known = False
        #: From the last metadata; None from brokers before 0.10.1.
        self.cluster_id: str | None = None
        #: Topic ids from metadata, by name; brokers before 2.8 have none.
        self.topic_ids: dict[str, UUID] = {}
        #: Whether some broker has ever checked who a connection is for (ApiVersions 5).
        self._has_checks = False

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

    @property
    def nodes(self) -> list[int]:
        """The node ids of the brokers in the last metadata, sorted."""
        return sorted(self._brokers)

    def _open(self, address: tuple[str, int], node: int | None = None) -> Connection:
        """The open connection of a key; connect if there is none or it is closed."""
        there = self._begin((*address, node))
        run(opened(there, self.deadline()))
        return there

    def _begin(self, key: _Key) -> Connection:
        """Like `_open`, but the connection may not be open yet."""
        self._maker.check()
        there = self._connections.get(key)
        if there is None or not there.is_usable():
            if there is not None and there.was_open:
                self._reached.add(key[:2])
            source, expected, before = self._source(key[:2]), self._expected(key[:2]), there
            there = Connection(key[0], key[1], self.config, wait=False, source=source, expected=expected)
            self._connections[key] = there
            there.is_proven = self._is_known
            if before is not None and not before.was_open:
                there.patience = there.next_patience = before.next_patience
        elif there.must_renew:
            there.renew()
        return there

    def _source(self, address: tuple[str, int]) -> str:
        """Where the address comes from, for errors: from a broker, if none has ever answered there."""
        is_reached = address in self._reached or any(
            key[:2] == address and connection.was_open for key, connection in self._connections.items()
        )
        node = next((node for node, there in self._brokers.items() if there == address), None)
        if is_reached or node is None or self._described_by is None or address in self.config.bootstrap_servers:
            return ""
        host, port = self._described_by
        return f"the address of broker {node} as {host}:{port} advertises it, check advertised.listeners"

    def _expected(self, address: tuple[str, int]) -> BrokerIdentity | None:
        """The broker that an address belongs to; None if several share it, or if no broker has ever checked that."""
        there = [node for node, its in self._brokers.items() if its == address]
        if len(there) != 1 or self.cluster_id is None or not self.config.cluster_check:
            return None
        if not self._has_checks:  # a broker that has gone does not make it another cluster
            speaks = (connection.speaks(API_VERSIONS, WITH_IDENTITY) for connection in self._connections.values())
            self._has_checks = any(speaks)
        return BrokerIdentity(self.cluster_id, there[0]) if self._has_checks else None

    def _rebootstrap(self, why: str) -> None:
        """Forget the brokers, and ask bootstrap.servers for them: addresses lead elsewhere than they did."""
        _log.warning("asking bootstrap.servers for the brokers of the cluster: %s", why)
        self.close()
        self._brokers.clear()
        self.forget_leaders()

    def address(self, node: int) -> tuple[str, int]:
        """A broker's host and port in the last metadata; `ConnectionFailed` if it is not there."""
        if node not in self._brokers:
            raise ConnectionFailed(f"broker {node} is not part of the cluster")
        return self._brokers[node]

    def connection(self, node: int) -> Connection:
        """The connection to a broker for records; `ConnectionFailed` if it is unknown or can't be reached."""
        return self._open(self.address(node), node)

    def begin_connection(self, node: int) -> Connection:
        """Like `connection`, but without waiting: it may not be open yet, see `Connection.open_step`."""
        return self._begin((*self.address(node), node))

    def plain_connection(self, node: int) -> Connection:
        """The connection to a broker for everything but records, which may not be open yet.

        Several requests may be in flight on it.
        """
        return self._begin((*self.address(node), None))

    def suspect(self, node: int) -> None:
        """Note that this broker did not answer a request; `asking_any` asks it last."""
        if node in self._brokers:
            self._silent[self._brokers[node]] = time.monotonic()

    def doubt(self) -> None:
        """Note that the last metadata are wrong, or may be: the next request to any broker goes to another one."""
        if self._described_by is not None:
            self._silent[self._described_by] = time.monotonic() - _DOUBT_SECONDS

    def request(self, node: int, api: Api, message: Message, last: int | None = None) -> Message:
        """Send a broker a request for anything but records; raises what `Connection` raises.

        `last`: see `Connection.version_of`.
        """
        return run(self.asking(node, api, message, self.deadline(), last))

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
        return run(self.asking_all(api, requests))

    def asking_all(
        self, api: Api, requests: Mapping[_Request, tuple[int, Message]]
    ) -> Steps[dict[_Request, Message | KlogError]]:
        deadline = self.deadline()
        asked = {key: self.asking(node, api, message, deadline) for key, (node, message) in requests.items()}
        return (yield from each(asked))

    def asking(
        self, node: int, api: Api, message: Message, deadline: float | None = None, last: int | None = None
    ) -> Steps[Message]:
        """The steps of `request`, by default within the deadline of one that begins now."""
        deadline = self.deadline() if deadline is None else deadline
        try:
            with unsent():
                connection = self.plain_connection(node)
                yield from opened(connection, deadline)
            answer = yield from answered(connection, api, message, deadline, last)
        except (ConnectionFailed, RequestTimedOut):
            self.suspect(node)
            raise
        if answer.get("error_code") == ErrorCode.NOT_COORDINATOR:
            self.doubt()  # another broker may know better which one it is
        return answer

    def asking_version(self, node: int, api: Api, deadline: float | None = None) -> Steps[int]:
        """The steps of `version_of`."""
        deadline = self.deadline() if deadline is None else deadline
        connection = self.plain_connection(node)
        yield from opened(connection, deadline)
        return connection.version_of(api)

    def asking_features(self, node: int, deadline: float) -> Steps[Mapping[str, int]]:
        """The steps of a look at the finalized levels of the cluster's features, as a broker knows them.

        It is asked once for each connection, and again after metadata.max.age.ms: levels change while brokers run.
        """
        with unsent():
            connection = self.plain_connection(node)
            yield from opened(connection, deadline)
        oldest = time.monotonic() - self.config.metadata_max_age_ms / 1000
        is_known = connection.features_at is not None and connection.features_at >= oldest
        if not is_known and connection.speaks(API_VERSIONS, FIRST_WITH_FEATURES):
            answer = yield from answered(connection, API_VERSIONS, SOFTWARE, deadline)
            check_code(API_VERSIONS, answer["error_code"], f"ApiVersions at {connection.address}")
        return connection.features

    def version_of(self, node: int, api: Api) -> int:
        """The API version that `request` uses with a broker; raises what `Connection` raises."""
        return run(self.asking_version(node, api))

    def bounds(
        self, timeout_ms: float | None = None, limit: str = "request.timeout.ms", outer: Bounds | None = None
    ) -> Bounds:
        """The bounds of a call that begins now, by default with request.timeout.ms: not beyond those of outer blocks.

        `outer` stands for these.
        """
        outer = self._bounds if outer is None else outer
        own = time.monotonic() + (self.config.request_timeout_ms if timeout_ms is None else timeout_ms) / 1000
        return Bounds(own, limit) if own < outer.deadline else outer

    def deadline(self) -> float:
        """The deadline of a request that begins now, a reading of `time.monotonic`."""
        return min(self._bounds.deadline, time.monotonic() + self.config.request_timeout_ms / 1000)

    @contextmanager
    def within(self, timeout_ms: float, limit: str = "request.timeout.ms") -> Iterator[float]:
        """Bound all requests of the block by one deadline, and yield it: this one or an earlier one of an outer block.

        `limit` is the name of the setting that the time comes from.
        """
        outer, own = self._bounds, time.monotonic() + timeout_ms / 1000
        if own < outer.deadline:
            self._bounds = Bounds(own, limit)
        try:
            yield self._bounds.deadline
        finally:
            self._bounds = outer

    def end_deadlines(self) -> None:
        """Free later requests of deadlines whose block an interrupt has ended halfway."""
        self._bounds = Bounds()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Free the requests of the block from the deadlines of outer blocks, and put those off by the time it takes."""
        outer, begin = self._bounds, time.monotonic()
        self._bounds = Bounds()
        try:
            yield
        finally:
            self._bounds = outer._replace(deadline=outer.deadline + time.monotonic() - begin)

    def metadata(
        self, topics: Collection[str] | None, *, create: bool = False, is_retried: bool = False
    ) -> dict[str, Message]:
        """Fetch metadata of the topics (None: all topics), by name; unknown topics have their error code.

        With `create`, brokers with auto.create.topics.enable create missing topics. `is_retried`: see `asking_any`.
        """
        return run(self.asking_metadata(topics, create=create, is_retried=is_retried))

    def asking_metadata(
        self,
        topics: Collection[str] | None,
        outer: Bounds | None = None,
        *,
        create: bool = False,
        is_retried: bool = False,
    ) -> Steps[dict[str, Message]]:
        """The steps of `metadata`, in these bounds."""
        bounds = self.bounds(outer=outer)
        retry = Retry(self.config, *bounds)
        while True:
            answer = yield from self.asking_any(
                METADATA, lambda version: self.metadata_message(version, topics, create), bounds, is_retried=is_retried
            )
            if answer["error_code"] == ErrorCode.REBOOTSTRAP_REQUIRED:  # KIP-1102
                failure = ConnectionFailed("the broker that was asked for metadata wants bootstrap.servers to be asked")
                self._rebootstrap(str(failure))
            else:
                check_code(METADATA, answer["error_code"], "metadata")
                if answer["brokers"]:
                    return self.learn(answer, topics)
                # a broker that has just started knows none yet; perhaps another one does
                failure = ConnectionFailed("a broker answers, but its metadata lists no brokers")
            self.doubt()
            yield from retried(retry, failure)

    @staticmethod
    def metadata_message(version: int, topics: Collection[str] | None, create: bool) -> Message:
        """A Metadata request; arguments as of `metadata`."""
        # before version 4 naming a topic creates it
        is_all = topics is None or bool(topics and not create and version < _FIRST_NOT_CREATING)
        every: list[Message] | None = [] if version == 0 else None
        names = every if is_all else [{"name": topic} for topic in topics or ()]
        return {"topics": names, "allow_auto_topic_creation": create}

    def learn(self, answer: Message, topics: Collection[str] | None) -> dict[str, Message]:
        """Take over a Metadata response; the result of `metadata`.

        For leaders with smaller epochs than those known before it tells the latter (KIP-320), -1 if they are forgotten.
        """
        self._brokers = {entry["node_id"]: (entry["host"], entry["port"]) for entry in answer["brokers"]}
        addresses = {*self._brokers.values(), *self.config.bootstrap_servers}
        self._silent = {address: at for address, at in self._silent.items() if address in addresses}
        self._reached &= addresses
        needed: set[_Key] = {(*address, None) for address in addresses}
        needed |= {(*address, node) for node, address in self._brokers.items()}
        for key in self._connections.keys() - needed:
            self._connections.pop(key).close()
        self.controller_id = answer["controller_id"]
        if self._is_known and self.cluster_id != answer["cluster_id"]:
            _log.warning("the brokers are of cluster %s now, before of %s", answer["cluster_id"], self.cluster_id)
        self._is_known, self.cluster_id = True, answer["cluster_id"]
        for topic in answer["topics"]:
            is_same = topic["topic_id"].int and topic["topic_id"] == self.topic_ids.get(topic["name"])
            if not topic["error_code"] and topic["topic_id"].int:
                self.topic_ids[topic["name"]] = topic["topic_id"]
            elif topic["error_code"] in UNKNOWN_TOPIC:
                self.doubt()
            for partition in topic["partitions"]:
                its = topic["name"], partition["partition_index"]
                if is_same and 0 <= partition["leader_epoch"] < (known := self._epochs.get(its, -1)):
                    partition |= {"leader_id": self._leaders.get(its, -1), "leader_epoch": known}
                    self.doubt()
                self._leaders[its], self._epochs[its] = partition["leader_id"], partition["leader_epoch"]
        metadata = {topic["name"]: topic for topic in answer["topics"]}
        if topics is None and (missing := self.topic_ids.keys() - metadata.keys()):
            for name in missing:
                del self.topic_ids[name]
            self.doubt()
        return metadata if topics is None else {name: metadata[name] for name in topics if name in metadata}

    def partitions(
        self, topics: Collection[str], *, create: bool = False, missing_ok: bool = False
    ) -> dict[str, list[int]]:
        """Partition numbers by topic. A missing topic is a `ProtocolError`, or is left out with `missing_ok`."""
        return run(self.asking_partitions(topics, create=create, missing_ok=missing_ok))

    def asking_partitions(
        self, topics: Collection[str], *, create: bool = False, missing_ok: bool = False
    ) -> Steps[dict[str, list[int]]]:
        return numbers_of((yield from self.asking_metadata(topics, create=create)), topics, missing_ok=missing_ok)

    def candidates(self) -> list[tuple[str, int]]:
        """Addresses for a request to any broker, in this order: connected ones, known ones, bootstrap.servers.

        Known ones, and bootstrap.servers, are in random order: many clients that start together, or that lose a broker,
        must not all ask the same one.

        Brokers that did not answer their last request, and those of `doubt`, come after all others, first the one asked
        longest ago.
        """
        for connection in self._connections.values():
            if connection.is_misrouted:
                self._rebootstrap(f"{connection.address} leads to another broker")
                break
        connected = [key[:2] for key in self._connections if key[2] is None]
        addresses = [*connected, *shuffled(self._brokers.values()), *shuffled(self.config.bootstrap_servers)]
        return sorted(dict.fromkeys(addresses), key=lambda address: self._silent.get(address, -math.inf))

    def asking_any(
        self, api: Api, message: Callable[[int], Message], outer: Bounds | None = None, *, is_retried: bool = False
    ) -> Steps[Message]:
        """The steps of a request to any broker, see `candidates`, in these bounds. `message` makes it for a version.

        Raises what `Connection` raises, when request.timeout.ms is over. With `is_retried` they end after each broker
        was asked once, as the caller pauses and retries.
        """
        bounds = self.bounds(outer=outer)
        # a cluster that was reached before may come back; otherwise the address is probably wrong
        patience = math.inf if self._is_known else time.monotonic() + self.config.connect_timeout_ms / 1000
        retry = Retry(self.config, *bounds, patience)
        rounds = 0
        while True:
            candidates = self.candidates()
            errors: list[KlogError] = []
            answer = yield from self._asking_in_turns(candidates, api, message, bounds.deadline, errors)
            if answer is not None:
                return answer
            strangers = [error for error in errors if isinstance(error, DecodeError)]  # not brokers
            failed = [str(error) for error in errors if not isinstance(error, DecodeError)]
            failures = some_of(failed, separator="; ")
            if strangers and not failures and not self._is_known:
                raise strangers[-1]
            has_security = self.config.security.protocol != PLAINTEXT
            interrupted = [error for error in errors if isinstance(error, HandshakeInterrupted)]
            rounds += sum(error.is_by_broker or has_security for error in interrupted) == len(candidates)
            if rounds == _INTERRUPTED_ROUNDS and not self._is_known:
                raise HandshakeInterrupted(failures)
            lost = ConnectionFailed(failures)
            lost.is_late = any(isinstance(error, RequestTimedOut) for error in errors)
            failure: KlogError = lost
            if strangers and not (failures and self._is_known):  # brokers that were reached may come back
                failure = strangers[-1]
            self._unreached_since = self._unreached_since or time.monotonic()
            if self.has_no_patience() or is_retried:
                raise failure
            yield from retried(retry, failure)

    def _asking_in_turns(
        self,
        candidates: Sequence[tuple[str, int]],
        api: Api,
        message: Callable[[int], Message],
        deadline: float,
        errors: list[KlogError],
    ) -> Steps[Message | None]:
        """The first answer; None if there is none, with what all that were asked have failed with.

        Each turn has a share of the time before the next ones are asked, too, so that silent brokers leave time for the
        others. A slow one may answer until all have had a turn, and `_LEAST_SHARE` seconds at least.
        """
        turns = deque(_in_turns(candidates))
        asked: dict[tuple[str, int], Steps[Message]] = {}
        #: When each was asked, and when it is given up if no others are left to ask.
        begun: dict[tuple[str, int], float] = {}
        given_up_at: dict[tuple[str, int], float] = {}
        next_at = -math.inf
        try:
            while True:
                now = time.monotonic()
                if turns and begun and now >= deadline:
                    turns.clear()  # the next call asks the others first
                if turns and (not asked or now >= next_at):
                    share = max(0, deadline - now) / min(_SHARES, len(turns))
                    next_at = now + share
                    self._silent |= {address: begun[address] for address in asked}
                    for address in turns.popleft():
                        asked[address], begun[address] = self._asking_at(address, api, message, deadline), now
                        given_up_at[address] = now + max(share, _LEAST_SHARE) if turns else math.inf
                waits: list[Wait] = []
                for address, steps in list(asked.items()):
                    try:
                        waits.append(next(steps))
                        continue
                    except StopIteration as end:
                        self._silent.pop(address, None)
                        self._described_by, self._unreached_since = address, None
                        answer: Message = end.value
                        return answer
                    except (ConnectionFailed, RequestTimedOut, DecodeError) as error:
                        errors.append(error)
                    self._silent[address] = begun[address]
                    del asked[address]
                until = next_at if turns else max((given_up_at[address] for address in asked), default=-math.inf)
                if asked and time.monotonic() < until:
                    yield Wait(None, min(until, *(wait.until for wait in waits)), parts=tuple(waits))
                elif not turns:
                    self._silent |= {address: begun[address] for address in asked}
                    errors += [RequestTimedOut(f"broker {host}:{port} did not answer in time") for host, port in asked]
                    return None
        finally:
            for steps in asked.values():
                steps.close()

    def _asking_at(
        self, address: tuple[str, int], api: Api, message: Callable[[int], Message], until: float
    ) -> Steps[Message]:
        connection = self._begin((*address, None))
        yield from opened(connection, until)
        return (yield from answered(connection, api, message(connection.version_of(api)), until))

    def has_no_patience(self) -> bool:
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

    def expect_leaders(self, leaders: Mapping[TopicPartition, int]) -> None:
        """Take over leaders that another client has seen, unless this one knows better or does not know the broker.

        Not those that did not answer this client: they may have been replaced since.
        """
        for key, node in leaders.items():
            if node in self._brokers and self._brokers[node] not in self._silent:
                self._leaders.setdefault(key, node)

    def forget_leader(self, topic: str, partition: int) -> None:
        """Forget this partition's leader; the next use fetches metadata, from another broker."""
        self.doubt()
        self._leaders.pop((topic, partition), None)

    def by_leader(
        self, partitions: Iterable[TopicPartition]
    ) -> tuple[dict[int, list[TopicPartition]], dict[TopicPartition, ProtocolError]]:
        """Partitions by leader, and the errors of partitions that are unknown or have no leader now."""
        return run(self.asking_by_leader(partitions))

    def asking_by_leader(
        self, partitions: Iterable[TopicPartition]
    ) -> Steps[tuple[dict[int, list[TopicPartition]], dict[TopicPartition, ProtocolError]]]:
        wanted = list(partitions)
        unknown = {topic for topic, partition in wanted if self._leaders.get((topic, partition), -1) < 0}
        metadata = (yield from self.asking_metadata(unknown)) if unknown else {}
        return by_node({key: self._leader_error(*key, metadata) or self._leaders[key] for key in wanted})

    def _leader_error(self, topic: str, partition: int, metadata: Mapping[str, Message]) -> ProtocolError | None:
        """Why a partition has no leader; `found` is the metadata fetched for topics with unknown leaders."""
        if topic in metadata and (code := metadata[topic]["error_code"]) not in (0, ErrorCode.LEADER_NOT_AVAILABLE):
            return answer_error(METADATA, code, f"topic {topic}")
        node = self._leaders.get((topic, partition))
        if node is not None and node >= 0:
            return None
        if topic not in metadata or not metadata[topic]["partitions"]:
            code = metadata[topic]["error_code"] if topic in metadata else 0
            return answer_error(METADATA, code or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic}")
        if node is None:
            advice = f"topic {topic} has {len(metadata[topic]['partitions'])} partitions, numbered from 0"
            what = f"partition {topic}-{partition}"
            return ProtocolError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, what, advice=advice)
        return answer_error(METADATA, ErrorCode.LEADER_NOT_AVAILABLE, f"partition {topic}-{partition}")

    def forget_leaders(self) -> None:
        """Forget all leaders and the controller; the next use fetches metadata."""
        self._leaders.clear()
        self.controller_id = -1

    def refresh_after(self, failure: KlogError) -> None:
        """Forget leaders if the failure shows that they may be outdated, see `doubt`."""
        if not isinstance(failure, ProtocolError) or failure.remedy is Remedy.REFRESH:
            self.doubt()
            self.forget_leaders()

    def attempt(self, action: Callable[[], _T], timeout_ms: int | None = None, limit: str = "request.timeout.ms") -> _T:
        """Run `action` until it succeeds or the time is over; retriable errors are retried with fresh metadata.

        `limit`: see `within`.
        """
        return run(self.attempting(lambda: at_once(action), timeout_ms, limit))

    def attempting(
        self, action: Callable[[], Steps[_T]], timeout_ms: int | None = None, limit: str = "request.timeout.ms"
    ) -> Steps[_T]:
        """The steps of `attempt`. Until they have ended, the cluster's other requests have their deadline, too."""
        with self.within(timeout_ms or self.config.request_timeout_ms, limit):
            retry = Retry(self.config, *self._bounds)
            is_first = True
            while True:
                try:
                    return (yield from action())
                except (ConnectionFailed, RequestTimedOut) as error:
                    if self.has_no_patience():
                        raise
                    failure: KlogError = error
                except ProtocolError as error:
                    if not error.retriable:
                        raise
                    failure = error
                self.refresh_after(failure)  # first: if no time is left, the next call must not ask the same leader
                yield from retried(retry, failure)
                # what lasts is told by `retry`, at intervals that double
                _log.log(logging.INFO if is_first else logging.DEBUG, "trying again: %s", failure)
                is_first = False

    def controller(self) -> int:
        """The node id of the controller, after connecting to it."""
        return run(self.asking_controller())

    def asking_controller(self) -> Steps[int]:
        if self.controller_id not in self._brokers:
            yield from self.asking_metadata([])
        yield from opened(self.plain_connection(self.controller_id), self.deadline())
        return self.controller_id

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def numbers_of(
    metadata: Mapping[str, Message], topics: Collection[str], *, missing_ok: bool = False
) -> dict[str, list[int]]:
    """Partition numbers by topic, of metadata: see `Cluster.partitions`."""
    result = {}
    for name in topics:
        code = metadata[name]["error_code"] if name in metadata else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if missing_ok and code in UNKNOWN_TOPIC:
            continue
        if code and not (code == ErrorCode.LEADER_NOT_AVAILABLE and metadata[name]["partitions"]):
            raise answer_error(METADATA, code, f"topic {name}")
        result[name] = sorted(entry["partition_index"] for entry in metadata[name]["partitions"])
    return result


def _in_turns(addresses: Sequence[tuple[str, int]]) -> Iterator[Sequence[tuple[str, int]]]:
    """Addresses to ask at the same time: the first ones alone, then ever more, as these have all been silent."""
    at, size = 0, 1
    while at < len(addresses):
        yield addresses[at : at + size]
        at += size
        size = 1 if at < _SHARES else 2 * size


def by_node(nodes: Mapping[_Request, int | _Error]) -> tuple[dict[int, list[_Request]], dict[_Request, _Error]]:
    """What is asked of each node, and the errors of the rest; `nodes` has a node id or an error for each."""
    groups: dict[int, list[_Request]] = {}
    failures: dict[_Request, _Error] = {}
    for key, node in nodes.items():
        if isinstance(node, int):
            groups.setdefault(node, []).append(key)
        else:
            failures[key] = node
    return groups, failures
