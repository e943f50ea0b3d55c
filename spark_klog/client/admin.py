"""Topics: create, delete, list; their settings and partitions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from spark_klog.client.answers import by_key, check_code, worst
from spark_klog.client.cluster import Cluster
from spark_klog.errors import ConnectionFailed, ErrorCode, ProtocolError, RequestTimedOut
from spark_klog.protocol.apis import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.configs import DEFAULT_SOURCE, DELETE, SET, TOPIC

#: How a broker refuses to make a change that is made.
_MADE_BEFORE = {
    CREATE_TOPICS.key: ErrorCode.TOPIC_ALREADY_EXISTS,
    DELETE_TOPICS.key: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    CREATE_PARTITIONS.key: ErrorCode.INVALID_PARTITIONS,
}


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

    def is_created() -> bool:
        return len(cluster.partitions([name])[name]) == partitions

    _change(cluster, CREATE_TOPICS, request, "topics", name, f"creating topic {name}", is_created)
    _await_leaders(cluster, name, partitions)


def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete a topic; `ProtocolError` where it does not exist or the broker refuses."""
    request = {
        "topics": [{"name": name}],
        "topic_names": [name],
        "timeout_ms": cluster.config.request_timeout_ms,
    }

    def is_deleted() -> bool:
        return not cluster.partitions([name], missing_ok=True)

    _change(cluster, DELETE_TOPICS, request, "responses", name, f"deleting topic {name}", is_deleted)
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
        answer = cluster.request(cluster.controller(), DESCRIBE_CONFIGS, request)
        results = ((result["resource_name"], result) for result in answer["results"])
        found = {}
        for name, result in by_key(DESCRIBE_CONFIGS, answer, results, names).items():
            _check(DESCRIBE_CONFIGS, result, f"settings of topic {name}")
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

    _change(cluster, INCREMENTAL_ALTER_CONFIGS, request, "responses", name, f"settings of topic {name}", lambda: False)


def add_partitions(cluster: Cluster, name: str, count: int) -> None:
    """Give a topic more partitions, up to `count`, and wait until they have leaders; `ProtocolError` as above."""
    request = {
        "topics": [{"name": name, "count": count, "assignments": None}],
        "timeout_ms": cluster.config.request_timeout_ms,
    }

    def is_added() -> bool:
        return len(cluster.partitions([name])[name]) == count

    _change(cluster, CREATE_PARTITIONS, request, "results", name, f"partitions of topic {name}", is_added)
    _await_leaders(cluster, name, count)


def _await_leaders(cluster: Cluster, name: str, count: int) -> None:
    def ask() -> None:
        _, failures = cluster.by_leader([(name, partition) for partition in range(count)])
        if failures:
            raise worst(failures.values())

    cluster.attempt(ask)


def _change(
    cluster: Cluster, api: Api, request: Message, results: str, name: str, doing: str, is_done: Callable[[], bool]
) -> None:
    """Have the controller change one topic; `ProtocolError` with the broker's own words if it refuses.

    A broker that answered too late, or whose answer was lost, may have made the change. It then refuses to make it
    again; `is_done` tells whether that is so.
    """
    is_answer_lost = False

    def change() -> None:
        nonlocal is_answer_lost
        node = cluster.controller()
        try:
            answer = cluster.request(node, api, request)
        except (ConnectionFailed, RequestTimedOut):
            is_answer_lost = True
            raise
        key = "resource_name" if api is INCREMENTAL_ALTER_CONFIGS else "name"
        result = by_key(api, answer, ((entry[key], entry) for entry in answer[results]), [name])[name]
        try:
            _check(api, result, doing)
        except ProtocolError as error:
            if error.code == ErrorCode.REQUEST_TIMED_OUT:
                is_answer_lost = True
            if not is_answer_lost or error.code != _MADE_BEFORE.get(api.key) or not is_done():
                raise

    cluster.attempt(change)


def _check(api: Api, result: Message, doing: str) -> None:
    """`ProtocolError` with the broker's own words if the result is a failure."""
    reason = result["error_message"]
    check_code(api, result["error_code"], f"{doing} ({reason})" if reason else doing)
