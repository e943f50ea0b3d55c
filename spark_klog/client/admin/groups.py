"""Groups at their coordinators, and their offsets; offsets by time, deletion of records, log directories, brokers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from spark_klog.base.names import TopicPartition
from spark_klog.client.admin.calls import (
    AdminCalls,
    Outcomes,
    Places,
    Routes,
    by_field,
    by_partition,
    checked,
    known,
    whole,
)
from spark_klog.client.answers import answer_error
from spark_klog.client.arguments import items_of, mapping_of, name_of, names_of, number_of, partition_of, partitions_of
from spark_klog.client.calls import call, steps_of
from spark_klog.client.offsets import Committed, GroupOffsets, topic_entries, topic_numbers
from spark_klog.client.requests import Steps, at_once
from spark_klog.errors import (
    ConfigError,
    DecodeError,
    ErrorCode,
    KlogError,
    ProtocolError,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import (
    CONSUMER_GROUP_DESCRIBE,
    DELETE_GROUPS,
    DELETE_RECORDS,
    DESCRIBE_GROUPS,
    DESCRIBE_LOG_DIRS,
    LIST_GROUPS,
    LIST_OFFSETS,
    METADATA,
    OFFSET_DELETE,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.groups import decode_assignment
from spark_klog.protocol.tables.records import EARLIEST, LATEST, MAX_TIMESTAMP

#: The protocol type of groups of consumers, by either protocol.
_CONSUMER = "consumer"
#: Types of groups, by protocol.
CLASSIC, CONSUMER = "classic", "consumer"
#: The state of a group that does not exist.
DEAD = "Dead"
OffsetTime = Literal["earliest", "latest", "max-timestamp"] | int
_PLACES = {"earliest": EARLIEST, "latest": LATEST, "max-timestamp": MAX_TIMESTAMP}
#: The first version of ListOffsets with MAX_TIMESTAMP (KIP-734).
_FIRST_WITH_MAX = 7
#: DeleteRecords up to the high watermark.
_TO_END = -1


@dataclass(frozen=True)
class GroupListing:
    """A group in a list; `coordinator` is a node id, `protocol_type` is "" if the group has only offsets.

    `group_type`: "classic" or "consumer" (KIP-848), in Kafka also others; "" before Kafka 3.8 (ListGroups 5).
    """

    group: str
    state: str
    protocol_type: str
    coordinator: int
    group_type: str


@dataclass(frozen=True)
class GroupMember:
    """A member; `assignment` is partitions by topic, None if the group is not a consumer group."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    assignment: dict[str, list[int]] | None


@dataclass(frozen=True)
class GroupDescription:
    """A group as its coordinator (a node id) describes it.

    A group that does not exist has the state `DEAD`; coordinators since Kafka 4.0 give a `reason`. `protocol` is the
    assignor: one of the members', or in a group of KIP-848 one of the coordinator's. `group_type`: `CLASSIC`,
    `CONSUMER` (KIP-848), or "" if it does not exist.
    """

    group: str
    state: str
    protocol_type: str
    protocol: str
    coordinator: int
    members: tuple[GroupMember, ...]
    reason: str | None
    group_type: str


@dataclass(frozen=True)
class FoundOffset:
    """An offset, with the timestamp (ms) and the leader epoch of its record where the broker tells them.

    `offset` is None if no record has the timestamp or a later one.
    """

    offset: int | None
    timestamp: int | None
    leader_epoch: int | None


@dataclass(frozen=True)
class BrokerDescription:
    """A broker: its node id, address and rack."""

    node: int
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True)
class ClusterDescription:
    """The cluster; `controller` is a node id, with KRaft any broker, which passes changes on; None if unknown."""

    cluster_id: str | None
    controller: int | None
    brokers: tuple[BrokerDescription, ...]


@dataclass(frozen=True)
class Replica:
    """A log in a directory: its size in bytes, and how many records it is behind.

    `is_future`: it will replace the log in another directory of the broker.
    """

    size: int
    offset_lag: int
    is_future: bool


@dataclass(frozen=True)
class LogDir:
    """A log directory of a broker; `error` says why it can't be used.

    `total_bytes` and `usable_bytes` of its volume are None from brokers before 3.3.
    """

    error: KlogError | None
    replicas: dict[TopicPartition, Replica]
    total_bytes: int | None
    usable_bytes: int | None


class GroupCalls(AdminCalls):
    """Calls about groups, records, logs and brokers."""

    @call
    def list_groups(self) -> Steps[list[GroupListing]]:
        """The groups of all brokers, sorted by name; `ProtocolError` if a broker refuses. ListGroups."""
        return sorted((yield from self._of_all_brokers(self._listed)), key=lambda listing: listing.group)

    @call
    def list_groups_by_broker(self) -> Steps[Outcomes[int, list[GroupListing]]]:
        """The groups of each broker by its node id, or why it did not answer; each is asked once. ListGroups."""
        with self._turn, self._call():
            return Outcomes((yield from self._of_each_broker(self._listed)))

    def _listed(self, node: int) -> Steps[list[GroupListing]]:
        answer = checked(
            LIST_GROUPS, (yield from self.cluster.asking(node, LIST_GROUPS, {})), f"ListGroups of broker {node}"
        )
        entries = answer["groups"]
        stateless = [entry["group_id"] for entry in entries if not entry["group_state"]]  # versions before 4
        described: Mapping[str, GroupDescription | KlogError] = {}
        if stateless:
            described = yield from self._describe(lambda names: at_once(lambda: ({node: names}, {})), stateless)
        states = {key: description.state for key, description in Outcomes(described).check().items()}
        return [
            GroupListing(
                entry["group_id"],
                entry["group_state"] or states[entry["group_id"]],
                entry["protocol_type"],
                node,
                entry["group_type"].lower(),
            )
            for entry in entries
        ]

    @call
    def describe_groups(self, groups: Iterable[str]) -> Steps[Outcomes[str, GroupDescription]]:
        """Describe groups; one that does not exist has the state `DEAD`.

        DescribeGroups and ConsumerGroupDescribe, at the coordinators.
        """
        names = names_of("groups", groups)
        return self._each(names, lambda rest: self._describe(self._at_coordinators, rest))

    @call
    def describe_group(self, group: str) -> Steps[GroupDescription]:
        """Describe a group; its state is `DEAD` if it does not exist."""
        return (yield from steps_of(self.describe_groups)([name_of("the name of a group", group)])).check()[group]

    def _describe(self, places: Places[str], names: list[str]) -> Steps[dict[str, GroupDescription | KlogError]]:
        answered = yield from self._ask(
            places,
            DESCRIBE_GROUPS,
            names,
            lambda keys: {"groups": keys},
            by_field("groups", "group_id"),
            "group",
            # since version 6; earlier versions only set the state
            accepted=[ErrorCode.GROUP_ID_NOT_FOUND],
        )
        described = {name: _described(entry) for name, entry in answered.items()}
        absent = [name for name, info in described.items() if isinstance(info, GroupDescription) and info.state == DEAD]
        return described | ((yield from self._of_consumer_protocol(places, absent)) if absent else {})

    def _of_consumer_protocol(
        self, places: Places[str], names: list[str]
    ) -> Steps[dict[str, GroupDescription | KlogError]]:
        """Describe those of the groups that are of KIP-848: DescribeGroups does not know them."""
        try:
            answered = yield from self._ask(
                places,
                CONSUMER_GROUP_DESCRIBE,
                names,
                lambda keys: {"group_ids": keys},
                by_field("groups", "group_id"),
                "group",
                accepted=[ErrorCode.GROUP_ID_NOT_FOUND],
            )
        except UnsupportedVersionError:  # before Kafka 3.7
            return {}
        return {
            name: entry if isinstance(entry, KlogError) else _of_epoch(entry)
            for name, entry in answered.items()
            if not _has_no_epochs(entry)
        }

    @call
    def delete_groups(self, groups: Iterable[str]) -> Steps[Outcomes[str, None]]:
        """Delete groups without members, with their offsets. DeleteGroups (Kafka 1.1), at the coordinators.

        A group with members has the error NON_EMPTY_GROUP, one that does not exist GROUP_ID_NOT_FOUND.
        """
        return self._each_at(
            DELETE_GROUPS,
            names_of("groups", groups),
            lambda keys: {"groups_names": keys},
            by_field("results", "group_id"),
            "deleting group",
            lambda _, code: code == ErrorCode.GROUP_ID_NOT_FOUND,
            places=self._at_coordinators,
        )

    @call
    def delete_group(self, group: str) -> Steps[None]:
        """Delete a group; `ProtocolError` if it has members or does not exist."""
        (yield from steps_of(self.delete_groups)([name_of("the name of a group", group)])).check()

    @call
    def list_group_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> Steps[dict[TopicPartition, Committed]]:
        """The committed offsets of the partitions that have one, or of all (None). OffsetFetch, at the coordinator."""
        name_of("the name of a group", group)
        wanted = None if partitions is None else partitions_of("partitions", partitions)
        return self._attempt(lambda: GroupOffsets(self.cluster, group).asking_committed(wanted))

    @call
    def alter_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int | Committed]
    ) -> Steps[Outcomes[TopicPartition, None]]:
        """Commit offsets for a group that has no members; other partitions keep theirs.

        OffsetCommit, at the coordinator. A group with members has the error UNKNOWN_MEMBER_ID.
        """
        name_of("the name of a group", group)
        wanted: dict[TopicPartition, Committed] = {}
        for key, value in mapping_of("offsets", offsets).items():
            committed = value if isinstance(value, Committed) else Committed(number_of(f"the offset of {key}", value))
            number_of(f"the offset of {key}", committed.offset)
            wanted[partition_of("offsets", key)] = committed

        def ask(rest: list[TopicPartition]) -> Steps[dict[TopicPartition, KlogError | None]]:
            # a new one each time looks the coordinator up again
            offsets = GroupOffsets(self.cluster, group)
            refused = yield from offsets.committing_once({key: wanted[key] for key in rest})
            return {key: refused.get(key) for key in rest}

        return self._each(wanted, ask)

    @call
    def delete_group_offsets(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> Steps[Outcomes[TopicPartition, None]]:
        """Delete a group's offsets of topics that none of its members reads. OffsetDelete (Kafka 2.4).

        It goes to the coordinator. A topic that a member reads has the error GROUP_SUBSCRIBED_TO_TOPIC.
        """
        name_of("the name of a group", group)
        wanted = partitions_of("partitions", partitions)

        def places(rest: list[TopicPartition]) -> Steps[Routes[TopicPartition]]:
            return {(yield from self._found.asking_node(group)): rest}, {}

        def request(rest: list[TopicPartition]) -> Message:
            return {"group_id": group, "topics": topic_entries((key, {}) for key in rest)}

        doing = f"deleting for group {group} the offset of"
        return self._each_at(OFFSET_DELETE, wanted, request, by_partition(), doing, places=places)

    @call
    def describe_cluster(self) -> Steps[ClusterDescription]:
        """The brokers, the controller and the id of the cluster. Metadata, any broker."""
        answer = yield from self._attempt(lambda: self.cluster.asking_any(METADATA, lambda _: {"topics": []}))
        brokers = [
            BrokerDescription(entry["node_id"], entry["host"], entry["port"], entry["rack"])
            for entry in sorted(answer["brokers"], key=lambda entry: int(entry["node_id"]))
        ]
        return ClusterDescription(answer["cluster_id"], known(answer["controller_id"]), tuple(brokers))

    @call
    def list_offsets(self, times: Mapping[TopicPartition, OffsetTime]) -> Steps[Outcomes[TopicPartition, FoundOffset]]:
        """The offset of each partition at a time. ListOffsets, at the leaders.

        A time is "earliest", "latest", "max-timestamp" (the record with the largest timestamp, Kafka 3.0) or ms since
        1970: the first record with this timestamp or a later one. With isolation.level=read_committed, "latest" is the
        last stable offset.
        """
        wanted = {partition_of("times", key): _time(key, value) for key, value in mapping_of("times", times).items()}

        def check(_: list[TopicPartition]) -> Steps[None]:
            return self._check_max_timestamp() if MAX_TIMESTAMP in wanted.values() else at_once(lambda: None)

        def request(keys: list[TopicPartition]) -> Message:
            entries = topic_entries((key, {"timestamp": wanted[key]}) for key in keys)
            return {"isolation_level": self.cluster.config.isolation_level, "topics": entries}

        leaders, doing = self.cluster.asking_by_leader, "ListOffsets of"
        return self._each_at(
            LIST_OFFSETS, wanted, request, by_partition(), doing, check=check, places=leaders, result=_found
        )

    def _check_max_timestamp(self) -> Steps[None]:
        for node in self.cluster.nodes:
            if (yield from self.cluster.asking_version(node, LIST_OFFSETS)) < _FIRST_WITH_MAX:
                raise UnsupportedVersionError(f"ListOffsets by max-timestamp needs Kafka 3.0 or later at broker {node}")

    @call
    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> Steps[Outcomes[TopicPartition, int]]:
        """Delete the records before an offset of each partition (-1: all); the result is the first offset left.

        DeleteRecords (Kafka 0.11), at the leaders. An offset that the log does not have is OFFSET_OUT_OF_RANGE, a
        compacted topic POLICY_VIOLATION.
        """
        wanted = {
            partition_of("offsets", key): number_of(f"the offset of {key}", offset, _TO_END)
            for key, offset in mapping_of("offsets", offsets).items()
        }

        def request(keys: list[TopicPartition]) -> Message:
            entries = topic_entries((key, {"offset": wanted[key]}) for key in keys)
            return {"topics": entries, "timeout_ms": self._broker_timeout_ms}

        return self._each_at(
            DELETE_RECORDS,
            wanted,
            request,
            by_partition(),
            "DeleteRecords of",
            places=self.cluster.asking_by_leader,
            result=lambda entry: int(entry["low_watermark"]),
        )

    @call
    def describe_log_dirs(
        self, brokers: Iterable[int] | None = None, partitions: Iterable[TopicPartition] | None = None
    ) -> Steps[Outcomes[int, dict[str, LogDir]]]:
        """The log directories of brokers (None: all) by path, with the logs of the partitions (None: all) in them.

        DescribeLogDirs (Kafka 1.0), at each broker.
        """
        nodes = None if brokers is None else [number_of("a broker", node) for node in items_of("brokers", brokers)]
        wanted = None if partitions is None else partitions_of("partitions", partitions)

        request = {"topics": None if wanted is None else topic_numbers(wanted, "topic")}

        with self._turn, self._call():
            if nodes is None:
                yield from self._attempt(lambda: self.cluster.asking_metadata([]))
                nodes = self.cluster.nodes
            return (
                yield from self._each_at(
                    DESCRIBE_LOG_DIRS,
                    nodes,
                    lambda _: request,
                    whole,
                    "DescribeLogDirs of broker",
                    places=lambda rest: self._at_brokers({node: node for node in rest}),
                    result=_directories,
                )
            )


def _described(entry: Message | KlogError) -> GroupDescription | KlogError:
    if isinstance(entry, KlogError):
        return entry
    try:
        members = tuple(_members(entry))
    except DecodeError as error:
        return error
    return GroupDescription(
        entry["group_id"],
        entry["group_state"],
        entry["protocol_type"],
        entry["protocol_data"],
        entry["answered_by"],
        members,
        entry["error_message"],
        "" if entry["group_state"] == DEAD else CLASSIC,
    )


def _has_no_epochs(entry: Message | KlogError) -> bool:
    """Whether the group is not of KIP-848; Kafka 3.7 to 3.9 have the request, and refuse it unless told otherwise."""
    if isinstance(entry, ProtocolError):
        return bool(entry.code == ErrorCode.UNSUPPORTED_VERSION)
    return isinstance(entry, UnsupportedVersionError) if isinstance(entry, KlogError) else bool(entry["error_code"])


def _of_epoch(entry: Message) -> GroupDescription:
    """A group of KIP-848; its protocol is the coordinator's assignor."""
    members = tuple(
        GroupMember(
            *(member["member_id"], member["instance_id"], member["client_id"], member["client_host"]),
            {row["topic_name"]: sorted(row["partitions"]) for row in member["assignment"]["topic_partitions"]},
        )
        for member in entry["members"]
    )
    return GroupDescription(
        *(
            entry["group_id"],
            entry["group_state"],
            _CONSUMER,
            entry["assignor_name"],
            entry["answered_by"],
            members,
            None,
            CONSUMER,
        )
    )


def _members(entry: Message) -> Iterator[GroupMember]:
    for member in entry["members"]:
        try:
            is_consumer = entry["protocol_type"] == _CONSUMER
            assignment = decode_assignment(member["member_assignment"]) if is_consumer else None
        except DecodeError as error:
            raise DecodeError(f"assignment of member {member['member_id']} of {entry['group_id']}: {error}") from None
        yield GroupMember(
            member["member_id"], member["group_instance_id"], member["client_id"], member["client_host"], assignment
        )


def _time(key: object, value: object) -> int:
    if isinstance(value, str):
        if value not in _PLACES:
            raise ConfigError(f"the time {value!r} of {key}: set earliest, latest, max-timestamp or ms since 1970")
        return _PLACES[value]
    return number_of(f"the time of {key}", value)


def _found(entry: Message) -> FoundOffset:
    return FoundOffset(known(entry["offset"]), known(entry["timestamp"]), known(entry["leader_epoch"]))


def _directories(answer: Message) -> dict[str, LogDir]:
    directories: dict[str, LogDir] = {}
    for entry in answer["results"]:
        if entry["log_dir"] in directories:
            raise DecodeError(f"DescribeLogDirs response with {entry['log_dir']!r} twice")
        code = entry["error_code"]
        directories[entry["log_dir"]] = LogDir(
            answer_error(DESCRIBE_LOG_DIRS, code, f"log directory {entry['log_dir']}") if code else None,
            dict(_replicas(entry)),
            known(entry["total_bytes"]),
            known(entry["usable_bytes"]),
        )
    return directories


def _replicas(entry: Message) -> Iterator[tuple[TopicPartition, Replica]]:
    for topic in entry["topics"]:
        for partition in topic["partitions"]:
            replica = Replica(partition["partition_size"], partition["offset_lag"], partition["is_future_key"])
            yield (topic["name"], partition["partition_index"]), replica
