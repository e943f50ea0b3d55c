"""Records of Kafka's internal topics: keys and values of __consumer_offsets and __transaction_state.

Sources: OffsetCommitKey.json, OffsetCommitValue.json, GroupMetadataKey.json, GroupMetadataValue.json,
TransactionLogKey.json, TransactionLogValue.json of Kafka 3.9 and 4.1. Kafka 4 writes the flexible versions; none of
their tagged fields is needed here.
"""

from __future__ import annotations

from spark_klog.protocol.schema import BYTES, INT8, INT16, INT32, INT64, STRING, F, array, structs, versioned

OFFSET_COMMIT_KEY = versioned("OffsetCommitKey", "0-1", F("group", STRING), F("topic", STRING), F("partition", INT32))

OFFSET_COMMIT_VALUE = versioned(
    "OffsetCommitValue",
    "0-4",
    F("offset", INT64),
    F("leader_epoch", INT32, "3+", default=-1),
    F("metadata", STRING),
    F("commit_timestamp", INT64),
    F("expire_timestamp", INT64, "1", default=-1),
    flexible=4,
)

GROUP_METADATA_KEY = versioned("GroupMetadataKey", "2", F("group", STRING))

GROUP_METADATA_VALUE = versioned(
    "GroupMetadataValue",
    "0-4",
    F("protocol_type", STRING),
    F("generation", INT32),
    F("protocol", STRING, nullable="0+"),
    F("leader", STRING, nullable="0+"),
    F("current_state_timestamp", INT64, "2+", default=-1),
    structs(
        "members",
        F("member_id", STRING),
        F("group_instance_id", STRING, "3+", nullable="3+", default=None),
        F("client_id", STRING),
        F("client_host", STRING),
        F("rebalance_timeout", INT32, "1+", default=-1),
        F("session_timeout", INT32),
        F("subscription", BYTES),
        F("assignment", BYTES),
    ),
    flexible=4,
)

TRANSACTION_LOG_KEY = versioned("TransactionLogKey", "0", F("transactional_id", STRING))

TRANSACTION_LOG_VALUE = versioned(
    "TransactionLogValue",
    "0-1",
    F("producer_id", INT64),
    F("producer_epoch", INT16),
    F("transaction_timeout_ms", INT32),
    F("transaction_status", INT8),
    structs("transaction_partitions", F("topic", STRING), F("partition_ids", array(INT32)), nullable="0+"),
    F("transaction_last_update_timestamp_ms", INT64),
    F("transaction_start_timestamp_ms", INT64),
    flexible=1,
)
