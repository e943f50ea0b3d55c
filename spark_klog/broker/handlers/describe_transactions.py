"""DescribeTransactions v0 (KIP-664): the state of transactional ids that this broker coordinates."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.transactions.records import partitions_by_topic
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    ids = dict.fromkeys(message["transactional_ids"])
    return {"transaction_states": [await _describe(broker, request, each) for each in ids]}


async def _describe(broker: Broker, request: Request, transactional_id: str) -> Message:
    none: Message = {
        "transactional_id": transactional_id,
        "transaction_state": "",
        "transaction_timeout_ms": 0,
        "transaction_start_time_ms": 0,
        "producer_id": 0,
        "producer_epoch": 0,
        "topics": [],
    }
    if not broker.authorizer.is_admin(request.session):
        return none | {"error_code": ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    if not transactional_id:
        return none | {"error_code": ErrorCode.INVALID_REQUEST}
    log = await broker.transactions.log_of(transactional_id)
    if isinstance(log, ErrorCode):
        return none | {"error_code": log}
    found = broker.transactions.known(transactional_id)
    if found is None:
        return none | {"error_code": ErrorCode.TRANSACTIONAL_ID_NOT_FOUND}
    topics = partitions_by_topic(found.partitions)
    return {
        "error_code": ErrorCode.NONE,
        "transactional_id": transactional_id,
        "transaction_state": found.state.text,
        "transaction_timeout_ms": found.timeout_ms,
        "transaction_start_time_ms": found.started_ms,
        "producer_id": found.producer.producer_id,
        "producer_epoch": found.producer.epoch,
        "topics": [{"topic": topic, "partitions": partitions} for topic, partitions in topics.items()],
    }
