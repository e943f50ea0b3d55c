"""EndTxn v0-4: commit or abort. The answer comes when that is decided and written down; markers may follow it."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.transactions.transaction import Producer
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_FIRST_FENCED = 2


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    producer = Producer(message["producer_id"], message["producer_epoch"])
    code = await broker.transactions.end(message["transactional_id"], producer, commits=message["committed"])
    is_old = code is ErrorCode.PRODUCER_FENCED and request.version < _FIRST_FENCED
    return {"error_code": ErrorCode.INVALID_PRODUCER_EPOCH if is_old else code}
