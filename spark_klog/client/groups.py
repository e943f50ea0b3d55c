"""Groups as their coordinators tell of them: ListGroups, DescribeGroups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spark_klog.client.answers import by_key, check_code
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import find_coordinator
from spark_klog.errors import DecodeError, ErrorCode
from spark_klog.protocol.apis import DESCRIBE_GROUPS, LIST_GROUPS
from spark_klog.protocol.codec import Message
from spark_klog.protocol.member_assignment import decode_assignment

CONSUMER = "consumer"
#: The state of a group that is not there.
DEAD = "Dead"


@dataclass(frozen=True)
class GroupListing:
    """A group in a list; `coordinator` is a node id, `protocol_type` "" where it has offsets only."""

    group: str
    state: str
    protocol_type: str
    coordinator: int


@dataclass(frozen=True)
class GroupMember:
    """A member; `assignment` is partitions by topic, None where the group is not one of consumers."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    assignment: dict[str, list[int]] | None


@dataclass(frozen=True)
class GroupDescription:
    """A group at its coordinator (a node id).

    One that is not there, or is of another protocol than this (KIP-848), has the state `DEAD`; since Kafka 4.0 the
    coordinator gives a `reason`.
    """

    group: str
    state: str
    protocol_type: str
    protocol: str
    coordinator: int
    members: tuple[GroupMember, ...]
    reason: str | None


def list_groups(cluster: Cluster) -> list[GroupListing]:
    """The groups of all brokers, by name; `ProtocolError` where a broker refuses."""

    def ask() -> list[GroupListing]:
        cluster.metadata([])
        return [listing for node in cluster.nodes for listing in _groups_of(cluster, node)]

    return sorted(cluster.attempt(ask), key=lambda listing: listing.group)


def _groups_of(cluster: Cluster, node: int) -> list[GroupListing]:
    answer = cluster.request(node, LIST_GROUPS, {})
    check_code(LIST_GROUPS, answer["error_code"], f"ListGroups of broker {node}")
    entries = answer["groups"]
    stateless = [entry["group_id"] for entry in entries if not entry["group_state"]]  # versions before 4
    states = {found.group: found.state for found in _describe(cluster, node, stateless)}
    return [
        GroupListing(entry["group_id"], entry["group_state"] or states[entry["group_id"]], entry["protocol_type"], node)
        for entry in entries
    ]


def describe_group(cluster: Cluster, group: str) -> GroupDescription:
    """A group at its coordinator; `ProtocolError` where the broker refuses, `DecodeError`."""
    (found,) = cluster.attempt(lambda: _describe(cluster, find_coordinator(cluster, group), [group]))
    return found


def _describe(cluster: Cluster, node: int, groups: list[str]) -> list[GroupDescription]:
    if not groups:
        return []
    answer = cluster.request(node, DESCRIBE_GROUPS, {"groups": groups})
    found = []
    entries = by_key(DESCRIBE_GROUPS, answer, ((entry["group_id"], entry) for entry in answer["groups"]), groups)
    for entry in entries.values():
        if entry["error_code"] != ErrorCode.GROUP_ID_NOT_FOUND:  # since version 6; before it is the state alone
            check_code(DESCRIBE_GROUPS, entry["error_code"], f"group {entry['group_id']}")
        found.append(
            GroupDescription(
                entry["group_id"],
                entry["group_state"],
                entry["protocol_type"],
                entry["protocol_data"],
                node,
                tuple(_members(entry)),
                entry["error_message"],
            )
        )
    return found


def _members(entry: Message) -> Iterable[GroupMember]:
    for member in entry["members"]:
        try:
            is_consumer = entry["protocol_type"] == CONSUMER
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
