"""InitProducerId v0-5: assign a producer id and epoch (KIP-98, KIP-360).

Without a transactional id, the producer id is new. A transactional id keeps its producer id and gets the next epoch,
which fences earlier instances. If one left a transaction open, it is aborted first (CONCURRENT_TRANSACTIONS meanwhile).
"""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.transactions.older_clients import as_known
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import INIT_PRODUCER_ID
from spark_klog.protocol.codec import Message

_NONE = -1


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    transactional_id = message["transactional_id"]
    expected = ProducerIdAndEpoch(message["producer_id"], message["producer_epoch"])
    if transactional_id == "" or (expected.producer_id == _NONE) != (expected.epoch == _NONE):
        return _failed(ErrorCode.INVALID_REQUEST)
    if transactional_id is None:
        producer_id = await broker.transactions.new_producer_id()
        found = producer_id if isinstance(producer_id, ErrorCode) else ProducerIdAndEpoch(producer_id, 0)
    else:
        known = None if expected.producer_id == _NONE else expected
        found = await broker.transactions.init(transactional_id, message["transaction_timeout_ms"], known)
    if isinstance(found, ErrorCode):
        return _failed(as_known(INIT_PRODUCER_ID, request.version, found))
    return {"error_code": ErrorCode.NONE, "producer_id": found.producer_id, "producer_epoch": found.epoch}


def _failed(code: ErrorCode) -> Message:
    return {"error_code": code, "producer_id": _NONE, "producer_epoch": _NONE}
