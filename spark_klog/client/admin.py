"""Topics: create, delete, list."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.client.cluster import Cluster
from spark_klog.errors import ErrorCode, ProtocolError
from spark_klog.protocol.apis import CREATE_TOPICS, DELETE_TOPICS


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
        for topic in cluster.controller(CREATE_TOPICS, request)["topics"]:
            if topic["error_code"]:
                reason = topic["error_message"] or "refused"
                raise ProtocolError(topic["error_code"], f"creating topic {name} ({reason})")

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
        for topic in cluster.controller(DELETE_TOPICS, request)["responses"]:
            if topic["error_code"]:
                raise ProtocolError(topic["error_code"], f"deleting topic {name}")

    cluster.attempt(delete)
    cluster.forget_leaders()


def list_topics(cluster: Cluster) -> list[str]:
    """All topics but internal ones."""
    return sorted(
        name
        for name, topic in cluster.metadata(None).items()
        if not topic["is_internal"] and topic["error_code"] == ErrorCode.NONE
    )
