"""Views of a cluster as JSON: its topics, its groups, Spark queries from their checkpoints, loads from their audits.

Each takes a few requests, however many topics there are. Of groups the offsets at the coordinator, in ZooKeeper and in
checkpoints stand side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spark_klog.base.addresses import without_user
from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin
from spark_klog.client.admin.groups import GroupDescription, GroupListing
from spark_klog.client.admin.topics import ConfigResource, TopicDescription
from spark_klog.errors import ErrorCode, KlogError, ProtocolError
from spark_klog.groups.checkpoint import checkpoint_state
from spark_klog.groups.lag import group_json, lags_json
from spark_klog.groups.look import Look
from spark_klog.groups.stores import existing, open_store
from spark_klog.protocol.tables.records import LATEST

#: Topics shown; the page says how many there are.
_MAX_TOPICS = 10_000
#: Groups whose members and offsets are looked up: a request a group.
_MAX_GROUPS = 1000
#: Codes of topics in a Metadata response that are shown.
_LISTED = (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)


def overview(admin: Admin) -> dict[str, Any]:
    """Brokers, and for each topic its partitions, records (offsets between the first and the last) and bytes.

    `missing` says what did not answer; a topic's records are those of the other partitions, and `latest` is None.
    """
    look = Look()
    described = admin.describe_cluster()
    with admin.exclusive() as cluster:  # one look at the metadata, of which each partition is 30 bytes
        there = [topic for _, topic in sorted(cluster.metadata(None).items()) if topic["error_code"] in _LISTED]
        shown = there[:_MAX_TOPICS]
        leaders = {
            (topic["name"], part["partition_index"]): part["leader_id"]
            for topic in shown
            for part in topic["partitions"]
        }
        first, end = look.ends(cluster, [key for key, leader in leaders.items() if leader >= 0])
    sizes, logs = _sizes(admin, look)
    leads = Counter(leaders.values())
    rows = []
    for topic in shown:
        keys = [(topic["name"], part["partition_index"]) for part in topic["partitions"]]
        unanswered = sum(key in look.partitions for key in keys)
        rows.append(
            {
                "name": topic["name"],
                "internal": topic["is_internal"],
                "partitions": len(keys),
                "offline": sum(leaders[key] < 0 for key in keys),
                "records": sum(end[key] - first[key] for key in keys if key in end),
                "latest": None if unanswered else sum(end[key] for key in keys if key in end),
                "unanswered": unanswered,
                "bytes": None if sizes is None else sum(sizes.get(key, 0) for key in keys),
            }
        )
    return {
        "clusterId": described.cluster_id,
        "brokers": [
            {
                "id": broker.node,
                "host": broker.host,
                "port": broker.port,
                "rack": broker.rack,
                "controller": broker.node == described.controller,
                "leads": leads[broker.node],
                "bytes": logs.get(broker.node),
            }
            for broker in described.brokers
        ],
        "topics": rows,
        "topicCount": len(there),
        "missing": look.missing,
    }


def _sizes(
    admin: Admin, look: Look, topic: TopicDescription | None = None
) -> tuple[dict[TopicPartition, int] | None, dict[int, int]]:
    """Bytes of each partition (the largest copy; None if no broker tells) and of each broker. Best effort.

    With a topic only its partitions count, and only brokers that have some are asked.
    """
    brokers_of = None if topic is None else {node for part in topic.partitions for node in part.replicas}
    keys = None if topic is None else [(topic.name, part.partition) for part in topic.partitions]
    try:
        with admin.exclusive() as cluster, look.waiting(cluster):
            answered = admin.describe_log_dirs(brokers_of, keys)
    except KlogError:  # before Kafka 1.0, or not allowed
        return None, {}
    sizes: dict[TopicPartition, int] = {}
    brokers: dict[int, int] = {}
    for node, directories in answered.items():
        if isinstance(directories, KlogError):
            continue
        brokers[node] = 0
        for directory in directories.values():
            for key, replica in directory.replicas.items():
                sizes[key] = max(sizes.get(key, 0), replica.size)
                brokers[node] += replica.size
    return (sizes if brokers else None), brokers


def topic(admin: Admin, name: str) -> dict[str, Any]:
    """A topic's partitions and settings; `ProtocolError` if it does not exist."""
    described = admin.describe_topic(name)
    led = [(name, part.partition) for part in described.partitions if part.leader is not None]
    look = Look()
    with admin.exclusive() as cluster:
        first, end = look.ends(cluster, led)
    sizes = _sizes(admin, look, described)[0] or {}
    settings, error = _settings(admin, name)
    return {
        "name": name,
        "id": None if described.topic_id is None else str(described.topic_id),
        "internal": described.is_internal,
        "settings": settings,
        "settingsError": error,
        "missing": look.missing,
        "partitions": [
            {
                "partition": part.partition,
                "leader": part.leader,
                "replicas": list(part.replicas),
                "inSync": list(part.in_sync),
                "earliest": first.get((name, part.partition)),
                "latest": end.get((name, part.partition)),
                "bytes": sizes.get((name, part.partition)),
            }
            for part in described.partitions
        ],
    }


def _settings(admin: Admin, name: str) -> tuple[list[dict[str, Any]], str | None]:
    """The topic's settings, those that differ from the defaults first; or none, and why the broker refuses them."""
    try:
        described = admin.describe_configs([("topic", name)])[ConfigResource("topic", name)]
    except KlogError as error:  # before Kafka 0.11
        return [], str(error)
    if isinstance(described, KlogError):
        return [], str(described)
    rows = [
        {"name": setting.name, "value": setting.value, "source": setting.source, "default": setting.is_default}
        for setting in described.values()
    ]
    return sorted(rows, key=lambda row: (bool(row["default"]), str(row["name"]))), None


class _Group(NamedTuple):
    """A listed group; its members and offsets, each None if they are not looked up, or the broker refuses."""

    listed: GroupListing
    described: GroupDescription | None
    offsets: Mapping[TopicPartition, int] | None


def groups(admin: Admin) -> dict[str, Any]:
    """All groups, with the number of members and the lag in records (None: unknown); `missing`: what did not answer.

    A group's lag is without that of its `unanswered` partitions.
    """
    look = Look()
    known = _all(admin, look)
    latest = _latest(admin, look, known)
    rows = [
        {
            "group": group.listed.group,
            "state": group.listed.state,
            "type": group.listed.group_type,
            "protocolType": group.listed.protocol_type,
            "coordinator": group.listed.coordinator,
            "members": None if group.described is None else len(group.described.members),
            "lag": _lag(group.offsets, latest),
            "unanswered": _unanswered(group.offsets, look),
        }
        for group in known
    ]
    return {"groups": rows, "missing": look.missing}


def readers(admin: Admin, topic: str) -> list[dict[str, Any]]:
    """The groups that have offsets of a topic, or members that read it; members and lag are of this topic."""
    rows, look = [], Look()
    known = _all(admin, look)
    latest = _latest(admin, look, known, topic)
    for group in known:
        members = () if group.described is None else group.described.members
        reading = [member for member in members if topic in (member.assignment or {})]
        offsets = {key: offset for key, offset in (group.offsets or {}).items() if key[0] == topic}
        if reading or offsets:
            row = {"group": group.listed.group, "state": group.listed.state}
            rows.append(
                {**row, "members": len(reading), "lag": _lag(offsets, latest), "unanswered": _unanswered(offsets, look)}
            )
    return rows


def _all(admin: Admin, look: Look) -> list[_Group]:
    listed = look.list_groups(admin)
    names = [group.group for group in listed[:_MAX_GROUPS]]
    described = look.describe_groups(admin, names).successes if names else {}
    offsets: dict[str, Mapping[TopicPartition, int]] = {}
    for name in names:
        if name in look.groups:
            continue
        try:
            committed = look.list_group_offsets(admin, name)
        except ProtocolError:  # not allowed
            continue
        if committed is not None:
            offsets[name] = {key: entry.offset for key, entry in committed.items()}
    return [_Group(group, described.get(group.group), offsets.get(group.group)) for group in listed]


def _latest(admin: Admin, look: Look, known: Iterable[_Group], topic: str | None = None) -> dict[TopicPartition, int]:
    """The end offset of each partition that a group has an offset of, if the cluster has it, and its leader answers."""
    return _latest_of(admin, look, {key for group in known for key in group.offsets or () if topic in (None, key[0])})


def _latest_of(admin: Admin, look: Look, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    with admin.exclusive() as cluster:
        return look.offsets(cluster, existing(cluster, keys, is_led=False), (LATEST,))[LATEST]


def _lag(offsets: Mapping[TopicPartition, int] | None, latest: Mapping[TopicPartition, int]) -> int | None:
    known = [max(0, latest[key] - offset) for key, offset in (offsets or {}).items() if key in latest]
    return sum(known) if known else None


def _unanswered(offsets: Mapping[TopicPartition, int] | None, look: Look) -> int:
    return sum(key in look.partitions for key in offsets or ())


def group(
    admin: Admin, name: str, stores: Sequence[str], checkpoints: Sequence[str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """A group, and its offsets in each place that has some; a place that can't be read has its error instead."""
    described = admin.describe_group(name)
    offsets: dict[str, Mapping[TopicPartition, int]] = {
        "kafka": {key: committed.offset for key, committed in admin.list_group_offsets(name).items()}
    }
    errors: dict[str, str] = {}
    topics = {topic for topic, _ in offsets["kafka"]}.union(*(member.assignment or () for member in described.members))
    for label, address in [*((at, at) for at in stores), *((at, f"checkpoint:{at}") for at in checkpoints)]:
        try:
            with open_store(address, name, settings) as store:
                stored = store.fetch()
        except (KlogError, OSError) as error:
            errors[without_user(label)] = str(error)
            continue
        # a checkpoint does not know its group: it is of interest if it reads the same topics
        if label in stores or not topics or topics & {topic for topic, _ in stored}:
            offsets[without_user(label)] = stored
    look = Look()
    with admin.exclusive() as cluster:
        lags = lags_json(cluster, described, offsets, "offsets", look)
    return {
        **group_json(described),
        "places": list(offsets),
        "errors": errors,
        "partitions": lags,
        "missing": look.missing,
    }


def queries(admin: Admin, checkpoints: Sequence[str]) -> list[dict[str, Any]]:
    """What each checkpoint holds, and how far its planned end is behind; or the error that it can't be read by."""
    states: list[dict[str, Any]] = []
    for address in checkpoints:
        try:
            state = checkpoint_state(address)
            latest = _latest_of(admin, Look(), {key for source in state.sources for key in source.offsets or {}})
        except (KlogError, OSError) as error:
            states.append({"checkpoint": without_user(address), "error": str(error)})
            continue
        partitions = [
            {
                "source": source.number,
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "latest": latest.get((topic, partition)),
            }
            for source in state.sources
            for (topic, partition), offset in sorted((source.offsets or {}).items())
        ]
        states.append(
            {
                "checkpoint": without_user(address),
                "query": state.query,
                "planned": state.planned,
                "done": state.done,
                "stateful": state.is_stateful,
                "partitions": partitions,
            }
        )
    return states


def loads(outputs: Sequence[str]) -> list[dict[str, Any]]:
    """The status of each load, as `klog load status --json` prints it; or its error."""
    if not outputs:
        return []
    from spark_klog.load.audit import status, statuses_json
    from spark_klog.load.by_topic import of_each
    from spark_klog.load.driving import STEPS_AT_ONCE

    states: list[dict[str, Any]] = []
    for output in outputs:
        try:
            states += statuses_json(of_each(output, status, STEPS_AT_ONCE))
        except (KlogError, OSError) as error:
            states.append({"output": without_user(output), "error": str(error)})
    return states
