"""WriteTxnMarkers v1: end transactions in partitions that this broker leads, for another broker or an admin."""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.transactions.markers import MarkerEntry, write_marker
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    is_admin = broker.authorizer.is_admin(request.session)
    return {"markers": [await _write(broker, entry, is_admin) for entry in message["markers"]]}


async def _write(broker: Broker, entry: dict[str, Any], is_admin: bool) -> Message:
    producer = ProducerIdAndEpoch(entry["producer_id"], entry["producer_epoch"])
    marker = MarkerEntry(producer, entry["transaction_result"], entry["coordinator_epoch"])

    async def written(topic: str, partition: int) -> Message:
        await broker.turns.take()
        code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        if is_admin:
            code = await write_marker(broker, (topic, partition), marker)
        return {"partition_index": partition, "error_code": code}

    topics = []
    for topic in entry["topics"]:  # Python 3.10 has no await in a comprehension within another one
        partitions = [await written(topic["name"], each) for each in dict.fromkeys(topic["partition_indexes"])]
        topics.append({"name": topic["name"], "partitions": partitions})
    return {"producer_id": producer.producer_id, "topics": topics}
