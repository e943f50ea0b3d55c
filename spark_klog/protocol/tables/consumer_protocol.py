"""What members of consumer groups tell each other through the broker (KIP-62): subscriptions and assignments.

Versions above the known ones are read as these, as Kafka does it; user data and what follows is not needed here.
"""

from __future__ import annotations

from spark_klog.protocol.schema import INT32, STRING, F, array, versioned

SUBSCRIPTION = versioned("ConsumerProtocolSubscription", "0+", F("topics", array(STRING)))

ASSIGNMENT = versioned(
    "ConsumerProtocolAssignment",
    "0+",
    F("assigned_partitions", array(F("topic", STRING), F("partitions", array(INT32)))),
)
