"""Offsets of partitions (ListOffsets) and of groups (OffsetCommit, OffsetFetch)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from spark_klog.client.answers import answer_error, by_key, check_code, worst
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.errors import (
    ConnectionFailed,
    ErrorCode,
    KlogError,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import FIND_COORDINATOR, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.coordinator import GROUP
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST

#: The answer where no record is as late as the timestamp.
NO_OFFSET = -1
#: The version of OffsetFetch that can ask for all offsets of a group (KIP-88).
_FIRST_OF_ALL = 2
#: The versions of FindCoordinator and OffsetFetch that ask for several groups.
_FIRST_OF_SEVERAL, _FIRST_OF_GROUPS = 4, 8
_T = TypeVar("_T")


def list_offsets(
    cluster: Cluster, times: Mapping[TopicPartition, int], isolation_level: int | None = None
) -> dict[TopicPartition, int]:
    """The offset of each partition at a time (ms, or EARLIEST, LATEST); NO_OFFSET where no record is that late.

    With `isolation.level=read_committed`, unless another level is given, LATEST is the last stable offset.
    `ProtocolError` names the partition.
    """
    found: dict[TopicPartition, int] = {}

    def ask() -> None:
        leaders, failed = cluster.by_leader([key for key in times if key not in found])
        answered, refused = _offsets_at(cluster, leaders, times, isolation_level)
        found.update(answered)
        if failures := [*failed.values(), *refused.values()]:
            raise worst(failures)

    cluster.attempt(ask)
    return found


def offsets_of_led(
    cluster: Cluster, times: Mapping[TopicPartition, int]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, KlogError]]:
    """As `list_offsets`, but each leader of the last metadata is asked once; with the errors of those that may pass.

    `ProtocolError` for one that does not pass.
    """
    failed: dict[TopicPartition, KlogError] = {}
    leaders: dict[int, dict[str, list[int]]] = {}
    for topic, partition in times:
        node = cluster.last_leader(topic, partition)
        if node is None:
            what = f"partition {topic}-{partition}"
            failed[topic, partition] = ProtocolError(ErrorCode.LEADER_NOT_AVAILABLE, what)
        else:
            leaders.setdefault(node, {}).setdefault(topic, []).append(partition)
    found, refused = _offsets_at(cluster, leaders, times, None)
    for refusal in refused.values():
        if isinstance(refusal, ProtocolError) and not refusal.retriable:
            raise refusal
    return found, failed | refused


def _offsets_at(
    cluster: Cluster,
    leaders: Mapping[int, Mapping[str, Collection[int]]],
    times: Mapping[TopicPartition, int],
    isolation_level: int | None,
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, KlogError]]:
    """Offsets of partitions, grouped by leader, and the error of each that has none; `DecodeError` of any answer."""
    found: dict[TopicPartition, int] = {}
    failed: dict[TopicPartition, KlogError] = {}
    requests = {
        node: {
            "isolation_level": cluster.config.isolation_level if isolation_level is None else isolation_level,
            "topics": [
                {
                    "name": topic,
                    "partitions": [
                        {"partition_index": partition, "timestamp": times[topic, partition]} for partition in partitions
                    ],
                }
                for topic, partitions in topics.items()
            ],
        }
        for node, topics in leaders.items()
    }
    for node, answer in cluster.request_each(LIST_OFFSETS, requests).items():
        wanted = [(topic, partition) for topic, numbers in leaders[node].items() for partition in numbers]
        try:
            if isinstance(answer, KlogError):
                raise answer
            entries = by_key(LIST_OFFSETS, answer, _partitions(answer), wanted)
        except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
            failed |= dict.fromkeys(wanted, error)
            continue
        for (topic, partition), entry in entries.items():
            code = entry["error_code"]
            if code == ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT:
                found[topic, partition] = NO_OFFSET  # magic 0 has no timestamps to look for
            elif code:
                failed[topic, partition] = answer_error(LIST_OFFSETS, code, f"ListOffsets of {topic}-{partition}")
            else:
                found[topic, partition] = entry["offset"]
    return found, failed


def _partitions(answer: Message) -> Iterator[tuple[TopicPartition, Message]]:
    for topic in answer["topics"]:
        for entry in topic["partitions"]:
            yield (topic["name"], entry["partition_index"]), entry


def offset_range(cluster: Cluster, topic: str, partition: int) -> tuple[int, int]:
    """(earliest, latest) of one partition."""
    key = topic, partition
    return list_offsets(cluster, {key: EARLIEST})[key], list_offsets(cluster, {key: LATEST})[key]


def find_coordinator(cluster: Cluster, group: str) -> int:
    """The node id of the broker that coordinates a group; `ProtocolError` if there is none now."""
    is_of_several = False

    def request(version: int) -> Message:
        nonlocal is_of_several
        is_of_several = version >= _FIRST_OF_SEVERAL
        return {"coordinator_keys": [group], "key_type": GROUP} if is_of_several else {"key": group, "key_type": GROUP}

    answer = cluster.any_broker(FIND_COORDINATOR, request)
    entry = answer
    if is_of_several:
        found = ((str(item["key"]), item) for item in answer["coordinators"])
        entry = by_key(FIND_COORDINATOR, answer, found, [group])[group]
    check_code(FIND_COORDINATOR, entry["error_code"], f"coordinator of group {group}")
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
                wanted = {"partition_index": partition, "committed_offset": offset, "committed_metadata": ""}
                topics.setdefault(topic, []).append(wanted)
            request = {
                "group_id": self.group,
                "topics": [{"name": topic, "partitions": entries} for topic, entries in topics.items()],
            }
            answer = self._cluster.request(self._find(), OFFSET_COMMIT, request)
            failures = [
                answer_error(
                    OFFSET_COMMIT, entry["error_code"], f"commit of {topic}-{partition} for group {self.group}"
                )
                for (topic, partition), entry in by_key(OFFSET_COMMIT, answer, _partitions(answer), offsets).items()
                if entry["error_code"]
            ]
            if failures:
                raise worst(failures)

        self._attempt(ask)

    def fetch(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """Committed offsets of those of the partitions that have one; of all that have one (Kafka 0.10.2 or later)."""

        def ask() -> dict[TopicPartition, int]:
            topics: dict[str, list[int]] = {}
            for topic, partition in partitions or ():
                topics.setdefault(topic, []).append(partition)
            wanted = [{"name": topic, "partition_indexes": indexes} for topic, indexes in topics.items()]
            node = self._find()
            version = self._cluster.version_of(node, OFFSET_FETCH)
            if partitions is None and version < _FIRST_OF_ALL:
                raise UnsupportedVersionError(f"broker {node} does not tell all offsets of a group")
            request: Message = {"group_id": self.group, "topics": None if partitions is None else wanted}
            if version < _FIRST_OF_GROUPS:
                return self._committed(self._cluster.request(node, OFFSET_FETCH, request), partitions)
            answer = self._cluster.request(node, OFFSET_FETCH, {"groups": [request]})
            groups = by_key(OFFSET_FETCH, answer, ((item["group_id"], item) for item in answer["groups"]), [self.group])
            return self._committed(groups[self.group] | _throttle(answer), partitions)

        return self._attempt(ask)

    def _committed(self, answer: Message, partitions: Collection[TopicPartition] | None) -> dict[TopicPartition, int]:
        """The offsets in what is answered for a group."""
        what = f"offsets of group {self.group}"
        check_code(OFFSET_FETCH, answer["error_code"], what)
        entries = list(_partitions(answer))
        wanted = {key for key, _ in entries} if partitions is None else partitions
        found = {}
        for key, entry in by_key(OFFSET_FETCH, answer, entries, wanted).items():
            if entry["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                continue  # so brokers before 0.9 say that there is none
            check_code(OFFSET_FETCH, entry["error_code"], what)
            if entry["committed_offset"] >= 0:
                found[key] = entry["committed_offset"]
        return found

    def _attempt(self, ask: Callable[[], _T]) -> _T:
        """As `Cluster.attempt`; the coordinator is looked for again after any failure."""

        def ask_again() -> _T:
            try:
                return ask()
            except KlogError:
                self._coordinator = None
                raise

        return self._cluster.attempt(ask_again)


def _throttle(answer: Message) -> Message:
    return {"throttle_time_ms": answer["throttle_time_ms"]}
