"""Handlers: for each API a function, in the module of its family.

It gets the broker, the request's context and its message, and returns the response or an awaitable of it; None is no
response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.handlers import (
    acls,
    cluster,
    configs,
    consumer_groups,
    credentials,
    fetch,
    groups,
    list_offsets,
    offsets,
    produce,
    reassignments,
    topics,
    transactions,
)
from spark_klog.protocol import apis
from spark_klog.protocol.codec import Message

Handler = Callable[[Broker, Request, Message], Message | Awaitable[Message | None] | None]

#: By the API's key.
HANDLERS: dict[int, Handler] = {
    apis.PRODUCE.key: produce.produce,
    apis.FETCH.key: fetch.fetch,
    apis.LIST_OFFSETS.key: list_offsets.list_offsets,
    apis.METADATA.key: cluster.metadata,
    apis.OFFSET_COMMIT.key: offsets.offset_commit,
    apis.OFFSET_FETCH.key: offsets.offset_fetch,
    apis.FIND_COORDINATOR.key: groups.find_coordinator,
    apis.JOIN_GROUP.key: groups.join_group,
    apis.HEARTBEAT.key: groups.heartbeat,
    apis.LEAVE_GROUP.key: groups.leave_group,
    apis.SYNC_GROUP.key: groups.sync_group,
    apis.DESCRIBE_GROUPS.key: groups.describe_groups,
    apis.LIST_GROUPS.key: groups.list_groups,
    apis.SASL_HANDSHAKE.key: credentials.sasl_handshake,
    apis.API_VERSIONS.key: cluster.api_versions,
    apis.CREATE_TOPICS.key: topics.create_topics,
    apis.DELETE_TOPICS.key: topics.delete_topics,
    apis.DELETE_RECORDS.key: topics.delete_records,
    apis.INIT_PRODUCER_ID.key: transactions.init_producer_id,
    apis.OFFSET_FOR_LEADER_EPOCH.key: list_offsets.offset_for_leader_epoch,
    apis.ADD_PARTITIONS_TO_TXN.key: transactions.add_partitions_to_txn,
    apis.ADD_OFFSETS_TO_TXN.key: transactions.add_offsets_to_txn,
    apis.END_TXN.key: transactions.end_txn,
    apis.WRITE_TXN_MARKERS.key: transactions.write_txn_markers,
    apis.TXN_OFFSET_COMMIT.key: offsets.txn_offset_commit,
    apis.DESCRIBE_ACLS.key: acls.describe_acls,
    apis.CREATE_ACLS.key: acls.create_acls,
    apis.DELETE_ACLS.key: acls.delete_acls,
    apis.DESCRIBE_CONFIGS.key: configs.describe_configs,
    apis.ALTER_CONFIGS.key: configs.alter_configs,
    apis.ALTER_REPLICA_LOG_DIRS.key: reassignments.alter_replica_log_dirs,
    apis.DESCRIBE_LOG_DIRS.key: cluster.describe_log_dirs,
    apis.SASL_AUTHENTICATE.key: credentials.sasl_authenticate,
    apis.CREATE_PARTITIONS.key: topics.create_partitions,
    apis.DELETE_GROUPS.key: groups.delete_groups,
    apis.ELECT_LEADERS.key: reassignments.elect_leaders,
    apis.INCREMENTAL_ALTER_CONFIGS.key: configs.incremental_alter_configs,
    apis.ALTER_PARTITION_REASSIGNMENTS.key: reassignments.alter_partition_reassignments,
    apis.LIST_PARTITION_REASSIGNMENTS.key: reassignments.list_partition_reassignments,
    apis.OFFSET_DELETE.key: offsets.offset_delete,
    apis.DESCRIBE_CLIENT_QUOTAS.key: cluster.describe_client_quotas,
    apis.ALTER_CLIENT_QUOTAS.key: cluster.alter_client_quotas,
    apis.DESCRIBE_USER_SCRAM_CREDENTIALS.key: credentials.describe_user_scram_credentials,
    apis.ALTER_USER_SCRAM_CREDENTIALS.key: credentials.alter_user_scram_credentials,
    apis.DESCRIBE_CLUSTER.key: cluster.describe_cluster,
    apis.DESCRIBE_PRODUCERS.key: transactions.describe_producers,
    apis.DESCRIBE_TRANSACTIONS.key: transactions.describe_transactions,
    apis.LIST_TRANSACTIONS.key: transactions.list_transactions,
    apis.CONSUMER_GROUP_HEARTBEAT.key: consumer_groups.consumer_group_heartbeat,
    apis.CONSUMER_GROUP_DESCRIBE.key: consumer_groups.consumer_group_describe,
    apis.LIST_CONFIG_RESOURCES.key: configs.list_config_resources,
    apis.DESCRIBE_TOPIC_PARTITIONS.key: cluster.describe_topic_partitions,
}
