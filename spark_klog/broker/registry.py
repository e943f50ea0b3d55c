"""Which brokers live and which topics there are, as the shared tree has it.

Everything is answered from memory; `refresh` reads the tree again, after a watch fired or before an unknown topic is
refused. The methods that touch the tree block: the server calls them in a thread. A node that does not decode, as a
tool of others may leave it, is told of once and passed over.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar
from uuid import UUID, uuid4

from spark_klog.directories import paths
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.tree import SESSION_SECONDS, NodeExists, Tree
from spark_klog.errors import ConfigError, DecodeError, DirectoryError
from spark_klog.log.directory import new_cluster_id
from spark_klog.log.names import check_topic_name
from spark_klog.log.partition_log import system_ms

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: From a topic's own settings to others.
Alter = Callable[[Mapping[str, str]], Mapping[str, str]]

NO_LEADER = -1
MAX_PARTITIONS = 10_000
_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.25


class TopicCollides(ConfigError):
    """A topic whose name differs from another one's in '.' and '_' only: metrics of Kafka could not tell them apart."""


class TopicExists(ConfigError):
    """There is a topic of that name."""


class UnknownTopic(ConfigError):
    """There is no such topic."""


class InvalidPartitions(ConfigError):
    """A topic can't have that many partitions."""


class InvalidAssignment(ConfigError):
    """Partitions can't be assigned so."""


@dataclass(frozen=True)
class Topic:
    """A topic as registered: replicas by partition, the first one leads; its own settings."""

    name: str
    topic_id: UUID
    assignment: dict[int, list[int]]
    settings: Mapping[str, str] = field(default_factory=dict)


class Nameless(NamedTuple):
    """A topic whose node has no topic id: tools of before Kafka 2.8 write none.

    `is_new`: it has neither states nor more partitions than before, so they have just made it; else they have altered
    it. `topic_id` is what it had before,
    if that is known.
    """

    value: bytes
    assignment: dict[int, list[int]]
    is_new: bool
    topic_id: UUID | None


class Registry:
    """This broker's view of the tree, and its entry in it."""

    def __init__(self, tree: Tree, broker_id: int, session_seconds: float = SESSION_SECONDS) -> None:
        self._tree = tree
        self.broker_id = broker_id
        self._session_seconds = session_seconds
        self.brokers: dict[int, list[paths.Endpoint]] = {}
        self.topics: dict[str, Topic] = {}
        #: By topic id.
        self.names: dict[UUID, str] = {}
        self.nameless: dict[str, Nameless] = {}
        #: Nodes of topics without a value: of topics that are being deleted.
        self.empty: list[str] = []
        #: Who has entered itself as the controller.
        self.controller: int | None = None
        self._cluster_id: str | None = None
        self._entry: bytes | None = None
        self._told: dict[str, str] = {}
        #: By topic: the values of its nodes that it was decoded from.
        self._sources: dict[str, tuple[bytes, bytes | None]] = {}

    def cluster_id(self, preferred: str | None) -> str:
        """The cluster's id; made once, `preferred` where there is none yet."""
        found = self._tree.get(paths.CLUSTER_ID_PATH)
        if found is None:
            self._make(paths.CLUSTER_ID_PATH, paths.cluster_id_payload(preferred or new_cluster_id()))
            found = self._tree.get(paths.CLUSTER_ID_PATH)
        assert found is not None
        self._cluster_id = paths.parse_cluster_id(found)
        return self._cluster_id

    def register(self, endpoints: Sequence[paths.Endpoint]) -> None:
        """Enter this broker, for as long as it lives.

        `ConfigError` where another one has its id. An entry with this very address is what an earlier life left
        behind, since the port is bound by us now: it is replaced. One whose address does not answer may be that of a
        broker that was killed: its session is given the time to end.
        """
        for path in paths.COMMON_PATHS:
            if self._tree.get(path) is None:
                self._make(path, b"")
        path = paths.broker_id_path(self.broker_id)
        entry = paths.broker_payload(endpoints, system_ms())
        ours = {(one.host, one.port) for one in endpoints}
        deadline: float | None = None
        while not self._make(path, entry, ephemeral=True):
            other = self._tree.get(path)
            if other is None:
                continue
            others = self._decoded(paths.parse_broker, other, path) or []
            if any((one.host, one.port) in ours for one in others):
                self._tree.delete(path)
                continue
            where = paths.host_and_port(others[0].host, others[0].port) if others else "another address"
            refusal = f"broker id {self.broker_id} is registered by a broker at {where}"
            if others and _answers((others[0].host, others[0].port)):
                raise ConfigError(f"{refusal}; choose another --broker-id")
            if deadline is None:
                # the server may round a timeout up, or raise it
                deadline = time.monotonic() + 2 * self._session_seconds
                _log.warning("%s, which does not answer: waiting for the end of its session", refusal)
            elif time.monotonic() > deadline:
                raise ConfigError(
                    f"{refusal}, which does not answer, but its session has not ended in "
                    f"{2 * self._session_seconds:g} s; choose another --broker-id, or stop that broker"
                )
            time.sleep(_PAUSE_SECONDS)
        self._entry = entry
        controller = self._tree.get(paths.CONTROLLER_PATH)
        if controller and self._decoded(paths.parse_controller, controller, paths.CONTROLLER_PATH) == self.broker_id:
            self._tree.delete(paths.CONTROLLER_PATH)  # of an earlier life, too

    def _make(self, path: str, value: bytes, ephemeral: bool = False) -> bool:
        """Create a node; False where it is."""
        try:
            self._tree.create(path, value, ephemeral=ephemeral)
        except NodeExists:
            return False
        return True

    def unregister(self) -> None:
        """Remove this broker's entry; not that of another broker which has its id."""
        entry, self._entry = self._entry, None
        path = paths.broker_id_path(self.broker_id)
        if entry is not None and self._tree.get(path) == entry:
            self._tree.delete(path)

    def _keep_entry(self) -> None:
        """Enter this broker again if its entry was lost; the tree itself does so after a lost session."""
        path = paths.broker_id_path(self.broker_id)
        if self._entry is None:
            return
        there = self._tree.get(path)
        if there is None and self._make(path, self._entry, ephemeral=True):
            _log.warning("the entry of broker %d was gone: it is registered again", self.broker_id)
        elif there not in (None, self._entry):
            self._tell(path, f"broker id {self.broker_id} has been taken by another broker; clients are sent there")

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` (from any thread) when brokers, topics, their settings or the controller may have changed."""
        self._tree.watch("/", changed)  # /controller
        self._tree.watch(paths.BROKER_IDS_PATH, changed)
        self._tree.watch(paths.BROKER_TOPICS_PATH, changed, values=True)
        self._tree.watch(paths.TOPIC_CONFIGS_PATH, changed, values=True)
        self._tree.watch(paths.CONFIG_CHANGES_PATH, changed)
        self._tree.watch(paths.DELETE_TOPICS_PATH, changed)

    def refresh(self) -> None:
        """Read all of it again. One call at a time: a slow reading must not replace a later one.

        `DirectoryError` where the tree is not our cluster's: one that is empty, say, since its disk was not mounted,
        would have no topics, and these would be taken for deleted.
        """
        whose = self._tree.get(paths.CLUSTER_ID_PATH)
        cluster_id = self._decoded(paths.parse_cluster_id, whose, paths.CLUSTER_ID_PATH) if whose else None
        if cluster_id != self._cluster_id:
            there = f"cluster {cluster_id}" if cluster_id else "no cluster"
            raise DirectoryError(
                f"{paths.CLUSTER_ID_PATH} names {there}, this broker belongs to {self._cluster_id}: restore the "
                "directories, or start the broker on those that it is to follow"
            )
        self._keep_entry()
        brokers = {}
        for name, value in self._values(paths.BROKER_IDS_PATH):
            endpoints = self._decoded(paths.parse_broker, value, f"{paths.BROKER_IDS_PATH}/{name}")
            if endpoints is not None and name.isdecimal():
                brokers[int(name)] = endpoints
        controller = self._tree.get(paths.CONTROLLER_PATH)
        self.controller = (
            self._decoded(paths.parse_controller, controller, paths.CONTROLLER_PATH) if controller else None
        )
        topics: dict[str, Topic] = {}
        nameless: dict[str, Nameless] = {}
        found = self._values(paths.BROKER_TOPICS_PATH)
        configs = self._tree.get_many([paths.topic_config_path(name) for name, _ in found])
        for (name, value), config in zip(found, configs, strict=True):
            topic = self._topic(name, value, config, nameless)
            if topic is not None:
                topics[name] = topic
        self.brokers, self.nameless = brokers, nameless
        self._take_topics(topics)
        self.empty = [name for name, value in found if not value]

    def _take_topics(self, topics: dict[str, Topic]) -> None:
        self.topics = topics
        self.names = {topic.topic_id: name for name, topic in topics.items()}
        self._sources = {name: source for name, source in self._sources.items() if name in topics}

    def _values(self, path: str) -> list[tuple[str, bytes]]:
        names = self._tree.children(path)
        values = self._tree.get_many([f"{path}/{name}" for name in names])
        return [(name, value) for name, value in zip(names, values, strict=True) if value is not None]

    def _topic(self, name: str, value: bytes, config: bytes | None, nameless: dict[str, Nameless]) -> Topic | None:
        path, known = paths.topic_path(name), self.topics.get(name)
        if known is not None and self._sources.get(name) == (value, config):
            return known
        self._sources.pop(name, None)
        try:
            check_topic_name(name)
        except ConfigError as error:
            self._tell(path, str(error))
            return None
        parsed = self._decoded(paths.parse_topic, value, path) if value else None
        if parsed is None:
            return known  # it is being deleted, or what is wrong will be mended: no reason to delete its logs
        assignment, topic_id = parsed
        settings: Mapping[str, str] = {}
        decoded: Mapping[str, str] | None = None
        if config:
            before = known.settings if known is not None else settings
            decoded = self._decoded(paths.parse_topic_config, config, paths.topic_config_path(name))
            settings = before if decoded is None else decoded
        if topic_id is None:
            # A tool that alters a topic adds partitions to it; its states may not have been written yet.
            has_grown = known is not None and _has_grown(known.assignment, assignment)
            is_new = not has_grown and not self._tree.children(paths.partitions_path(name))
            topic_id = known.topic_id if known is not None and not is_new else None
            nameless[name] = Nameless(value, assignment, is_new, topic_id)
            if topic_id is None:
                return None
        elif not config or decoded is not None:
            self._sources[name] = value, config
        return Topic(name, topic_id, assignment, settings)

    def _decoded(self, parse: Callable[[bytes, str], _T], value: bytes, path: str) -> _T | None:
        try:
            return parse(value, path)
        except DecodeError as error:
            self._tell(path, str(error))
            return None

    def _tell(self, path: str, what: str) -> None:
        if self._told.get(path) != what:
            self._told[path] = what
            _log.error("%s", what)

    def addresses(self, listener: str) -> dict[int, tuple[str, int]]:
        """Host and port by broker id, as clients of that listener reach them; brokers without it are left out."""
        return {
            broker_id: (endpoint.host, endpoint.port)
            for broker_id, endpoints in sorted(self.brokers.items())
            for endpoint in endpoints
            if endpoint.listener == listener
        }

    def leader(self, topic: Topic, partition: int) -> int:
        """The leader's broker id, NO_LEADER where that broker is not there."""
        replicas = topic.assignment.get(partition) or [NO_LEADER]
        return replicas[0] if replicas[0] in self.brokers else NO_LEADER

    def leader_of(self, name: str, partition: int) -> int:
        """The leader's broker id of a partition; NO_LEADER where it, or that broker, is not there."""
        topic = self.topics.get(name)
        return NO_LEADER if topic is None else self.leader(topic, partition)

    def key(self, topic: str, topic_id: UUID, partition: int) -> tuple[str, int]:
        """(topic name, partition) of a partition whose topic is named, or else known by its id."""
        return topic or self.names.get(topic_id, ""), partition

    def leads(self, topic: str, partition: int) -> bool | None:
        """Whether this broker leads the partition; None where it does not exist."""
        found = self.topics.get(topic)
        if found is None or partition not in found.assignment:
            return None
        return found.assignment[partition][:1] == [self.broker_id]

    @property
    def controller_id(self) -> int:
        """The broker that clients send topic changes to. Any does them, so there always is one."""
        return self.controller if self.controller in self.brokers else min(self.brokers, default=NO_LEADER)

    def settings(self, name: str) -> dict[str, str]:
        """The topic's own settings."""
        topic = self.topics.get(name)
        return dict(topic.settings) if topic is not None else {}

    def assign(self, partitions: int) -> dict[int, list[int]]:
        """Partitions one after the other over the brokers that live."""
        brokers = sorted(self.brokers) or [self.broker_id]
        shift = len(self.topics)
        return {partition: [brokers[(partition + shift) % len(brokers)]] for partition in range(partitions)}

    def check_collision(self, name: str) -> None:
        """`TopicCollides` for a new topic if the name of another one differs in '.' and '_' only."""
        if name not in self.topics and ("." in name or "_" in name):
            unified = name.replace(".", "_")
            others = [other for other in self.topics if other != name and other.replace(".", "_") == unified]
            if others:
                raise TopicCollides(f"topic '{name}' collides with existing topics: {', '.join(sorted(others))}")

    def create_topic(
        self,
        name: str,
        assignment: dict[int, list[int]],
        settings: Mapping[str, str],
        topic_id: UUID | None = None,
    ) -> bool:
        """Register a topic; False where it exists."""
        path, payload = paths.topic_config_path(name), paths.topic_config_payload(settings)
        while True:
            before = self._tree.get(path)
            if self._tree.get(paths.topic_path(name)) is not None:
                return False
            if self._replace(path, before, payload):
                break
        if not self._make(paths.topic_path(name), paths.topic_payload(assignment, topic_id or uuid4())):
            if before is not None:
                self._tree.swap(path, payload, before)  # another broker was faster: its topic, its settings
            return False
        self._make(path, payload)  # an earlier topic's deletion may have taken them away
        self._put_states(name, assignment)
        # read again alone: to read all topics for each of a thousand new ones would take minutes
        value = self._tree.get(paths.topic_path(name))
        config = self._tree.get(paths.topic_config_path(name))
        topic = self._topic(name, value, config, {}) if value else None
        if topic is not None:
            self._take_topics(self.topics | {name: topic})
        return topic is not None

    def _put_states(self, name: str, assignment: Mapping[int, Sequence[int]]) -> None:
        for partition, replicas in assignment.items():
            payload = paths.partition_state_payload(replicas[0], replicas[:1])
            self._tree.put(paths.partition_state_path(name, partition), payload)

    def add_partitions(
        self, name: str, count: int, assignment: Sequence[Sequence[int]] | None = None, *, validate_only: bool = False
    ) -> None:
        """Give a topic `count` partitions in all; `assignment` has the replicas of each new one.

        `UnknownTopic`, `InvalidPartitions` or `InvalidAssignment`; with `validate_only` nothing else is done.
        """
        path = paths.topic_path(name)
        while True:
            value = self._tree.get(path)
            if not value:
                raise UnknownTopic(f"there is no topic {name}")
            before, topic_id = paths.parse_topic(value, path)
            if not len(before) < count <= MAX_PARTITIONS:
                raise InvalidPartitions(
                    f"topic {name} has {len(before)} partitions: it can get more, {MAX_PARTITIONS} at the most, "
                    f"not {count}"
                )
            new = self._new_partitions(before, count, assignment)
            if validate_only:
                return
            known = self.topics.get(name)
            topic_id = topic_id or (known.topic_id if known is not None else None)
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
                    f"assignment {list(replicas)}: there is no replication, one broker that lives is wanted, "
                    f"of {brokers}"
                )
        return {number: list(replicas) for number, replicas in zip(numbers, assignment, strict=True)}

    def _replace(self, path: str, before: bytes | None, value: bytes) -> bool:
        """Write a node, None if there is none; False if it is not as it was `before`."""
        return self._make(path, value) if before is None else self._tree.swap(path, before, value)

    def alter_settings(self, name: str, alter: Alter, *, validate_only: bool = False) -> None:
        """Replace the topic's own settings by what `alter` makes of them, as the tree has them then.

        `UnknownTopic`, and what `alter` raises; with `validate_only` nothing else is done.
        """
        path = paths.topic_config_path(name)
        while True:
            if not self._tree.get(paths.topic_path(name)):
                raise UnknownTopic(f"there is no topic {name}")
            value = self._tree.get(path)
            known = self._decoded(paths.parse_topic_config, value, path) if value else {}
            settings = alter(self.settings(name) if known is None else known)
            if validate_only:
                return
            if self._replace(path, value, paths.topic_config_payload(settings)):
                break
        _log.info("topic %s has the settings %s now", name, dict(settings))
        self.refresh()

    def delete_topic(self, name: str, topic_id: UUID | None = None) -> None:
        """As `remove_topic`, and forget the topic: to read all topics for each deleted one would take minutes.

        `UnknownTopic` if the topic of that name has another id than `topic_id` by now.
        """
        path = paths.topic_path(name)
        if topic_id is not None:
            value = self._tree.get(path)
            now = self._decoded(paths.parse_topic, value, path) if value else None
            if now is None or now[1] not in (None, topic_id):
                raise UnknownTopic(f"topic {name} is no longer the one of id {topic_id}")
        self.remove_topic(name)
        self._take_topics({other: topic for other, topic in self.topics.items() if other != name})

    def remove_topic(self, name: str) -> None:
        """Remove the topic's nodes, what asked for it last; no error where there are none."""
        self._tree.delete(paths.topic_path(name))
        if self._tree.get(paths.topic_path(name)) is None:  # else another broker has created it again
            self._tree.delete(paths.topic_config_path(name))
        self._tree.delete(paths.delete_topic_path(name))

    def group_offsets(self, group: str) -> OffsetDirectory:
        """A group's offsets where consumers of before Kafka 0.9 keep them."""
        return OffsetDirectory(self._tree, group)

    def close(self) -> None:
        self._tree.close()


def _has_grown(before: Mapping[int, Sequence[int]], now: Mapping[int, Sequence[int]]) -> bool:
    return len(now) > len(before) and all(now.get(partition) == replicas for partition, replicas in before.items())


def _answers(address: tuple[str, int]) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection(address, _PROBE_SECONDS):
            return True
    except OSError:
        return False
