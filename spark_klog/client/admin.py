"""Topics: create, delete, list; their settings and partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from spark_klog.client.cluster import Cluster
from spark_klog.errors import ErrorCode, ProtocolError
from spark_klog.protocol.apis import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import DEFAULT_SOURCE, DELETE, SET, TOPIC


def create_topic(
    cluster: Cluster,
    name: str,
    partitions: int = 1,
    settings: Mapping[str, str] | None = None,
    replication_factor: int = 1,
) -> None:
    """Create a topic and wait until its partitions have leaders; `ProtocolError` where the broker refuses."""
    request = {
        "topics": [
            {
                "name": name,
                "num_partitions": partitions,
                "replication_factor": replication_factor,
                "configs": [{"name": key, "value": value} for key, value in (settings or {}).items()],
            }
        ],
        "timeout_ms": cluster.config.request_timeout_ms,
    }

    def create() -> None:
        _check(cluster.controller(CREATE_TOPICS, request)["topics"], f"creating topic {name}")

    def await_leaders() -> None:
        for partition in range(partitions):
            cluster.leader(name, partition)

    cluster.attempt(create)
    cluster.attempt(await_leaders)


def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete a topic; `ProtocolError` where it does not exist or the broker refuses."""

    def delete() -> None:
        request = {
            "topics": [{"name": name}],
            "topic_names": [name],
            "timeout_ms": cluster.config.request_timeout_ms,
        }
        _check(cluster.controller(DELETE_TOPICS, request)["responses"], f"deleting topic {name}")

    cluster.attempt(delete)
    cluster.forget_leaders()


def list_topics(cluster: Cluster) -> list[str]:
    """All topics but internal ones."""
    return sorted(
        name
        for name, topic in cluster.metadata(None).items()
        if not topic["is_internal"] and topic["error_code"] == ErrorCode.NONE
    )


def topic_settings(cluster: Cluster, names: Collection[str]) -> dict[str, dict[str, str]]:
    """The settings that differ from the defaults, by topic; `ProtocolError` for one that does not exist.

    They are the topic's own or come from the broker's configuration. Values that a broker keeps for itself are empty.
    """
    request = {
        "resources": [{"resource_type": TOPIC, "resource_name": name, "configuration_keys": None} for name in names]
    }

    def ask() -> dict[str, dict[str, str]]:
        results = cluster.controller(DESCRIBE_CONFIGS, request)["results"]
        found = {}
        for result in results:
            name = result["resource_name"]
            _check([result], f"settings of topic {name}")
            found[name] = {entry["name"]: entry["value"] or "" for entry in result["configs"] if _differs(entry)}
        return found

    return cluster.attempt(ask) if names else {}


def _differs(entry: Message) -> bool:
    source = entry["config_source"]
    # version 0 tells no source
    return bool(source != DEFAULT_SOURCE if source >= 0 else not entry["is_default"])


def alter_topic_settings(cluster: Cluster, name: str, settings: Mapping[str, str], remove: Iterable[str] = ()) -> None:
    """Set and remove settings of a topic, all or none; `ProtocolError` where refused (Kafka 2.3 or later)."""
    changes = [{"name": key, "config_operation": SET, "value": value} for key, value in settings.items()]
    changes += [{"name": key, "config_operation": DELETE, "value": None} for key in remove]
    request = {"resources": [{"resource_type": TOPIC, "resource_name": name, "configs": changes}]}

    def alter() -> None:
        _check(cluster.controller(INCREMENTAL_ALTER_CONFIGS, request)["responses"], f"settings of topic {name}")

    cluster.attempt(alter)


def add_partitions(cluster: Cluster, name: str, count: int) -> None:
    """Give a topic more partitions, up to `count`, and wait until they have leaders; `ProtocolError` as above."""
    request = {
        "topics": [{"name": name, "count": count, "assignments": None}],
        "timeout_ms": cluster.config.request_timeout_ms,
    }

    def add() -> None:
        _check(cluster.controller(CREATE_PARTITIONS, request)["results"], f"partitions of topic {name}")

    def await_leaders() -> None:
        for partition in range(count):
            cluster.leader(name, partition)

    cluster.attempt(add)
    cluster.attempt(await_leaders)


def _check(results: Iterable[Message], doing: str) -> None:
    """`ProtocolError` with the broker's own words for the first result that is a failure."""
    for result in results:
        if result["error_code"]:
            reason = result["error_message"]
            raise ProtocolError(result["error_code"], f"{doing} ({reason})" if reason else doing)
