"""The cluster: ApiVersions, Metadata, DescribeTopicPartitions, DescribeCluster, DescribeLogDirs, client quotas.

There is no replication: the leader is the only replica and in-sync replica. The leader epoch is -1 (unknown, so clients
do not check it) for partitions without a log on this broker.
"""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from typing import Any
from uuid import UUID

from spark_klog.base.names import TRANSACTION_VERSION
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop import distinct
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.metadata.nodes import TopicExists
from spark_klog.broker.metadata.registry import NO_LEADER, Topic
from spark_klog.broker.security.authorizer import SEE, WRITE
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.metadata import WITH_IDENTITY

_UNKNOWN_EPOCH = -1
_log = logging.getLogger(__name__)
_USER, _CLIENT_ID, _IP = "user", "client-id", "ip"
_MAX_PARTITIONS = 2000
#: There are none without replication; the schema allows null, but Java's admin client fails on it.
_NO_ELIGIBLE: Message = {"eligible_leader_replicas": [], "last_known_elr": []}
#: Versions 10 and 11 return topic ids, but can't request topics by id (KIP-516).
_FIRST_BY_ID = 12
_BROKERS = 1
#: The first ApiVersions whose supported features may begin at 0 (KIP-1022): older clients fail on it.
_FIRST_WITH_ZERO = 4


def missing_topic(name: str | None, topic_id: UUID | None, code: ErrorCode) -> Message:
    """A response entry for a topic that was requested by name or by id and does not exist."""
    return {"error_code": code, "name": name, "topic_id": topic_id or UUID(int=0), "partitions": []}


def topic_message(broker: Broker, request: Request, topic: Topic) -> dict[str, Any]:
    """A topic with its partitions; leaders have the addresses of the client's listener."""
    registry, logs, name = broker.registry, broker.logs, topic.name
    reachable = registry.addresses(request.session.listener)
    shared: dict[tuple[int, ...], Message] = {}  # by replicas
    partitions = []
    for partition, replicas in sorted(topic.assignment.items()):
        of_replicas = shared.get(key := tuple(replicas))
        if of_replicas is None:
            leader = registry.leader(topic, partition)
            alive = leader in reachable
            of_replicas = shared[key] = {
                "error_code": ErrorCode.NONE if alive else ErrorCode.LEADER_NOT_AVAILABLE,
                "leader_id": leader if alive else NO_LEADER,
                "replica_nodes": replicas,
                "isr_nodes": replicas[:1] if alive else [],
                "offline_replicas": [replica for replica in replicas if replica not in registry.brokers],
            }
        log = logs.get(name, partition)
        epoch = _UNKNOWN_EPOCH if log is None else log.leader_epoch
        partitions.append({**of_replicas, "partition_index": partition, "leader_epoch": epoch})
    return {
        "error_code": ErrorCode.NONE,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.name in INTERNAL_TOPICS,
        "partitions": partitions,
    }


def describe_client_quotas(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeClientQuotas v0-1 (KIP-546): the broker has no quotas, so the result is always empty."""
    if not broker.authorizer.is_admin(request.session):
        return _refused(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins describe quotas")
    kinds = [component["entity_type"] for component in message["components"]]
    if unknown := set(kinds) - {_USER, _CLIENT_ID, _IP}:
        code = ErrorCode.INVALID_REQUEST if "" in unknown else ErrorCode.UNSUPPORTED_VERSION
        return _refused(code, f"quotas apply to {_USER}, {_CLIENT_ID} or {_IP}, not to {min(unknown)[:100]!r}")
    if len(set(kinds)) < len(kinds) or (_IP in kinds and len(kinds) > 1):
        return _refused(ErrorCode.INVALID_REQUEST, f"a filter names each entity once, and {_IP} alone")
    return {"error_code": ErrorCode.NONE, "entries": []}


def _refused(code: ErrorCode, reason: str) -> Message:
    return {"error_code": code, "error_message": reason, "entries": None}


def alter_client_quotas(broker: Broker, request: Request, message: Message) -> Message:
    """AlterClientQuotas v0-1 (KIP-546): refused, since the broker has no quotas.

    Removing a quota succeeds, as in Kafka for a quota that does not exist.
    """
    is_admin = broker.authorizer.is_admin(request.session)
    return {"entries": [{"entity": entry["entity"]} | _alter(entry, is_admin) for entry in message["entries"]]}


def _alter(entry: dict[str, Any], is_admin: bool) -> Message:
    if not is_admin:
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": "only admins alter quotas"}
    set_quotas = [op["key"] for op in entry["ops"] if not op["remove"]]
    if set_quotas or not entry["entity"]:
        reason = f"quota {set_quotas[0][:100]!r}: this broker has no quotas" if set_quotas else "the entity has no name"
        return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    return {"error_code": ErrorCode.NONE}


async def describe_topic_partitions(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeTopicPartitions v0 (KIP-966): metadata in pages; the cursor names the next page's first partition."""
    limit = min(max(1, message["response_partition_limit"]), _MAX_PARTITIONS)
    cursor = message["cursor"]
    start = (cursor["topic_name"], max(0, cursor["partition_index"])) if cursor else ("", 0)
    names = sorted({topic["name"] for topic in message["topics"]} or broker.registry.topics)
    topics: list[dict[str, Any]] = []
    async for name in broker.turns.each(names):
        if name < start[0]:
            continue
        refusal = broker.authorizer.refusal(request.session, SEE, name)
        if refusal and not message["topics"]:
            continue
        if not limit:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
        if refusal:
            topics.append(missing_topic(name, None, refusal))
            continue
        topic = await broker.partitions.topic(name)
        if topic is None:
            topics.append(missing_topic(name, None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
            continue
        described = topic_message(broker, request, topic)
        described["topic_authorized_operations"] = broker.authorizer.topic_operations(request.session, name)
        first = start[1] if name == start[0] else 0
        partitions = [entry | _NO_ELIGIBLE for entry in described["partitions"] if entry["partition_index"] >= first]
        topics.append(described | {"partitions": partitions[:limit]})
        if len(partitions) > limit:
            next_index = partitions[limit]["partition_index"]
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": next_index}}
        limit -= len(partitions)
    return {"topics": topics}


async def metadata(broker: Broker, request: Request, message: Message) -> Message:
    """Metadata v0-13: the brokers, and the leaders of the requested topics.

    Topics that do not exist are created if both the broker (auto.create.topics.enable) and the request allow it. A
    topic that was deleted just now is answered without partitions at first (LEADER_NOT_AVAILABLE), as Kafka answers for
    each one that it creates: who has deleted it beside a client that goes on does not take it for the old one.
    """
    requested = message["topics"]
    if requested is None or (request.version == 0 and not requested):
        topics = []
        for name, known in sorted(broker.registry.topics.items()):
            await broker.turns.take()
            if broker.authorizer.allows(request.session, SEE, name):
                topics.append(topic_message(broker, request, known))
    else:
        once = distinct(requested, lambda entry: (entry["name"], entry["topic_id"]))
        topics = [await _one_topic(broker, request, entry, message["allow_auto_topic_creation"]) for entry in once]
    authorizer = broker.authorizer
    if message["include_topic_authorized_operations"]:
        for topic in topics:
            await broker.turns.take()
            if topic["name"] and topic["error_code"] != ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                topic["topic_authorized_operations"] = authorizer.topic_operations(request.session, topic["name"])
    answer: Message = {
        "brokers": [
            {"node_id": node, "host": host, "port": port}
            for node, (host, port) in broker.registry.addresses(request.session.listener).items()
        ],
        "cluster_id": broker.cluster_id,
        "controller_id": broker.registry.controller_id,
        "topics": topics,
    }
    if message["include_cluster_authorized_operations"]:
        answer["cluster_authorized_operations"] = authorizer.cluster_operations(request.session)
    return answer


async def _one_topic(broker: Broker, request: Request, entry: dict[str, Any], may_create: bool) -> Message:
    name, topic_id = entry["name"], entry["topic_id"]
    if name is None and request.version < _FIRST_BY_ID:
        return missing_topic("", topic_id, ErrorCode.INVALID_REQUEST)
    if name is None:
        topic = await broker.partitions.topic_by_id(topic_id)
        if topic is None or not broker.authorizer.allows(request.session, SEE, topic.name):
            return missing_topic(None, topic_id, ErrorCode.UNKNOWN_TOPIC_ID)
        return topic_message(broker, request, topic)
    if refusal := broker.authorizer.refusal(request.session, SEE, name):
        return missing_topic(name, None, refusal)
    if await broker.partitions.topic(name) is None:
        if not (may_create and broker.config.auto_create_topics):
            return missing_topic(name, None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if refusal := broker.authorizer.refusal(request.session, WRITE, name):
            return missing_topic(name, None, refusal)
        try:
            await broker.changes.create_topic(name, broker.config.default_partitions(name))
            if broker.follower.has_just_dropped(name):
                return missing_topic(name, None, ErrorCode.LEADER_NOT_AVAILABLE)
        except TopicExists:
            await broker.follower.refresh()
        except ConfigError:
            return missing_topic(name, None, ErrorCode.INVALID_TOPIC_EXCEPTION)
        except DirectoryError as error:
            _log.error("topic %s can't be created: %s", name, error)
    topic = broker.registry.topics.get(name)
    if topic is None:  # the directories are unavailable, or the controller has not completed a tool's topic yet
        return missing_topic(name, None, ErrorCode.LEADER_NOT_AVAILABLE)
    return topic_message(broker, request, topic)


def describe_log_dirs(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeLogDirs v1-4 (KIP-113): the data directory, with the sizes of its logs and of the disk."""
    if not broker.authorizer.is_admin(request.session):  # versions before 3 can't carry the error
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "results": []}
    requested = message["topics"]
    chosen = None if requested is None else {topic["topic"]: set(topic["partitions"]) for topic in requested}
    topics: dict[str, list[Message]] = defaultdict(list)
    for (topic, partition), log in sorted(broker.logs.logs.items()):
        if chosen is None or partition in chosen.get(topic, ()):
            topics[topic].append({"partition_index": partition, "partition_size": log.size, "offset_lag": 0})
    path = broker.logs.path
    try:
        disk = shutil.disk_usage(path)
    except OSError as error:
        _log.error("%s can't be measured: %s", path, error)
        return {
            "results": [{"error_code": ErrorCode.KAFKA_STORAGE_ERROR, "log_dir": str(path.absolute()), "topics": []}]
        }
    result = {
        "error_code": ErrorCode.NONE,
        "log_dir": str(path.absolute()),
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
        "total_bytes": disk.total,
        "usable_bytes": disk.free,
    }
    return {"results": [result]}


def describe_cluster(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeCluster v0-2 (KIP-700): the live brokers."""
    if message["endpoint_type"] != _BROKERS:
        reason = "controllers have no endpoints of their own"
        return {"error_code": ErrorCode.MISMATCHED_ENDPOINT_TYPE, "error_message": reason, "brokers": []}
    answer: Message = {
        "error_code": ErrorCode.NONE,
        "cluster_id": broker.cluster_id,
        "controller_id": broker.registry.controller_id,
        "brokers": [
            {"broker_id": node, "host": host, "port": port}
            for node, (host, port) in broker.registry.addresses(request.session.listener).items()
        ],
    }
    if message["include_cluster_authorized_operations"]:
        answer["cluster_authorized_operations"] = broker.authorizer.cluster_operations(request.session)
    return answer


def api_versions(broker: Broker, request: Request, message: Message) -> Message:
    """ApiVersions v0-5 (KIP-35): the APIs and versions that this broker serves, from the protocol tables.

    From version 3 on with the finalized level of transaction.version (KIP-584), by which clients choose how they make
    transactions (KIP-890).

    Version 5 may name the cluster and the broker that the client wants (KIP-1242): if this is another one, the client
    gets REBOOTSTRAP_REQUIRED and looks up its addresses again.
    """
    if request.version >= WITH_IDENTITY and message["cluster_id"] is not None:
        wanted = message["cluster_id"], message["node_id"]
        if wanted != (broker.cluster_id, broker.config.broker_id):
            _log.debug("%s looks for broker %d of cluster %s", request.peer, message["node_id"], wanted[0][:100])
            return {"error_code": ErrorCode.REBOOTSTRAP_REQUIRED, "api_keys": []}
    keys = [
        {"api_key": api.key, "min_version": api.versions.first, "max_version": api.versions.last}
        for api in BY_KEY.values()
    ]
    answer = {"error_code": 0, "api_keys": keys, "finalized_features_epoch": broker.registry.features_since_ms}
    level = broker.registry.transaction_version
    if level:
        finalized = {"name": TRANSACTION_VERSION, "max_version_level": level, "min_version_level": level}
        answer["finalized_features"] = [finalized]
    if request.version >= _FIRST_WITH_ZERO:
        supported = {"name": TRANSACTION_VERSION, "min_version": 0, "max_version": broker.config.transaction_version}
        answer["supported_features"] = [supported]
    return answer
