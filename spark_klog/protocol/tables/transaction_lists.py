"""Admin APIs for producers and transactions (KIP-664): DescribeProducers (61), DescribeTransactions (65) and
ListTransactions (66)."""

from __future__ import annotations

from spark_klog.protocol.schema import INT16, INT32, INT64, STRING, F, api, array, struct

DESCRIBE_PRODUCERS = api(
    61,
    "DescribeProducers",
    "0-0",
    0,
    struct(
        F("topics", array(F("name", STRING), F("partition_indexes", array(INT32)))),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "topics",
            array(
                F("name", STRING),
                F(
                    "partitions",
                    array(
                        F("partition_index", INT32),
                        F("error_code", INT16),
                        F("error_message", STRING, nullable="0+", default=None),
                        F(
                            "active_producers",
                            array(
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
            ),
        ),
    ),
)

DESCRIBE_TRANSACTIONS = api(
    65,
    "DescribeTransactions",
    "0-0",
    0,
    struct(
        F("transactional_ids", array(STRING)),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "transaction_states",
            array(
                F("error_code", INT16),
                F("transactional_id", STRING),
                F("transaction_state", STRING),
                F("transaction_timeout_ms", INT32),
                F("transaction_start_time_ms", INT64),
                F("producer_id", INT64),
                F("producer_epoch", INT16),
                F("topics", array(F("topic", STRING), F("partitions", array(INT32)))),
            ),
        ),
    ),
)

LIST_TRANSACTIONS = api(
    66,
    "ListTransactions",
    "0-1",
    0,
    struct(
        F("state_filters", array(STRING)),
        F("producer_id_filters", array(INT64)),
        F("duration_filter", INT64, "1+", default=-1),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("unknown_state_filters", array(STRING)),
        F(
            "transaction_states",
            array(F("transactional_id", STRING), F("producer_id", INT64), F("transaction_state", STRING)),
        ),
    ),
)
