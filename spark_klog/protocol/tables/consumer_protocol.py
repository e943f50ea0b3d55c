"""Subscriptions and assignments that members of consumer groups exchange through the broker (KIP-62).

Unknown newer versions are read as the known ones, as in Kafka; user data and later fields are ignored.
"""

from __future__ import annotations

from spark_klog.protocol.schema import INT32, STRING, F, array, versioned

SUBSCRIPTION = versioned("ConsumerProtocolSubscription", "0+", F("topics", array(STRING)))

ASSIGNMENT = versioned(
    "ConsumerProtocolAssignment",
    "0+",
    F("assigned_partitions", array(F("topic", STRING), F("partitions", array(INT32)))),
)
