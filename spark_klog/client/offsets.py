"""Offsets of partitions (ListOffsets) and of groups (OffsetCommit, OffsetFetch)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.errors import ErrorCode, ProtocolError, UnsupportedVersionError, raise_for_code
from spark_klog.protocol.apis import FIND_COORDINATOR, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.coordinator import GROUP
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST

#: The answer where no record is as late as the timestamp.
NO_OFFSET = -1
#: The version of OffsetFetch that can ask for all offsets of a group (KIP-88).
_FIRST_OF_ALL = 2


def list_offsets(
    cluster: Cluster, times: Mapping[TopicPartition, int], isolation_level: int | None = None
) -> dict[TopicPartition, int]:
    """The offset of each partition at a time (ms, or EARLIEST, LATEST); NO_OFFSET where no record is that late.

    With `isolation.level=read_committed`, unless another level is given, LATEST is the last stable offset.
    `ProtocolError` names the partition.
    """
    found: dict[TopicPartition, int] = {}
    isolation = cluster.config.isolation_level if isolation_level is None else isolation_level

    def ask() -> None:
        rest = [key for key in times if key not in found]
        for node, topics in cluster.by_leader(rest).items():
            request = {
                "isolation_level": isolation,
                "topics": [
                    {
                        "name": topic,
                        "partitions": [
                            {"partition_index": partition, "timestamp": times[topic, partition]}
                            for partition in partitions
                        ],
                    }
                    for topic, partitions in topics.items()
                ],
            }
            answer = cluster.connection(node).request(LIST_OFFSETS, request)
            for topic in answer["topics"]:
                for entry in topic["partitions"]:
                    key = topic["name"], entry["partition_index"]
                    if entry["error_code"] == ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT:
                        found[key] = NO_OFFSET  # magic 0 has no timestamps to look for
                        continue
                    raise_for_code(entry["error_code"], f"ListOffsets of {key[0]}-{key[1]}")
                    found[key] = entry["offset"]

    cluster.attempt(ask)
    return found


def offset_range(cluster: Cluster, topic: str, partition: int) -> tuple[int, int]:
    """(earliest, latest) of one partition."""
    key = topic, partition
    return list_offsets(cluster, {key: EARLIEST})[key], list_offsets(cluster, {key: LATEST})[key]


def find_coordinator(cluster: Cluster, group: str) -> int:
    """The node id of the broker that coordinates a group; `ProtocolError` where there is none now."""
    node = cluster.controller_id
    if node < 0:
        cluster.metadata([])
        node = cluster.controller_id
    connection = cluster.connection(node)
    request: Message = {"key": group, "key_type": GROUP}
    if connection.version_of(FIND_COORDINATOR) >= 4:
        request = {"coordinator_keys": [group], "key_type": GROUP}
    answer = connection.request(FIND_COORDINATOR, request)
    entry = answer["coordinators"][0] if answer["coordinators"] else answer
    raise_for_code(entry["error_code"], f"coordinator of group {group}")
    cluster.metadata([])
    return int(entry["node_id"])


class GroupOffsets:
    """The committed offsets of a group, at its coordinator."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self.group = group
        self._coordinator: int | None = None

    def _find(self) -> int:
        if self._coordinator is None:
            self._coordinator = find_coordinator(self._cluster, self.group)
        return self._coordinator

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets from outside the group's generations; `ProtocolError` names the partition."""

        def ask() -> None:
            topics: dict[str, list[Message]] = {}
            for (topic, partition), offset in offsets.items():
                entry = {"partition_index": partition, "committed_offset": offset, "committed_metadata": ""}
                topics.setdefault(topic, []).append(entry)
            request = {
                "group_id": self.group,
                "topics": [{"name": topic, "partitions": entries} for topic, entries in topics.items()],
            }
            answer = self._at_coordinator(lambda node: self._cluster.connection(node).request(OFFSET_COMMIT, request))
            for topic in answer["topics"]:
                for entry in topic["partitions"]:
                    what = f"commit of {topic['name']}-{entry['partition_index']} for group {self.group}"
                    self._check(entry["error_code"], what)

        self._cluster.attempt(ask)

    def fetch(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """Committed offsets of those of the partitions that have one; of all that have one (Kafka 0.10.2 or later)."""

        def ask() -> dict[TopicPartition, int]:
            topics: dict[str, list[int]] = {}
            for topic, partition in partitions or ():
                topics.setdefault(topic, []).append(partition)
            wanted = [{"name": topic, "partition_indexes": indexes} for topic, indexes in topics.items()]

            def fetch(node: int) -> Message:
                connection = self._cluster.connection(node)
                version = connection.version_of(OFFSET_FETCH)
                if partitions is None and version < _FIRST_OF_ALL:
                    raise UnsupportedVersionError(f"broker {connection.address} does not tell all offsets of a group")
                request: Message = {"group_id": self.group, "topics": None if partitions is None else wanted}
                if version >= 8:
                    request = {"groups": [request]}
                answer = connection.request(OFFSET_FETCH, request)
                return answer["groups"][0] if answer["groups"] else answer

            answer = self._at_coordinator(fetch)
            self._check(answer["error_code"], f"offsets of group {self.group}")
            found = {}
            for topic in answer["topics"]:
                for entry in topic["partitions"]:
                    self._check(entry["error_code"], f"offsets of group {self.group}")
                    if entry["committed_offset"] >= 0:
                        found[topic["name"], entry["partition_index"]] = entry["committed_offset"]
            return found

        return self._cluster.attempt(ask)

    def _at_coordinator(self, action: Callable[[int], Message]) -> Message:
        try:
            return action(self._find())
        except Exception:
            self._coordinator = None
            raise

    def _check(self, code: int, what: str) -> None:
        if code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
            self._coordinator = None
        if code:
            raise ProtocolError(code, what)
