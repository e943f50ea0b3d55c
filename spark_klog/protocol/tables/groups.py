"""Groups: coordinators, committed offsets, membership.

FindCoordinator (key 10; GroupCoordinator in the guide), OffsetCommit (8) and OffsetFetch (9).
Membership: JoinGroup (11), SyncGroup (14), Heartbeat (12), LeaveGroup (13), DescribeGroups (15), ListGroups (16),
DeleteGroups (42) and OffsetDelete (47). Groups of KIP-848: ConsumerGroupHeartbeat (68), ConsumerGroupDescribe (69).
Subscriptions and assignments that members of consumer groups exchange through the broker (KIP-62). Unknown newer
versions are read as the known ones, as in Kafka; user data and later fields are ignored.
Records of __consumer_offsets: OffsetCommitKey.json, OffsetCommitValue.json, GroupMetadataKey.json and
GroupMetadataValue.json of Kafka 3.9 and 4.1, ConsumerGroup*Key.json and ConsumerGroup*Value.json of 4.1. The version of
a key is its type.
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
    UUID,
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

#: The first versions of OffsetCommit and OffsetFetch that name topics by their ids, and only so (KIP-848).
OFFSETS_WITH_TOPIC_IDS = 10

OFFSET_COMMIT = api(8, "OffsetCommit", "0-10", flexible=8)(
    struct(
        F("group_id", STRING),
        F("generation_id_or_member_epoch", INT32, "1+", default=-1),
        F("member_id", STRING, "1+"),
        F("group_instance_id", STRING, "7+", nullable="7+", default=None),
        F("retention_time_ms", INT64, "2-4", default=-1),
        structs(
            "topics",
            F("name", STRING, "0-9"),
            F("topic_id", UUID, "10+"),
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
            F("name", STRING, "0-9"),
            F("topic_id", UUID, "10+"),
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

OFFSET_FETCH = api(9, "OffsetFetch", "0-10", flexible=6)(
    struct(
        F("group_id", STRING, "0-7"),
        # null asks for all of the group's offsets
        structs("topics", F("name", STRING), F("partition_indexes", array(INT32)), versions="0-7", nullable="2-7"),
        structs(
            "groups",
            F("group_id", STRING),
            F("member_id", STRING, "9+", nullable="9+", default=None),
            F("member_epoch", INT32, "9+", default=-1),
            structs(
                "topics",
                F("name", STRING, "8-9"),
                F("topic_id", UUID, "10+"),
                F("partition_indexes", array(INT32)),
                nullable="8+",
            ),
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
            structs(
                "topics",
                F("name", STRING, "8-9"),
                F("topic_id", UUID, "10+"),
                structs("partitions", *_FETCHED_PARTITION),
            ),
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

DELETE_GROUPS = api(42, "DeleteGroups", "0-3", flexible=2)(
    struct(F("groups_names", array(STRING))),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "results",
            F("group_id", STRING),
            F("error_code", INT16),
            F("error_message", STRING, "3+", nullable="3+", default=None),
        ),
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

_TOPIC_PARTITIONS = F("topic_id", UUID), F("partitions", array(INT32))

#: Epochs of ConsumerGroupHeartbeat that are not a member's: it joins; it leaves; it leaves for a while (static).
JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH = 0, -1, -2

CONSUMER_GROUP_HEARTBEAT = api(68, "ConsumerGroupHeartbeat", "0-1", flexible=0)(
    # fields that are null, or a rebalance timeout of -1, have not changed since the last heartbeat
    struct(
        F("group_id", STRING),
        F("member_id", STRING),
        F("member_epoch", INT32),
        F("instance_id", STRING, nullable="0+", default=None),
        F("rack_id", STRING, nullable="0+", default=None),
        F("rebalance_timeout_ms", INT32, default=-1),
        F("subscribed_topic_names", array(STRING), nullable="0+", default=None),
        F("subscribed_topic_regex", STRING, "1+", nullable="1+", default=None),
        F("server_assignor", STRING, nullable="0+", default=None),
        structs("topic_partitions", *_TOPIC_PARTITIONS, nullable="0+", default=None),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("error_message", STRING, nullable="0+", default=None),
        F("member_id", STRING, nullable="0+", default=None),
        F("member_epoch", INT32),
        F("heartbeat_interval_ms", INT32),
        F("assignment", struct(structs("topic_partitions", *_TOPIC_PARTITIONS)), nullable="0+", default=None),
    ),
)

_DESCRIBED_ASSIGNMENT = struct(
    structs("topic_partitions", F("topic_id", UUID), F("topic_name", STRING), F("partitions", array(INT32)))
)

CONSUMER_GROUP_DESCRIBE = api(69, "ConsumerGroupDescribe", "0-1", flexible=0)(
    struct(
        F("group_ids", array(STRING)),
        F("include_authorized_operations", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "groups",
            F("error_code", INT16),
            F("error_message", STRING, nullable="0+", default=None),
            F("group_id", STRING),
            F("group_state", STRING),
            F("group_epoch", INT32),
            F("assignment_epoch", INT32),
            F("assignor_name", STRING),
            structs(
                "members",
                F("member_id", STRING),
                F("instance_id", STRING, nullable="0+", default=None),
                F("rack_id", STRING, nullable="0+", default=None),
                F("member_epoch", INT32),
                F("client_id", STRING),
                F("client_host", STRING),
                F("subscribed_topic_names", array(STRING)),
                F("subscribed_topic_regex", STRING, nullable="0+", default=None),
                F("assignment", _DESCRIBED_ASSIGNMENT),
                F("target_assignment", _DESCRIBED_ASSIGNMENT),
                F("member_type", INT8, "1+", default=-1),
            ),
            F("authorized_operations", INT32, default=-2147483648),
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

# Records of a group of KIP-848: its epoch, and for each member its subscription, target and current assignment.

CONSUMER_GROUP_METADATA_KEY = versioned("ConsumerGroupMetadataKey", "3", F("group", STRING))

CONSUMER_GROUP_METADATA_VALUE = versioned("ConsumerGroupMetadataValue", "0", F("epoch", INT32), flexible=0)

CONSUMER_GROUP_TOPICS_KEY = versioned("ConsumerGroupPartitionMetadataKey", "4", F("group", STRING))

CONSUMER_GROUP_TOPICS_VALUE = versioned(
    "ConsumerGroupPartitionMetadataValue",
    "0",
    structs(
        "topics",
        F("topic_id", UUID),
        F("topic_name", STRING),
        F("num_partitions", INT32),
        structs("partition_metadata", F("partition", INT32), F("racks", array(STRING))),
    ),
    flexible=0,
)

CONSUMER_GROUP_MEMBER_KEY = versioned("ConsumerGroupMemberMetadataKey", "5", F("group", STRING), F("member", STRING))

CONSUMER_GROUP_MEMBER_VALUE = versioned(
    "ConsumerGroupMemberMetadataValue",
    "0",
    F("instance_id", STRING, nullable="0+", default=None),
    F("rack_id", STRING, nullable="0+", default=None),
    F("client_id", STRING),
    F("client_host", STRING),
    F("subscribed_topic_names", array(STRING)),
    F("subscribed_topic_regex", STRING, nullable="0+", default=None),
    F("rebalance_timeout_ms", INT32, default=-1),
    F("server_assignor", STRING, nullable="0+", default=None),
    # of a member of the classic protocol
    F(
        "classic_member_metadata",
        struct(
            F("session_timeout_ms", INT32),
            structs("supported_protocols", F("name", STRING), F("metadata", BYTES)),
        ),
        nullable="0+",
        default=None,
        tag=0,
    ),
    flexible=0,
)

CONSUMER_GROUP_TARGET_KEY = versioned("ConsumerGroupTargetAssignmentMetadataKey", "6", F("group", STRING))

CONSUMER_GROUP_TARGET_VALUE = versioned(
    "ConsumerGroupTargetAssignmentMetadataValue", "0", F("assignment_epoch", INT32), flexible=0
)

CONSUMER_GROUP_TARGET_MEMBER_KEY = versioned(
    "ConsumerGroupTargetAssignmentMemberKey", "7", F("group", STRING), F("member", STRING)
)

CONSUMER_GROUP_TARGET_MEMBER_VALUE = versioned(
    "ConsumerGroupTargetAssignmentMemberValue", "0", structs("topic_partitions", *_TOPIC_PARTITIONS), flexible=0
)

CONSUMER_GROUP_CURRENT_KEY = versioned(
    "ConsumerGroupCurrentMemberAssignmentKey", "8", F("group", STRING), F("member", STRING)
)

CONSUMER_GROUP_CURRENT_VALUE = versioned(
    "ConsumerGroupCurrentMemberAssignmentValue",
    "0",
    F("member_epoch", INT32),
    F("previous_member_epoch", INT32),
    F("state", INT8),
    structs("assigned_partitions", *_TOPIC_PARTITIONS),
    structs("partitions_pending_revocation", *_TOPIC_PARTITIONS),
    flexible=0,
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
