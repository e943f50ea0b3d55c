"""Offsets of partitions (ListOffsets) and of consumer groups (OffsetCommit, OffsetFetch)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error, by_key, check_code, worst
from spark_klog.client.cluster import Cluster, by_node
from spark_klog.client.coordinator import Coordinators
from spark_klog.client.requests import Steps, run
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    ErrorCode,
    KlogError,
    ProtocolError,
    Remedy,
    RequestTimedOut,
    UnsupportedVersionError,
    is_retriable,
)
from spark_klog.protocol.apis import LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import EARLIEST, LATEST, READ_UNCOMMITTED

#: The offset in a response if no record has this timestamp or a later one.
NO_OFFSET = -1
_MAX_OFFSET = 0x7FFFFFFFFFFFFFFF
_HAS_MEMBERS = "the group has members, and only they can commit: stop them first, or take another group"
#: Seconds in which brokers may learn of a topic that another one has created; after that the topic does not exist.
UNKNOWN_SECONDS = 1.0
_log = logging.getLogger(__name__)
#: The first version of OffsetFetch that can return all offsets of a group (KIP-88).
_FIRST_OF_ALL = 2
#: The first version of OffsetFetch that takes several groups.
_FIRST_OF_GROUPS = 8
#: Of a new topic, or of a deleted one.
_UNKNOWN_TO_COORDINATORS = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
#: Errors of a reader that is not a member in this epoch.
_REFUSED_READER = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.STALE_MEMBER_EPOCH)
#: Topics are meant by their names.
_NO_IDS: Mapping[str, UUID] = MappingProxyType({})
_T = TypeVar("_T")


class Committed(NamedTuple):
    """A committed offset, the leader epoch of the record before it (-1: unknown), and its metadata string."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""


def list_offsets(
    cluster: Cluster, times: Mapping[TopicPartition, int], isolation_level: int | None = None
) -> dict[TopicPartition, int]:
    """The offset of each partition at a time (ms, or EARLIEST, LATEST); NO_OFFSET if no record is that late.

    With read_committed, LATEST is the last stable offset; `isolation_level` is by default that of the settings.
    `ProtocolError` names the partition.
    """
    offsets: dict[TopicPartition, int] = {}

    def ask() -> Steps[None]:
        leaders, failed = yield from cluster.asking_by_leader([key for key in times if key not in offsets])
        answered, refused = yield from _offsets_at(cluster, leaders, times, isolation_level)
        offsets.update(answered)
        if failures := [*failed.values(), *refused.values()]:
            raise worst(failures)

    run(cluster.attempting(ask))
    return offsets


def offsets_of_led(
    cluster: Cluster, times: Mapping[TopicPartition, int], isolation_level: int | None = None
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, KlogError]]:
    """Like `list_offsets`, but without retries: ask each leader in the last metadata once.

    Returns the offsets, and the retriable errors of the other partitions. Raises a `ProtocolError` that is not
    retriable.
    """
    return run(asking_offsets_of_led(cluster, times, isolation_level))


def asking_offsets_of_led(
    cluster: Cluster, times: Mapping[TopicPartition, int], isolation_level: int | None = None
) -> Steps[tuple[dict[TopicPartition, int], dict[TopicPartition, KlogError]]]:
    """The steps of `offsets_of_led`."""

    def leader(topic: str, partition: int) -> int | KlogError:
        node = cluster.last_leader(topic, partition)
        if node is None:
            return ProtocolError(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {topic}-{partition}")
        return node

    leaders, failed = by_node({key: leader(*key) for key in times})
    offsets, refused = yield from _offsets_at(cluster, leaders, times, isolation_level)
    for refusal in refused.values():
        if not is_retriable(refusal):
            raise refusal
    if failed or refused:
        cluster.doubt()
    return offsets, failed | refused


def _offsets_at(
    cluster: Cluster,
    leaders: Mapping[int, Sequence[TopicPartition]],
    times: Mapping[TopicPartition, int],
    isolation_level: int | None,
) -> Steps[tuple[dict[TopicPartition, int], dict[TopicPartition, KlogError]]]:
    """Offsets of partitions grouped by leader, and the errors of the others; `DecodeError` for any bad response."""
    offsets: dict[TopicPartition, int] = {}
    failed: dict[TopicPartition, KlogError] = {}
    requests: dict[int, tuple[int, Message]] = {}
    for node, keys in leaders.items():
        topics = topic_entries((key, {"timestamp": times[key]}) for key in keys)
        level = cluster.config.isolation_level if isolation_level is None else isolation_level
        requests[node] = node, {"isolation_level": level, "topics": topics}
    for node, answer in (yield from cluster.asking_all(LIST_OFFSETS, requests)).items():
        try:
            if isinstance(answer, KlogError):
                raise answer
            entries = by_key(LIST_OFFSETS, answer, partition_entries(answer), leaders[node])
        except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
            failed |= dict.fromkeys(leaders[node], error)
            continue
        for (topic, partition), entry in entries.items():
            code = entry["error_code"]
            if code == ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT:
                offsets[topic, partition] = NO_OFFSET  # magic 0 has no timestamps
            elif code:
                failed[topic, partition] = answer_error(LIST_OFFSETS, code, f"ListOffsets of {topic}-{partition}")
            else:
                offsets[topic, partition] = entry["offset"]
    return offsets, failed


def partition_entries(answer: Message, requested: Iterable[Message] = ()) -> Iterator[tuple[TopicPartition, Message]]:
    """The entries of a response about offsets, by topic and partition.

    `requested` are the topics of the request, if the response may name them by their ids.
    """
    names = {topic["topic_id"]: topic["name"] for topic in requested if "topic_id" in topic}
    for topic in answer["topics"]:
        name = topic["name"] or names.get(topic.get("topic_id"), f"the id {topic.get('topic_id')}")
        for entry in topic["partitions"]:
            yield (name, entry["partition_index"]), entry


def with_topic_ids(topics: list[Message], ids: Mapping[str, UUID]) -> list[Message]:
    """The topics of a request, with their ids if all of them are known: brokers that take ids then get no names."""
    if not all(topic["name"] in ids for topic in topics):
        return topics
    return [{**topic, "topic_id": ids[topic["name"]]} for topic in topics]


def forget_unknown_id(cluster: Cluster, topic: str, code: int) -> None:
    """After UNKNOWN_TOPIC_ID the topic is named, until metadata have its id again: perhaps it was created anew."""
    if code == ErrorCode.UNKNOWN_TOPIC_ID:
        cluster.topic_ids.pop(topic, None)


def by_topic(entries: Iterable[tuple[TopicPartition, _T]]) -> dict[str, list[_T]]:
    """The entries of partitions in a request, by topic."""
    topics: dict[str, list[_T]] = {}
    for (topic, _), entry in entries:
        topics.setdefault(topic, []).append(entry)
    return topics


def numbers_by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    return by_topic((key, key[1]) for key in partitions)


def topic_numbers(
    partitions: Iterable[TopicPartition], name: str = "name", numbers: str = "partitions"
) -> list[Message]:
    """The partitions as a field of a request: each topic under `name`, the numbers of its partitions."""
    return [{name: topic, numbers: some} for topic, some in numbers_by_topic(partitions).items()]


def topic_entries(entries: Iterable[tuple[TopicPartition, Message]]) -> list[Message]:
    """The entries of partitions as a field of a request, by topic; each gets its partition's number."""
    topics = by_topic((key, {"partition_index": key[1], **entry}) for key, entry in entries)
    return [{"name": topic, "partitions": some} for topic, some in topics.items()]


def topics_to_commit(offsets: Mapping[TopicPartition, Committed]) -> list[Message]:
    """The field `topics` of a request that commits offsets."""
    return topic_entries(
        (
            key,
            {
                "committed_offset": committed.offset,
                "committed_leader_epoch": committed.leader_epoch,
                "committed_metadata": committed.metadata,
            },
        )
        for key, committed in offsets.items()
    )


def commit_errors(
    cluster: Cluster,
    answer: Message,
    requested: Message,
    partitions: Collection[TopicPartition],
    *,
    is_member: bool = False,
) -> dict[TopicPartition, ProtocolError]:
    """The errors in the response to OffsetCommit, by partition; `is_member` if a member of the group has asked."""
    failures = {}
    group, entries = requested["group_id"], partition_entries(answer, requested["topics"])
    for key, entry in by_key(OFFSET_COMMIT, answer, entries, partitions).items():
        if code := entry["error_code"]:
            forget_unknown_id(cluster, key[0], code)
            what = f"commit of {key[0]}-{key[1]} for group {group}"
            is_foreign = code == ErrorCode.UNKNOWN_MEMBER_ID and not is_member
            failures[key] = (
                ProtocolError(code, what, advice=_HAS_MEMBERS)
                if is_foreign
                else answer_error(OFFSET_COMMIT, code, what)
            )
    return failures


class Uncommitted:
    """The offsets of a commit that the coordinator has not stored yet, from attempt to attempt.

    A coordinator refuses offsets of a topic that it does not know, be it new or deleted, as if it might appear soon. A
    partition that metadata do not name either counts as deleted: with `skips_deleted` at once, and its offset is left
    out with a warning; otherwise after a second, and it is the commit's error. `topic_ids` are those of the topics to
    which the offsets belong: another topic of the same name does not get them.
    """

    def __init__(
        self,
        cluster: Cluster,
        offsets: Mapping[TopicPartition, Committed],
        topic_ids: Mapping[str, UUID],
        *,
        skips_deleted: bool,
    ) -> None:
        self._cluster, self._skips_deleted, self.topic_ids = cluster, skips_deleted, dict(topic_ids)
        self._unknown_until = time.monotonic() + (0.0 if skips_deleted else UNKNOWN_SECONDS)
        self.offsets = dict(offsets)

    def answered(self, refused: Mapping[TopicPartition, ProtocolError]) -> Steps[None]:
        """Keep the refused offsets, and raise the worst error, unless nothing is left to commit."""
        self.offsets = {key: self.offsets[key] for key in refused}
        failures = dict(refused)
        unknown = [key for key in refused if refused[key].code in _UNKNOWN_TO_COORDINATORS]
        if unknown and time.monotonic() >= self._unknown_until:
            topics = {topic for topic, _ in unknown}
            there = yield from self._cluster.asking_partitions(topics, missing_ok=True)
            for key in unknown:
                topic_id = self.topic_ids.get(key[0])
                is_another = topic_id is not None and self._cluster.topic_ids.get(key[0], topic_id) != topic_id
                if key[1] in there.get(key[0], ()) and not is_another:
                    continue
                failures[key] = ProtocolError(refused[key].code, refused[key].what, Remedy.FAIL, "it was deleted")
                if self._skips_deleted:
                    _log.warning("no offset is committed of a topic that does not exist any more: %s", failures[key])
                    del failures[key], self.offsets[key]
        if failures:
            raise worst(list(failures.values()))


def check_committable(key: TopicPartition, offset: int) -> None:
    """Raise `ConfigError` if an offset is negative or does not fit into 64 bits."""
    if not 0 <= offset <= _MAX_OFFSET:
        raise ConfigError(
            f"offset {offset} of {key[0]}-{key[1]} must be from 0 to 2^63 - 1: "
            "commit the offset of the next record to read"
        )


def high_watermarks(cluster: Cluster, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The high watermark of each partition, whatever the isolation level is. Raises what `list_offsets` raises.

    A position beyond the last stable offset, in an open transaction, is not beyond the log's end.
    """
    return list_offsets(cluster, dict.fromkeys(partitions, LATEST), READ_UNCOMMITTED)


def first_and_end(
    cluster: Cluster, partitions: Collection[TopicPartition]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """The (earliest, latest) offset of each partition. Raises what `list_offsets` raises."""
    first = list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))
    return first, list_offsets(cluster, dict.fromkeys(partitions, LATEST))


def offset_range(cluster: Cluster, topic: str, partition: int) -> tuple[int, int]:
    """The (earliest, latest) offsets of one partition's log, whatever the isolation level is."""
    key = topic, partition
    first, end = (list_offsets(cluster, {key: time}, READ_UNCOMMITTED)[key] for time in (EARLIEST, LATEST))
    return first, end


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """A group, and a member in one of its generations, by which the coordinator rejects outdated members (KIP-447).

    `generation` is -1 and `member` "" without membership; `instance` is the member's group.instance.id, if any.
    """

    group: str
    generation: int = -1
    member: str = ""
    instance: str | None = None


class GroupOffsets:
    """The committed offsets of a group at its coordinator.

    With `is_stable`, `fetch` waits while an open transaction has offsets of the partitions (KIP-447, Kafka 2.5): they
    would otherwise be read again although the transaction is then committed.

    `reader` gives the member of KIP-848 that reads them, None for others. The coordinator refuses one that is not in
    this epoch (from OffsetFetch 9 on), as the last owner of a partition may not have committed yet: `on_refused` is
    called, and the error can be retried.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        *,
        is_stable: bool = False,
        reader: Callable[[], GroupMetadata | None] = lambda: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self.group = group
        self._is_stable, self._reader, self._on_refused = is_stable, reader, on_refused
        self._coordinators = Coordinators(cluster)

    def commit(
        self,
        offsets: Mapping[TopicPartition, int | Committed],
        topic_ids: Mapping[str, UUID] = _NO_IDS,
        *,
        skips_deleted: bool = False,
    ) -> None:
        """Commit offsets without being a member of the group; `ProtocolError` names the partition.

        `topic_ids` and `skips_deleted`: see `Uncommitted`. Without ids the offsets are those of the names.
        """
        wanted = {key: given if isinstance(given, Committed) else Committed(given) for key, given in offsets.items()}
        left = Uncommitted(self._cluster, wanted, topic_ids, skips_deleted=skips_deleted)

        def ask() -> Steps[None]:
            yield from left.answered((yield from self.committing_once(left.offsets, left.topic_ids)))

        run(self._coordinators.attempting(ask))

    def committing_once(
        self, offsets: Mapping[TopicPartition, Committed], topic_ids: Mapping[str, UUID] = _NO_IDS
    ) -> Steps[dict[TopicPartition, ProtocolError]]:
        """Like `commit`, but without retries; returns the errors of partitions that were refused."""
        node = yield from self._coordinators.asking_node(self.group)
        request = {"group_id": self.group, "topics": with_topic_ids(topics_to_commit(offsets), topic_ids)}
        answer = yield from self._cluster.asking(node, OFFSET_COMMIT, request)
        return commit_errors(self._cluster, answer, request, offsets)

    def fetch(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """Committed offsets of the given partitions that have one, or (since Kafka 0.10.2) of all that have one."""
        return {key: committed.offset for key, committed in self.committed(partitions).items()}

    def committed(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, Committed]:
        """Like `fetch`, with leader epochs (from OffsetFetch 5 on) and metadata strings."""

        return run(self.asking_committed(partitions))

    def asking_committed(
        self, partitions: Collection[TopicPartition] | None = None
    ) -> Steps[dict[TopicPartition, Committed]]:
        def ask() -> Steps[dict[TopicPartition, Committed]]:
            offsets, failed = yield from self._asking(partitions)
            if failed:
                raise worst(list(failed.values()))
            return offsets

        return self._coordinators.attempting(ask)

    def asking_committed_now(
        self, partitions: Collection[TopicPartition]
    ) -> Steps[tuple[dict[TopicPartition, Committed], dict[TopicPartition, ProtocolError]]]:
        """Like `asking_committed`, but ask once.

        Also returns the errors of single partitions, for example of those with offsets in an open transaction.
        """
        with self._coordinators.forgotten_on_error():
            return (yield from self._asking(partitions))

    def _asking(
        self, partitions: Collection[TopicPartition] | None
    ) -> Steps[tuple[dict[TopicPartition, Committed], dict[TopicPartition, ProtocolError]]]:
        topics = None if partitions is None else topic_numbers(partitions, numbers="partition_indexes")
        node = yield from self._coordinators.asking_node(self.group)
        version = yield from self._cluster.asking_version(node, OFFSET_FETCH)
        if partitions is None and version < _FIRST_OF_ALL:
            raise UnsupportedVersionError(f"broker {node} does not tell all offsets of a group")
        request: Message = {"group_id": self.group, "topics": topics}
        stable = {"require_stable": self._is_stable}
        if version < _FIRST_OF_GROUPS:
            older = yield from self._cluster.asking(node, OFFSET_FETCH, request | stable)
            return self._committed(older, partitions)
        if topics is not None:
            request["topics"] = topics = with_topic_ids(topics, self._cluster.topic_ids)
        if (member := self._reader()) is not None:
            request |= {"member_id": member.member, "member_epoch": member.generation}
        asked = {"groups": [request], **stable}
        answer = yield from self._cluster.asking(node, OFFSET_FETCH, asked)
        groups = by_key(OFFSET_FETCH, answer, ((entry["group_id"], entry) for entry in answer["groups"]), [self.group])
        group = groups[self.group]
        if group["error_code"] in _REFUSED_READER:
            self._on_refused()
            advice = "the member's next heartbeat tells its epoch or its loss"
            raise ProtocolError(group["error_code"], f"offsets of group {self.group}", Remedy.RETRY, advice)
        return self._committed(group | {"throttle_time_ms": answer["throttle_time_ms"]}, partitions, topics or ())

    def _committed(
        self, answer: Message, partitions: Collection[TopicPartition] | None, requested: Iterable[Message] = ()
    ) -> tuple[dict[TopicPartition, Committed], dict[TopicPartition, ProtocolError]]:
        """The offsets in a group's part of a response, and the errors of partitions."""
        what = f"offsets of group {self.group}"
        check_code(OFFSET_FETCH, answer["error_code"], what)
        entries = list(partition_entries(answer, requested))
        wanted = {key for key, _ in entries} if partitions is None else partitions
        offsets, failed = {}, {}
        for key, entry in by_key(OFFSET_FETCH, answer, entries, wanted).items():
            code = entry["error_code"]
            if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                continue  # brokers before 0.9 respond so if there is no offset
            if code:
                forget_unknown_id(self._cluster, key[0], code)
                failed[key] = answer_error(OFFSET_FETCH, code, what)
            elif entry["committed_offset"] >= 0:
                epoch, metadata = entry["committed_leader_epoch"], entry["metadata"] or ""
                offsets[key] = Committed(entry["committed_offset"], epoch, metadata)
        return offsets, failed
