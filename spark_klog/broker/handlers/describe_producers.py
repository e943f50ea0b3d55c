"""DescribeProducers v0 (KIP-664): producers in partitions led here, with their open transactions."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.authorizer import READ
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_NONE = -1


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    topics = []
    answered: set[tuple[str, int]] = set()
    for topic in message["topics"]:
        name = topic["name"]
        indexes = [index for index in dict.fromkeys(topic["partition_indexes"]) if (name, index) not in answered]
        answered.update((name, index) for index in indexes)
        partitions = [await _partition(broker, request, name, index) for index in indexes]
        topics.append({"name": name, "partitions": partitions})
    return {"topics": topics}


async def _partition(broker: Broker, request: Request, topic: str, index: int) -> Message:
    log = broker.authorizer.refusal(request.session, READ, topic) or await broker.leader_log(
        topic, index, for_reading=True
    )
    if isinstance(log, ErrorCode):
        return {"partition_index": index, "error_code": log, "active_producers": []}
    producers = [
        {
            "producer_id": producer_id,
            "producer_epoch": producer.epoch,
            "last_sequence": producer.batches[-1].last_sequence if producer.batches else _NONE,
            "last_timestamp": producer.last_timestamp,
            "coordinator_epoch": producer.coordinator_epoch,
            "current_txn_start_offset": producer.transaction_first_offset,
        }
        for producer_id, producer in log.producers.producers.items()
    ]
    return {"partition_index": index, "error_code": ErrorCode.NONE, "active_producers": producers}
