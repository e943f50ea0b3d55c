"""ApiVersions (key 18) and Metadata (key 3): supported versions of each API; brokers, topics and leaders."""

from __future__ import annotations

from spark_klog.protocol.schema import BOOLEAN, INT16, INT32, INT64, STRING, UUID, F, Field, api, array, struct

#: The current leader, if the broker is not it (KIP-951).
CURRENT_LEADER = struct(F("leader_id", INT32, default=-1), F("leader_epoch", INT32, default=-1))


def node_endpoints(versions: str) -> Field:
    """The brokers that a response's `current_leader`s name."""
    broker = array(
        F("node_id", INT32), F("host", STRING), F("port", INT32), F("rack", STRING, nullable="0+", default=None)
    )
    return F("node_endpoints", broker, versions, tag=0)


API_VERSIONS = api(
    18,
    "ApiVersions",
    "0-4",
    3,
    struct(
        F("client_software_name", STRING, "3+"),
        F("client_software_version", STRING, "3+"),
    ),
    struct(
        F("error_code", INT16),
        F("api_keys", array(F("api_key", INT16), F("min_version", INT16), F("max_version", INT16))),
        F("throttle_time_ms", INT32, "1+"),
        F(
            "supported_features",
            array(F("name", STRING), F("min_version", INT16), F("max_version", INT16)),
            "3+",
            tag=0,
        ),
        F("finalized_features_epoch", INT64, "3+", default=-1, tag=1),
        F(
            "finalized_features",
            array(F("name", STRING), F("max_version_level", INT16), F("min_version_level", INT16)),
            "3+",
            tag=2,
        ),
        F("zk_migration_ready", BOOLEAN, "3+", tag=3),
    ),
)

METADATA = api(
    3,
    "Metadata",
    "0-13",
    9,
    struct(
        # null, and in version 0 an empty array, asks for all topics
        F(
            "topics",
            array(F("topic_id", UUID, "10+"), F("name", STRING, nullable="10+")),
            nullable="1+",
        ),
        F("allow_auto_topic_creation", BOOLEAN, "4+", default=True),
        F("include_cluster_authorized_operations", BOOLEAN, "8-10"),
        F("include_topic_authorized_operations", BOOLEAN, "8+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "3+"),
        F(
            "brokers",
            array(
                F("node_id", INT32),
                F("host", STRING),
                F("port", INT32),
                F("rack", STRING, "1+", nullable="1+", default=None),
            ),
        ),
        F("cluster_id", STRING, "2+", nullable="2+", default=None),
        F("controller_id", INT32, "1+", default=-1),
        F(
            "topics",
            array(
                F("error_code", INT16),
                F("name", STRING, nullable="12+"),
                F("topic_id", UUID, "10+"),
                F("is_internal", BOOLEAN, "1+"),
                F(
                    "partitions",
                    array(
                        F("error_code", INT16),
                        F("partition_index", INT32),
                        F("leader_id", INT32),
                        F("leader_epoch", INT32, "7+", default=-1),
                        F("replica_nodes", array(INT32)),
                        F("isr_nodes", array(INT32)),
                        F("offline_replicas", array(INT32), "5+"),
                    ),
                ),
                F("topic_authorized_operations", INT32, "8+", default=-2147483648),
            ),
        ),
        F("cluster_authorized_operations", INT32, "8-10", default=-2147483648),
        F("error_code", INT16, "13+"),
    ),
)
