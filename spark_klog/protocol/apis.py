"""The APIs by name and by key."""

from __future__ import annotations

from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.coordinator import FIND_COORDINATOR, OFFSET_COMMIT, OFFSET_FETCH
from spark_klog.protocol.tables.fetch import FETCH
from spark_klog.protocol.tables.list_offsets import LIST_OFFSETS
from spark_klog.protocol.tables.metadata import API_VERSIONS, METADATA
from spark_klog.protocol.tables.produce import PRODUCE
from spark_klog.protocol.tables.sasl import SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.protocol.tables.topics import CREATE_TOPICS, DELETE_TOPICS

__all__ = [
    "API_VERSIONS",
    "BY_KEY",
    "CREATE_TOPICS",
    "DELETE_TOPICS",
    "FETCH",
    "FIND_COORDINATOR",
    "LIST_OFFSETS",
    "METADATA",
    "OFFSET_COMMIT",
    "OFFSET_FETCH",
    "PRODUCE",
    "SASL_AUTHENTICATE",
    "SASL_HANDSHAKE",
]

BY_KEY: dict[int, Api] = {
    api.key: api
    for api in (
        PRODUCE,
        FETCH,
        LIST_OFFSETS,
        METADATA,
        OFFSET_COMMIT,
        OFFSET_FETCH,
        FIND_COORDINATOR,
        API_VERSIONS,
        CREATE_TOPICS,
        DELETE_TOPICS,
        SASL_HANDSHAKE,
        SASL_AUTHENTICATE,
    )
}
