"""AddPartitionsToTxn v0-5: add partitions to a transaction, before it writes to them.

Clients use versions up to 3, for one transaction. Brokers use version 4 and later, for several transactions, or only to
verify that partitions are in one (KIP-890). If one partition can't be added, none is.
"""

from __future__ import annotations

from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.security.authorizer import WRITE
from spark_klog.broker.transactions.older_clients import as_known
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch, TopicPartition
from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import ADD_PARTITIONS_TO_TXN
from spark_klog.protocol.codec import Message

_FIELDS = ("transactional_id", "producer_id", "producer_epoch", "topics")
_FIRST_BATCHED = 4


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if request.version >= _FIRST_BATCHED:
        results = [
            {
                "transactional_id": entry["transactional_id"],
                "topic_results": await _add(broker, request, entry, verify_only=entry["verify_only"]),
            }
            for entry in message["transactions"]
        ]
        return {"error_code": ErrorCode.NONE, "results_by_transaction": results}
    entry = {name: message[f"v3_and_below_{name}"] for name in _FIELDS}
    return {"results_by_topic_v3_and_below": await _add(broker, request, entry, verify_only=False)}


async def _add(broker: Broker, request: Request, entry: dict[str, Any], *, verify_only: bool) -> list[Message]:
    transactional_id = entry["transactional_id"]
    producer = ProducerIdAndEpoch(entry["producer_id"], entry["producer_epoch"])
    keys = [(topic["name"], partition) for topic in entry["topics"] for partition in topic["partitions"]]
    codes = {key: await _refusal(broker, request, key, verify_only=verify_only) for key in keys}
    if verify_only:
        for key in keys:
            codes[key] = codes[key] or await broker.transactions.verify(transactional_id, producer, key)
    elif any(codes.values()):
        codes = {key: code or ErrorCode.OPERATION_NOT_ATTEMPTED for key, code in codes.items()}
    else:
        code = await broker.transactions.add(transactional_id, producer, frozenset(keys))
        codes = dict.fromkeys(keys, code)
    return [
        {
            "name": topic["name"],
            "results_by_partition": [
                {
                    "partition_index": partition,
                    "partition_error_code": as_known(
                        ADD_PARTITIONS_TO_TXN, request.version, codes[topic["name"], partition]
                    ),
                }
                for partition in topic["partitions"]
            ],
        }
        for topic in entry["topics"]
    ]


async def _refusal(broker: Broker, request: Request, key: TopicPartition, *, verify_only: bool) -> ErrorCode:
    if key[0] in INTERNAL_TOPICS and not verify_only:  # as in Kafka; AddOffsetsToTxn adds __consumer_offsets
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED
    if refusal := broker.authorizer.refusal(request.session, WRITE, key[0]):
        return refusal
    topic = await broker.topic(key[0])
    is_there = topic is not None and key[1] in topic.assignment
    return ErrorCode.NONE if is_there else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
