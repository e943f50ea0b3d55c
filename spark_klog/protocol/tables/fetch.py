"""Fetch (key 1): read record batches from an offset on. Versions 0 and 1 get message
sets of magic 0, 2 and 3 up to magic 1, 4 and later (isolation levels) all; 7 brought fetch sessions,
13 topic ids."""

from __future__ import annotations

from spark_klog.protocol.schema import INT8, INT16, INT32, INT64, RECORDS, STRING, UUID, F, api, array, struct
from spark_klog.protocol.tables.metadata import CURRENT_LEADER, node_endpoints

FETCH = api(
    1,
    "Fetch",
    "0-17",
    12,
    struct(
        F("cluster_id", STRING, "12+", nullable="12+", default=None, tag=0),
        F("replica_id", INT32, "0-14", default=-1),
        F(
            "replica_state",
            struct(F("replica_id", INT32, default=-1), F("replica_epoch", INT64, default=-1)),
            "15+",
            tag=1,
        ),
        F("max_wait_ms", INT32),
        F("min_bytes", INT32),
        F("max_bytes", INT32, "3+", default=0x7FFFFFFF),
        F("isolation_level", INT8, "4+"),
        F("session_id", INT32, "7+"),
        F("session_epoch", INT32, "7+", default=-1),
        F(
            "topics",
            array(
                F("topic", STRING, "0-12"),
                F("topic_id", UUID, "13+"),
                F(
                    "partitions",
                    array(
                        F("partition", INT32),
                        F("current_leader_epoch", INT32, "9+", default=-1),
                        F("fetch_offset", INT64),
                        F("last_fetched_epoch", INT32, "12+", default=-1),
                        F("log_start_offset", INT64, "5+", default=-1),
                        F("partition_max_bytes", INT32),
                        F("replica_directory_id", UUID, "17+", tag=0),
                    ),
                ),
            ),
        ),
        F(
            "forgotten_topics_data",
            array(F("topic", STRING, "7-12"), F("topic_id", UUID, "13+"), F("partitions", array(INT32))),
            "7+",
        ),
        F("rack_id", STRING, "11+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F("error_code", INT16, "7+"),
        F("session_id", INT32, "7+"),
        F(
            "responses",
            array(
                F("topic", STRING, "0-12"),
                F("topic_id", UUID, "13+"),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("error_code", INT16),
                        F("high_watermark", INT64),
                        F("last_stable_offset", INT64, "4+", default=-1),
                        F("log_start_offset", INT64, "5+", default=-1),
                        F(
                            "diverging_epoch",
                            struct(F("epoch", INT32, default=-1), F("end_offset", INT64, default=-1)),
                            "12+",
                            tag=0,
                        ),
                        F("current_leader", CURRENT_LEADER, "12+", tag=1),
                        F(
                            "snapshot_id",
                            struct(F("end_offset", INT64, default=-1), F("epoch", INT32, default=-1)),
                            "12+",
                            tag=2,
                        ),
                        F(
                            "aborted_transactions",
                            array(F("producer_id", INT64), F("first_offset", INT64)),
                            "4+",
                            nullable="4+",
                            default=None,
                        ),
                        F("preferred_read_replica", INT32, "11+", default=-1),
                        F("records", RECORDS, nullable="0+"),
                    ),
                ),
            ),
        ),
        node_endpoints("16+"),
    ),
)
