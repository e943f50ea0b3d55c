"""TxnOffsetCommit v0-4: offsets that take effect if the transaction commits; from v3 on with membership (KIP-447)."""

from __future__ import annotations

import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.commit_request import (
    check_offsets,
    encode_commits,
    log_failure,
    not_served,
    response,
    unconfirmed,
)
from spark_klog.broker.transactions.older_clients import as_known
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import BatchTooLarge
from spark_klog.log.sequences import ProducerRefused
from spark_klog.protocol.apis import TXN_OFFSET_COMMIT
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
_NO_MEMBER = -1


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group = message["group_id"]
    producer = ProducerIdAndEpoch(message["producer_id"], message["producer_epoch"])
    checked = await check_offsets(broker, request, message)
    codes, offsets, _ = checked
    while True:
        commits = await encode_commits(group, offsets, producer=(producer.producer_id, producer.epoch))
        log = await broker.coordinator.log_of(group)
        if not group:
            log = ErrorCode.INVALID_GROUP_ID
        if not isinstance(log, ErrorCode):
            verification = await broker.verifier.verify(message["transactional_id"], producer, log, of_offsets=True)
            await broker.flushes.make_early_room(log)
        if not checked.refuse_deleted(broker):  # no await between these checks and the append
            break
    if isinstance(log, ErrorCode):
        failure = log
    elif not (failure := not_served(broker, log) or _membership(broker, message)):
        failure, reason = verification.outcome()
        if failure:
            _log.warning("%s (%s): %s", request.client_id, request.peer, reason)
    if failure:
        codes = dict.fromkeys(codes, as_known(TXN_OFFSET_COMMIT, request.version, failure))
    elif commits is not None and not isinstance(log, ErrorCode):
        try:
            broker.offsets.append(log, commits)
            await broker.flushes.flush_many(log)
            codes |= await unconfirmed(broker, log, offsets)
        except ProducerRefused as error:
            codes |= dict.fromkeys(offsets, error.code)
        except (BatchTooLarge, OSError) as error:
            codes |= log_failure(group, offsets, error)
    return response(message, codes)


def _membership(broker: Broker, message: Message) -> ErrorCode:
    """NONE if the member may commit; a producer without a member id may always, as before KIP-447."""
    generation, member_id, instance_id = message["generation_id"], message["member_id"], message["group_instance_id"]
    if generation == _NO_MEMBER and not member_id and instance_id is None:
        return ErrorCode.NONE
    return broker.groups.may_commit(message["group_id"], member_id, instance_id, generation, in_transaction=True)
