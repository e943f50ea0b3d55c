"""Subscriptions and assignments that members of consumer groups exchange through the broker (KIP-62).

Unknown newer versions are read as the known ones, as in Kafka; user data and later fields are ignored.
"""

from __future__ import annotations

from spark_klog.protocol.schema import BYTES, INT32, STRING, F, array, versioned

SUBSCRIPTION = versioned("ConsumerProtocolSubscription", "0+", F("topics", array(STRING)))

ASSIGNMENT = versioned(
    "ConsumerProtocolAssignment",
    "0+",
    F("assigned_partitions", array(F("topic", STRING), F("partitions", array(INT32)))),
)

_PARTITIONS = array(F("topic", STRING), F("partitions", array(INT32)))

#: A subscription with all that a group's leader looks at (KIP-429, KIP-792, KIP-881).
MEMBER_SUBSCRIPTION = versioned(
    "ConsumerProtocolSubscription",
    "0+",
    F("topics", array(STRING)),
    F("user_data", BYTES, nullable="0+", default=None),
    F("owned_partitions", _PARTITIONS, "1+"),
    F("generation_id", INT32, "2+", default=-1),
    F("rack_id", STRING, "3+", nullable="3+", default=None),
)

#: An assignment as a leader writes it.
MEMBER_ASSIGNMENT = versioned(
    "ConsumerProtocolAssignment",
    "0+",
    F("assigned_partitions", _PARTITIONS),
    F("user_data", BYTES, nullable="0+", default=None),
)
