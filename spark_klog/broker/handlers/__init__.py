"""One file an API: a function from a request to its response (or an awaitable of it), registered here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.handlers import (
    alter_configs,
    api_versions,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_topic_partitions,
    fetch,
    find_coordinator,
    heartbeat,
    join_group,
    leave_group,
    list_groups,
    list_offsets,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sasl_authenticate,
    sasl_handshake,
    sync_group,
)
from spark_klog.protocol import apis
from spark_klog.protocol.codec import Message

Handler = Callable[[Broker, Request, Message], Message | Awaitable[Message | None] | None]

HANDLERS: dict[int, Handler] = {
    apis.PRODUCE.key: produce.handle,
    apis.FETCH.key: fetch.handle,
    apis.LIST_OFFSETS.key: list_offsets.handle,
    apis.METADATA.key: metadata.handle,
    apis.OFFSET_COMMIT.key: offset_commit.handle,
    apis.OFFSET_FETCH.key: offset_fetch.handle,
    apis.FIND_COORDINATOR.key: find_coordinator.handle,
    apis.JOIN_GROUP.key: join_group.handle,
    apis.HEARTBEAT.key: heartbeat.handle,
    apis.LEAVE_GROUP.key: leave_group.handle,
    apis.SYNC_GROUP.key: sync_group.handle,
    apis.DESCRIBE_GROUPS.key: describe_groups.handle,
    apis.LIST_GROUPS.key: list_groups.handle,
    apis.DELETE_GROUPS.key: delete_groups.handle,
    apis.OFFSET_DELETE.key: offset_delete.handle,
    apis.API_VERSIONS.key: api_versions.handle,
    apis.CREATE_TOPICS.key: create_topics.handle,
    apis.DELETE_TOPICS.key: delete_topics.handle,
    apis.DELETE_RECORDS.key: delete_records.handle,
    apis.OFFSET_FOR_LEADER_EPOCH.key: offset_for_leader_epoch.handle,
    apis.DESCRIBE_CONFIGS.key: describe_configs.handle,
    apis.ALTER_CONFIGS.key: alter_configs.handle,
    apis.DESCRIBE_LOG_DIRS.key: describe_log_dirs.handle,
    apis.CREATE_PARTITIONS.key: create_partitions.handle,
    apis.INCREMENTAL_ALTER_CONFIGS.key: alter_configs.handle_incremental,
    apis.DESCRIBE_CLUSTER.key: describe_cluster.handle,
    apis.DESCRIBE_TOPIC_PARTITIONS.key: describe_topic_partitions.handle,
    apis.SASL_HANDSHAKE.key: sasl_handshake.handle,
    apis.SASL_AUTHENTICATE.key: sasl_authenticate.handle,
}
