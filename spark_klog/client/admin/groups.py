"""Groups at their coordinators: list, describe and delete them, and their offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from spark_klog.client.admin.calls import AdminCalls, Outcomes, by_field, without_results
from spark_klog.client.answers import answer_error, by_key, check_code
from spark_klog.client.arguments import mapping_of, name_of, names_of, number_of, partition_of, partitions_of
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.coordinator import find_coordinator
from spark_klog.client.offsets import Committed, GroupOffsets, by_topic, partition_entries
from spark_klog.errors import ConnectionFailed, DecodeError, ErrorCode, KlogError, ProtocolError, RequestTimedOut
from spark_klog.protocol.apis import DELETE_GROUPS, DESCRIBE_GROUPS, LIST_GROUPS, OFFSET_DELETE
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.groups import decode_assignment

_CONSUMER = "consumer"
#: The state of a group that does not exist.
DEAD = "Dead"


@dataclass(frozen=True)
class GroupListing:
    """A group in a list; `coordinator` is a node id, `protocol_type` is "" if the group has only offsets."""

    group: str
    state: str
    protocol_type: str
    coordinator: int


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

    A group that does not exist or uses the protocol of KIP-848 has the state `DEAD`; coordinators since Kafka 4.0 give
    a `reason`.
    """

    group: str
    state: str
    protocol_type: str
    protocol: str
    coordinator: int
    members: tuple[GroupMember, ...]
    reason: str | None


class GroupCalls(AdminCalls):
    """Calls about groups."""

    def list_groups(self) -> list[GroupListing]:
        """The groups of all brokers, sorted by name; `ProtocolError` if a broker refuses. ListGroups."""

        def ask() -> list[GroupListing]:
            self.cluster.metadata([])
            return [listing for node in self.cluster.nodes for listing in self._groups_of(node)]

        with self._turn, self._call():
            return sorted(self._attempt(ask), key=lambda listing: listing.group)

    def _groups_of(self, node: int) -> list[GroupListing]:
        answer = self.cluster.request(node, LIST_GROUPS, {})
        check_code(LIST_GROUPS, answer["error_code"], f"ListGroups of broker {node}")
        entries = answer["groups"]
        stateless = [entry["group_id"] for entry in entries if not entry["group_state"]]  # versions before 4
        described = self._describe({node: stateless} if stateless else {})
        states = {key: found.state for key, found in Outcomes(described).check().items()}
        return [
            GroupListing(
                entry["group_id"], entry["group_state"] or states[entry["group_id"]], entry["protocol_type"], node
            )
            for entry in entries
        ]

    def describe_groups(self, groups: Iterable[str]) -> Outcomes[str, GroupDescription]:
        """Describe groups; one that does not exist has the state `DEAD`. DescribeGroups, at the coordinators."""
        names = names_of("groups", groups)

        def ask(rest: list[str]) -> dict[str, GroupDescription | KlogError]:
            by_node, failures = self._coordinators(rest)
            return {**failures, **self._describe(by_node)}

        with self._turn, self._call():
            return self._each(names, ask)

    def describe_group(self, group: str) -> GroupDescription:
        """Describe a group; its state is `DEAD` if it does not exist."""
        return self.describe_groups([name_of("the name of a group", group)]).check()[group]

    def _describe(self, by_node: Mapping[int, Collection[str]]) -> dict[str, GroupDescription | KlogError]:
        found: dict[str, GroupDescription | KlogError] = {}
        answered = self._ask_brokers(
            DESCRIBE_GROUPS,
            by_node,
            lambda names: {"groups": list(names)},
            by_field("groups", "group_id"),
            lambda name: f"group {name}",
            # since version 6; earlier versions only set the state
            accepted=[ErrorCode.GROUP_ID_NOT_FOUND],
        )
        for node, names in by_node.items():
            for name in names:
                entry = answered[name]
                try:
                    found[name] = entry if isinstance(entry, KlogError) else _described(entry, node)
                except DecodeError as error:
                    found[name] = error
        return found

    def delete_groups(self, groups: Iterable[str]) -> Outcomes[str, None]:
        """Delete groups without members, with their offsets. DeleteGroups (Kafka 1.1), at the coordinators.

        A group with members has the error NON_EMPTY_GROUP, one that does not exist GROUP_ID_NOT_FOUND.
        """
        names = names_of("groups", groups)
        is_answer_lost: set[str] = set()

        def ask(rest: list[str]) -> dict[str, Message | KlogError]:
            answered = self._ask_coordinators(
                DELETE_GROUPS,
                rest,
                lambda keys: {"groups_names": list(keys)},
                by_field("results", "group_id"),
                lambda name: f"deleting group {name}",
            )
            for name, result in answered.items():
                if isinstance(result, ConnectionFailed | RequestTimedOut) and not result.is_unsent:
                    is_answer_lost.add(name)
                is_gone = isinstance(result, ProtocolError) and result.code == ErrorCode.GROUP_ID_NOT_FOUND
                if is_gone and name in is_answer_lost:
                    answered[name] = {}  # the attempt whose response was lost has deleted it
            return answered

        with self._turn, self._call():
            return without_results(self._each(names, ask))

    def delete_group(self, group: str) -> None:
        """Delete a group; `ProtocolError` if it has members or does not exist."""
        self.delete_groups([name_of("the name of a group", group)]).check()

    def list_group_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, Committed]:
        """The committed offsets of the partitions that have one, or of all (None). OffsetFetch, at the coordinator."""
        name_of("the name of a group", group)
        wanted = None if partitions is None else partitions_of("partitions", partitions)
        with self._turn, self._call():
            return self._attempt(lambda: GroupOffsets(self.cluster, group).committed(wanted))

    def alter_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int | Committed]
    ) -> Outcomes[TopicPartition, None]:
        """Commit offsets for a group that has no members; other partitions keep theirs.

        OffsetCommit, at the coordinator. A group with members has the error UNKNOWN_MEMBER_ID.
        """
        name_of("the name of a group", group)
        wanted: dict[TopicPartition, Committed] = {}
        for key, value in mapping_of("offsets", offsets).items():
            item = value if isinstance(value, Committed) else Committed(number_of(f"the offset of {key}", value))
            number_of(f"the offset of {key}", item.offset)
            wanted[partition_of("offsets", key)] = item

        def ask(rest: list[TopicPartition]) -> dict[TopicPartition, KlogError | None]:
            # a new one each time looks the coordinator up again
            refused = GroupOffsets(self.cluster, group).commit_once({key: wanted[key] for key in rest})
            return {key: refused.get(key) for key in rest}

        with self._turn, self._call():
            return self._each(wanted, ask)

    def delete_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> Outcomes[TopicPartition, None]:
        """Delete a group's offsets of topics that none of its members reads. OffsetDelete (Kafka 2.4).

        It goes to the coordinator. A topic that a member reads has the error GROUP_SUBSCRIBED_TO_TOPIC.
        """
        name_of("the name of a group", group)
        wanted = partitions_of("partitions", partitions)

        def ask(rest: list[TopicPartition]) -> dict[TopicPartition, Message | KlogError]:
            node = find_coordinator(self.cluster, group)
            answer = self.cluster.request(node, OFFSET_DELETE, {"group_id": group, "topics": _topics(rest)})
            check_code(OFFSET_DELETE, answer["error_code"], f"deleting offsets of group {group}")
            found: dict[TopicPartition, Message | KlogError] = {}
            for key, entry in by_key(OFFSET_DELETE, answer, partition_entries(answer), rest).items():
                code, what = entry["error_code"], f"deleting the offset of {key[0]}-{key[1]} for group {group}"
                found[key] = answer_error(OFFSET_DELETE, code, what) if code else entry
            return found

        with self._turn, self._call():
            return without_results(self._each(wanted, ask))


def _topics(partitions: Iterable[TopicPartition]) -> list[Message]:
    entries = by_topic((key, {"partition_index": key[1]}) for key in partitions)
    return [{"name": topic, "partitions": numbers} for topic, numbers in entries.items()]


def _described(entry: Message, node: int) -> GroupDescription:
    return GroupDescription(
        entry["group_id"],
        entry["group_state"],
        entry["protocol_type"],
        entry["protocol_data"],
        node,
        tuple(_members(entry)),
        entry["error_message"],
    )


def _members(entry: Message) -> Iterator[GroupMember]:
    for member in entry["members"]:
        try:
            is_consumer = entry["protocol_type"] == _CONSUMER
            assignment = decode_assignment(member["member_assignment"]) if is_consumer else None
        except DecodeError as error:
            raise DecodeError(f"assignment of member {member['member_id']} of {entry['group_id']}: {error}") from None
        yield GroupMember(
            member["member_id"],
            member["group_instance_id"],
            member["client_id"],
            member["client_host"],
            assignment,
        )
