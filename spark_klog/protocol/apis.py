"""All APIs, by name and by key: the broker serves, and the client uses, what is imported here."""

from __future__ import annotations

from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.acls import (
    CREATE_ACLS as CREATE_ACLS,
    DELETE_ACLS as DELETE_ACLS,
    DESCRIBE_ACLS as DESCRIBE_ACLS,
)
from spark_klog.protocol.tables.cluster import (
    DESCRIBE_CLUSTER as DESCRIBE_CLUSTER,
    DESCRIBE_LOG_DIRS as DESCRIBE_LOG_DIRS,
    DESCRIBE_TOPIC_PARTITIONS as DESCRIBE_TOPIC_PARTITIONS,
)
from spark_klog.protocol.tables.configs import (
    ALTER_CONFIGS as ALTER_CONFIGS,
    DESCRIBE_CONFIGS as DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS as INCREMENTAL_ALTER_CONFIGS,
    LIST_CONFIG_RESOURCES as LIST_CONFIG_RESOURCES,
)
from spark_klog.protocol.tables.coordinator import (
    FIND_COORDINATOR as FIND_COORDINATOR,
    OFFSET_COMMIT as OFFSET_COMMIT,
    OFFSET_FETCH as OFFSET_FETCH,
)
from spark_klog.protocol.tables.fetch import FETCH as FETCH
from spark_klog.protocol.tables.groups import (
    DELETE_GROUPS as DELETE_GROUPS,
    DESCRIBE_GROUPS as DESCRIBE_GROUPS,
    HEARTBEAT as HEARTBEAT,
    JOIN_GROUP as JOIN_GROUP,
    LEAVE_GROUP as LEAVE_GROUP,
    LIST_GROUPS as LIST_GROUPS,
    OFFSET_DELETE as OFFSET_DELETE,
    SYNC_GROUP as SYNC_GROUP,
)
from spark_klog.protocol.tables.leader_epoch import OFFSET_FOR_LEADER_EPOCH as OFFSET_FOR_LEADER_EPOCH
from spark_klog.protocol.tables.list_offsets import LIST_OFFSETS as LIST_OFFSETS
from spark_klog.protocol.tables.metadata import (
    API_VERSIONS as API_VERSIONS,
    METADATA as METADATA,
)
from spark_klog.protocol.tables.partitions import (
    CREATE_PARTITIONS as CREATE_PARTITIONS,
    DELETE_RECORDS as DELETE_RECORDS,
)
from spark_klog.protocol.tables.produce import PRODUCE as PRODUCE
from spark_klog.protocol.tables.quotas import (
    ALTER_CLIENT_QUOTAS as ALTER_CLIENT_QUOTAS,
    DESCRIBE_CLIENT_QUOTAS as DESCRIBE_CLIENT_QUOTAS,
)
from spark_klog.protocol.tables.reassignments import (
    ALTER_PARTITION_REASSIGNMENTS as ALTER_PARTITION_REASSIGNMENTS,
    ALTER_REPLICA_LOG_DIRS as ALTER_REPLICA_LOG_DIRS,
    ELECT_LEADERS as ELECT_LEADERS,
    LIST_PARTITION_REASSIGNMENTS as LIST_PARTITION_REASSIGNMENTS,
)
from spark_klog.protocol.tables.sasl import (
    SASL_AUTHENTICATE as SASL_AUTHENTICATE,
    SASL_HANDSHAKE as SASL_HANDSHAKE,
)
from spark_klog.protocol.tables.scram import (
    ALTER_USER_SCRAM_CREDENTIALS as ALTER_USER_SCRAM_CREDENTIALS,
    DESCRIBE_USER_SCRAM_CREDENTIALS as DESCRIBE_USER_SCRAM_CREDENTIALS,
)
from spark_klog.protocol.tables.topics import (
    CREATE_TOPICS as CREATE_TOPICS,
    DELETE_TOPICS as DELETE_TOPICS,
)
from spark_klog.protocol.tables.transaction_lists import (
    DESCRIBE_PRODUCERS as DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS as DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS as LIST_TRANSACTIONS,
)
from spark_klog.protocol.tables.transactions import (
    ADD_OFFSETS_TO_TXN as ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN as ADD_PARTITIONS_TO_TXN,
    END_TXN as END_TXN,
    INIT_PRODUCER_ID as INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT as TXN_OFFSET_COMMIT,
    WRITE_TXN_MARKERS as WRITE_TXN_MARKERS,
)

_ALL = [value for value in list(globals().values()) if isinstance(value, Api)]
#: In the order of their keys.
BY_KEY: dict[int, Api] = {api.key: api for api in sorted(_ALL, key=lambda api: api.key)}
