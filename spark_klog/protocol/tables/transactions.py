"""Idempotent and transactional producers (KIP-98, KIP-360, KIP-447, KIP-890, KIP-1228).

InitProducerId (key 22), AddPartitionsToTxn (24), AddOffsetsToTxn (25), EndTxn (26), WriteTxnMarkers (27) and
TxnOffsetCommit (28). Brokers send versions 4 and up of AddPartitionsToTxn to each other; clients send the lower ones.
For admins (KIP-664): DescribeProducers (61), DescribeTransactions (65) and ListTransactions (66).
Records of __transaction_state: TransactionLogKey.json and TransactionLogValue.json of Kafka 3.9 and 4.4.
"""

from __future__ import annotations

from spark_klog.protocol.schema import (
    BOOLEAN,
    ERROR,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UUID,
    F,
    api,
    array,
    struct,
    structs,
    versioned,
)

INIT_PRODUCER_ID = api(22, "InitProducerId", "0-5", flexible=2)(
    struct(
        F("transactional_id", STRING, nullable="0+"),
        F("transaction_timeout_ms", INT32),
        F("producer_id", INT64, "3+", default=-1),
        F("producer_epoch", INT16, "3+", default=-1),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("producer_id", INT64, default=-1),
        F("producer_epoch", INT16),
    ),
)

ADD_PARTITIONS_TO_TXN = api(24, "AddPartitionsToTxn", "0-5", flexible=3)(
    struct(
        structs(
            "transactions",
            F("transactional_id", STRING, "4+"),
            F("producer_id", INT64, "4+"),
            F("producer_epoch", INT16, "4+"),
            F("verify_only", BOOLEAN, "4+"),
            structs("topics", F("name", STRING), F("partitions", array(INT32)), versions="4+"),
            versions="4+",
        ),
        F("v3_and_below_transactional_id", STRING, "0-3"),
        F("v3_and_below_producer_id", INT64, "0-3"),
        F("v3_and_below_producer_epoch", INT16, "0-3"),
        structs("v3_and_below_topics", F("name", STRING), F("partitions", array(INT32)), versions="0-3"),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16, "4+"),
        structs(
            "results_by_transaction",
            F("transactional_id", STRING, "4+"),
            structs(
                "topic_results",
                F("name", STRING),
                structs("results_by_partition", F("partition_index", INT32), F("partition_error_code", INT16)),
                versions="4+",
            ),
            versions="4+",
        ),
        structs(
            "results_by_topic_v3_and_below",
            F("name", STRING),
            structs("results_by_partition", F("partition_index", INT32), F("partition_error_code", INT16)),
            versions="0-3",
        ),
    ),
)

ADD_OFFSETS_TO_TXN = api(25, "AddOffsetsToTxn", "0-4", flexible=3)(
    struct(
        F("transactional_id", STRING),
        F("producer_id", INT64),
        F("producer_epoch", INT16),
        F("group_id", STRING),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
    ),
)

#: The first EndTxn that raises the epoch, and answers it: only for clients of version 2 of transactions.
FIRST_END_OF_TRANSACTIONS_2 = 5

END_TXN = api(26, "EndTxn", "0-5", flexible=3)(
    struct(
        F("transactional_id", STRING),
        F("producer_id", INT64),
        F("producer_epoch", INT16),
        F("committed", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("producer_id", INT64, "5+", default=-1),
        F("producer_epoch", INT16, "5+", default=-1),
    ),
)

#: The first WriteTxnMarkers that says by which transaction.version a transaction has ended (KIP-1228).
FIRST_MARKERS_WITH_VERSION = 2

WRITE_TXN_MARKERS = api(27, "WriteTxnMarkers", "1-2", flexible=1)(
    struct(
        structs(
            "markers",
            F("producer_id", INT64),
            F("producer_epoch", INT16),
            F("transaction_result", BOOLEAN),
            structs("topics", F("name", STRING), F("partition_indexes", array(INT32))),
            F("coordinator_epoch", INT32),
            F("transaction_version", INT8, "2+"),
        ),
    ),
    struct(
        structs(
            "markers",
            F("producer_id", INT64),
            structs(
                "topics", F("name", STRING), structs("partitions", F("partition_index", INT32), F("error_code", INT16))
            ),
        ),
    ),
)

#: The first TxnOffsetCommit that adds the group to the transaction itself (KIP-890): only for clients of version 2 of
#: transactions, which bump the epoch with each.
FIRST_OF_TRANSACTIONS_2 = 5
#: The first TxnOffsetCommit that names topics by their ids, and only so (KIP-1319).
TXN_OFFSETS_WITH_TOPIC_IDS = 6

TXN_OFFSET_COMMIT = api(28, "TxnOffsetCommit", "0-6", flexible=3)(
    struct(
        F("transactional_id", STRING),
        F("group_id", STRING),
        F("producer_id", INT64),
        F("producer_epoch", INT16),
        F("generation_id", INT32, "3+", default=-1),
        F("member_id", STRING, "3+"),
        F("group_instance_id", STRING, "3+", nullable="3+", default=None),
        structs(
            "topics",
            F("name", STRING, "0-5"),
            F("topic_id", UUID, "6+"),
            structs(
                "partitions",
                F("partition_index", INT32),
                F("committed_offset", INT64),
                F("committed_leader_epoch", INT32, "2+", default=-1),
                F("committed_metadata", STRING, nullable="0+"),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "topics",
            F("name", STRING, "0-5"),
            F("topic_id", UUID, "6+"),
            structs("partitions", F("partition_index", INT32), F("error_code", INT16)),
        ),
    ),
)

DESCRIBE_PRODUCERS = api(61, "DescribeProducers", "0-0", flexible=0)(
    struct(structs("topics", F("name", STRING), F("partition_indexes", array(INT32)))),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "topics",
            F("name", STRING),
            structs(
                "partitions",
                F("partition_index", INT32),
                *ERROR,
                structs(
                    "active_producers",
                    F("producer_id", INT64),
                    F("producer_epoch", INT32),
                    F("last_sequence", INT32, default=-1),
                    F("last_timestamp", INT64, default=-1),
                    F("coordinator_epoch", INT32),
                    F("current_txn_start_offset", INT64, default=-1),
                ),
            ),
        ),
    ),
)

DESCRIBE_TRANSACTIONS = api(65, "DescribeTransactions", "0-0", flexible=0)(
    struct(F("transactional_ids", array(STRING))),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "transaction_states",
            F("error_code", INT16),
            F("transactional_id", STRING),
            F("transaction_state", STRING),
            F("transaction_timeout_ms", INT32),
            F("transaction_start_time_ms", INT64),
            F("producer_id", INT64),
            F("producer_epoch", INT16),
            structs("topics", F("topic", STRING), F("partitions", array(INT32))),
        ),
    ),
)

LIST_TRANSACTIONS = api(66, "ListTransactions", "0-2", flexible=0)(
    struct(
        F("state_filters", array(STRING)),
        F("producer_id_filters", array(INT64)),
        F("duration_filter", INT64, "1+", default=-1),
        F("transactional_id_pattern", STRING, "2+", nullable="2+", default=None),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("unknown_state_filters", array(STRING)),
        structs(
            "transaction_states", F("transactional_id", STRING), F("producer_id", INT64), F("transaction_state", STRING)
        ),
    ),
)

TRANSACTION_LOG_KEY = versioned("TransactionLogKey", "0", F("transactional_id", STRING))

TRANSACTION_LOG_VALUE = versioned(
    "TransactionLogValue",
    "0-1",
    F("producer_id", INT64),
    F("previous_producer_id", INT64, "1+", default=-1, tag=0),
    F("next_producer_id", INT64, "1+", default=-1, tag=1),
    F("producer_epoch", INT16),
    F("transaction_timeout_ms", INT32),
    F("transaction_status", INT8),
    structs("transaction_partitions", F("topic", STRING), F("partition_ids", array(INT32)), nullable="0+"),
    F("transaction_last_update_timestamp_ms", INT64),
    F("transaction_start_timestamp_ms", INT64),
    F("client_transaction_version", INT16, "1+", tag=2),
    flexible=1,
)
