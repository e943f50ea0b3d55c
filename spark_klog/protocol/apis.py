"""All APIs, by name and by key, and since when Kafka has them.

The broker serves, and the client uses, what is imported here.
"""

from __future__ import annotations

from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.configs import (
    ALTER_CLIENT_QUOTAS as ALTER_CLIENT_QUOTAS,
    ALTER_CONFIGS as ALTER_CONFIGS,
    DESCRIBE_CLIENT_QUOTAS as DESCRIBE_CLIENT_QUOTAS,
    DESCRIBE_CONFIGS as DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS as INCREMENTAL_ALTER_CONFIGS,
    LIST_CONFIG_RESOURCES as LIST_CONFIG_RESOURCES,
)
from spark_klog.protocol.tables.groups import (
    CONSUMER_GROUP_DESCRIBE as CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT as CONSUMER_GROUP_HEARTBEAT,
    DELETE_GROUPS as DELETE_GROUPS,
    DESCRIBE_GROUPS as DESCRIBE_GROUPS,
    FIND_COORDINATOR as FIND_COORDINATOR,
    HEARTBEAT as HEARTBEAT,
    JOIN_GROUP as JOIN_GROUP,
    LEAVE_GROUP as LEAVE_GROUP,
    LIST_GROUPS as LIST_GROUPS,
    OFFSET_COMMIT as OFFSET_COMMIT,
    OFFSET_DELETE as OFFSET_DELETE,
    OFFSET_FETCH as OFFSET_FETCH,
    SYNC_GROUP as SYNC_GROUP,
)
from spark_klog.protocol.tables.metadata import (
    ALTER_PARTITION_REASSIGNMENTS as ALTER_PARTITION_REASSIGNMENTS,
    ALTER_REPLICA_LOG_DIRS as ALTER_REPLICA_LOG_DIRS,
    API_VERSIONS as API_VERSIONS,
    CREATE_PARTITIONS as CREATE_PARTITIONS,
    CREATE_TOPICS as CREATE_TOPICS,
    DELETE_RECORDS as DELETE_RECORDS,
    DELETE_TOPICS as DELETE_TOPICS,
    DESCRIBE_CLUSTER as DESCRIBE_CLUSTER,
    DESCRIBE_LOG_DIRS as DESCRIBE_LOG_DIRS,
    DESCRIBE_TOPIC_PARTITIONS as DESCRIBE_TOPIC_PARTITIONS,
    ELECT_LEADERS as ELECT_LEADERS,
    LIST_PARTITION_REASSIGNMENTS as LIST_PARTITION_REASSIGNMENTS,
    METADATA as METADATA,
)
from spark_klog.protocol.tables.records import (
    FETCH as FETCH,
    LIST_OFFSETS as LIST_OFFSETS,
    OFFSET_FOR_LEADER_EPOCH as OFFSET_FOR_LEADER_EPOCH,
    PRODUCE as PRODUCE,
)
from spark_klog.protocol.tables.security import (
    ALTER_USER_SCRAM_CREDENTIALS as ALTER_USER_SCRAM_CREDENTIALS,
    CREATE_ACLS as CREATE_ACLS,
    DELETE_ACLS as DELETE_ACLS,
    DESCRIBE_ACLS as DESCRIBE_ACLS,
    DESCRIBE_USER_SCRAM_CREDENTIALS as DESCRIBE_USER_SCRAM_CREDENTIALS,
    SASL_AUTHENTICATE as SASL_AUTHENTICATE,
    SASL_HANDSHAKE as SASL_HANDSHAKE,
)
from spark_klog.protocol.tables.transactions import (
    ADD_OFFSETS_TO_TXN as ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN as ADD_PARTITIONS_TO_TXN,
    DESCRIBE_PRODUCERS as DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS as DESCRIBE_TRANSACTIONS,
    END_TXN as END_TXN,
    INIT_PRODUCER_ID as INIT_PRODUCER_ID,
    LIST_TRANSACTIONS as LIST_TRANSACTIONS,
    TXN_OFFSET_COMMIT as TXN_OFFSET_COMMIT,
    WRITE_TXN_MARKERS as WRITE_TXN_MARKERS,
)

_ALL = [value for value in list(globals().values()) if isinstance(value, Api)]
#: In the order of their keys.
BY_KEY: dict[int, Api] = {api.key: api for api in sorted(_ALL, key=lambda api: api.key)}
#: The first version of Apache Kafka that has each API, from the KIPs that introduced them, for messages about brokers
#: that lack it; APIs that Kafka 0.10.1 has are left out.
SINCE = {
    **dict.fromkeys((21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33), "0.11"),
    **dict.fromkeys((34, 35, 36, 37), "1.0"),
    **dict.fromkeys((38, 39, 40, 41, 42), "1.1"),
    43: "2.2",
    44: "2.3",
    **dict.fromkeys((45, 46, 47), "2.4"),
    **dict.fromkeys((48, 49), "2.6"),
    **dict.fromkeys((50, 51), "2.7"),
    **dict.fromkeys((60, 61), "2.8"),
    **dict.fromkeys((65, 66), "3.0"),
    74: "3.7",
    75: "3.8",
}
