"""The cluster, its topics and replicas.

ApiVersions (key 18) and Metadata (3): supported versions of each API; brokers, topics and leaders.
Descriptions: DescribeCluster (60, KIP-700), DescribeTopicPartitions (75, KIP-966) and DescribeLogDirs (35, KIP-113).
Topics: CreateTopics (19) and DeleteTopics (20), KIP-4; CreatePartitions (37, KIP-195) and DeleteRecords (21, KIP-107).
Location and leadership of replicas: AlterReplicaLogDirs (34, KIP-113), ElectLeaders (43, KIP-460),
AlterPartitionReassignments (45) and ListPartitionReassignments (46, both KIP-455).
"""

from __future__ import annotations

from spark_klog.protocol.schema import (
    BOOLEAN,
    ERROR,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UUID,
    F,
    Field,
    api,
    array,
    struct,
    structs,
)

_TIMEOUT = F("timeout_ms", INT32, default=60_000)
#: The current leader, if the broker is not it (KIP-951).
CURRENT_LEADER = struct(F("leader_id", INT32, default=-1), F("leader_epoch", INT32, default=-1))


def node_endpoints(versions: str) -> Field:
    """The brokers that a response's `current_leader`s name."""
    return structs(
        "node_endpoints",
        F("node_id", INT32),
        F("host", STRING),
        F("port", INT32),
        F("rack", STRING, nullable="0+", default=None),
        versions=versions,
        tag=0,
    )


#: The first version of ApiVersions that says whom the client wants to reach: cluster and node, both or neither
#: (KIP-1242). A broker that is another one answers REBOOTSTRAP_REQUIRED.
WITH_IDENTITY = 5
#: The first version of ApiVersions with the cluster's features (KIP-584).
FIRST_WITH_FEATURES = 3

API_VERSIONS = api(18, "ApiVersions", "0-5", flexible=3)(
    struct(
        F("client_software_name", STRING, "3+"),
        F("client_software_version", STRING, "3+"),
        F("cluster_id", STRING, "5+", nullable="5+", default=None),
        F("node_id", INT32, "5+", default=-1),
    ),
    struct(
        F("error_code", INT16),
        structs("api_keys", F("api_key", INT16), F("min_version", INT16), F("max_version", INT16)),
        F("throttle_time_ms", INT32, "1+"),
        structs(
            "supported_features",
            F("name", STRING),
            F("min_version", INT16),
            F("max_version", INT16),
            versions="3+",
            tag=0,
        ),
        F("finalized_features_epoch", INT64, "3+", default=-1, tag=1),
        structs(
            "finalized_features",
            F("name", STRING),
            F("max_version_level", INT16),
            F("min_version_level", INT16),
            versions="3+",
            tag=2,
        ),
        F("zk_migration_ready", BOOLEAN, "3+", tag=3),
    ),
)

METADATA = api(3, "Metadata", "0-13", flexible=9)(
    struct(
        # null, and in version 0 an empty array, asks for all topics
        structs("topics", F("topic_id", UUID, "10+"), F("name", STRING, nullable="10+"), nullable="1+"),
        F("allow_auto_topic_creation", BOOLEAN, "4+", default=True),
        F("include_cluster_authorized_operations", BOOLEAN, "8-10"),
        F("include_topic_authorized_operations", BOOLEAN, "8+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "3+"),
        structs(
            "brokers",
            F("node_id", INT32),
            F("host", STRING),
            F("port", INT32),
            F("rack", STRING, "1+", nullable="1+", default=None),
        ),
        F("cluster_id", STRING, "2+", nullable="2+", default=None),
        F("controller_id", INT32, "1+", default=-1),
        structs(
            "topics",
            F("error_code", INT16),
            F("name", STRING, nullable="12+"),
            F("topic_id", UUID, "10+"),
            F("is_internal", BOOLEAN, "1+"),
            structs(
                "partitions",
                F("error_code", INT16),
                F("partition_index", INT32),
                F("leader_id", INT32),
                F("leader_epoch", INT32, "7+", default=-1),
                F("replica_nodes", array(INT32)),
                F("isr_nodes", array(INT32)),
                F("offline_replicas", array(INT32), "5+"),
            ),
            F("topic_authorized_operations", INT32, "8+", default=-2147483648),
        ),
        F("cluster_authorized_operations", INT32, "8-10", default=-2147483648),
        F("error_code", INT16, "13+"),
    ),
)

DESCRIBE_CLUSTER = api(60, "DescribeCluster", "0-2", flexible=0)(
    struct(
        F("include_cluster_authorized_operations", BOOLEAN),
        F("endpoint_type", INT8, "1+", default=1),
        F("include_fenced_brokers", BOOLEAN, "2+"),
    ),
    struct(
        F("throttle_time_ms", INT32),
        *ERROR,
        F("endpoint_type", INT8, "1+", default=1),
        F("cluster_id", STRING),
        F("controller_id", INT32, default=-1),
        structs(
            "brokers",
            F("broker_id", INT32),
            F("host", STRING),
            F("port", INT32),
            F("rack", STRING, nullable="0+", default=None),
            F("is_fenced", BOOLEAN, "2+"),
        ),
        F("cluster_authorized_operations", INT32, default=-2147483648),
    ),
)

DESCRIBE_TOPIC_PARTITIONS = api(75, "DescribeTopicPartitions", "0", flexible=0)(
    struct(
        structs("topics", F("name", STRING)),
        F("response_partition_limit", INT32, default=2000),
        F("cursor", struct(F("topic_name", STRING), F("partition_index", INT32)), nullable="0+", default=None),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "topics",
            F("error_code", INT16),
            F("name", STRING, nullable="0+"),
            F("topic_id", UUID),
            F("is_internal", BOOLEAN),
            structs(
                "partitions",
                F("error_code", INT16),
                F("partition_index", INT32),
                F("leader_id", INT32),
                F("leader_epoch", INT32, default=-1),
                F("replica_nodes", array(INT32)),
                F("isr_nodes", array(INT32)),
                F("eligible_leader_replicas", array(INT32), nullable="0+", default=None),
                F("last_known_elr", array(INT32), nullable="0+", default=None),
                F("offline_replicas", array(INT32)),
            ),
            F("topic_authorized_operations", INT32, default=-2147483648),
        ),
        F("next_cursor", struct(F("topic_name", STRING), F("partition_index", INT32)), nullable="0+", default=None),
    ),
)

DESCRIBE_LOG_DIRS = api(35, "DescribeLogDirs", "1-4", flexible=2)(
    struct(structs("topics", F("topic", STRING), F("partitions", array(INT32)), nullable="0+")),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16, "3+"),
        structs(
            "results",
            F("error_code", INT16),
            F("log_dir", STRING),
            structs(
                "topics",
                F("name", STRING),
                structs(
                    "partitions",
                    F("partition_index", INT32),
                    F("partition_size", INT64),
                    F("offset_lag", INT64),
                    F("is_future_key", BOOLEAN),
                ),
            ),
            F("total_bytes", INT64, "4+", default=-1),
            F("usable_bytes", INT64, "4+", default=-1),
        ),
    ),
)

CREATE_TOPICS = api(19, "CreateTopics", "0-7", flexible=5)(
    struct(
        structs(
            "topics",
            F("name", STRING),
            F("num_partitions", INT32),
            F("replication_factor", INT16),
            structs("assignments", F("partition_index", INT32), F("broker_ids", array(INT32))),
            structs("configs", F("name", STRING), F("value", STRING, nullable="0+")),
        ),
        F("timeout_ms", INT32, default=60000),
        F("validate_only", BOOLEAN, "1+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "2+"),
        structs(
            "topics",
            F("name", STRING),
            F("topic_id", UUID, "7+"),
            F("error_code", INT16),
            F("error_message", STRING, "1+", nullable="0+", default=None),
            F("topic_config_error_code", INT16, "5+", tag=0),
            F("num_partitions", INT32, "5+", default=-1),
            F("replication_factor", INT16, "5+", default=-1),
            structs(
                "configs",
                F("name", STRING),
                F("value", STRING, nullable="0+"),
                F("read_only", BOOLEAN),
                F("config_source", INT8, default=-1),
                F("is_sensitive", BOOLEAN),
                versions="5+",
                nullable="5+",
            ),
        ),
    ),
)

DELETE_TOPICS = api(20, "DeleteTopics", "0-6", flexible=4)(
    struct(
        structs("topics", F("name", STRING, nullable="6+", default=None), F("topic_id", UUID), versions="6+"),
        F("topic_names", array(STRING), "0-5"),
        F("timeout_ms", INT32, default=60000),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        structs(
            "responses",
            F("name", STRING, nullable="6+"),
            F("topic_id", UUID, "6+"),
            F("error_code", INT16),
            F("error_message", STRING, "5+", nullable="5+", default=None),
        ),
    ),
)

CREATE_PARTITIONS = api(37, "CreatePartitions", "0-3", flexible=2)(
    struct(
        structs(
            "topics",
            F("name", STRING),
            F("count", INT32),
            structs("assignments", F("broker_ids", array(INT32)), nullable="0+", default=None),
        ),
        F("timeout_ms", INT32),
        F("validate_only", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "results",
            F("name", STRING),
            *ERROR,
        ),
    ),
)

DELETE_RECORDS = api(21, "DeleteRecords", "0-2", flexible=2)(
    struct(
        structs("topics", F("name", STRING), structs("partitions", F("partition_index", INT32), F("offset", INT64))),
        F("timeout_ms", INT32),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "topics",
            F("name", STRING),
            structs("partitions", F("partition_index", INT32), F("low_watermark", INT64), F("error_code", INT16)),
        ),
    ),
)

ALTER_REPLICA_LOG_DIRS = api(34, "AlterReplicaLogDirs", "1-2", flexible=2)(
    struct(
        structs(
            "dirs",
            F("path", STRING),
            structs("topics", F("name", STRING), F("partitions", array(INT32))),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "results",
            F("topic_name", STRING),
            structs("partitions", F("partition_index", INT32), F("error_code", INT16)),
        ),
    ),
)

ELECT_LEADERS = api(43, "ElectLeaders", "0-2", flexible=2)(
    struct(
        F("election_type", INT8, "1+"),
        structs("topic_partitions", F("topic", STRING), F("partitions", array(INT32)), nullable="0+"),
        _TIMEOUT,
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16, "1+"),
        structs(
            "replica_election_results",
            F("topic", STRING),
            structs(
                "partition_result",
                F("partition_id", INT32),
                *ERROR,
            ),
        ),
    ),
)

ALTER_PARTITION_REASSIGNMENTS = api(45, "AlterPartitionReassignments", "0-1", flexible=0)(
    struct(
        _TIMEOUT,
        F("allow_replication_factor_change", BOOLEAN, "1+", default=True),
        structs(
            "topics",
            F("name", STRING),
            structs(
                "partitions",
                F("partition_index", INT32),
                F("replicas", array(INT32), nullable="0+", default=None),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("allow_replication_factor_change", BOOLEAN, "1+", default=True),
        *ERROR,
        structs(
            "responses",
            F("name", STRING),
            structs(
                "partitions",
                F("partition_index", INT32),
                *ERROR,
            ),
        ),
    ),
)

LIST_PARTITION_REASSIGNMENTS = api(46, "ListPartitionReassignments", "0", flexible=0)(
    struct(
        _TIMEOUT,
        structs("topics", F("name", STRING), F("partition_indexes", array(INT32)), nullable="0+", default=None),
    ),
    struct(
        F("throttle_time_ms", INT32),
        *ERROR,
        structs(
            "topics",
            F("name", STRING),
            structs(
                "partitions",
                F("partition_index", INT32),
                F("replicas", array(INT32)),
                F("adding_replicas", array(INT32)),
                F("removing_replicas", array(INT32)),
            ),
        ),
    ),
)
