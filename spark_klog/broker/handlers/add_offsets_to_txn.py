"""AddOffsetsToTxn v0-4: add a group's partition of __consumer_offsets to a transaction, before it commits offsets."""

from __future__ import annotations

import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.transactions.older_clients import as_known
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.protocol.apis import ADD_OFFSETS_TO_TXN
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group = message["group_id"]
    if not group:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    try:
        _, partition = await broker.coordinator.find(group)
    except DirectoryError as error:
        _log.error("group %s has no coordinator: %s", group, error)
        return {"error_code": ErrorCode.COORDINATOR_NOT_AVAILABLE}
    producer = ProducerIdAndEpoch(message["producer_id"], message["producer_epoch"])
    keys = frozenset({(OFFSETS_TOPIC, partition)})
    code = await broker.transactions.add(message["transactional_id"], producer, keys)
    return {"error_code": as_known(ADD_OFFSETS_TO_TXN, request.version, code)}
