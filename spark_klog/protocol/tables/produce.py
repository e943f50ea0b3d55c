"""Produce (key 0): append record batches. Versions 0-2 carry message sets, 3 and up record batches of
magic 2; 10 adds the current leader to errors (KIP-951), 13 names topics by id (KIP-516)."""

from __future__ import annotations

from spark_klog.protocol.schema import INT16, INT32, INT64, RECORDS, STRING, UUID, F, api, array, struct
from spark_klog.protocol.tables.metadata import CURRENT_LEADER, node_endpoints

PRODUCE = api(
    0,
    "Produce",
    "0-13",
    9,
    struct(
        F("transactional_id", STRING, "3+", nullable="3+", default=None),
        F("acks", INT16),
        F("timeout_ms", INT32),
        F(
            "topic_data",
            array(
                F("name", STRING, "0-12"),
                F("topic_id", UUID, "13+"),
                F("partition_data", array(F("index", INT32), F("records", RECORDS, nullable="0+"))),
            ),
        ),
    ),
    struct(
        F(
            "responses",
            array(
                F("name", STRING, "0-12"),
                F("topic_id", UUID, "13+"),
                F(
                    "partition_responses",
                    array(
                        F("index", INT32),
                        F("error_code", INT16),
                        F("base_offset", INT64, default=-1),
                        F("log_append_time_ms", INT64, "2+", default=-1),
                        F("log_start_offset", INT64, "5+", default=-1),
                        F(
                            "record_errors",
                            array(
                                F("batch_index", INT32),
                                F("batch_index_error_message", STRING, "8+", nullable="8+", default=None),
                            ),
                            "8+",
                        ),
                        F("error_message", STRING, "8+", nullable="8+", default=None),
                        F("current_leader", CURRENT_LEADER, "10+", tag=0),
                    ),
                ),
            ),
        ),
        F("throttle_time_ms", INT32, "1+"),
        node_endpoints("10+"),
    ),
)
