"""Which brokers live and which topics there are, as the shared tree has it.

Everything is answered from memory; `refresh` reads the tree again, after a watch fired or before an unknown topic is
refused. The methods that touch the tree block: the server calls them in a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from spark_klog.directories import paths
from spark_klog.directories.tree import NodeExists, Tree
from spark_klog.errors import ConfigError
from spark_klog.log.directory import new_cluster_id

_log = logging.getLogger(__name__)
_IDS, _TOPICS = "/brokers/ids", "/brokers/topics"

NO_LEADER = -1


@dataclass(frozen=True)
class Topic:
    """A topic as registered: replicas by partition, the first one leads.

    One that an old tool registered without an id gets the same made-up one from every broker.
    """

    name: str
    topic_id: UUID
    assignment: dict[int, list[int]]


class Registry:
    """This broker's view of the tree, and its entry in it."""

    def __init__(self, tree: Tree, broker_id: int) -> None:
        self._tree = tree
        self.broker_id = broker_id
        self.brokers: dict[int, list[paths.Endpoint]] = {}
        self.topics: dict[str, Topic] = {}
        self._registered = False

    def cluster_id(self, preferred: str | None) -> str:
        """The cluster's id; made once, `preferred` where there is none yet."""
        found = self._tree.get(paths.CLUSTER_ID_PATH)
        if found is None:
            try:
                payload = paths.cluster_id_payload(preferred or new_cluster_id())
                self._tree.create(paths.CLUSTER_ID_PATH, payload)
            except NodeExists:
                pass
            found = self._tree.get(paths.CLUSTER_ID_PATH)
        assert found is not None
        return paths.parse_cluster_id(found)

    def register(self, endpoints: Sequence[paths.Endpoint]) -> None:
        """Enter this broker, for as long as it lives.

        `ConfigError` where another one has its id. An entry with this very address is what an earlier life left
        behind, since the port is bound by us now: it is replaced.
        """
        path = paths.broker_id_path(self.broker_id)
        payload = paths.broker_payload(endpoints, time.time_ns() // 1_000_000)
        there = self._tree.get(path)
        ours = {(one.host, one.port) for one in endpoints}
        if there is not None and any((one.host, one.port) in ours for one in paths.parse_broker(there)):
            self._tree.delete(path)
        try:
            self._tree.create(path, payload, ephemeral=True)
        except NodeExists:
            other = self._tree.get(path)
            where = "another address"
            if other:
                first = paths.parse_broker(other)[0]
                where = paths.host_and_port(first.host, first.port)
            raise ConfigError(
                f"broker id {self.broker_id} is registered by a broker at {where}; choose another --broker-id"
            ) from None
        self._registered = True

    def unregister(self) -> None:
        """Remove this broker's entry; not that of another broker which has its id."""
        if self._registered:
            self._tree.delete(paths.broker_id_path(self.broker_id))
            self._registered = False

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` (from any thread) when brokers or topics may have changed."""
        self._tree.watch(_IDS, changed)
        self._tree.watch(_TOPICS, changed)

    def refresh(self) -> None:
        """Read brokers and topics again. One call at a time: a slow reading must not replace a later one."""
        brokers = {}
        for name in self._tree.children(_IDS):
            value = self._tree.get(f"{_IDS}/{name}")
            if value is not None and name.isdecimal():
                brokers[int(name)] = paths.parse_broker(value)
        topics = {}
        for name in self._tree.children(_TOPICS):
            value = self._tree.get(paths.topic_path(name))
            if value:
                assignment, topic_id = paths.parse_topic(value)
                topics[name] = Topic(name, topic_id or uuid5(NAMESPACE_URL, f"klog:{name}"), assignment)
            elif value is not None and name in self.topics:
                topics[name] = self.topics[name]
        self.brokers, self.topics = brokers, topics

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

    def leads(self, topic: str, partition: int) -> bool | None:
        """Whether this broker leads the partition; None where it does not exist."""
        found = self.topics.get(topic)
        if found is None or partition not in found.assignment:
            return None
        return found.assignment[partition][:1] == [self.broker_id]

    @property
    def controller_id(self) -> int:
        """The broker that clients send topic changes to; any would do, so the smallest id."""
        return min(self.brokers, default=NO_LEADER)

    def assign(self, partitions: int) -> dict[int, list[int]]:
        """Partitions one after the other over the brokers that live."""
        brokers = sorted(self.brokers) or [self.broker_id]
        shift = len(self.topics)
        return {partition: [brokers[(partition + shift) % len(brokers)]] for partition in range(partitions)}

    def create_topic(
        self,
        name: str,
        assignment: dict[int, list[int]],
        settings: dict[str, str],
        topic_id: UUID | None = None,
    ) -> bool:
        """Register a topic; False where it exists."""
        if settings:
            self._tree.put(paths.topic_config_path(name), paths.topic_config_payload(settings))
        try:
            self._tree.create(paths.topic_path(name), paths.topic_payload(assignment, topic_id or uuid4()))
        except NodeExists:
            return False
        for partition, replicas in assignment.items():
            self._tree.put(
                paths.partition_state_path(name, partition),
                paths.partition_state_payload(replicas[0], replicas),
            )
        self.refresh()
        return True

    def settings(self, name: str) -> dict[str, str]:
        """The topic's own settings."""
        found = self._tree.get(paths.topic_config_path(name))
        return paths.parse_topic_config(found) if found else {}

    def delete_topic(self, name: str) -> None:
        self._tree.delete(paths.topic_path(name))
        self._tree.delete(paths.topic_config_path(name))
        self.refresh()

    def close(self) -> None:
        self._tree.close()
