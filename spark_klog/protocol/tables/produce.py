"""Produce (key 0): append record batches. Versions 0-2 carry message sets, 3 and up record batches of magic 2."""

from __future__ import annotations

from spark_klog.protocol.schema import INT16, INT32, INT64, RECORDS, STRING, F, api, array, struct

PRODUCE = api(
    0,
    "Produce",
    "0-9",
    9,
    struct(
        F("transactional_id", STRING, "3+", nullable="3+", default=None),
        F("acks", INT16),
        F("timeout_ms", INT32),
        F(
            "topic_data",
            array(
                F("name", STRING),
                F("partition_data", array(F("index", INT32), F("records", RECORDS, nullable="0+"))),
            ),
        ),
    ),
    struct(
        F(
            "responses",
            array(
                F("name", STRING),
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
                    ),
                ),
            ),
        ),
        F("throttle_time_ms", INT32, "1+"),
    ),
)
