"""Records and their offsets.

Produce (key 0): append record batches. Versions 0-2 carry message sets, 3 and up record batches of magic 2; 10 adds the
current leader to errors (KIP-951), 13 names topics by id (KIP-516).
Fetch (1): read record batches from an offset on. Versions 0 and 1 get message sets of magic 0, 2 and 3 up to magic 1,
4 and later (isolation levels) all; 7 brought fetch sessions, 13 topic ids.
ListOffsets (2): an offset by time; -1 is the latest, -2 the earliest, -3 that of the largest timestamp.
OffsetForLeaderEpoch (23, KIP-101, KIP-320): the end offset of a leader epoch.
"""

from __future__ import annotations

from spark_klog.protocol.schema import INT8, INT16, INT32, INT64, RECORDS, STRING, UUID, F, api, array, struct, structs
from spark_klog.protocol.tables.metadata import CURRENT_LEADER, node_endpoints

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
#: The isolation level with which LATEST is the high watermark, not the last stable offset.
READ_UNCOMMITTED = 0
READ_COMMITTED = 1
#: The first version of Produce with batches of magic 2; earlier ones have message sets of magic 0 or 1.
PRODUCE_WITH_MAGIC_2 = 3
#: The first Produce that adds its partitions to the transaction itself (KIP-890): only for clients of version 2 of
#: transactions, which bump the epoch with each.
PRODUCE_OF_TRANSACTIONS_2 = 12
#: The first versions that name topics by id (KIP-516).
PRODUCE_WITH_TOPIC_IDS = FETCH_WITH_TOPIC_IDS = 13
#: Ids and epochs of fetch sessions (KIP-227): none, a new one, and the end of one.
NO_SESSION, INITIAL_EPOCH, FINAL_EPOCH = 0, 0, -1

PRODUCE = api(0, "Produce", "0-13", flexible=9)(
    struct(
        F("transactional_id", STRING, "3+", nullable="3+", default=None),
        F("acks", INT16),
        F("timeout_ms", INT32),
        structs(
            "topic_data",
            F("name", STRING, "0-12"),
            F("topic_id", UUID, "13+"),
            structs("partition_data", F("index", INT32), F("records", RECORDS, nullable="0+")),
        ),
    ),
    struct(
        structs(
            "responses",
            F("name", STRING, "0-12"),
            F("topic_id", UUID, "13+"),
            structs(
                "partition_responses",
                F("index", INT32),
                F("error_code", INT16),
                F("base_offset", INT64, default=-1),
                F("log_append_time_ms", INT64, "2+", default=-1),
                F("log_start_offset", INT64, "5+", default=-1),
                structs(
                    "record_errors",
                    F("batch_index", INT32),
                    F("batch_index_error_message", STRING, "8+", nullable="8+", default=None),
                    versions="8+",
                ),
                F("error_message", STRING, "8+", nullable="8+", default=None),
                F("current_leader", CURRENT_LEADER, "10+", tag=0),
            ),
        ),
        F("throttle_time_ms", INT32, "1+"),
        node_endpoints("10+"),
    ),
)

FETCH = api(1, "Fetch", "0-17", flexible=12)(
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
        structs(
            "topics",
            F("topic", STRING, "0-12"),
            F("topic_id", UUID, "13+"),
            structs(
                "partitions",
                F("partition", INT32),
                F("current_leader_epoch", INT32, "9+", default=-1),
                F("fetch_offset", INT64),
                F("last_fetched_epoch", INT32, "12+", default=-1),
                F("log_start_offset", INT64, "5+", default=-1),
                F("partition_max_bytes", INT32),
                F("replica_directory_id", UUID, "17+", tag=0),
            ),
        ),
        structs(
            "forgotten_topics_data",
            F("topic", STRING, "7-12"),
            F("topic_id", UUID, "13+"),
            F("partitions", array(INT32)),
            versions="7+",
        ),
        F("rack_id", STRING, "11+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F("error_code", INT16, "7+"),
        F("session_id", INT32, "7+"),
        structs(
            "responses",
            F("topic", STRING, "0-12"),
            F("topic_id", UUID, "13+"),
            structs(
                "partitions",
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
                structs(
                    "aborted_transactions",
                    F("producer_id", INT64),
                    F("first_offset", INT64),
                    versions="4+",
                    nullable="4+",
                    default=None,
                ),
                F("preferred_read_replica", INT32, "11+", default=-1),
                F("records", RECORDS, nullable="0+"),
            ),
        ),
        node_endpoints("16+"),
    ),
)

LIST_OFFSETS = api(2, "ListOffsets", "0-10", flexible=6)(
    struct(
        F("replica_id", INT32, default=-1),
        F("isolation_level", INT8, "2+"),
        structs(
            "topics",
            F("name", STRING),
            structs(
                "partitions",
                F("partition_index", INT32),
                F("current_leader_epoch", INT32, "4+", default=-1),
                F("timestamp", INT64),
                F("max_num_offsets", INT32, "0", default=1),
            ),
        ),
        F("timeout_ms", INT32, "10+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "2+"),
        structs(
            "topics",
            F("name", STRING),
            structs(
                "partitions",
                F("partition_index", INT32),
                F("error_code", INT16),
                F("old_style_offsets", array(INT64), "0"),
                F("timestamp", INT64, "1+", default=-1),
                F("offset", INT64, "1+", default=-1),
                F("leader_epoch", INT32, "4+", default=-1),
            ),
        ),
    ),
)

OFFSET_FOR_LEADER_EPOCH = api(23, "OffsetForLeaderEpoch", "0-4", flexible=4)(
    struct(
        F("replica_id", INT32, "3+", default=-2),
        structs(
            "topics",
            F("topic", STRING),
            structs(
                "partitions",
                F("partition", INT32),
                F("current_leader_epoch", INT32, "2+", default=-1),
                F("leader_epoch", INT32),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32, "2+"),
        structs(
            "topics",
            F("topic", STRING),
            structs(
                "partitions",
                F("error_code", INT16),
                F("partition", INT32),
                F("leader_epoch", INT32, "1+", default=-1),
                F("end_offset", INT64, default=-1),
            ),
        ),
    ),
)
