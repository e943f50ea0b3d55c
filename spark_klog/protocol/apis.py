"""The APIs by name and by key."""

from __future__ import annotations

from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.cluster import DESCRIBE_CLUSTER, DESCRIBE_LOG_DIRS, DESCRIBE_TOPIC_PARTITIONS
from spark_klog.protocol.tables.configs import ALTER_CONFIGS, DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS
from spark_klog.protocol.tables.coordinator import FIND_COORDINATOR, OFFSET_COMMIT, OFFSET_FETCH
from spark_klog.protocol.tables.fetch import FETCH
from spark_klog.protocol.tables.groups import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_GROUPS,
    OFFSET_DELETE,
    SYNC_GROUP,
)
from spark_klog.protocol.tables.leader_epoch import OFFSET_FOR_LEADER_EPOCH
from spark_klog.protocol.tables.list_offsets import LIST_OFFSETS
from spark_klog.protocol.tables.metadata import API_VERSIONS, METADATA
from spark_klog.protocol.tables.partitions import CREATE_PARTITIONS, DELETE_RECORDS
from spark_klog.protocol.tables.produce import PRODUCE
from spark_klog.protocol.tables.sasl import SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.protocol.tables.topics import CREATE_TOPICS, DELETE_TOPICS
from spark_klog.protocol.tables.transaction_lists import DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS
from spark_klog.protocol.tables.transactions import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT,
    WRITE_TXN_MARKERS,
)

_ALL = (
    PRODUCE,
    FETCH,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    FIND_COORDINATOR,
    JOIN_GROUP,
    HEARTBEAT,
    LEAVE_GROUP,
    SYNC_GROUP,
    DESCRIBE_GROUPS,
    LIST_GROUPS,
    DELETE_GROUPS,
    OFFSET_DELETE,
    API_VERSIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DELETE_RECORDS,
    OFFSET_FOR_LEADER_EPOCH,
    DESCRIBE_CONFIGS,
    ALTER_CONFIGS,
    DESCRIBE_LOG_DIRS,
    CREATE_PARTITIONS,
    INCREMENTAL_ALTER_CONFIGS,
    DESCRIBE_CLUSTER,
    DESCRIBE_TOPIC_PARTITIONS,
    SASL_HANDSHAKE,
    SASL_AUTHENTICATE,
    INIT_PRODUCER_ID,
    ADD_PARTITIONS_TO_TXN,
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    WRITE_TXN_MARKERS,
    TXN_OFFSET_COMMIT,
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
)

__all__ = [
    "ADD_OFFSETS_TO_TXN",
    "ADD_PARTITIONS_TO_TXN",
    "ALTER_CONFIGS",
    "API_VERSIONS",
    "BY_KEY",
    "CREATE_PARTITIONS",
    "CREATE_TOPICS",
    "DELETE_GROUPS",
    "DELETE_RECORDS",
    "DELETE_TOPICS",
    "DESCRIBE_CLUSTER",
    "DESCRIBE_CONFIGS",
    "DESCRIBE_GROUPS",
    "DESCRIBE_LOG_DIRS",
    "DESCRIBE_PRODUCERS",
    "DESCRIBE_TOPIC_PARTITIONS",
    "DESCRIBE_TRANSACTIONS",
    "END_TXN",
    "FETCH",
    "FIND_COORDINATOR",
    "HEARTBEAT",
    "INCREMENTAL_ALTER_CONFIGS",
    "INIT_PRODUCER_ID",
    "JOIN_GROUP",
    "LEAVE_GROUP",
    "LIST_GROUPS",
    "LIST_OFFSETS",
    "LIST_TRANSACTIONS",
    "METADATA",
    "OFFSET_COMMIT",
    "OFFSET_DELETE",
    "OFFSET_FETCH",
    "OFFSET_FOR_LEADER_EPOCH",
    "PRODUCE",
    "SASL_AUTHENTICATE",
    "SASL_HANDSHAKE",
    "SYNC_GROUP",
    "TXN_OFFSET_COMMIT",
    "WRITE_TXN_MARKERS",
]

BY_KEY: dict[int, Api] = {api.key: api for api in _ALL}
