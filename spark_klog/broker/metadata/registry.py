"""Registry of live brokers and of topics, as the shared tree has them.

Lookups are answered from memory. `refresh` reads the tree again, after a watch fired or before an unknown topic is
refused. Methods that use the tree block: the server calls them in a thread. A node that does not decode, which a
foreign tool may have written, is logged once and skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID, uuid4

from spark_klog.base.clock import system_ms
from spark_klog.base.names import check_topic_name
from spark_klog.broker.metadata.nodes import (
    InvalidAssignment,
    InvalidPartitions,
    NodeDecoder,
    TopicCollides,
    TopicExists,
    TopicRefused,
    UnknownTopic,
    children_with_values,
    create_node,
    replace_node,
)
from spark_klog.broker.metadata.registration import Registration
from spark_klog.errors import ConfigError, DirectoryError
from spark_klog.log.directory import new_cluster_id
from spark_klog.log.topic_journal import KeptTopic
from spark_klog.trees import paths
from spark_klog.trees.consumers import OffsetDirectory
from spark_klog.trees.paths import DeletionRequest
from spark_klog.trees.tree import SESSION_SECONDS, Tree

_log = logging.getLogger(__name__)
_NONE = DeletionRequest(None, frozenset())
#: Function from a topic's own settings to its new ones.
Alter = Callable[[Mapping[str, str]], Mapping[str, str]]
#: Name, replicas by partition, and own settings.
NewTopic = tuple[str, dict[int, list[int]], Mapping[str, str]]
#: The id of a topic that is being deleted, None if its nodes are gone already, or the error: it has another id by now.
Asked = UUID | UnknownTopic | DirectoryError | None
NO_LEADER = -1
MAX_PARTITIONS = 10_000
#: Bytes of all groups' settings: ZooKeeper's nodes hold a megabyte.
_MOST_GROUP_SETTINGS = 512 * 1024


class Deletions:
    """Deletions of topics as one broker sees them: a topic's nodes stay until each live broker has dropped it.

    A topic whose nodes were removed at once could be created again while a broker has not heard of it. A leader would
    append the new topic's records to the old log, acknowledge them, and drop them with the log; the coordinator of a
    group would drop offsets that were committed for the new topic.

    1. A request in the tree names the topic's id. A tool's has none: the controller adds the id.
    2. Each broker that reads the request drops the topic, and writes its own id into the request.
    3. When all live ones have, the controller removes the nodes, or the broker that was asked if it waits for no other.

    Source: Kafka keeps a topic's nodes likewise until all live replicas are deleted (`TopicDeletionManager`).

    Methods block, and one runs at a time.

    `pending` is read in another thread: it is replaced, never changed.
    """

    def __init__(self, tree: Tree, decoder: NodeDecoder, broker_id: int) -> None:
        self._tree, self._decoder, self._broker_id = tree, decoder, broker_id
        #: Ids, by name, of the topics that are being deleted, and that this broker serves no more.
        self.pending: Mapping[str, UUID] = {}
        #: Topics whose deletion is requested, with the id that the request names, None if it has none.
        self.requested: Mapping[str, UUID | None] = {}

    def read(self) -> None:
        """Read the requests again. Then read the topics, and give them to `match`."""
        requests = children_with_values(self._tree, paths.DELETE_TOPICS_PATH)
        self.requested = {name: self._parse(name, value).topic_id for name, value in requests}

    def match(self, topic_ids: Mapping[str, UUID]) -> None:
        """Find the pending topics among those that were in the tree after `read`, given by name and id."""
        self.pending = {
            name: topic_id
            for name, topic_id in self.requested.items()
            if topic_id is not None and topic_ids.get(name) == topic_id
        }

    def request(self, name: str, topic_id: UUID | None = None, known_id: UUID | None = None) -> UUID | None:
        """Ask for the deletion of the topic that has the name now; its id, None if it is gone or needed no request.

        `known_id` is the id by which brokers know the topic: a tool that altered it since has removed the id. Raises
        `UnknownTopic` if `topic_id` is given and the topic has another id by now.
        """
        path = paths.delete_topic_path(name)
        while True:
            value, known = self._topic(name)
            now = None if known is None else known[1]
            if topic_id is not None and (known is None or now not in (None, topic_id)):
                raise UnknownTopic(f"topic {name} is no longer the one of id {topic_id}")
            request = self._tree.get(path)
            if known is not None and now is None and known_id is not None and self._has_states(name):
                assert value is not None
                self._tree.swap(paths.topic_path(name), value, paths.topic_payload(known[0], known_id))
            elif now is None:  # no request can tell it from a later topic
                if self.remove(name, value, request):
                    return None
            elif self._parse(name, request).topic_id == now or replace_node(
                self._tree, path, request, paths.deletion_payload(now, ())
            ):
                return now

    def add(self, topic_ids: Mapping[str, UUID]) -> None:
        """Note deletions that were asked for here, without reading all requests again."""
        self.pending = {**self.pending, **topic_ids}

    def claim(self, name: str) -> None:
        """The controller's part for a request that is not pending: add the topic's id, or remove what is left."""
        path = paths.delete_topic_path(name)
        value, known = self._topic(name)
        request = self._tree.get(path)
        if request is None:
            return  # an earlier controller has done it
        now, asked = None if known is None else known[1], self._parse(name, request).topic_id
        if known is None or (now is None and asked is None):
            _log.info("deleting topic %s, as requested by %s", name, path)
            self.remove(name, value, request)  # if its node has changed, the next round deletes it
        elif now is None:
            return  # a tool has just created it; once it has an id, the request is seen to be for an earlier topic
        elif asked is None:
            _log.info("deleting topic %s, as requested by %s", name, path)
            self._tree.swap(path, request, paths.deletion_payload(now, ()))
        elif asked != now:
            self._tree.delete_if(path, request)  # its topic is gone, this is a later one

    def acknowledge(self) -> None:
        """Tell the other brokers that this one has dropped the pending topics."""
        for name, topic_id in self.pending.items():
            path = paths.delete_topic_path(name)
            while True:
                value = self._tree.get(path)
                request = self._parse(name, value)
                if value is None or request.topic_id != topic_id or self._broker_id in request.dropped:
                    break
                if self._tree.swap(path, value, paths.deletion_payload(topic_id, {*request.dropped, self._broker_id})):
                    break

    def finish(self, name: str) -> bool:
        """Remove the nodes of a pending topic, unless another live broker may still know it; whether it is over."""
        topic_id, path = self.pending[name], paths.delete_topic_path(name)
        while True:
            value, known = self._topic(name)
            request = self._tree.get(path)
            asked = self._parse(name, request)
            if known is not None and known[1] not in (None, topic_id):  # it is gone, this is a later one
                if request is not None and asked.topic_id == topic_id:
                    self._tree.delete_if(path, request)
                break
            if known is not None and asked.topic_id != topic_id:
                break  # the request was withdrawn, by hand
            if value is not None and self._others(asked):
                return False
            if self.remove(name, value, request):
                break
        self.pending = {other: pending for other, pending in self.pending.items() if other != name}
        return True

    def waits_for(self, name: str) -> list[int] | None:
        """The live brokers, other than this one, that have not dropped a topic; None if its node is gone."""
        if self._tree.get(paths.topic_path(name)) is None:
            return None
        return self._others(self._parse(name, self._tree.get(paths.delete_topic_path(name))))

    def _others(self, request: DeletionRequest) -> list[int]:
        """The live brokers, other than this one, that a request does not name.

        Call it after the request was read: a broker registers before it reads the requests, so that one which is not
        live yet will see this one.
        """
        live = {int(number) for number in self._tree.children(paths.BROKER_IDS_PATH) if number.isdecimal()}
        return sorted(live - request.dropped - {self._broker_id})

    def remove(self, name: str, value: bytes | None, request: bytes | None) -> bool:
        """Remove a topic's nodes, the request last; missing nodes are no error.

        `value` and `request` are what the nodes were found with, None if there was none. If the topic's node has
        another value by now, nothing is removed, and the result is False.
        """
        path, config_path = paths.topic_path(name), paths.topic_config_path(name)
        if value is not None and not self._tree.delete_if(path, value):
            return False
        config = self._tree.get(config_path)
        is_gone = config is not None and self._tree.get(path) is None and self._tree.delete_if(config_path, config)
        if config is not None and is_gone and self._tree.get(path) is not None:
            create_node(self._tree, config_path, config)  # another broker has created the topic again meanwhile
        if request is not None:
            self._tree.delete_if(paths.delete_topic_path(name), request)
        return True

    def _topic(self, name: str) -> tuple[bytes | None, tuple[dict[int, list[int]], UUID | None] | None]:
        """The value of a topic's node, and what it says; None if there is none, or it does not decode."""
        path = paths.topic_path(name)
        value = self._tree.get(path)
        return value, self._decoder.decode(paths.parse_topic, value, path) if value else None

    def _has_states(self, name: str) -> bool:
        return bool(self._tree.children(paths.partitions_path(name)))

    def _parse(self, name: str, request: bytes | None) -> DeletionRequest:
        """A request that does not decode asks by the name, as a tool's does."""
        path = paths.delete_topic_path(name)
        return (self._decoder.decode(paths.parse_deletion, request, path) if request else None) or _NONE


@dataclass(frozen=True)
class Topic:
    """A registered topic: replicas by partition, the first of which leads, and its own settings."""

    name: str
    topic_id: UUID
    assignment: dict[int, list[int]]
    settings: Mapping[str, str] = field(default_factory=dict)


class Nameless(NamedTuple):
    """A topic whose node has no topic id: tools older than Kafka 2.8 write none.

    `is_new`: a tool has just created it, since it has no partition states and has not grown; else a tool has altered
    it. `topic_id` is its previous id, if known.
    """

    value: bytes
    assignment: dict[int, list[int]]
    is_new: bool
    topic_id: UUID | None


class Registry:
    """This broker's view of the tree; its own entry there is `registration`."""

    def __init__(self, tree: Tree, broker_id: int, session_seconds: float = SESSION_SECONDS) -> None:
        self._tree = tree
        self.broker_id = broker_id
        self._decoder = NodeDecoder()
        self.deletions = Deletions(tree, self._decoder, broker_id)
        self.registration = Registration(tree, self._decoder, broker_id, session_seconds)
        self.brokers: dict[int, list[paths.Endpoint]] = {}
        #: The finalized level of transaction.version: the last one that all live brokers serve, and since when (ms).
        self.transaction_version, self.features_since_ms = 0, 0
        self.topics: dict[str, Topic] = {}
        #: Topic names by topic id.
        self.names: dict[UUID, str] = {}
        self.nameless: dict[str, Nameless] = {}
        #: Topics whose node has no value, because they are being deleted.
        self.empty: list[str] = []
        #: Names whose node does not tell a topic: one may be there.
        self.unread: set[str] = set()
        #: Id of the broker that is registered as the controller.
        self.controller: int | None = None
        #: By group: its own settings.
        self.group_settings: Mapping[str, Mapping[str, str]] = {}
        #: Called with changed topics, by name, before the tree has them: a standalone broker's tree does not last.
        self.keep_topics: Callable[[Mapping[str, KeptTopic]], None] = lambda topics: None
        self._cluster_id: str | None = None
        self._lease = tree.lease()
        #: The session in which this broker was registered before it read the topics.
        self._session: int | None = None
        #: By topic: the node values that it was decoded from.
        self._sources: dict[str, tuple[bytes, bytes | None]] = {}

    def cluster_id(self, preferred: str | None) -> str:
        """The cluster's id; if there is none yet, create it, from `preferred` if that is given."""
        payload = self._tree.get(paths.CLUSTER_ID_PATH)
        if payload is None:
            create_node(self._tree, paths.CLUSTER_ID_PATH, paths.cluster_id_payload(preferred or new_cluster_id()))
            payload = self._tree.get(paths.CLUSTER_ID_PATH)
        assert payload is not None
        self._cluster_id = paths.parse_cluster_id(payload)
        return self._cluster_id

    def sync(self) -> None:
        """Wait until no power failure can undo the changes of the tree made here; `DirectoryError`."""
        self._tree.sync()

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` (from any thread) when brokers, topics, their settings or the controller may have changed."""
        self._tree.watch("/", changed)  # /controller
        self._tree.watch(paths.BROKER_IDS_PATH, changed)
        self._tree.watch(paths.BROKER_TOPICS_PATH, changed, values=True)
        self._tree.watch(paths.TOPIC_CONFIGS_PATH, changed, values=True)
        self._tree.watch(paths.CONFIG_CHANGES_PATH, changed)
        self._tree.watch(paths.CONFIGS_PATH, changed, values=True)  # those of groups
        self._tree.watch(paths.DELETE_TOPICS_PATH, changed, values=True)

    def refresh(self) -> None:
        """Read everything again. Make one call at a time: a slow read must not overwrite a later one.

        Raises `DirectoryError` if the tree belongs to another cluster or to none: a tree that is empty because its disk
        is not mounted would look as if all topics had been deleted.
        """
        whose = self._tree.get(paths.CLUSTER_ID_PATH)
        cluster_id = self._decoder.decode(paths.parse_cluster_id, whose, paths.CLUSTER_ID_PATH) if whose else None
        if cluster_id != self._cluster_id:
            there = f"cluster {cluster_id}" if cluster_id else "no cluster"
            raise DirectoryError(
                f"{paths.CLUSTER_ID_PATH} names {there}, this broker belongs to {self._cluster_id}: restore the "
                "directories, or start the broker with the directories of its own cluster"
            )
        session = self._lease.session
        is_registered = self.registration.keep()
        brokers = {}
        versions = []
        for name, value in children_with_values(self._tree, paths.BROKER_IDS_PATH):
            endpoints = self._decoder.decode(paths.parse_broker, value, f"{paths.BROKER_IDS_PATH}/{name}")
            if endpoints is not None and name.isdecimal():
                brokers[int(name)] = endpoints
                versions.append(paths.parse_transaction_version(value))
        controller = self._tree.get(paths.CONTROLLER_PATH)
        self.controller = (
            self._decoder.decode(paths.parse_controller, controller, paths.CONTROLLER_PATH) if controller else None
        )
        self.group_settings = self._read_group_settings()[1]
        # Before the topics: a request is removed after its topic's node, so a broker that has just registered, and was
        # not waited for, sees the request or no topic.
        self.deletions.read()
        topics: dict[str, Topic] = {}
        nameless: dict[str, Nameless] = {}
        payloads = children_with_values(self._tree, paths.BROKER_TOPICS_PATH)
        configs = self._tree.get_many([paths.topic_config_path(name) for name, _ in payloads])
        for (name, value), config in zip(payloads, configs, strict=True):
            topic = self._topic(name, value, config, nameless)
            if topic is not None:
                topics[name] = topic
        self.brokers, self.nameless = brokers, nameless
        self._finalize(min(versions, default=0))
        self.deletions.match({name: topic.topic_id for name, topic in topics.items()})
        pending = self.deletions.pending
        self._take_topics({name: topic for name, topic in topics.items() if name not in pending})
        self.empty = [name for name, value in payloads if not value]
        self.unread = {name for name, _ in payloads} - topics.keys()
        self._session = session if is_registered else None  # last: from now on it is taken for true

    def _finalize(self, transaction_version: int) -> None:
        """Clients believe the features of the latest time, whichever broker tells them."""
        if not self.features_since_ms or transaction_version != self.transaction_version:
            self.features_since_ms = max(system_ms(), self.features_since_ms + 1)
        self.transaction_version = transaction_version

    def holds(self, *, for_reading: bool = False) -> bool:
        """Whether no topic can have been deleted, and created again, without this broker.

        That is so while the session lives in which it registered and then read the topics: deletions wait for it.
        While the tree is out of reach, a broker that knows of no other may go on, since no other deletes topics; the
        others may only read.
        """
        lease = self._lease
        if self._session is None or lease.session != self._session:
            return False
        return lease.holds or (lease.is_cut_off and (for_reading or self.brokers.keys() <= {self.broker_id}))

    @property
    def is_cut_off(self) -> bool:
        """Whether the tree is out of reach: it is of no use to wait for `holds`."""
        return self._lease.is_cut_off

    def _take_topics(self, topics: dict[str, Topic]) -> None:
        self.topics = topics
        self.names = {topic.topic_id: name for name, topic in topics.items()}
        self._sources = {name: source for name, source in self._sources.items() if name in topics}

    def _topic(self, name: str, value: bytes, config: bytes | None, nameless: dict[str, Nameless]) -> Topic | None:
        path, known = paths.topic_path(name), self.topics.get(name)
        if known is not None and self._sources.get(name) == (value, config):
            return known
        self._sources.pop(name, None)
        try:
            check_topic_name(name)
        except ConfigError as error:
            self._decoder.log_error(path, str(error))
            return None
        parsed = self._decoder.decode(paths.parse_topic, value, path) if value else None
        if parsed is None:
            return known  # the topic is being deleted, or its value will be repaired: keep its logs
        assignment, topic_id = parsed
        settings: Mapping[str, str] = {}
        decoded: Mapping[str, str] | None = None
        if config:
            before = known.settings if known is not None else settings
            decoded = self._decoder.decode(paths.parse_topic_config, config, paths.topic_config_path(name))
            settings = before if decoded is None else decoded
        if topic_id is None:
            # a tool that alters a topic adds partitions; the topic's states may not have been written yet
            has_grown = known is not None and _has_grown(known.assignment, assignment)
            is_new = not has_grown and not self._tree.children(paths.partitions_path(name))
            previous = known.topic_id if known is not None else self.deletions.requested.get(name)
            topic_id = None if is_new else previous
            nameless[name] = Nameless(value, assignment, is_new, topic_id)
            if topic_id is None:
                return None
        elif not config or decoded is not None:
            self._sources[name] = value, config
        return Topic(name, topic_id, assignment, settings)

    def addresses(self, listener: str) -> dict[int, tuple[str, int]]:
        """Host and port by broker id, for clients of that listener; brokers without the listener are left out."""
        return {
            broker_id: (endpoint.host, endpoint.port)
            for broker_id, endpoints in sorted(self.brokers.items())
            for endpoint in endpoints
            if endpoint.listener == listener
        }

    def leader(self, topic: Topic, partition: int) -> int:
        """The leader's broker id, NO_LEADER if that broker is down."""
        replicas = topic.assignment.get(partition) or [NO_LEADER]
        return replicas[0] if replicas[0] in self.brokers else NO_LEADER

    def leader_of(self, name: str, partition: int) -> int:
        """The leader's broker id of a partition; NO_LEADER if the partition does not exist or its leader is down."""
        topic = self.topics.get(name)
        return NO_LEADER if topic is None else self.leader(topic, partition)

    def key(self, topic: str, topic_id: UUID, partition: int) -> tuple[str, int]:
        """(topic name, partition); the topic is given by name, or by id if the name is empty."""
        return topic or self.names.get(topic_id, ""), partition

    def leads(self, topic: str, partition: int) -> bool | None:
        """Whether this broker leads the partition; None if the partition does not exist."""
        known = self.topics.get(topic)
        if known is None or partition not in known.assignment:
            return None
        return known.assignment[partition][:1] == [self.broker_id]

    @property
    def controller_id(self) -> int:
        """The broker to which clients send topic changes; any broker can make them, so one is always named."""
        return self.controller if self.controller in self.brokers else min(self.brokers, default=NO_LEADER)

    def settings(self, name: str) -> dict[str, str]:
        topic = self.topics.get(name)
        return dict(topic.settings) if topic is not None else {}

    def assign(self, partitions: int, ahead: int = 0) -> dict[int, list[int]]:
        """Assign partitions to the live brokers in turn, if `ahead` other topics are created before."""
        brokers = sorted(self.brokers) or [self.broker_id]
        shift = len(self.topics) + ahead
        return {partition: [brokers[(partition + shift) % len(brokers)]] for partition in range(partitions)}

    def check_collision(self, name: str, more: Iterable[str] = ()) -> None:
        """Raise `TopicCollides` if a new topic's name differs from another one, or of `more`, only in '.' and '_'."""
        if name not in self.topics and ("." in name or "_" in name):
            unified = name.replace(".", "_")
            others = [other for other in (*self.topics, *more) if other != name and other.replace(".", "_") == unified]
            if others:
                raise TopicCollides(f"topic '{name}' collides with existing topics: {', '.join(sorted(others))}")

    def create_topics(self, topics: Sequence[NewTopic]) -> list[Topic | TopicRefused | DirectoryError]:
        """Register new topics; returns what became of each. `DirectoryError` if none was registered."""
        made: dict[str, KeptTopic] = {}
        refused: dict[str, TopicRefused] = {}
        for name, assignment, settings in topics:
            try:
                self.check_collision(name, made)
                if name in self.topics or name in self.deletions.pending:
                    raise self._exists(name)
                made[name] = KeptTopic(uuid4(), [*assignment], settings)
            except TopicRefused as error:
                refused[name] = error
        self.keep_topics(made)
        registered = self.register((topic, made[topic[0]].topic_id) for topic in topics if topic[0] in made)
        return [refused.get(name) or registered.get(name) or self._exists(name) for name, _, _ in topics]

    def _exists(self, name: str) -> TopicExists:
        if name in self.deletions.pending:
            return TopicExists(f"topic {name} is being deleted; create it when that is over")
        return TopicExists(f"topic {name} exists")

    def register(self, topics: Iterable[tuple[NewTopic, UUID]]) -> dict[str, Topic | DirectoryError]:
        """Register topics, and look at the tree once for each; those that exist are left out."""
        made: dict[str, Topic | DirectoryError] = {}
        failure: DirectoryError | None = None
        for topic, topic_id in topics:
            try:
                if failure is not None:  # in an outage each would wait as long
                    made[topic[0]] = failure
                elif registered := self._create_nodes(*topic, topic_id):
                    made[registered.name] = registered
            except DirectoryError as error:
                made[topic[0]] = failure = error
        self._take_topics(self.topics | {name: topic for name, topic in made.items() if isinstance(topic, Topic)})
        return made

    def _create_nodes(
        self, name: str, assignment: dict[int, list[int]], settings: Mapping[str, str], topic_id: UUID
    ) -> Topic | None:
        path, payload = paths.topic_config_path(name), paths.topic_config_payload(settings)
        while True:
            before = self._tree.get(path)
            if self._tree.get(paths.topic_path(name)) is not None:
                return None
            if replace_node(self._tree, path, before, payload):
                break
        if not create_node(self._tree, paths.topic_path(name), paths.topic_payload(assignment, topic_id)):
            if before is not None:
                self._tree.swap(path, payload, before)  # another broker was faster: restore its settings
            return None
        create_node(self._tree, path, payload)  # the deletion of an earlier topic may have removed the settings
        self._put_states(name, assignment)
        # read only this topic: rereading all topics after each of a thousand creations would take minutes
        value = self._tree.get(paths.topic_path(name))
        config = self._tree.get(paths.topic_config_path(name))
        return self._topic(name, value, config, {}) if value else None

    def _put_states(self, name: str, assignment: Mapping[int, Sequence[int]]) -> None:
        states = {
            paths.partition_state_path(name, partition): paths.partition_state_payload(replicas[0], replicas[:1])
            for partition, replicas in assignment.items()
        }
        self._tree.put_many(states, lasting=False)  # the controller writes what is missing

    def add_partitions(
        self, name: str, count: int, assignment: Sequence[Sequence[int]] | None = None, *, validate_only: bool = False
    ) -> None:
        """Raise a topic's number of partitions to `count`; `assignment` has the replicas of each new partition.

        With `validate_only` nothing is written. Raises `UnknownTopic`, `InvalidPartitions` or `InvalidAssignment`.
        """
        path = paths.topic_path(name)
        while True:
            value = self._tree.get(path)
            if not value:
                raise UnknownTopic(f"there is no topic {name}")
            before, topic_id = paths.parse_topic(value, path)
            if not len(before) < count <= MAX_PARTITIONS:
                raise InvalidPartitions(
                    f"topic {name} has {len(before)} partitions: the new number must be larger, and "
                    f"{MAX_PARTITIONS} or less, not {count}"
                )
            new = self._new_partitions(before, count, assignment)
            if validate_only:
                return
            known = self.topics.get(name)
            topic_id = topic_id or (known.topic_id if known is not None else None)
            if topic_id is not None:
                self.keep_topics({name: KeptTopic(topic_id, [*before, *new], self.settings(name))})
            if self._tree.swap(path, value, paths.topic_payload({**before, **new}, topic_id)):
                break
        self._put_states(name, new)
        self.refresh()

    def _new_partitions(
        self, before: Mapping[int, Sequence[int]], count: int, assignment: Sequence[Sequence[int]] | None
    ) -> dict[int, list[int]]:
        numbers = range(len(before), count)
        brokers = sorted(self.brokers) or [self.broker_id]
        if assignment is None:
            first = list(before.get(0, ()))[:1]
            shift = brokers.index(first[0]) if first and first[0] in brokers else 0
            return {number: [brokers[(number + shift) % len(brokers)]] for number in numbers}
        if len(assignment) != len(numbers):
            raise InvalidAssignment(f"{len(assignment)} assignments for {len(numbers)} new partitions")
        for replicas in assignment:
            if len(replicas) != 1 or replicas[0] not in brokers:
                raise InvalidAssignment(
                    f"assignment {list(replicas)}: there is no replication, it must be one live broker, of {brokers}"
                )
        return {number: list(replicas) for number, replicas in zip(numbers, assignment, strict=True)}

    def alter_settings(self, name: str, alter: Alter, *, validate_only: bool = False) -> None:
        """Replace the topic's own settings by `alter` of those in the tree.

        With `validate_only` nothing is written. Raises `UnknownTopic`, and what `alter` raises.
        """
        path = paths.topic_config_path(name)
        while True:
            if not self._tree.get(paths.topic_path(name)):
                raise UnknownTopic(f"there is no topic {name}")
            value = self._tree.get(path)
            known = self._decoder.decode(paths.parse_topic_config, value, path) if value else {}
            settings = alter(self.settings(name) if known is None else known)
            if validate_only:
                return
            if (topic := self.topics.get(name)) is not None:
                self.keep_topics({name: KeptTopic(topic.topic_id, [*topic.assignment], settings)})
            if replace_node(self._tree, path, value, paths.topic_config_payload(settings)):
                break
        _log.info("topic %s now has the settings %s", name, dict(settings))
        self.refresh()

    def _read_group_settings(self) -> tuple[bytes | None, dict[str, Mapping[str, str]]]:
        """The node's value, and what it means; a value that does not decode changes nothing."""
        path = paths.GROUP_CONFIGS_PATH
        value = self._tree.get(path)
        known = self._decoder.decode(paths.parse_group_configs, value, path) if value else {}
        return value, dict(self.group_settings if known is None else known)

    def alter_group_settings(
        self, group: str, alter: Alter, keep: Callable[[bytes], None], *, validate_only: bool = False
    ) -> None:
        """Replace a group's own settings by `alter` of those in the tree; the group need not exist.

        `keep` gets the new value of the node before the tree does. Raises what these raise, and `ConfigError` if there
        are too many groups with settings.
        """
        while True:
            value, known = self._read_group_settings()
            settings = alter(known.get(group, {}))
            groups = {name: own for name, own in (known | {group: settings}).items() if own}
            payload = paths.group_configs_payload(groups)
            if len(payload) > _MOST_GROUP_SETTINGS:
                raise ConfigError("too many groups have settings of their own: delete those of groups that are gone")
            if validate_only:
                return
            keep(payload)
            if replace_node(self._tree, paths.GROUP_CONFIGS_PATH, value, payload):
                break
        _log.info("group %s now has the settings %s", group, dict(settings))
        self.group_settings = groups

    def restore_group_settings(self, payload: bytes) -> None:
        """Take over what `keep` of `alter_group_settings` has kept; `DecodeError`."""
        self.group_settings = paths.parse_group_configs(payload)
        self._tree.put(paths.GROUP_CONFIGS_PATH, payload)

    def begin_deletions(self, topics: Mapping[str, UUID | None]) -> dict[str, Asked]:
        """Ask for the deletion of topics, given by name, and forget them. `DirectoryError` if none was asked for.

        When their logs are dropped, `deletions.finish` goes on.
        """
        known = {name: topic.topic_id for name in topics if (topic := self.topics.get(name)) is not None}
        self.keep_topics(
            {name: KeptTopic(topic_id, (), {}) for name, topic_id in known.items() if topics[name] in (None, topic_id)}
        )
        asked: dict[str, Asked] = {}
        failure: DirectoryError | None = None
        for name, topic_id in topics.items():
            try:
                asked[name] = failure or self.deletions.request(name, topic_id, known.get(name))
            except UnknownTopic as error:
                asked[name] = error
            except DirectoryError as error:
                asked[name] = failure = error
        self.deletions.add({name: topic_id for name, topic_id in asked.items() if isinstance(topic_id, UUID)})
        gone = {name for name, outcome in asked.items() if not isinstance(outcome, Exception)}
        self._take_topics({name: topic for name, topic in self.topics.items() if name not in gone})
        return asked

    def group_offsets(self, group: str) -> OffsetDirectory:
        """Committed offsets of a group, in the place where consumers older than Kafka 0.9 keep them."""
        return OffsetDirectory(self._tree, group)

    def close(self) -> None:
        self._tree.close()


def _has_grown(before: Mapping[int, Sequence[int]], now: Mapping[int, Sequence[int]]) -> bool:
    return len(now) > len(before) and all(now.get(partition) == replicas for partition, replicas in before.items())
