"""Descriptions of a cluster: DescribeCluster (key 60, KIP-700), DescribeLogDirs (35, KIP-113) and
DescribeTopicPartitions (75, KIP-966)."""

from __future__ import annotations

from spark_klog.protocol.schema import BOOLEAN, INT8, INT16, INT32, INT64, STRING, UUID, F, api, array, struct

DESCRIBE_CLUSTER = api(
    60,
    "DescribeCluster",
    "0-2",
    0,
    struct(
        F("include_cluster_authorized_operations", BOOLEAN),
        F("endpoint_type", INT8, "1+", default=1),
        F("include_fenced_brokers", BOOLEAN, "2+"),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("error_message", STRING, nullable="0+", default=None),
        F("endpoint_type", INT8, "1+", default=1),
        F("cluster_id", STRING),
        F("controller_id", INT32, default=-1),
        F(
            "brokers",
            array(
                F("broker_id", INT32),
                F("host", STRING),
                F("port", INT32),
                F("rack", STRING, nullable="0+", default=None),
                F("is_fenced", BOOLEAN, "2+"),
            ),
        ),
        F("cluster_authorized_operations", INT32, default=-2147483648),
    ),
)

DESCRIBE_LOG_DIRS = api(
    35,
    "DescribeLogDirs",
    "1-4",
    2,
    struct(
        F("topics", array(F("topic", STRING), F("partitions", array(INT32))), nullable="0+"),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16, "3+"),
        F(
            "results",
            array(
                F("error_code", INT16),
                F("log_dir", STRING),
                F(
                    "topics",
                    array(
                        F("name", STRING),
                        F(
                            "partitions",
                            array(
                                F("partition_index", INT32),
                                F("partition_size", INT64),
                                F("offset_lag", INT64),
                                F("is_future_key", BOOLEAN),
                            ),
                        ),
                    ),
                ),
                F("total_bytes", INT64, "4+", default=-1),
                F("usable_bytes", INT64, "4+", default=-1),
            ),
        ),
    ),
)

DESCRIBE_TOPIC_PARTITIONS = api(
    75,
    "DescribeTopicPartitions",
    "0",
    0,
    struct(
        F("topics", array(F("name", STRING))),
        F("response_partition_limit", INT32, default=2000),
        F("cursor", struct(F("topic_name", STRING), F("partition_index", INT32)), nullable="0+", default=None),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "topics",
            array(
                F("error_code", INT16),
                F("name", STRING, nullable="0+"),
                F("topic_id", UUID),
                F("is_internal", BOOLEAN),
                F(
                    "partitions",
                    array(
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
                ),
                F("topic_authorized_operations", INT32, default=-2147483648),
            ),
        ),
        F("next_cursor", struct(F("topic_name", STRING), F("partition_index", INT32)), nullable="0+", default=None),
    ),
)
