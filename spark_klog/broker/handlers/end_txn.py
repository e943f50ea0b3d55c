"""EndTxn v0-4: commit or abort. The response is sent once the decision is written; markers may follow later."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.transactions.older_clients import as_known
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.protocol.apis import END_TXN
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    producer = ProducerIdAndEpoch(message["producer_id"], message["producer_epoch"])
    code = await broker.transactions.end(message["transactional_id"], producer, commits=message["committed"])
    return {"error_code": as_known(END_TXN, request.version, code)}
