"""The client: connections, cluster metadata, fetches, consumer, producer, offsets, admin.

Public names are imported at first use, so that importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_PUBLIC = {
    "Acl": "spark_klog.client.admin.users",
    "AclFilter": "spark_klog.client.admin.users",
    "Admin": "spark_klog.client.admin.admin",
    "Append": "spark_klog.client.admin.topics",
    "Committed": "spark_klog.client.offsets",
    "ConfigResource": "spark_klog.client.admin.topics",
    "Consumer": "spark_klog.client.consumer.consumer",
    "ConsumerRecord": "spark_klog.client.consumer.decoding",
    "Delivery": "spark_klog.client.producer.receipts",
    "GroupMetadata": "spark_klog.client.offsets",
    "NewTopic": "spark_klog.client.admin.topics",
    "Outcomes": "spark_klog.client.admin.calls",
    "Producer": "spark_klog.client.producer.producer",
    "QuotaEntity": "spark_klog.client.admin.users",
    "Reassignment": "spark_klog.client.admin.topics",
    "RebalanceListener": "spark_klog.client.consumer.group",
    "RecordMetadata": "spark_klog.client.producer.receipts",
    "ScramCredential": "spark_klog.client.admin.users",
    "ScramDeletion": "spark_klog.client.admin.users",
    "Subtract": "spark_klog.client.admin.topics",
    "named_cluster": "spark_klog.client.settings",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
