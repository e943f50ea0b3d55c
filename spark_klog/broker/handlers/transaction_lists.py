"""Descriptions of transactions and producers (KIP-664)."""

from __future__ import annotations

import logging

from spark_klog.base.clock import system_ms
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.topic_pattern import TopicPattern, matches_in_turns
from spark_klog.broker.security.authorizer import READ
from spark_klog.broker.transactions.records import partitions_by_topic
from spark_klog.broker.transactions.transaction import State
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
_STATES = {state.text for state in State}
_NONE = -1


async def list_transactions(broker: Broker, request: Request, message: Message) -> Message:
    """ListTransactions v0-2 (KIP-664, KIP-994, KIP-1152): the transactional ids that this broker coordinates."""
    states, producers = set(message["state_filters"]), set(message["producer_id_filters"])
    unknown = sorted(states - _STATES)
    answer = {"error_code": ErrorCode.NONE, "unknown_state_filters": unknown, "transaction_states": []}
    if broker.transactions.is_loading:
        return answer | {"error_code": ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
    if not broker.authorizer.is_admin(request.session):  # as in Kafka, ids that the client may not see are left out
        return answer
    age, now = message["duration_filter"], system_ms()
    pattern = None
    if text := message["transactional_id_pattern"]:
        await broker.turns.take(before_long_step=True)
        try:
            if not text.isascii():
                raise ConfigError("only ASCII is supported in a pattern of transactional ids")
            pattern = TopicPattern(text)
        except ConfigError as error:
            _log.info("%s (%s) lists transactions: %s", request.client_id, request.peer, error)
            return answer | {"error_code": ErrorCode.INVALID_REGULAR_EXPRESSION}
    answer["transaction_states"] = [
        {
            "transactional_id": each.transactional_id,
            "producer_id": each.producer.producer_id,
            "transaction_state": each.state.text,
        }
        async for each in broker.turns.each(broker.transactions)
        if (not states or each.state.text in states)
        and (not producers or each.producer.producer_id in producers)
        and (age < 0 or (each.state is State.ONGOING and now - each.started_ms > age))
        and (pattern is None or await matches_in_turns(pattern, each.transactional_id, broker.turns))
    ]
    return answer


async def describe_transactions(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeTransactions v0 (KIP-664): the state of transactional ids that this broker coordinates."""
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
    known = broker.transactions.known(transactional_id)
    if known is None:
        return none | {"error_code": ErrorCode.TRANSACTIONAL_ID_NOT_FOUND}
    topics = partitions_by_topic(known.partitions)
    return {
        "error_code": ErrorCode.NONE,
        "transactional_id": transactional_id,
        "transaction_state": known.state.text,
        "transaction_timeout_ms": known.timeout_ms,
        "transaction_start_time_ms": known.started_ms,
        "producer_id": known.producer.producer_id,
        "producer_epoch": known.producer.epoch,
        "topics": [{"topic": topic, "partitions": partitions} for topic, partitions in topics.items()],
    }


async def describe_producers(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeProducers v0 (KIP-664): producers in partitions led here, with their open transactions."""
    topics = []
    answered: set[tuple[str, int]] = set()
    async for topic in broker.turns.each(message["topics"]):
        name = topic["name"]
        indexes = [index for index in dict.fromkeys(topic["partition_indexes"]) if (name, index) not in answered]
        answered.update((name, index) for index in indexes)
        partitions = [await _partition(broker, request, name, index) for index in indexes]
        topics.append({"name": name, "partitions": partitions})
    return {"topics": topics}


async def _partition(broker: Broker, request: Request, topic: str, index: int) -> Message:
    log = broker.authorizer.refusal(request.session, READ, topic) or await broker.partitions.leader_log(
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
