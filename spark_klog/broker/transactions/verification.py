"""Transaction errors by version of the client, and verification of transactional batches.

`as_known` replaces errors that older clients do not know: KIP-588 (PRODUCER_FENCED), KIP-890 (TRANSACTION_ABORTABLE),
KIP-1319 (STALE_MEMBER_EPOCH is fatal for producers older than 4.4), KAFKA-7296 (COORDINATOR_LOAD_IN_PROGRESS for those
older than 2.0).

`TransactionVerifier` (KIP-890): the leader of a partition asks the transaction's coordinator about a batch, or has it
add the partition.
"""

from __future__ import annotations

import asyncio
import logging
import time

from spark_klog.base.names import TopicPartition
from spark_klog.broker.metadata.registry import Registry
from spark_klog.broker.transactions.coordinator import TransactionCoordinator
from spark_klog.broker.transactions.markers import UNANSWERED, ask
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol import apis
from spark_klog.protocol.apis import ADD_OFFSETS_TO_TXN, ADD_PARTITIONS_TO_TXN
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_FENCED = ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH
_ABORTABLE = ErrorCode.TRANSACTION_ABORTABLE, ErrorCode.INVALID_TXN_STATE
_STALE = ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.ILLEGAL_GENERATION
_LOADING = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE
#: By API and error: the first version that knows the error, and its replacement in earlier versions.
_FIRST: dict[tuple[int, ErrorCode], tuple[int, ErrorCode]] = {
    (api.key, code): (version, instead)
    for (code, instead), api, version in (
        (_FENCED, apis.ADD_PARTITIONS_TO_TXN, 2),
        (_FENCED, apis.ADD_OFFSETS_TO_TXN, 2),
        (_FENCED, apis.END_TXN, 2),
        (_FENCED, apis.INIT_PRODUCER_ID, 4),
        (_ABORTABLE, apis.PRODUCE, 11),
        (_ABORTABLE, apis.ADD_PARTITIONS_TO_TXN, 5),
        (_ABORTABLE, apis.TXN_OFFSET_COMMIT, 4),
        (_LOADING, apis.TXN_OFFSET_COMMIT, 2),
        (_STALE, apis.TXN_OFFSET_COMMIT, 6),
    )
}
_log = logging.getLogger(__name__)
#: First version of AddPartitionsToTxn that brokers send each other.
_BATCHED = 4
#: The version of AddOffsetsToTxn that brokers send each other.
_ADD_OFFSETS = 4
#: Seconds that a batch waits for the end of the transaction before its own, and between looks at it; as in Kafka.
_LONGEST_WAIT, _PAUSE = 0.1, 0.02
#: Errors after which a broker that verifies a transaction must ask again.
_PASSING = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    }
)


def as_known(api: Api, version: int, code: ErrorCode) -> ErrorCode:
    """The error to send to a client of this version."""
    first, instead = _FIRST.get((api.key, code), (0, code))
    return instead if version < first else code


class Verification:
    """The answer to whether a batch belongs to an ongoing transaction; `outcome` says whether it still holds."""

    def __init__(
        self, transactional_id: str, producer: ProducerIdAndEpoch, log: PartitionLog, *, of_offsets: bool, adds: bool
    ) -> None:
        self._transactional_id, self._producer, self._log = transactional_id, producer, log
        self._of_offsets, self._adds = of_offsets, adds
        self._ended = _ended_transactions(log, producer)
        #: The coordinator's answer.
        self.code = ErrorCode.NONE

    def outcome(self) -> tuple[ErrorCode, str]:
        """(error, reason), NONE if the batch may be appended now, without an await in between."""
        code, log = self.code, self._log
        if self._ended != _ended_transactions(log, self._producer):  # a marker came since: the answer may be outdated
            code = ErrorCode.CONCURRENT_TRANSACTIONS
        if code is ErrorCode.NONE:
            return code, ""
        if code is ErrorCode.PRODUCER_FENCED:
            return ErrorCode.INVALID_PRODUCER_EPOCH, f"transactional.id={self._transactional_id}"
        reason = f"transaction {self._transactional_id!r} does not have {log.topic}-{log.partition}: {code.name}"
        if code in _PASSING:  # an error that every client version knows and retries
            passing = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if self._of_offsets else ErrorCode.NOT_ENOUGH_REPLICAS
            return passing, reason
        return code if self._adds else ErrorCode.TRANSACTION_ABORTABLE, reason


class TransactionVerifier:
    """Asks for the transactions of the partitions that this broker leads; `coordinator` has the ids of this broker."""

    def __init__(self, registry: Registry, coordinator: TransactionCoordinator) -> None:
        self._registry, self._coordinator = registry, coordinator

    async def verify(
        self,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        log: PartitionLog,
        *,
        adds: bool = False,
        group: str | None = None,
    ) -> Verification:
        """Check that a batch belongs to an ongoing transaction, of offsets of a `group` or of records.

        `adds` adds the partition to the transaction, or begins it (transaction.version 2); it waits a moment for the
        end of the one before. Only the first batch of a transaction in a log is verified. `as_known` replaces
        TRANSACTION_ABORTABLE for clients that do not know it.
        """
        until = time.monotonic() + _LONGEST_WAIT
        while True:
            verification = Verification(transactional_id, producer, log, of_offsets=group is not None, adds=adds)
            known = log.producers.producers.get(producer.producer_id)
            if known is not None and known.epoch == producer.epoch and known.is_in_transaction:
                return verification
            if known is not None and known.epoch > producer.epoch:  # its coordinator may not know its id any more
                verification.code = ErrorCode.PRODUCER_FENCED
                return verification
            key = log.topic, log.partition
            if adds:
                verification.code = await self._add(transactional_id, producer, key, group)
            else:
                verification.code = await self._verify(transactional_id, producer, key)
            is_ending = adds and verification.code is ErrorCode.CONCURRENT_TRANSACTIONS
            if not is_ending or time.monotonic() >= until:
                return verification
            await asyncio.sleep(_PAUSE)

    async def _add(
        self, transactional_id: str, producer: ProducerIdAndEpoch, key: TopicPartition, group: str | None
    ) -> ErrorCode:
        node = await self._coordinator_of(transactional_id)
        if isinstance(node, ErrorCode):
            return node
        if node == self._registry.broker_id:
            return await self._coordinator.add(transactional_id, producer, frozenset({key}), by_leader=True)
        if group is None:
            return await self._ask_about_partition(node, transactional_id, producer, key, verify_only=False)
        request = {
            "transactional_id": transactional_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "group_id": group,
        }
        answer = await self._ask(node, ADD_OFFSETS_TO_TXN, _ADD_OFFSETS, request)
        return answer if isinstance(answer, ErrorCode) else ErrorCode(answer["error_code"])

    async def _verify(self, transactional_id: str, producer: ProducerIdAndEpoch, key: TopicPartition) -> ErrorCode:
        node = await self._coordinator_of(transactional_id)
        if isinstance(node, ErrorCode):
            return node
        if node == self._registry.broker_id:
            return await self._coordinator.verify(transactional_id, producer, key)
        return await self._ask_about_partition(node, transactional_id, producer, key, verify_only=True)

    async def _coordinator_of(self, transactional_id: str) -> int | ErrorCode:
        try:
            node, _ = await self._coordinator.find(transactional_id)
        except DirectoryError:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        return node

    async def _ask_about_partition(
        self,
        node: int,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        key: TopicPartition,
        *,
        verify_only: bool,
    ) -> ErrorCode:
        entry = {
            "transactional_id": transactional_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "verify_only": verify_only,
            "topics": [{"name": key[0], "partitions": [key[1]]}],
        }
        answer = await self._ask(node, ADD_PARTITIONS_TO_TXN, _BATCHED, {"transactions": [entry]})
        if isinstance(answer, ErrorCode):
            return answer
        results = [
            ErrorCode(entry["partition_error_code"])
            for result in answer["results_by_transaction"]
            for topic in result["topic_results"]
            for entry in topic["results_by_partition"]
        ]
        return results[0] if results else ErrorCode(answer["error_code"])

    async def _ask(self, node: int, api: Api, version: int, request: Message) -> Message | ErrorCode:
        try:
            return await ask(self._registry, node, api, version, request)
        except UNANSWERED as error:
            _log.warning("broker %d can't be asked for a transaction (%s): %s", node, api.name, error)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE


def _ended_transactions(log: PartitionLog, producer: ProducerIdAndEpoch) -> int:
    known = log.producers.producers.get(producer.producer_id)
    return 0 if known is None else known.ended_transactions
