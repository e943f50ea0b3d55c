"""Groups: coordinators, committed offsets, membership.

FindCoordinator (key 10; GroupCoordinator in the guide), OffsetCommit (8) and OffsetFetch (9).
Membership: JoinGroup (11), SyncGroup (14), Heartbeat (12), LeaveGroup (13), DescribeGroups (15), ListGroups (16),
DeleteGroups (42) and OffsetDelete (47).
Subscriptions and assignments that members of consumer groups exchange through the broker (KIP-62). Unknown newer
versions are read as the known ones, as in Kafka; user data and later fields are ignored.
Records of __consumer_offsets: OffsetCommitKey.json, OffsetCommitValue.json, GroupMetadataKey.json and
GroupMetadataValue.json of Kafka 3.9 and 4.1.
"""

from __future__ import annotations

from spark_klog.protocol.codec import decode_versioned
from spark_klog.protocol.schema import (
    BOOLEAN,
    BYTES,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    F,
    api,
    array,
    struct,
    structs,
    versioned,
)
from spark_klog.wire.primitives import Buffer

GROUP, TRANSACTION = 0, 1

FIND_COORDINATOR = api(10, "FindCoordinator", "0-6", flexible=3)(
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
        structs(
            "coordinators",
            F("key", STRING),
            F("node_id", INT32),
            F("host", STRING),
            F("port", INT32),
            F("error_code", INT16),
            F("error_message", STRING, nullable="4+", default=None),
            versions="4+",
        ),
    ),
)

OFFSET_COMMIT = api(8, "OffsetCommit", "0-9", flexible=8)(
    struct(
        F("group_id", STRING),
        F("generation_id_or_member_epoch", INT32, "1+", default=-1),
        F("member_id", STRING, "1+"),
        F("group_instance_id", STRING, "7+", nullable="7+", default=None),
        F("retention_time_ms", INT64, "2-4", default=-1),
        structs(
            "topics",
            F("name", STRING),
            structs(
                "partitions",
                F("partition_index", INT32),
                F("committed_offset", INT64),
                F("committed_leader_epoch", INT32, "6+", default=-1),
                F("commit_timestamp", INT64, "1", default=-1),
                F("committed_metadata", STRING, nullable="0+"),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32, "3+"),
        structs(
            "topics",
            F("name", STRING),
            structs("partitions", F("partition_index", INT32), F("error_code", INT16)),
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

OFFSET_FETCH = api(9, "OffsetFetch", "0-9", flexible=6)(
    struct(
        F("group_id", STRING, "0-7"),
        # null asks for all of the group's offsets
        structs("topics", F("name", STRING), F("partition_indexes", array(INT32)), versions="0-7", nullable="2-7"),
        structs(
            "groups",
            F("group_id", STRING),
            F("member_id", STRING, "9+", nullable="9+", default=None),
            F("member_epoch", INT32, "9+", default=-1),
            structs("topics", F("name", STRING), F("partition_indexes", array(INT32)), nullable="8+"),
            versions="8+",
        ),
        F("require_stable", BOOLEAN, "7+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "3+"),
        structs("topics", F("name", STRING), structs("partitions", *_FETCHED_PARTITION), versions="0-7"),
        F("error_code", INT16, "2-7"),
        structs(
            "groups",
            F("group_id", STRING),
            structs("topics", F("name", STRING), structs("partitions", *_FETCHED_PARTITION)),
            F("error_code", INT16),
            versions="8+",
        ),
    ),
)

JOIN_GROUP = api(11, "JoinGroup", "0-9", flexible=6)(
    struct(
        F("group_id", STRING),
        F("session_timeout_ms", INT32),
        F("rebalance_timeout_ms", INT32, "1+", default=-1),
        F("member_id", STRING),
        F("group_instance_id", STRING, "5+", nullable="5+", default=None),
        F("protocol_type", STRING),
        structs("protocols", F("name", STRING), F("metadata", BYTES)),
        F("reason", STRING, "8+", nullable="8+", default=None),
    ),
    struct(
        F("throttle_time_ms", INT32, "2+"),
        F("error_code", INT16),
        F("generation_id", INT32, default=-1),
        F("protocol_type", STRING, "7+", nullable="7+", default=None),
        F("protocol_name", STRING, nullable="7+"),
        F("leader", STRING),
        F("skip_assignment", BOOLEAN, "9+"),
        F("member_id", STRING),
        structs(
            "members",
            F("member_id", STRING),
            F("group_instance_id", STRING, "5+", nullable="5+", default=None),
            F("metadata", BYTES),
        ),
    ),
)

SYNC_GROUP = api(14, "SyncGroup", "0-5", flexible=4)(
    struct(
        F("group_id", STRING),
        F("generation_id", INT32),
        F("member_id", STRING),
        F("group_instance_id", STRING, "3+", nullable="3+", default=None),
        F("protocol_type", STRING, "5+", nullable="5+", default=None),
        F("protocol_name", STRING, "5+", nullable="5+", default=None),
        structs("assignments", F("member_id", STRING), F("assignment", BYTES)),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F("error_code", INT16),
        F("protocol_type", STRING, "5+", nullable="5+", default=None),
        F("protocol_name", STRING, "5+", nullable="5+", default=None),
        F("assignment", BYTES),
    ),
)

HEARTBEAT = api(12, "Heartbeat", "0-4", flexible=4)(
    struct(
        F("group_id", STRING),
        F("generation_id", INT32),
        F("member_id", STRING),
        F("group_instance_id", STRING, "3+", nullable="3+", default=None),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F("error_code", INT16),
    ),
)

LEAVE_GROUP = api(13, "LeaveGroup", "0-5", flexible=4)(
    struct(
        F("group_id", STRING),
        F("member_id", STRING, "0-2"),
        structs(
            "members",
            F("member_id", STRING, "3+"),
            F("group_instance_id", STRING, "3+", nullable="3+", default=None),
            F("reason", STRING, "5+", nullable="5+", default=None),
            versions="3+",
        ),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F("error_code", INT16),
        structs(
            "members",
            F("member_id", STRING, "3+"),
            F("group_instance_id", STRING, "3+", nullable="3+"),
            F("error_code", INT16, "3+"),
            versions="3+",
        ),
    ),
)

DESCRIBE_GROUPS = api(15, "DescribeGroups", "0-6", flexible=5)(
    struct(
        F("groups", array(STRING)),
        F("include_authorized_operations", BOOLEAN, "3+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        structs(
            "groups",
            F("error_code", INT16),
            F("error_message", STRING, "6+", nullable="6+", default=None),
            F("group_id", STRING),
            F("group_state", STRING),
            F("protocol_type", STRING),
            F("protocol_data", STRING),
            structs(
                "members",
                F("member_id", STRING),
                F("group_instance_id", STRING, "4+", nullable="4+", default=None),
                F("client_id", STRING),
                F("client_host", STRING),
                F("member_metadata", BYTES),
                F("member_assignment", BYTES),
            ),
            F("authorized_operations", INT32, "3+", default=-2147483648),
        ),
    ),
)

LIST_GROUPS = api(16, "ListGroups", "0-5", flexible=3)(
    struct(
        F("states_filter", array(STRING), "4+"),
        F("types_filter", array(STRING), "5+"),
    ),
    struct(
        F("throttle_time_ms", INT32, "1+"),
        F("error_code", INT16),
        structs(
            "groups",
            F("group_id", STRING),
            F("protocol_type", STRING),
            F("group_state", STRING, "4+"),
            F("group_type", STRING, "5+"),
        ),
    ),
)

DELETE_GROUPS = api(42, "DeleteGroups", "0-2", flexible=2)(
    struct(F("groups_names", array(STRING))),
    struct(
        F("throttle_time_ms", INT32),
        structs("results", F("group_id", STRING), F("error_code", INT16)),
    ),
)

OFFSET_DELETE = api(47, "OffsetDelete", "0", flexible=99)(
    struct(
        F("group_id", STRING),
        structs("topics", F("name", STRING), structs("partitions", F("partition_index", INT32))),
    ),
    struct(
        F("error_code", INT16),
        F("throttle_time_ms", INT32),
        structs(
            "topics", F("name", STRING), structs("partitions", F("partition_index", INT32), F("error_code", INT16))
        ),
    ),
)

# Keys and values of __consumer_offsets. Kafka 4 writes the flexible versions; none of their tagged fields is needed.

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

SUBSCRIPTION = versioned("ConsumerProtocolSubscription", "0+", F("topics", array(STRING)))

ASSIGNMENT = versioned(
    "ConsumerProtocolAssignment",
    "0+",
    structs("assigned_partitions", F("topic", STRING), F("partitions", array(INT32))),
)

_PARTITIONS = F("topic", STRING), F("partitions", array(INT32))

#: A subscription with all that a group's leader looks at (KIP-429, KIP-792, KIP-881).
MEMBER_SUBSCRIPTION = versioned(
    "ConsumerProtocolSubscription",
    "0+",
    F("topics", array(STRING)),
    F("user_data", BYTES, nullable="0+", default=None),
    structs("owned_partitions", *_PARTITIONS, versions="1+"),
    F("generation_id", INT32, "2+", default=-1),
    F("rack_id", STRING, "3+", nullable="3+", default=None),
)

#: An assignment as a leader writes it.
MEMBER_ASSIGNMENT = versioned(
    "ConsumerProtocolAssignment",
    "0+",
    structs("assigned_partitions", *_PARTITIONS),
    F("user_data", BYTES, nullable="0+", default=None),
)


def decode_assignment(data: Buffer) -> dict[str, list[int]]:
    """Partitions by topic, {} if `data` is empty; `DecodeError`."""
    if not len(data):
        return {}
    rows = decode_versioned(ASSIGNMENT, data)["assigned_partitions"]
    return {row["topic"]: sorted(row["partitions"]) for row in rows}
