"""Internal topics, in which the broker keeps its own state: their names and settings."""

from __future__ import annotations

from collections.abc import Mapping

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})
_SETTINGS = {"cleanup.policy": "compact"}


def with_internal_settings(topic: str, settings: Mapping[str, str]) -> Mapping[str, str]:
    """Add the defaults of internal topics, which are compacted, to a topic's own settings.

    This holds whoever created the topic: a client by Metadata or CreateTopics, a tool, or Apache Kafka, whose data
    directories contain no settings.
    """
    return {**_SETTINGS, **settings} if topic in INTERNAL_TOPICS else settings
