"""The client: connections, cluster metadata, fetches, consumer, producer, offsets, admin.

Public names are imported at first use, so that importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_klog.base.names import imported_at_first_use

if TYPE_CHECKING:
    from spark_klog.client.admin.admin import Admin
    from spark_klog.client.admin.calls import Outcomes
    from spark_klog.client.admin.topics import Append, ConfigResource, NewTopic, Reassignment, Subtract
    from spark_klog.client.admin.users import Acl, AclFilter, QuotaEntity, ScramCredential, ScramDeletion
    from spark_klog.client.consumer.consumer import Consumer
    from spark_klog.client.consumer.decoding import ConsumerRecord
    from spark_klog.client.consumer.group import RebalanceListener
    from spark_klog.client.offsets import Committed, GroupMetadata
    from spark_klog.client.producer.producer import Producer
    from spark_klog.client.producer.receipts import Delivery, RecordMetadata
    from spark_klog.client.settings import named_cluster

__all__ = [
    "Acl",
    "AclFilter",
    "Admin",
    "Append",
    "Committed",
    "ConfigResource",
    "Consumer",
    "ConsumerRecord",
    "Delivery",
    "GroupMetadata",
    "NewTopic",
    "Outcomes",
    "Producer",
    "QuotaEntity",
    "Reassignment",
    "RebalanceListener",
    "RecordMetadata",
    "ScramCredential",
    "ScramDeletion",
    "Subtract",
    "named_cluster",
]

__getattr__ = imported_at_first_use(
    __name__,
    {
        "admin.admin": "Admin",
        "admin.calls": "Outcomes",
        "admin.topics": "Append ConfigResource NewTopic Reassignment Subtract",
        "admin.users": "Acl AclFilter QuotaEntity ScramCredential ScramDeletion",
        "consumer.consumer": "Consumer",
        "consumer.decoding": "ConsumerRecord",
        "consumer.group": "RebalanceListener",
        "offsets": "Committed GroupMetadata",
        "producer.producer": "Producer",
        "producer.receipts": "Delivery RecordMetadata",
        "settings": "named_cluster",
    },
)
