"""OffsetForLeaderEpoch (key 23, KIP-101, KIP-320): the end offset of a leader epoch."""

from __future__ import annotations

from spark_klog.protocol.schema import INT16, INT32, INT64, STRING, F, api, array, struct

OFFSET_FOR_LEADER_EPOCH = api(
    23,
    "OffsetForLeaderEpoch",
    "0-4",
    4,
    struct(
        F("replica_id", INT32, "3+", default=-2),
        F(
            "topics",
            array(
                F("topic", STRING),
                F(
                    "partitions",
                    array(
                        F("partition", INT32),
                        F("current_leader_epoch", INT32, "2+", default=-1),
                        F("leader_epoch", INT32),
                    ),
                ),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32, "2+"),
        F(
            "topics",
            array(
                F("topic", STRING),
                F(
                    "partitions",
                    array(
                        F("error_code", INT16),
                        F("partition", INT32),
                        F("leader_epoch", INT32, "1+", default=-1),
                        F("end_offset", INT64, default=-1),
                    ),
                ),
            ),
        ),
    ),
)
