"""Paths of the ZooKeeper directories, and the payloads of their nodes.

    /cluster/id                                  {"version":"1","id":"..."}
    /brokers/ids/N                               the broker's endpoints (ephemeral)
    /brokers/topics/T                            partition -> replicas
    /brokers/topics/T/partitions/P/state         leader and isr
    /brokers/topics/T/N                          partitions of T on broker N, in ASCII decimal (0.7; ephemeral)
    /controller                                  id of the broker that is the controller (ephemeral)
    /controller_epoch                            number of controllers so far, in ASCII decimal
    /latest_producer_id_block                    the last block of producer ids that was allocated (KIP-98)
    /admin/delete_topics/T                       asks for the topic's deletion: empty, as tools write it, or
                                                 {"version":1,"topic_id":"...","dropped":[N,...]}
    /config/topics/T                             {"version":1,"config":{...}}
    /config/groups                               {"version":1,"groups":{GROUP:{...}}} (only klog's brokers use it)
    /config/changes/config_change_NNNNNNNNNN     created by tools after a change of a node of /config
    /consumers/G/offsets/T/P                     the offset in ASCII decimal
    /consumers/G/ids/C                           a running consumer of the group (ephemeral)

Payloads are compact JSON in UTF-8, with keys in the order of Kafka's builds for Scala 2.12 (a hash order; builds for
2.13 differ); readers accept any order. A function `..._path` raises ConfigError for a name that can't be part of a
path, a function `parse_...` DecodeError for a malformed payload of the node `path`. A node that Kafka
reads whatever its version says is read so here.

Sources: 0.10 documentation, "ZooKeeper Directories"; 0.7 design, "Broker Topic Registry"; KIP-103 (broker version 4),
KIP-584 (broker version 5), KIP-455 and KIP-516 (topic versions 2 and 3).
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from spark_klog.base.durable import check_version
from spark_klog.base.names import PLAINTEXT, TRANSACTION_VERSION
from spark_klog.base.settings import INT64_MAX
from spark_klog.errors import ConfigError, DecodeError

BROKER_IDS_PATH = "/brokers/ids"
BROKER_TOPICS_PATH = "/brokers/topics"
CLUSTER_ID_PATH = "/cluster/id"
CONTROLLER_PATH = "/controller"
PRODUCER_IDS_PATH = "/latest_producer_id_block"
CONTROLLER_EPOCH_PATH = "/controller_epoch"
DELETE_TOPICS_PATH = "/admin/delete_topics"
TOPIC_CONFIGS_PATH = "/config/topics"
CONFIGS_PATH = "/config"
GROUP_CONFIGS_PATH = "/config/groups"
CONFIG_CHANGES_PATH = "/config/changes"
#: Nodes that tools expect to exist; Kafka creates them when its first broker starts.
COMMON_PATHS = (
    BROKER_IDS_PATH,
    BROKER_TOPICS_PATH,
    CONFIG_CHANGES_PATH,
    TOPIC_CONFIGS_PATH,
    DELETE_TOPICS_PATH,
    "/consumers",
)

_DIGITS = re.compile("[0-9]{1,19}")
_TOPIC_ID = re.compile("[A-Za-z0-9_-]{22}")


class Endpoint(NamedTuple):
    """Address and protocol of one of a broker's listeners (KIP-103)."""

    listener: str
    security_protocol: str
    host: str
    port: int


class DeletionRequest(NamedTuple):
    """The topic to delete, None if only its name was given, and the brokers that serve it no more."""

    topic_id: UUID | None
    dropped: frozenset[int]


class PartitionState(NamedTuple):
    """Leader and in-sync replicas of a partition."""

    leader: int
    isr: list[int]
    controller_epoch: int
    leader_epoch: int


def broker_id_path(broker_id: int) -> str:
    return f"{BROKER_IDS_PATH}/{broker_id}"


def broker_payload(endpoints: Sequence[Endpoint], timestamp_ms: int, transaction_version: int = 0) -> bytes:
    """A registration, of version 5 if it names a feature: the last transaction.version that the broker serves."""
    # Readers older than version 2 only read `host` and `port`, which are a plaintext listener's.
    plaintext = next((point for point in endpoints if point.security_protocol == PLAINTEXT), None)
    features: dict[str, Any] = {}
    if transaction_version:  # from 1 on: brokers before 3.9 read no registration with a feature from 0 on
        features = {"features": {TRANSACTION_VERSION: {"min_version": 1, "max_version": transaction_version}}}
    return _json(
        {
            **features,
            "listener_security_protocol_map": {point.listener: point.security_protocol for point in endpoints},
            "endpoints": [f"{point.listener}://{host_and_port(point.host, point.port)}" for point in endpoints],
            "jmx_port": -1,
            "host": plaintext.host if plaintext else None,
            "timestamp": str(timestamp_ms),
            "port": plaintext.port if plaintext else -1,
            "version": 5 if features else 4,
        }
    )


def parse_transaction_version(payload: bytes, path: str = "/brokers/ids/[id]") -> int:
    """The last transaction.version that a registered broker serves, 0 if it names none; DecodeError."""
    features = _fields(payload, path).get("features")
    versions = features.get(TRANSACTION_VERSION) if isinstance(features, dict) else None
    last = versions.get("max_version") if isinstance(versions, dict) else None
    return last if isinstance(last, int) and last > 0 else 0


def parse_broker(payload: bytes, path: str = "/brokers/ids/[id]") -> list[Endpoint]:
    """The endpoints of a registration of any version, at least one; DecodeError."""
    fields = _fields(payload, path)
    endpoints = fields.get("endpoints")
    if endpoints is None:  # version 1
        host, port = fields.get("host"), fields.get("port")
        if isinstance(host, str) and host and _is_int(port) and 0 < fields["port"] < 65536:
            return [Endpoint(PLAINTEXT, PLAINTEXT, host, fields["port"])]
    if not isinstance(endpoints, list) or not endpoints or not all(isinstance(text, str) for text in endpoints):
        raise _malformed(path, "neither host and port nor endpoints", payload)
    protocols = fields.get("listener_security_protocol_map")
    protocols = protocols if isinstance(protocols, dict) else {}
    result = []
    for endpoint in endpoints:
        listener, _, address = endpoint.partition("://")
        host, _, digits = address.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not listener or not host or not (digits.isascii() and digits.isdigit()) or not 0 < int(digits[:6]) < 65536:
            raise _malformed(path, f"endpoint {endpoint!r} is not LISTENER://HOST:PORT", payload)
        protocol = protocols.get(listener, listener)
        result.append(Endpoint(listener, str(protocol), host, int(digits)))
    return result


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def topic_path(topic: str) -> str:
    return f"{BROKER_TOPICS_PATH}/{_name('topic', topic)}"


def topic_payload(assignment: Mapping[int, Sequence[int]], topic_id: UUID | None) -> bytes:
    """Partition -> broker ids, version 3; without a topic id version 2."""
    partitions = {str(partition): list(assignment[partition]) for partition in sorted(assignment)}
    if topic_id is None:
        return _json({"version": 2, "partitions": partitions, "adding_replicas": {}, "removing_replicas": {}})
    return _json(
        {
            "removing_replicas": {},
            "partitions": partitions,
            "topic_id": _base64(topic_id),
            "adding_replicas": {},
            "version": 3,
        }
    )


def parse_topic(payload: bytes, path: str = "/brokers/topics/[topic]") -> tuple[dict[int, list[int]], UUID | None]:
    """Partition -> broker ids, and the topic id if it has one; versions 1 to 3; DecodeError."""
    fields = _fields(payload, path)
    if not _is_int(fields.get("version")) or fields["version"] not in (1, 2, 3):
        raise _malformed(path, f"version {fields.get('version')!r} is not 1, 2 or 3", payload)
    partitions = fields.get("partitions")
    if not isinstance(partitions, dict):
        raise _malformed(path, "no object `partitions`", payload)
    assignment = {}
    for partition, replicas in partitions.items():
        if not (partition.isascii() and partition.isdigit()) or int(partition[:11]) >= 2**31:
            raise _malformed(path, f"partition {partition!r} is not a number", payload)
        assignment[int(partition)] = _ints(replicas, f"partitions.{partition}", payload, path)
    return assignment, _topic_id(fields, payload, path) if fields.get("topic_id") is not None else None


def topic_broker_path(topic: str, broker_id: int) -> str:
    """The ephemeral node with a 0.7 broker's number of partitions of the topic; ConfigError."""
    return f"{topic_path(topic)}/{broker_id}"


def partitions_path(topic: str) -> str:
    return f"{topic_path(topic)}/partitions"


def partition_state_path(topic: str, partition: int) -> str:
    return f"{partitions_path(topic)}/{partition}/state"


def partition_state_payload(leader: int, isr: Sequence[int], controller_epoch: int = 0, leader_epoch: int = 0) -> bytes:
    return _json(
        {
            "controller_epoch": controller_epoch,
            "leader": leader,
            "version": 1,
            "leader_epoch": leader_epoch,
            "isr": list(isr),
        }
    )


def parse_partition_state(
    payload: bytes, path: str = "/brokers/topics/[topic]/partitions/[partition]/state"
) -> PartitionState:
    fields = _fields(payload, path)
    for name in ("leader", "controller_epoch", "leader_epoch"):
        if not _is_int(fields.get(name)):
            raise _malformed(path, f"no number `{name}`", payload)
    isr = _ints(fields.get("isr"), "isr", payload, path)
    return PartitionState(fields["leader"], isr, fields["controller_epoch"], fields["leader_epoch"])


def topic_config_path(topic: str) -> str:
    return f"{TOPIC_CONFIGS_PATH}/{_name('topic', topic)}"


def topic_config_payload(config: Mapping[str, str]) -> bytes:
    return _json({"version": 1, "config": {key: config[key] for key in sorted(config)}})


def parse_topic_config(payload: bytes, path: str = "/config/topics/[topic]") -> dict[str, str]:
    config = _fields(payload, path).get("config")
    if not isinstance(config, dict) or not all(isinstance(value, str) for value in config.values()):
        raise _malformed(path, "no object `config` of strings", payload)
    return config


def group_configs_payload(groups: Mapping[str, Mapping[str, str]]) -> bytes:
    return _json({"version": 1, "groups": {name: dict(sorted(groups[name].items())) for name in sorted(groups)}})


def parse_group_configs(payload: bytes, path: str = GROUP_CONFIGS_PATH) -> dict[str, dict[str, str]]:
    fields = _fields(payload, path)
    check_version(fields.get("version"), 1, path, "remove it to forget the groups' own settings", DecodeError)
    groups = fields.get("groups")
    if not isinstance(groups, dict) or not all(
        isinstance(config, dict) and all(isinstance(value, str) for value in config.values())
        for config in groups.values()
    ):
        raise _malformed(path, "no object `groups` of objects of strings", payload)
    return groups


def delete_topic_path(topic: str) -> str:
    return f"{DELETE_TOPICS_PATH}/{_name('topic', topic)}"


def deletion_payload(topic_id: UUID, dropped: Iterable[int]) -> bytes:
    """A request to delete the topic with that id, and the brokers that serve it no more; only klog's brokers use it."""
    return _json({"version": 1, "topic_id": _base64(topic_id), "dropped": sorted(dropped)})


def parse_deletion(payload: bytes, path: str = "/admin/delete_topics/[topic]") -> DeletionRequest:
    """A request to delete a topic, with its id; DecodeError, also for the empty one of a tool."""
    fields = _fields(payload, path)
    dropped = _ints(fields.get("dropped"), "dropped", payload, path)
    return DeletionRequest(_topic_id(fields, payload, path), frozenset(dropped))


def controller_payload(broker_id: int, timestamp_ms: int) -> bytes:
    return _json({"version": 1, "brokerid": broker_id, "timestamp": str(timestamp_ms)})


def parse_controller(payload: bytes, path: str = CONTROLLER_PATH) -> int:
    broker_id = _fields(payload, path).get("brokerid")
    if not isinstance(broker_id, int):
        raise _malformed(path, "no number `brokerid`", payload)
    return broker_id


def cluster_id_payload(cluster_id: str) -> bytes:
    """The cluster's id, version "1" (here a string)."""
    return _json({"version": "1", "id": cluster_id})


def parse_cluster_id(payload: bytes, path: str = CLUSTER_ID_PATH) -> str:
    cluster_id = _fields(payload, path).get("id")
    if not isinstance(cluster_id, str) or not cluster_id:
        raise _malformed(path, "no string `id`", payload)
    return cluster_id


def producer_ids_payload(broker_id: int, first: int, last: int) -> bytes:
    """The last allocated block of producer ids, and the broker that has it; version 1."""
    return _json({"version": 1, "broker": broker_id, "block_start": str(first), "block_end": str(last)})


def parse_producer_ids(payload: bytes, path: str = PRODUCER_IDS_PATH) -> int:
    fields = _fields(payload, path)
    check_version(fields.get("version"), 1, path, "use another data directory or tree", DecodeError)
    last = fields.get("block_end")
    if not isinstance(last, str) or not _DIGITS.fullmatch(last) or int(last) > INT64_MAX:
        raise _malformed(path, "no number `block_end`", payload)
    return int(last)


def consumer_ids_path(group: str) -> str:
    return f"/consumers/{_name('group', group)}/ids"


def consumer_offsets_path(group: str) -> str:
    return f"/consumers/{_name('group', group)}/offsets"


def consumer_offset_path(group: str, topic: str, partition: int) -> str:
    return f"{consumer_offsets_path(group)}/{_name('topic', topic)}/{partition}"


def offset_payload(offset: int) -> bytes:
    """An offset in ASCII decimal; ConfigError unless it is in [0, 2^63)."""
    if not 0 <= offset <= INT64_MAX:
        raise ConfigError(f"offset {offset} cannot be stored: give one from 0 to {INT64_MAX}")
    return b"%d" % offset


def parse_offset(payload: bytes, path: str = "/consumers/[group]/offsets/[topic]/[partition]") -> int:
    """An offset; DecodeError. White space around it is accepted, since people edit these nodes by hand."""
    digits = payload.strip()
    if not digits.isdigit() or len(digits) > 19 or int(digits) > INT64_MAX:
        raise _malformed(path, "not an offset in decimal", payload)
    return int(digits)


def _name(kind: str, name: str) -> str:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ConfigError(
            f"{kind} name {name!r} cannot be part of a path: give one without '/', not empty, not '.' or '..'"
        )
    return name


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _fields(payload: bytes, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        raise _malformed(path, "not JSON", payload) from None
    if not isinstance(fields, dict):
        raise _malformed(path, "not a JSON object", payload)
    return fields


def _base64(topic_id: UUID) -> str:
    return urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def _topic_id(fields: Mapping[str, Any], payload: bytes, path: str) -> UUID:
    topic_id = fields.get("topic_id")
    if not isinstance(topic_id, str) or not _TOPIC_ID.fullmatch(topic_id):
        raise _malformed(path, f"topic_id {topic_id!r} is not 16 bytes in base64", payload)
    return UUID(bytes=urlsafe_b64decode(f"{topic_id}=="))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ints(value: object, name: str, payload: bytes, path: str) -> list[int]:
    if not isinstance(value, list) or not all(map(_is_int, value)):
        raise _malformed(path, f"`{name}` is not a list of numbers", payload)
    return value


def _malformed(path: str, why: str, payload: bytes) -> DecodeError:
    shown = payload[:200]
    return DecodeError(f"{path}: {why}: {shown!r}{'...' if len(payload) > len(shown) else ''}")
