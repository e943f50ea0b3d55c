"""Groups: members, assignment, and offsets at the coordinator, in ZooKeeper and in checkpoints side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spark_klog.client import Admin
from spark_klog.client.cluster import TopicPartition
from spark_klog.errors import KlogError
from spark_klog.groups.lag import owners_of, partition_lags
from spark_klog.groups.stores import open_store


def groups(admin: Admin) -> list[dict[str, Any]]:
    """All groups."""
    return [
        {"group": one.group, "state": one.state, "protocolType": one.protocol_type, "coordinator": one.coordinator}
        for one in admin.list_groups()
    ]


def group(
    admin: Admin, name: str, stores: Sequence[str], checkpoints: Sequence[str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """A group, and its offsets in each place that has some; a place that can't be read has its error instead."""
    described = admin.describe_group(name)
    owners = owners_of(described)
    offsets: dict[str, Mapping[TopicPartition, int]] = {
        "coordinator": {key: found.offset for key, found in admin.list_group_offsets(name).items()}
    }
    errors: dict[str, str] = {}
    topics = {topic for topic, _ in (*offsets["coordinator"], *owners)}
    for label, address in [*((one, one) for one in stores), *((one, f"checkpoint:{one}") for one in checkpoints)]:
        try:
            with open_store(address, name, settings) as store:
                found = store.fetch()
        except (KlogError, OSError) as error:
            errors[label] = str(error)
            continue
        # a checkpoint does not know its group: it is of interest if it reads the same topics
        if label in stores or not topics or topics & {topic for topic, _ in found}:
            offsets[label] = found
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
