"""Why a topic can't be created, changed or deleted."""

from __future__ import annotations

from spark_klog.errors import ConfigError


class TopicCollides(ConfigError):
    """The name differs from another topic's only in '.' and '_', which Kafka's metrics do not distinguish."""


class TopicExists(ConfigError):
    """The topic exists already."""


class UnknownTopic(ConfigError):
    """The topic does not exist."""


class InvalidPartitions(ConfigError):
    """The topic can't have that number of partitions."""


class InvalidAssignment(ConfigError):
    """The partitions can't be assigned to these brokers."""
