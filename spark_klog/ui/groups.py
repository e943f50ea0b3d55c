"""Groups: members, assignment, lag, and offsets at the coordinator, in ZooKeeper and in checkpoints side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spark_klog.base.addresses import without_user
from spark_klog.client import Admin
from spark_klog.client.admin.groups import GroupDescription, GroupListing
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import KlogError, ProtocolError
from spark_klog.groups.lag import owners_of, partition_lags
from spark_klog.groups.moves import existing
from spark_klog.groups.stores import open_store
from spark_klog.protocol.tables.records import LATEST

#: Groups whose members and offsets are looked up: a request a group.
_MAX_GROUPS = 1000


class _Group(NamedTuple):
    """A listed group; its members and offsets, each None if they are not looked up, or the broker refuses."""

    listed: GroupListing
    described: GroupDescription | None
    offsets: Mapping[TopicPartition, int] | None


def groups(admin: Admin) -> list[dict[str, Any]]:
    """All groups, with the number of members and the lag in records (None: unknown)."""
    found = _all(admin)
    latest = _latest(admin, found)
    return [
        {
            "group": one.listed.group,
            "state": one.listed.state,
            "protocolType": one.listed.protocol_type,
            "coordinator": one.listed.coordinator,
            "members": None if one.described is None else len(one.described.members),
            "lag": _lag(one.offsets, latest),
        }
        for one in found
    ]


def readers(admin: Admin, topic: str) -> list[dict[str, Any]]:
    """The groups that have offsets of a topic, or members that read it; members and lag are of this topic."""
    rows = []
    found = _all(admin)
    latest = _latest(admin, found, topic)
    for one in found:
        members = () if one.described is None else one.described.members
        reading = [member for member in members if topic in (member.assignment or {})]
        offsets = {key: offset for key, offset in (one.offsets or {}).items() if key[0] == topic}
        if reading or offsets:
            row = {"group": one.listed.group, "state": one.listed.state}
            rows.append({**row, "members": len(reading), "lag": _lag(offsets or None, latest)})
    return rows


def _all(admin: Admin) -> list[_Group]:
    listed = admin.list_groups()
    names = [one.group for one in listed[:_MAX_GROUPS]]
    described = admin.describe_groups(names).successes if names else {}
    offsets: dict[str, Mapping[TopicPartition, int]] = {}
    for name in names:
        try:
            offsets[name] = {key: found.offset for key, found in admin.list_group_offsets(name).items()}
        except ProtocolError:  # not allowed
            continue
    return [_Group(one, described.get(one.group), offsets.get(one.group)) for one in listed]


def _latest(admin: Admin, found: Iterable[_Group], topic: str | None = None) -> dict[TopicPartition, int]:
    """The end offset of each partition that a group has an offset of, if the cluster has it."""
    keys = {key for one in found for key in one.offsets or () if topic in (None, key[0])}
    with admin.exclusive() as cluster:
        return list_offsets(cluster, dict.fromkeys(existing(cluster, keys), LATEST))


def _lag(offsets: Mapping[TopicPartition, int] | None, latest: Mapping[TopicPartition, int]) -> int | None:
    known = [max(0, latest[key] - offset) for key, offset in (offsets or {}).items() if key in latest]
    return sum(known) if known else None


def group(
    admin: Admin, name: str, stores: Sequence[str], checkpoints: Sequence[str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """A group, and its offsets in each place that has some; a place that can't be read has its error instead."""
    described = admin.describe_group(name)
    owners = owners_of(described)
    offsets: dict[str, Mapping[TopicPartition, int]] = {
        "kafka": {key: found.offset for key, found in admin.list_group_offsets(name).items()}
    }
    errors: dict[str, str] = {}
    topics = {topic for topic, _ in (*offsets["kafka"], *owners)}
    for label, address in [*((one, one) for one in stores), *((one, f"checkpoint:{one}") for one in checkpoints)]:
        try:
            with open_store(address, name, settings) as store:
                found = store.fetch()
        except (KlogError, OSError) as error:
            errors[without_user(label)] = str(error)
            continue
        # a checkpoint does not know its group: it is of interest if it reads the same topics
        if label in stores or not topics or topics & {topic for topic, _ in found}:
            offsets[without_user(label)] = found
    with admin.exclusive() as cluster:
        lags = partition_lags(cluster, offsets, owners)
    return {
        "group": name,
        "state": described.state,
        "protocolType": described.protocol_type,
        "protocol": described.protocol,
        "coordinator": described.coordinator,
        "members": [
            {
                "member": member.member_id,
                "instance": member.instance_id,
                "client": member.client_id,
                "host": member.host,
                "assignment": member.assignment,
            }
            for member in described.members
        ],
        "places": list(offsets),
        "errors": errors,
        "partitions": [
            {
                "topic": lag.topic,
                "partition": lag.partition,
                "latest": lag.latest,
                "member": owners.get((lag.topic, lag.partition)),
                "offsets": {
                    place: {"offset": one.offset, "lag": one.records, "lost": one.lost, "lagMs": one.time_ms}
                    for place, one in lag.stores.items()
                },
            }
            for lag in lags
        ],
    }
