"""FindCoordinator (key 10; GroupCoordinator in the guide), OffsetCommit (key 8) and OffsetFetch (key 9)."""

from __future__ import annotations

from spark_klog.protocol.schema import BOOLEAN, INT8, INT16, INT32, INT64, STRING, F, api, array, struct

GROUP, TRANSACTION = 0, 1

FIND_COORDINATOR = api(
    10,
    "FindCoordinator",
    "0-6",
    3,
    struct(
        F("key", STRING, "0-3"),
        F("key_type", INT8, "1+"),
        F("coordinator_keys", array(STRING), "4+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F("error_code", INT16, "0-3"),
        F("error_message", STRING, "1-3", nullable="1-3", default=None),
        F("node_id", INT32, "0-3", default=-1),
        F("host", STRING, "0-3"),
        F("port", INT32, "0-3", default=-1),
        F(
            "coordinators",
            array(
                F("key", STRING),
                F("node_id", INT32),
                F("host", STRING),
                F("port", INT32),
                F("error_code", INT16),
                F("error_message", STRING, nullable="4+", default=None),
            ),
            "4+",
        ),
    ),
)

OFFSET_COMMIT = api(
    8,
    "OffsetCommit",
    "0-9",
    8,
    struct(
        F("group_id", STRING),
        F("generation_id_or_member_epoch", INT32, "1+", default=-1),
        F("member_id", STRING, "1+"),
        F("group_instance_id", STRING, "7+", nullable="7+", default=None),
        F("retention_time_ms", INT64, "2-4", default=-1),
        F(
            "topics",
            array(
                F("name", STRING),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("committed_offset", INT64),
                        F("committed_leader_epoch", INT32, "6+", default=-1),
                        F("commit_timestamp", INT64, "1", default=-1),
                        F("committed_metadata", STRING, nullable="0+"),
                    ),
                ),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32, "3+"),
        F(
            "topics",
            array(
                F("name", STRING),
                F("partitions", array(F("partition_index", INT32), F("error_code", INT16))),
            ),
        ),
    ),
)

_FETCHED_PARTITION = (
    F("partition_index", INT32),
    F("committed_offset", INT64),
    F("committed_leader_epoch", INT32, "5+", default=-1),
    F("metadata", STRING, nullable="0+"),
    F("error_code", INT16),
)

OFFSET_FETCH = api(
    9,
    "OffsetFetch",
    "0-9",
    6,
    struct(
        F("group_id", STRING, "0-7"),
        # null asks for all of the group's offsets
        F(
            "topics",
            array(F("name", STRING), F("partition_indexes", array(INT32))),
            "0-7",
            nullable="2-7",
        ),
        F(
            "groups",
            array(
                F("group_id", STRING),
                F("member_id", STRING, "9+", nullable="9+", default=None),
                F("member_epoch", INT32, "9+", default=-1),
                F("topics", array(F("name", STRING), F("partition_indexes", array(INT32))), nullable="8+"),
            ),
            "8+",
        ),
        F("require_stable", BOOLEAN, "7+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "3+"),
        F("topics", array(F("name", STRING), F("partitions", array(*_FETCHED_PARTITION))), "0-7"),
        F("error_code", INT16, "2-7"),
        F(
            "groups",
            array(
                F("group_id", STRING),
                F("topics", array(F("name", STRING), F("partitions", array(*_FETCHED_PARTITION)))),
                F("error_code", INT16),
            ),
            "8+",
        ),
    ),
)
