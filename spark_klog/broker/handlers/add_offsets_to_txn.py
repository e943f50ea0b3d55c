"""AddOffsetsToTxn v0-4: a transaction is going to commit offsets of a group, to its partition of __consumer_offsets."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.offset_manager import OFFSETS_TOPIC
from spark_klog.broker.transactions.transaction import Producer
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_FIRST_FENCED = 2


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group = message["group_id"]
    if not group:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    _, partition = await broker.coordinator_for(group)
    producer = Producer(message["producer_id"], message["producer_epoch"])
    keys = frozenset({(OFFSETS_TOPIC, partition)})
    code = await broker.transactions.add(message["transactional_id"], producer, keys)
    is_old = code is ErrorCode.PRODUCER_FENCED and request.version < _FIRST_FENCED
    return {"error_code": ErrorCode.INVALID_PRODUCER_EPOCH if is_old else code}
