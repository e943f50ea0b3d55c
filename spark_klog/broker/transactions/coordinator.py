"""Producer ids, and the transaction coordinator (KIP-98).

A broker claims blocks of 1000 producer ids, unique over all brokers and restarts. Brokers that share a tree claim them
by compare-and-set in its node /latest_producer_id_block, as Kafka does; a broker without one uses a file in its data
directory, with the same content. A restart discards the rest of a block.

The coordinator runs the state machine of `transaction.py` with a clock, a log and pending requests. A transactional id
lives in one partition of __transaction_state; the broker that leads it coordinates the id. Each change is appended
there before it is answered, so a broker that was killed resumes: it completes the transactions that it finds prepared
(PrepareCommit, PrepareAbort). Before EndTxn is answered, the coordinator writes markers to the partitions that this
broker leads, so most transactions have ended by then. `run` sends the other markers to their leaders, and retries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TRANSACTIONS_2, TopicPartition
from spark_klog.broker.coordinator import Coordinator
from spark_klog.broker.event_loop import MAX_ID_LENGTH, Pace
from spark_klog.broker.groups.coordinator import GroupCoordinator
from spark_klog.broker.metadata.internal_topics import TRANSACTIONS_TOPIC
from spark_klog.broker.metadata.nodes import replace_node
from spark_klog.broker.metadata.registry import NO_LEADER
from spark_klog.broker.partitions import ServedPartitions
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.broker.topic_changes import TopicChanges
from spark_klog.broker.transactions import transaction as machine
from spark_klog.broker.transactions.markers import MarkerEntry, MarkerSender, write_marker
from spark_klog.broker.transactions.records import encode_key, encode_value, read_transactions
from spark_klog.broker.transactions.transaction import (
    NeedsProducerId,
    Outcome,
    ProducerIdAndEpoch,
    Transaction,
)
from spark_klog.errors import DirectoryError, ErrorCode, KlogError
from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_log import PartitionLog
from spark_klog.trees import paths
from spark_klog.trees.tree import Tree

_log = logging.getLogger(__name__)
_BLOCK = 1000
_MAX_ID = 2**63 - 1
#: File name in the data directory.
PRODUCER_IDS = "latest_producer_id_block"
_RETRY_SECONDS = 0.5
#: The marker was written, or can't or need not be written any more.
_SETTLED = frozenset(
    {
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.TRANSACTION_COORDINATOR_FENCED,
    }
)


def claim_in_tree(tree: Tree, broker_id: int, floor: int) -> range:
    """Claim a block of unused ids, none below `floor`, in the tree that brokers share. Raises `DirectoryError`."""
    path = paths.PRODUCER_IDS_PATH
    while True:
        before = tree.get(path)  # b"" if Kafka has started here: it creates the node without a value
        block = _following(before, floor, path)
        if replace_node(tree, path, before, paths.producer_ids_payload(broker_id, block[0], block[-1])):
            return block


def claim_in_file(path: Path, broker_id: int, floor: int) -> range:
    """The same in a file. Raises `DirectoryError`, `DecodeError` or OSError."""
    files = FileSystem()
    try:
        before: bytes | None = files.read(path)
    except FileNotFoundError:
        before = None
    block = _following(before, floor, str(path))
    files.replace(path, paths.producer_ids_payload(broker_id, block[0], block[-1]))
    return block


def _following(before: bytes | None, floor: int, where: str) -> range:
    first = max(floor, paths.parse_producer_ids(before, where) + 1 if before else 0)
    if first > _MAX_ID - _BLOCK:
        raise DirectoryError(f"{where}: no producer ids are left above {first - 1}")
    return range(first, first + _BLOCK)


def _marker(transaction: Transaction, log: PartitionLog) -> MarkerEntry:
    """The marker of a prepared transaction; `log` has its state."""
    return MarkerEntry(transaction.producer, transaction.commits, log.leader_epoch, transaction.version)


class TransactionCoordinator(Coordinator):
    """All transactional ids whose partitions this broker leads. For one event loop.

    `claim` returns a block of unused producer ids, none below its argument, and blocks the thread.
    """

    def __init__(
        self,
        config: BrokerConfig,
        partitions: ServedPartitions,
        changes: TopicChanges,
        groups: GroupCoordinator,
        claim: Callable[[int], range],
    ) -> None:
        super().__init__(config, partitions, changes, TRANSACTIONS_TOPIC, "transaction")
        self._groups = groups
        self._claim, self._claiming = claim, asyncio.Lock()
        #: The rest of the block of producer ids.
        self._free_ids = iter(range(0))
        self._transactions: dict[str, Transaction] = {}
        #: Prepared transactions: partitions without a marker yet.
        self._missing: dict[str, set[TopicPartition]] = {}
        #: Ids whose markers are being written.
        self._writing: set[str] = set()
        #: Ids whose record can't be read: serving them would reset their epochs.
        self._unread_ids: set[str] = set()
        self._markers = MarkerSender(self._registry)
        self._is_due = asyncio.Event()

    @property
    def _version(self) -> int:
        """The cluster's transaction.version."""
        return self._registry.transaction_version

    def __iter__(self) -> Iterator[Transaction]:
        return iter(list(self._transactions.values()))

    def known(self, transactional_id: str) -> Transaction | None:
        return self._transactions.get(transactional_id)

    async def log_of(self, key: str, *, for_reading: bool = False) -> PartitionLog | ErrorCode:
        """As in `Coordinator`; also an error for an id whose record could not be read."""
        log = await super().log_of(key, for_reading=for_reading)
        return ErrorCode.COORDINATOR_NOT_AVAILABLE if key in self._unread_ids else log

    async def new_producer_id(self) -> int | ErrorCode:
        """An id that was never given before; if none can be claimed, an error after which clients retry."""
        if self.is_loading:  # ids of stored transactions are unknown yet and might be given twice
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        async with self._claiming:
            producer_id = next(self._free_ids, None)
            if producer_id is None:
                # above all in the logs and transactions here, which may come from another cluster
                used = [max(log.producers.producers, default=-1) for log in self._logs.logs.values()]
                used += [known.producer.producer_id for known in self._transactions.values()]
                try:
                    block = await asyncio.to_thread(self._claim, max(used, default=-1) + 1)
                except (KlogError, OSError) as error:
                    _log.error("producer ids can't be claimed: %s", error)
                    return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
                _log.info("claimed producer ids %d to %d", block[0], block[-1])
                self._free_ids = iter(block)
                producer_id = next(self._free_ids)
            return producer_id

    async def init(
        self, transactional_id: str, timeout_ms: int, expected: ProducerIdAndEpoch | None
    ) -> ProducerIdAndEpoch | ErrorCode:
        log = await self.log_of(transactional_id)
        if isinstance(log, ErrorCode):
            return log
        if len(transactional_id) > MAX_ID_LENGTH and transactional_id not in self._transactions:
            return ErrorCode.INVALID_REQUEST
        if not 0 < timeout_ms <= self._config.transaction_max_timeout_ms:
            return ErrorCode.INVALID_TRANSACTION_TIMEOUT
        new_id: int | None = None
        while True:
            now = system_ms()
            before = self._transactions.get(transactional_id)
            try:
                if before is None:
                    if new_id is None:
                        raise NeedsProducerId
                    before = machine.created(transactional_id, new_id, timeout_ms, now)
                outcome = machine.init(before, timeout_ms, expected, now, new_id, self._version)
            except NeedsProducerId:
                claimed = await self.new_producer_id()
                if isinstance(claimed, ErrorCode):
                    return claimed
                new_id = claimed
                await self._flushes.make_early_room(log)  # others have appended meanwhile
                continue
            if code := await self._keep(log, outcome):
                return code
            assert isinstance(outcome, Transaction)
            if not outcome.is_prepared:
                return outcome.producer
            # the previous instance's transaction must be aborted first; who wants to go on from it asks again, as in
            # Kafka: who only fences it is content, and leaves the id to be seen as aborted
            if transactional_id in self._missing or expected is not None:
                return ErrorCode.CONCURRENT_TRANSACTIONS

    async def add(
        self,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        partitions: frozenset[TopicPartition],
        *,
        by_leader: bool = False,
    ) -> ErrorCode:
        """Handle AddPartitionsToTxn and AddOffsetsToTxn, of a client or of the leader that has its records."""
        version = TRANSACTIONS_2 if by_leader else 0
        return await self._change(
            transactional_id, lambda before: machine.add(before, producer, partitions, system_ms(), version)
        )

    async def end(self, transactional_id: str, producer: ProducerIdAndEpoch, *, commits: bool) -> ErrorCode:
        """Handle EndTxn before version 5."""
        return await self._change(
            transactional_id, lambda before: machine.end(before, producer, commits=commits, now_ms=system_ms())
        )

    async def end_and_raise(
        self, transactional_id: str, producer: ProducerIdAndEpoch, *, commits: bool
    ) -> ProducerIdAndEpoch | ErrorCode:
        """Handle EndTxn from version 5 on; returns what the producer's next transaction has."""
        new_id: int | None = None
        while True:
            known = await self._known_with_log(transactional_id)
            if isinstance(known, ErrorCode):
                return known
            before, log = known
            try:
                outcome = machine.end_and_raise(before, producer, commits=commits, now_ms=system_ms(), new_id=new_id)
            except NeedsProducerId:
                claimed = await self.new_producer_id()
                if isinstance(claimed, ErrorCode):
                    return claimed
                new_id = claimed
                continue
            following = before.following if isinstance(outcome, ErrorCode) else outcome.following
            return await self._keep(log, outcome) or following

    async def verify(self, transactional_id: str, producer: ProducerIdAndEpoch, partition: TopicPartition) -> ErrorCode:
        """Check, against the ids of this broker, whether a producer may write to a partition; NONE or the error."""
        known = await self._known_with_log(transactional_id)
        return known if isinstance(known, ErrorCode) else machine.verify(known[0], producer, partition)

    async def _change(self, transactional_id: str, event: Callable[[Transaction], Outcome]) -> ErrorCode:
        known = await self._known_with_log(transactional_id)
        return known if isinstance(known, ErrorCode) else await self._keep(known[1], event(known[0]))

    async def _known_with_log(self, transactional_id: str) -> tuple[Transaction, PartitionLog] | ErrorCode:
        if not transactional_id:
            return ErrorCode.INVALID_REQUEST
        log = await self.log_of(transactional_id)
        if isinstance(log, ErrorCode):
            return log
        before = self._transactions.get(transactional_id)
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING if before is None else (before, log)

    async def _keep(self, log: PartitionLog, outcome: Outcome) -> ErrorCode:
        """Append the outcome of an event and apply it at once; return NONE or the error."""
        if isinstance(outcome, ErrorCode):  # NONE: the state was appended before, but its flush may have failed
            return outcome if outcome or await self._is_flushed(log) else ErrorCode.COORDINATOR_NOT_AVAILABLE
        if code := self._write(log, outcome.transactional_id, outcome):
            return code
        self._transactions[outcome.transactional_id] = outcome
        if outcome.is_prepared:  # note the markers now: the client may be gone before all are written
            self._missing[outcome.transactional_id] = set(outcome.partitions)
        if not await self._is_flushed(log):
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if outcome.is_prepared:
            await self._write_markers(log, outcome)
            self._is_due.set()
        return ErrorCode.NONE

    def _write(self, log: PartitionLog, transactional_id: str, state: Transaction | None) -> ErrorCode:
        return self._append(
            log,
            transactional_id,
            lambda: [(encode_key(transactional_id), None if state is None else encode_value(state, self._version))],
        )

    async def _write_markers(self, log: PartitionLog, transaction: Transaction) -> None:
        """Flush the decision, then write the markers that this broker can write; `run` sends the others."""
        transactional_id = transaction.transactional_id
        if transactional_id in self._writing:
            return
        self._writing.add(transactional_id)
        try:
            if not await self._is_flushed(log) or self._transactions.get(transactional_id) is not transaction:
                return
            marker = _marker(transaction, log)
            missing = set()
            for key in list(self._missing.get(transactional_id, ())):
                await self._partitions.turns.take()
                if await write_marker(self._partitions, self._groups, key, marker) not in _SETTLED:
                    missing.add(key)
            await self._flushes.make_early_room(log)
            self._note_missing(log, transaction, missing)
            await self._is_flushed(log)
        finally:
            self._writing.discard(transactional_id)

    def _note_missing(self, log: PartitionLog, transaction: Transaction, missing: set[TopicPartition]) -> None:
        transactional_id = transaction.transactional_id
        if self._transactions.get(transactional_id) is not transaction:
            return  # all transactions were forgotten meanwhile
        self._missing[transactional_id] = missing
        if missing:
            return
        done = machine.complete(transaction, system_ms())
        if not self._write(log, transactional_id, done):  # if it fails, `run` tries again
            del self._missing[transactional_id]
            self._transactions[transactional_id] = done

    async def load(self) -> None:
        """Read the transactions from the log; until then requests get COORDINATOR_LOAD_IN_PROGRESS."""
        for transactions, unread in await self._read_logs(read_transactions) or ():
            self._transactions |= transactions
            self._unread_ids |= unread
        self.is_loading = False
        for transaction in list(self._transactions.values()):
            if transaction.is_prepared and (log_of := self.local_log(transaction.transactional_id)) is not None:
                _log.info("completing transaction %s: %s", transaction.transactional_id, transaction.state.text)
                self._missing[transaction.transactional_id] = set(transaction.partitions)
                await self._write_markers(log_of, transaction)

    def forget_logs_of(self, name: str) -> None:
        """Forget all transactions if `name` is __transaction_state, whose logs were deleted or set aside."""
        if name != TRANSACTIONS_TOPIC:
            return
        self._transactions.clear()
        self._unread.clear()
        self._unread_ids.clear()
        self._missing.clear()

    async def run(self, offsets_are_read: Awaitable[None]) -> None:
        """Load, then write missing markers, abort timed-out transactions and expire ids; runs until cancelled.

        Waits for `offsets_are_read` first: a marker commits the offsets of its transaction.
        """
        config = self._config
        await offsets_are_read
        await self.load()
        loop = asyncio.get_running_loop()
        checked_at = expired_at = loop.time()
        shortest = min(config.transaction_check_ms, config.transactional_id_check_ms) / 1000
        while True:
            try:
                await asyncio.wait_for(self._is_due.wait(), min(_RETRY_SECONDS, shortest))
            except asyncio.TimeoutError:
                pass
            self._is_due.clear()
            now = loop.time()
            try:
                await self._write_missing()
                if now - checked_at >= config.transaction_check_ms / 1000:
                    checked_at = now
                    await self._abort_timed_out()
                if now - expired_at >= config.transactional_id_check_ms / 1000:
                    expired_at = now
                    await self._flushes.take(self._expire())
            except Exception:
                _log.exception("the maintenance of transactions failed and will be retried")

    async def _write_missing(self) -> None:
        """Write the missing markers that this broker can write, and send the others to their leaders."""
        by_leader: dict[int, dict[MarkerEntry, list[TopicPartition]]] = defaultdict(lambda: defaultdict(list))
        prepared: dict[str, Transaction] = {}
        for transactional_id in list(self._missing):
            log, transaction = self.local_log(transactional_id), self._transactions.get(transactional_id)
            if log is None or transaction is None or not transaction.is_prepared:
                continue
            await self._write_markers(log, transaction)
            if transactional_id in self._writing or log.failure is not None:
                continue  # the decision may not be on disk
            if self._transactions.get(transactional_id) is not transaction:
                continue  # it has completed, and the id may be in another transaction
            prepared[transactional_id] = transaction
            marker = _marker(transaction, log)
            for key in self._missing.get(transactional_id, ()):
                node = self._registry.leader_of(*key)
                if node not in (NO_LEADER, self._config.broker_id):
                    by_leader[node][marker].append(key)
        if not by_leader:
            return
        answers = await asyncio.gather(*(self._markers.send(node, markers) for node, markers in by_leader.items()))
        settled = {(part[0], part[1]) for answer in answers for part in answer if part[2] in _SETTLED}
        for transactional_id, transaction in prepared.items():
            log, missing = self.local_log(transactional_id), self._missing.get(transactional_id)
            if log is None or missing is None or transactional_id in self._writing:
                continue
            if self._transactions.get(transactional_id) is not transaction:
                continue
            left = {key for key in missing if (transaction.producer.producer_id, key) not in settled}
            if left != missing:
                self._note_missing(log, transaction, left)
                await self._is_flushed(log)
                await self._flushes.make_early_room(log)

    async def _abort_timed_out(self) -> None:
        now, pace = system_ms(), Pace()
        for transactional_id in list(self._transactions):
            await pace.rest()
            log = self.local_log(transactional_id)
            if log is not None and self._timed_out(transactional_id, now):
                await self._flushes.make_early_room(log)
            transaction = self._timed_out(transactional_id, now)
            if log is not None and transaction is not None:
                limit = transaction.timeout_ms
                _log.info("aborting transaction %s: its timeout of %d ms has passed", transactional_id, limit)
                try:
                    await self._keep(log, machine.fence(transaction, now, version=self._version))
                except NeedsProducerId:
                    await self._abort_with(transactional_id, await self.new_producer_id(), now)

    async def _abort_with(self, transactional_id: str, new_id: int | ErrorCode, now_ms: int) -> None:
        """Abort a timed-out transaction whose epochs are used up; the next check tries again if there is no id."""
        log, transaction = self.local_log(transactional_id), self._timed_out(transactional_id, now_ms)
        if log is not None and transaction is not None and not isinstance(new_id, ErrorCode):
            await self._keep(log, machine.fence(transaction, now_ms, version=self._version, new_id=new_id))

    def _timed_out(self, transactional_id: str, now_ms: int) -> Transaction | None:
        transaction = self._transactions.get(transactional_id)
        return transaction if transaction is not None and machine.is_timed_out(transaction, now_ms) else None

    def _expire(self) -> Iterator[PartitionLog | None]:
        """Remove expired ids: steps for `LogFlushes.take`."""
        before = system_ms() - self._config.transactional_id_expiration_ms
        for transactional_id in list(self._transactions):
            transaction = self._transactions.get(transactional_id)
            if transaction is None or not machine.is_expired(transaction, before):
                yield None
                continue
            log = self.local_log(transactional_id)
            yield log
            is_there = log is not None and self._transactions.get(transactional_id) is transaction
            if log is not None and is_there and not self._write(log, transactional_id, None):
                del self._transactions[transactional_id]
