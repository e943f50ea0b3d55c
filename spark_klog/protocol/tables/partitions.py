"""Changes of a topic's partitions: CreatePartitions (key 37, KIP-195) and DeleteRecords (21, KIP-107)."""

from __future__ import annotations

from spark_klog.protocol.schema import BOOLEAN, INT16, INT32, INT64, STRING, F, api, array, struct

CREATE_PARTITIONS = api(
    37,
    "CreatePartitions",
    "0-3",
    2,
    struct(
        F(
            "topics",
            array(
                F("name", STRING),
                F("count", INT32),
                F("assignments", array(F("broker_ids", array(INT32))), nullable="0+", default=None),
            ),
        ),
        F("timeout_ms", INT32),
        F("validate_only", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "results",
            array(F("name", STRING), F("error_code", INT16), F("error_message", STRING, nullable="0+", default=None)),
        ),
    ),
)

DELETE_RECORDS = api(
    21,
    "DeleteRecords",
    "0-2",
    2,
    struct(
        F("topics", array(F("name", STRING), F("partitions", array(F("partition_index", INT32), F("offset", INT64))))),
        F("timeout_ms", INT32),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "topics",
            array(
                F("name", STRING),
                F("partitions", array(F("partition_index", INT32), F("low_watermark", INT64), F("error_code", INT16))),
            ),
        ),
    ),
)
