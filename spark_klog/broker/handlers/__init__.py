"""One file an API: a function from a request to its response (or an awaitable of it), registered here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.handlers import (
    api_versions,
    create_topics,
    delete_topics,
    fetch,
    find_coordinator,
    list_offsets,
    metadata,
    offset_commit,
    offset_fetch,
    produce,
    sasl_authenticate,
    sasl_handshake,
)
from spark_klog.protocol import apis
from spark_klog.protocol.codec import Message

Handler = Callable[[Broker, Request, Message], Message | Awaitable[Message | None] | None]

HANDLERS: dict[int, Handler] = {
    apis.PRODUCE.key: produce.handle,
    apis.FETCH.key: fetch.handle,
    apis.LIST_OFFSETS.key: list_offsets.handle,
    apis.METADATA.key: metadata.handle,
    apis.OFFSET_COMMIT.key: offset_commit.handle,
    apis.OFFSET_FETCH.key: offset_fetch.handle,
    apis.FIND_COORDINATOR.key: find_coordinator.handle,
    apis.API_VERSIONS.key: api_versions.handle,
    apis.CREATE_TOPICS.key: create_topics.handle,
    apis.DELETE_TOPICS.key: delete_topics.handle,
    apis.SASL_HANDSHAKE.key: sasl_handshake.handle,
    apis.SASL_AUTHENTICATE.key: sasl_authenticate.handle,
}
