"""Transactions: what producers request of their coordinator, and coordinators of the partitions' leaders.

And descriptions of transactions and producers (KIP-664).
"""

from __future__ import annotations

import logging
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.topic_pattern import TopicPattern, matches_in_turns
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS, OFFSETS_TOPIC
from spark_klog.broker.security.authorizer import READ, WRITE
from spark_klog.broker.transactions.markers import MarkerEntry, write_marker
from spark_klog.broker.transactions.records import partitions_by_topic
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch, State
from spark_klog.broker.transactions.verification import as_known
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.apis import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.transactions import FIRST_END_OF_TRANSACTIONS_2

_log = logging.getLogger(__name__)
_FIELDS = ("transactional_id", "producer_id", "producer_epoch", "topics")
_FIRST_BATCHED = 4
_NONE = -1
_STATES = {state.text for state in State}


async def write_txn_markers(broker: Broker, request: Request, message: Message) -> Message:
    """WriteTxnMarkers v1-2: end transactions in partitions that this broker leads, for another broker or an admin."""
    is_admin = broker.authorizer.is_admin(request.session)
    return {"markers": [await _write(broker, entry, is_admin) async for entry in broker.turns.each(message["markers"])]}


async def _write(broker: Broker, entry: dict[str, Any], is_admin: bool) -> Message:
    producer = ProducerIdAndEpoch(entry["producer_id"], entry["producer_epoch"])
    marker = MarkerEntry(
        producer, entry["transaction_result"], entry["coordinator_epoch"], entry["transaction_version"]
    )

    async def written(topic: str, partition: int) -> Message:
        await broker.turns.take()
        code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        if is_admin:
            code = await write_marker(broker.partitions, broker.coordinator, (topic, partition), marker)
        return {"partition_index": partition, "error_code": code}

    topics = []
    async for topic in broker.turns.each(
        entry["topics"]
    ):  # Python 3.10 has no await in a comprehension within another one
        partitions = [await written(topic["name"], each) for each in dict.fromkeys(topic["partition_indexes"])]
        topics.append({"name": topic["name"], "partitions": partitions})
    return {"producer_id": producer.producer_id, "topics": topics}


async def end_txn(broker: Broker, request: Request, message: Message) -> Message:
    """EndTxn v0-5: commit or abort. The response is sent once the decision is written; markers may follow later.

    Version 5 is of transaction.version 2: it raises the epoch, and answers what the next transaction has (KIP-890).
    """
    producer = ProducerIdAndEpoch(message["producer_id"], message["producer_epoch"])
    if request.version >= FIRST_END_OF_TRANSACTIONS_2:
        transactional_id, commits = message["transactional_id"], message["committed"]
        outcome = await broker.transactions.end_and_raise(transactional_id, producer, commits=commits)
        if isinstance(outcome, ErrorCode):
            return _failed(outcome)
        return {"error_code": ErrorCode.NONE, "producer_id": outcome.producer_id, "producer_epoch": outcome.epoch}
    code = await broker.transactions.end(message["transactional_id"], producer, commits=message["committed"])
    return {"error_code": as_known(END_TXN, request.version, code)}


async def add_offsets_to_txn(broker: Broker, request: Request, message: Message) -> Message:
    """AddOffsetsToTxn v0-4: add a group's partition of __consumer_offsets to a transaction, before its offsets."""
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


async def add_partitions_to_txn(broker: Broker, request: Request, message: Message) -> Message:
    """AddPartitionsToTxn v0-5: add partitions to a transaction, before it writes to them.

    Clients use versions up to 3, for one transaction. Brokers use version 4 and later, for several transactions, or
    only to verify that partitions are in one (KIP-890). If one partition can't be added, none is.
    """
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
    topics = broker.turns.each(entry["topics"])
    keys = [(topic["name"], partition) async for topic in topics for partition in topic["partitions"]]
    codes = {key: await _refusal(broker, request, key, verify_only=verify_only) for key in keys}
    if verify_only:
        for key in keys:
            codes[key] = codes[key] or await broker.transactions.verify(transactional_id, producer, key)
    elif any(codes.values()):
        codes = {key: code or ErrorCode.OPERATION_NOT_ATTEMPTED for key, code in codes.items()}
    else:
        by_leader = request.version >= _FIRST_BATCHED
        code = await broker.transactions.add(transactional_id, producer, frozenset(keys), by_leader=by_leader)
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
    topic = await broker.partitions.topic(key[0])
    is_there = topic is not None and key[1] in topic.assignment
    return ErrorCode.NONE if is_there else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def init_producer_id(broker: Broker, request: Request, message: Message) -> Message:
    """InitProducerId v0-5: assign a producer id and epoch (KIP-98, KIP-360).

    Without a transactional id, the producer id is new. A transactional id keeps its producer id and gets the next
    epoch, which fences earlier instances. If one left a transaction open, it is aborted first (CONCURRENT_TRANSACTIONS
    meanwhile).
    """
    transactional_id = message["transactional_id"]
    expected = ProducerIdAndEpoch(message["producer_id"], message["producer_epoch"])
    if transactional_id == "" or (expected.producer_id == _NONE) != (expected.epoch == _NONE):
        return _failed(ErrorCode.INVALID_REQUEST)
    if transactional_id is None:
        producer_id = await broker.transactions.new_producer_id()
        outcome = producer_id if isinstance(producer_id, ErrorCode) else ProducerIdAndEpoch(producer_id, 0)
    else:
        known = None if expected.producer_id == _NONE else expected
        outcome = await broker.transactions.init(transactional_id, message["transaction_timeout_ms"], known)
    if isinstance(outcome, ErrorCode):
        return _failed(as_known(INIT_PRODUCER_ID, request.version, outcome))
    return {"error_code": ErrorCode.NONE, "producer_id": outcome.producer_id, "producer_epoch": outcome.epoch}


def _failed(code: ErrorCode) -> Message:
    return {"error_code": code, "producer_id": _NONE, "producer_epoch": _NONE}


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
