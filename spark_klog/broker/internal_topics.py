"""The topics that the broker keeps its own state in: their names, and what they are created with."""

from __future__ import annotations

from collections.abc import Mapping

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})
_SETTINGS = {"cleanup.policy": "compact"}


def with_internal_settings(topic: str, settings: Mapping[str, str]) -> Mapping[str, str]:
    """A topic's settings; an internal topic is compacted unless its own settings say otherwise.

    Whoever created it: a client by Metadata or CreateTopics, a tool, or Apache Kafka, whose data directories hold no
    settings.
    """
    return {**_SETTINGS, **settings} if topic in INTERNAL_TOPICS else settings
