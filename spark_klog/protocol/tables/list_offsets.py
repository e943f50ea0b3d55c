"""ListOffsets (key 2): an offset by time; -1 is the latest, -2 the earliest, -3 that of the largest timestamp."""

from __future__ import annotations

from spark_klog.protocol.schema import INT8, INT16, INT32, INT64, STRING, F, api, array, struct

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
#: The isolation level with which LATEST is the high watermark, not the last stable offset.
READ_UNCOMMITTED = 0

LIST_OFFSETS = api(
    2,
    "ListOffsets",
    "0-10",
    6,
    struct(
        F("replica_id", INT32, default=-1),
        F("isolation_level", INT8, "2+"),
        F(
            "topics",
            array(
                F("name", STRING),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("current_leader_epoch", INT32, "4+", default=-1),
                        F("timestamp", INT64),
                        F("max_num_offsets", INT32, "0", default=1),
                    ),
                ),
            ),
        ),
        F("timeout_ms", INT32, "10+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "2+"),
        F(
            "topics",
            array(
                F("name", STRING),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("error_code", INT16),
                        F("old_style_offsets", array(INT64), "0"),
                        F("timestamp", INT64, "1+", default=-1),
                        F("offset", INT64, "1+", default=-1),
                        F("leader_epoch", INT32, "4+", default=-1),
                    ),
                ),
            ),
        ),
    ),
)
