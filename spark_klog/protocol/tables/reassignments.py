"""Location and leadership of replicas: AlterReplicaLogDirs (key 34, KIP-113), ElectLeaders (43, KIP-460),
AlterPartitionReassignments (45) and ListPartitionReassignments (46, both KIP-455)."""

from __future__ import annotations

from spark_klog.protocol.schema import BOOLEAN, INT8, INT16, INT32, STRING, F, api, array, struct

_TIMEOUT = F("timeout_ms", INT32, default=60_000)

ALTER_REPLICA_LOG_DIRS = api(
    34,
    "AlterReplicaLogDirs",
    "1-2",
    2,
    struct(
        F(
            "dirs",
            array(
                F("path", STRING),
                F("topics", array(F("name", STRING), F("partitions", array(INT32)))),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "results",
            array(
                F("topic_name", STRING),
                F("partitions", array(F("partition_index", INT32), F("error_code", INT16))),
            ),
        ),
    ),
)

ELECT_LEADERS = api(
    43,
    "ElectLeaders",
    "0-2",
    2,
    struct(
        F("election_type", INT8, "1+"),
        F("topic_partitions", array(F("topic", STRING), F("partitions", array(INT32))), nullable="0+"),
        _TIMEOUT,
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16, "1+"),
        F(
            "replica_election_results",
            array(
                F("topic", STRING),
                F(
                    "partition_result",
                    array(
                        F("partition_id", INT32),
                        F("error_code", INT16),
                        F("error_message", STRING, nullable="0+", default=None),
                    ),
                ),
            ),
        ),
    ),
)

ALTER_PARTITION_REASSIGNMENTS = api(
    45,
    "AlterPartitionReassignments",
    "0-1",
    0,
    struct(
        _TIMEOUT,
        F("allow_replication_factor_change", BOOLEAN, "1+", default=True),
        F(
            "topics",
            array(
                F("name", STRING),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("replicas", array(INT32), nullable="0+", default=None),
                    ),
                ),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("allow_replication_factor_change", BOOLEAN, "1+", default=True),
        F("error_code", INT16),
        F("error_message", STRING, nullable="0+", default=None),
        F(
            "responses",
            array(
                F("name", STRING),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("error_code", INT16),
                        F("error_message", STRING, nullable="0+", default=None),
                    ),
                ),
            ),
        ),
    ),
)

LIST_PARTITION_REASSIGNMENTS = api(
    46,
    "ListPartitionReassignments",
    "0",
    0,
    struct(
        _TIMEOUT,
        F(
            "topics",
            array(F("name", STRING), F("partition_indexes", array(INT32))),
            nullable="0+",
            default=None,
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("error_message", STRING, nullable="0+", default=None),
        F(
            "topics",
            array(
                F("name", STRING),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("replicas", array(INT32)),
                        F("adding_replicas", array(INT32)),
                        F("removing_replicas", array(INT32)),
                    ),
                ),
            ),
        ),
    ),
)
