"""CreateTopics (key 19) and DeleteTopics (key 20), KIP-4."""

from __future__ import annotations

from spark_klog.protocol.schema import BOOLEAN, INT8, INT16, INT32, STRING, UUID, F, api, array, struct

CREATE_TOPICS = api(
    19,
    "CreateTopics",
    "0-7",
    5,
    struct(
        F(
            "topics",
            array(
                F("name", STRING),
                F("num_partitions", INT32),
                F("replication_factor", INT16),
                F("assignments", array(F("partition_index", INT32), F("broker_ids", array(INT32)))),
                F("configs", array(F("name", STRING), F("value", STRING, nullable="0+"))),
            ),
        ),
        F("timeout_ms", INT32, default=60000),
        F("validate_only", BOOLEAN, "1+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "2+"),
        F(
            "topics",
            array(
                F("name", STRING),
                F("topic_id", UUID, "7+"),
                F("error_code", INT16),
                F("error_message", STRING, "1+", nullable="0+", default=None),
                F("topic_config_error_code", INT16, "5+", tag=0),
                F("num_partitions", INT32, "5+", default=-1),
                F("replication_factor", INT16, "5+", default=-1),
                F(
                    "configs",
                    array(
                        F("name", STRING),
                        F("value", STRING, nullable="0+"),
                        F("read_only", BOOLEAN),
                        F("config_source", INT8, default=-1),
                        F("is_sensitive", BOOLEAN),
                    ),
                    "5+",
                    nullable="5+",
                ),
            ),
        ),
    ),
)

DELETE_TOPICS = api(
    20,
    "DeleteTopics",
    "0-6",
    4,
    struct(
        F("topics", array(F("name", STRING, nullable="6+", default=None), F("topic_id", UUID)), "6+"),
        F("topic_names", array(STRING), "0-5"),
        F("timeout_ms", INT32, default=60000),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F(
            "responses",
            array(
                F("name", STRING, nullable="6+"),
                F("topic_id", UUID, "6+"),
                F("error_code", INT16),
                F("error_message", STRING, "5+", nullable="5+", default=None),
            ),
        ),
    ),
)
