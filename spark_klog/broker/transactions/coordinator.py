"""The coordinator of transactions: the state machine in `transaction.py`, given a clock, a log and requests to answer.

A transactional id lives in a partition of __transaction_state, which the broker that leads it coordinates. Each change
is answered after it has been appended there, so that a broker that was killed goes on where it was: what is prepared
then (PrepareCommit, PrepareAbort) is completed. Markers go into the logs that this broker leads at once, so that most
transactions have ended when EndTxn is answered; other brokers are asked to write theirs, again and again until they do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from spark_klog.broker.background import Pace
from spark_klog.broker.internal_topics import TRANSACTIONS_TOPIC
from spark_klog.broker.registry import NO_LEADER
from spark_klog.broker.stored_rows import Rows, read_log, stored_rows
from spark_klog.broker.transactions import transaction as machine
from spark_klog.broker.transactions.markers import Marker, send_markers, write_marker
from spark_klog.broker.transactions.peers import ask, peer_address
from spark_klog.broker.transactions.producer_ids import ProducerIds
from spark_klog.broker.transactions.records import decode_key, decode_value, state_batch
from spark_klog.broker.transactions.transaction import (
    NeedsProducerId,
    Outcome,
    Producer,
    TopicPartition,
    Transaction,
)
from spark_klog.errors import DecodeError, DirectoryError, ErrorCode, KlogError
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog, system_ms
from spark_klog.protocol.apis import ADD_PARTITIONS_TO_TXN

if TYPE_CHECKING:
    from spark_klog.broker.broker import Broker

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.5
_UNANSWERED = (KlogError, OSError, asyncio.TimeoutError)
#: Of AddPartitionsToTxn: from here on brokers ask each other.
_BATCHED = 4
#: The marker can't, or need not, be written any more.
_SETTLED = frozenset(
    {
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.TRANSACTION_COORDINATOR_FENCED,
    }
)
#: What a broker that asks whether a producer may write is to be asked again.
_PASSING = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    }
)


class TransactionCoordinator:
    """All transactional ids whose partitions this broker leads. For one event loop."""

    def __init__(self, broker: Broker, producer_ids: ProducerIds, now_ms: Callable[[], int] = system_ms) -> None:
        self._broker = broker
        self._ids = producer_ids
        self._now_ms = now_ms
        self._transactions: dict[str, Transaction] = {}
        #: Of those that are prepared: where markers are still missing.
        self._missing: dict[str, set[TopicPartition]] = {}
        #: Those whose markers are being written.
        self._writing: set[str] = set()
        #: Partitions of __transaction_state that can't be read: their ids would lose their epochs.
        self._unread: set[int] = set()
        #: Ids whose record there can't be read: the same.
        self._unread_ids: set[str] = set()
        #: Brokers that do not answer.
        self._silent: set[int] = set()
        self._is_due = asyncio.Event()
        self.is_loading = True

    def __iter__(self) -> Iterator[Transaction]:
        return iter(list(self._transactions.values()))

    def known(self, transactional_id: str) -> Transaction | None:
        return self._transactions.get(transactional_id)

    async def find(self, transactional_id: str) -> tuple[int, int]:
        """(broker id, partition of __transaction_state) that keep it; makes that topic at first use."""
        return await self._broker.place_of(transactional_id, TRANSACTIONS_TOPIC)

    async def log_of(self, transactional_id: str) -> PartitionLog | ErrorCode:
        """Where the id is kept, if that is here and has been read."""
        try:
            _, partition = await self.find(transactional_id)
        except DirectoryError as error:
            _log.error("transactional id %s has no coordinator: %s", transactional_id, error)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not self._broker.registry.leads(TRANSACTIONS_TOPIC, partition):
            return ErrorCode.NOT_COORDINATOR
        log = self._broker.logs.get(TRANSACTIONS_TOPIC, partition)
        if log is None or partition in self._unread or transactional_id in self._unread_ids:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if self.is_loading:
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        await self._broker.flushes.make_early_room(log)
        return log

    async def new_producer_id(self) -> int | ErrorCode:
        """A producer id of its own; where none can be had now the client is to try again."""
        try:
            return await self._ids.next()
        except (KlogError, OSError) as error:
            _log.error("producer ids can't be claimed: %s", error)
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS

    async def init(self, transactional_id: str, timeout_ms: int, expected: Producer | None) -> Producer | ErrorCode:
        """InitProducerId of a transactional id."""
        log = await self.log_of(transactional_id)
        if isinstance(log, ErrorCode):
            return log
        if not 0 < timeout_ms <= self._broker.config.transaction_max_timeout_ms:
            return ErrorCode.INVALID_TRANSACTION_TIMEOUT
        new_id: int | None = None
        while True:
            now = self._now_ms()
            before = self._transactions.get(transactional_id)
            try:
                if before is None:
                    if new_id is None:
                        raise NeedsProducerId
                    before = machine.created(transactional_id, new_id, timeout_ms, now)
                outcome = machine.init(before, timeout_ms, expected, now, new_id)
            except NeedsProducerId:
                claimed = await self.new_producer_id()
                if isinstance(claimed, ErrorCode):
                    return claimed
                new_id = claimed
                continue
            if code := await self._keep(log, outcome):
                return code
            assert isinstance(outcome, Transaction)
            if not outcome.is_prepared:
                return outcome.producer
            if transactional_id in self._missing:  # the earlier instance's transaction is aborted first
                return ErrorCode.CONCURRENT_TRANSACTIONS

    async def add(self, transactional_id: str, producer: Producer, partitions: frozenset[TopicPartition]) -> ErrorCode:
        """AddPartitionsToTxn, AddOffsetsToTxn."""
        return await self._change(
            transactional_id, lambda before: machine.add(before, producer, partitions, self._now_ms())
        )

    async def end(self, transactional_id: str, producer: Producer, *, commits: bool) -> ErrorCode:
        """EndTxn."""
        return await self._change(
            transactional_id, lambda before: machine.end(before, producer, commits=commits, now_ms=self._now_ms())
        )

    async def verify(self, transactional_id: str, producer: Producer, partition: TopicPartition) -> ErrorCode:
        """Whether a producer may write to a partition: asked of this broker's transactions."""
        found = await self._known_with_log(transactional_id)
        return found if isinstance(found, ErrorCode) else machine.verify(found[0], producer, partition)

    async def _change(self, transactional_id: str, event: Callable[[Transaction], Outcome]) -> ErrorCode:
        found = await self._known_with_log(transactional_id)
        return found if isinstance(found, ErrorCode) else await self._keep(found[1], event(found[0]))

    async def _known_with_log(self, transactional_id: str) -> tuple[Transaction, PartitionLog] | ErrorCode:
        if not transactional_id:
            return ErrorCode.INVALID_REQUEST
        log = await self.log_of(transactional_id)
        if isinstance(log, ErrorCode):
            return log
        before = self._transactions.get(transactional_id)
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING if before is None else (before, log)

    async def _keep(self, log: PartitionLog, outcome: Outcome) -> ErrorCode:
        """Write what comes of an event; the error where there is one. It is appended and in force at once."""
        if isinstance(outcome, ErrorCode):  # what is so already may still be on its way to the disk, or lost there
            return outcome if outcome or await self._is_flushed(log) else ErrorCode.COORDINATOR_NOT_AVAILABLE
        if code := self._append(log, outcome.transactional_id, outcome):
            return code
        self._transactions[outcome.transactional_id] = outcome
        if outcome.is_prepared:  # the client may be gone before all markers are written
            self._missing[outcome.transactional_id] = set(outcome.partitions)
        if not await self._is_flushed(log):
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if outcome.is_prepared:
            await self._write_markers(log, outcome)
            self._is_due.set()
        return ErrorCode.NONE

    async def _is_flushed(self, log: PartitionLog) -> bool:
        """Whether what was appended is on the disk, as far as flush.messages asks for that."""
        try:
            await self._broker.flushes.flush_many(log)
        except OSError as error:
            _log.error("transactions can't be written to %s: %s", log.directory, error)
            return False
        return True

    def _append(self, log: PartitionLog, transactional_id: str, outcome: Transaction | None) -> ErrorCode:
        try:
            log.append(memoryview(state_batch(transactional_id, outcome, self._now_ms())), flushes=False)
        except BatchTooLarge as error:
            _log.error("transaction %s has too many partitions: %s", transactional_id, error)
            return ErrorCode.UNKNOWN_SERVER_ERROR
        except OSError as error:
            _log.error("transaction %s can't be written to %s: %s", transactional_id, log.directory, error)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        self._broker.purgatory.wake((log.topic, log.partition))
        return ErrorCode.NONE

    async def _write_markers(self, log: PartitionLog, transaction: Transaction) -> None:
        """Write those that this broker can, after the decision is on the disk; the others are left to `run`."""
        transactional_id = transaction.transactional_id
        if transactional_id in self._writing:
            return
        self._writing.add(transactional_id)
        try:
            if not await self._is_flushed(log) or self._transactions.get(transactional_id) is not transaction:
                return
            marker = Marker(transaction.producer, transaction.commits, log.leader_epoch)
            missing = set()
            for key in list(self._missing.get(transactional_id, ())):
                await self._broker.turns.take()
                if await write_marker(self._broker, key, marker) not in _SETTLED:
                    missing.add(key)
            await self._broker.flushes.make_early_room(log)
            self._note_missing(log, transaction, missing)
            await self._is_flushed(log)
        finally:
            self._writing.discard(transactional_id)

    def _note_missing(self, log: PartitionLog, transaction: Transaction, missing: set[TopicPartition]) -> None:
        transactional_id = transaction.transactional_id
        if self._transactions.get(transactional_id) is not transaction:
            return  # all were forgotten meanwhile
        self._missing[transactional_id] = missing
        if missing:
            return
        done = machine.complete(transaction, self._now_ms())
        if not self._append(log, transactional_id, done):  # else it is tried again
            del self._missing[transactional_id]
            self._transactions[transactional_id] = done

    async def may_append(
        self, transactional_id: str, producer: Producer, log: PartitionLog, *, of_offsets: bool = False
    ) -> tuple[ErrorCode, str]:
        """Whether a batch belongs to an ongoing transaction (KIP-890): the error it gets, and why.

        Only the first batch of a transaction in a log is asked for. TRANSACTION_ABORTABLE is for those who know it.
        """
        key = log.topic, log.partition
        while True:
            known = log.producers.producers.get(producer.producer_id)
            if known is not None and known.epoch == producer.epoch and known.is_in_transaction:
                return ErrorCode.NONE, ""
            ended = log.producers.ended_transactions
            code = await self._asked(transactional_id, producer, key)
            if ended == log.producers.ended_transactions:  # else the answer may be of before a marker
                break
        if code is ErrorCode.NONE:
            return code, ""
        reason = f"transaction {transactional_id!r} does not have {log.topic}-{log.partition}: {code.name}"
        if code is ErrorCode.PRODUCER_FENCED:
            return ErrorCode.INVALID_PRODUCER_EPOCH, reason
        if code in _PASSING:  # what all clients know, and then try again
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if of_offsets else ErrorCode.NOT_ENOUGH_REPLICAS, reason
        return ErrorCode.TRANSACTION_ABORTABLE, reason

    async def _asked(self, transactional_id: str, producer: Producer, key: TopicPartition) -> ErrorCode:
        broker = self._broker
        try:
            node, _ = await self.find(transactional_id)
        except DirectoryError:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if node == broker.config.broker_id:
            return await self.verify(transactional_id, producer, key)
        entry = {
            "transactional_id": transactional_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "verify_only": True,
            "topics": [{"name": key[0], "partitions": [key[1]]}],
        }
        try:
            answer = await ask(
                peer_address(broker.registry, node), ADD_PARTITIONS_TO_TXN, _BATCHED, {"transactions": [entry]}
            )
        except _UNANSWERED as error:
            _log.warning("broker %d can't be asked for transaction %s: %s", node, transactional_id, error)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        results = [
            ErrorCode(entry["partition_error_code"])
            for result in answer["results_by_transaction"]
            for topic in result["topic_results"]
            for entry in topic["results_by_partition"]
        ]
        return results[0] if results else ErrorCode(answer["error_code"])

    async def load(self) -> None:
        """Read the transactions from the log; until then their requests are answered with LOAD_IN_PROGRESS."""
        logs = [log for (topic, _), log in self._broker.logs.logs.items() if topic == TRANSACTIONS_TOPIC]
        for log in logs:
            found: dict[str, Transaction] = {}
            unread: set[str] = set()
            try:
                await read_log(partial(_read, found, unread), log)
            except Exception as error:
                if not self._broker.logs.serves(log):
                    break
                known = isinstance(error, (KlogError, OSError))
                text = "transactions of %s can't be read, and are not served: %s"
                _log.error(text, log.directory, error, exc_info=not known)
                self._unread.add(log.partition)
            else:
                if not self._broker.logs.serves(log):  # the topic was deleted meanwhile
                    break
                self._transactions |= found
                self._unread_ids |= unread
        self.is_loading = False
        for transaction in list(self._transactions.values()):
            if transaction.is_prepared and (log_of := self._log(transaction.transactional_id)) is not None:
                _log.info("completing transaction %s: %s", transaction.transactional_id, transaction.state.text)
                self._missing[transaction.transactional_id] = set(transaction.partitions)
                await self._write_markers(log_of, transaction)

    def _log(self, transactional_id: str) -> PartitionLog | None:
        return self._broker.internal_log(TRANSACTIONS_TOPIC, transactional_id)

    def forget_logs_of(self, name: str) -> None:
        """The logs of a topic were deleted or set aside: with those of __transaction_state all transactions go."""
        if name != TRANSACTIONS_TOPIC:
            return
        self._transactions.clear()
        self._unread.clear()
        self._unread_ids.clear()
        self._missing.clear()

    def highest_producer_id(self) -> int:
        """Of the transactional ids known here, -1 without any."""
        return max((known.producer.producer_id for known in self._transactions.values()), default=-1)

    async def run(self, offsets_are_read: Awaitable[None]) -> None:
        """Load, then write the markers that are missing, and look after old transactions; until it is cancelled.

        Nothing is completed before `offsets_are_read`: markers make them count.
        """
        config = self._broker.config
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
                    await self._broker.flushes.take(self._expire())
            except Exception:
                _log.exception("the care of transactions failed, and is tried again")

    async def _write_missing(self) -> None:
        """Try again where this broker leads, and ask the others."""
        wanted: dict[int, dict[Marker, list[TopicPartition]]] = defaultdict(lambda: defaultdict(list))
        asked: dict[str, Transaction] = {}
        for transactional_id in list(self._missing):
            log, transaction = self._log(transactional_id), self._transactions.get(transactional_id)
            if log is None or transaction is None or not transaction.is_prepared:
                continue
            await self._write_markers(log, transaction)
            if transactional_id in self._writing or log.failure is not None:
                continue  # the decision may not be on the disk
            if self._transactions.get(transactional_id) is not transaction:
                continue  # it is complete, and the next one may have been ended otherwise
            asked[transactional_id] = transaction
            marker = Marker(transaction.producer, transaction.commits, log.leader_epoch)
            for key in self._missing.get(transactional_id, ()):
                node = self._broker.registry.leader_of(*key)
                if node not in (NO_LEADER, self._broker.config.broker_id):
                    wanted[node][marker].append(key)
        if not wanted:
            return
        answers = await asyncio.gather(*(self._send(node, markers) for node, markers in wanted.items()))
        settled = {(found[0], found[1]) for answer in answers for found in answer if found[2] in _SETTLED}
        for transactional_id, transaction in asked.items():
            log, missing = self._log(transactional_id), self._missing.get(transactional_id)
            if log is None or missing is None or transactional_id in self._writing:
                continue
            if self._transactions.get(transactional_id) is not transaction:
                continue
            left = {key for key in missing if (transaction.producer.producer_id, key) not in settled}
            if left != missing:
                self._note_missing(log, transaction, left)
                await self._is_flushed(log)
                await self._broker.flushes.make_early_room(log)

    async def _send(
        self, node: int, markers: Mapping[Marker, list[TopicPartition]]
    ) -> set[tuple[int, TopicPartition, ErrorCode]]:
        """What another broker has done; nothing where it does not answer, which is told once."""
        try:
            answer = await send_markers(self._broker, node, markers)
            reason = "it answers CLUSTER_AUTHORIZATION_FAILED; its user ANONYMOUS, as whom brokers come, is no admin"
            if all(code is not ErrorCode.CLUSTER_AUTHORIZATION_FAILED for _, _, code in answer):
                self._silent.discard(node)
                return answer
        except _UNANSWERED as error:
            reason = str(error)
        if node not in self._silent:
            _log.warning("broker %d can't be asked to write markers, trying again and again: %s", node, reason)
        self._silent.add(node)
        return set()

    async def _abort_timed_out(self) -> None:
        now, pace = self._now_ms(), Pace()
        for transactional_id in list(self._transactions):
            await pace.rest()
            log = self._log(transactional_id)
            if log is not None and self._timed_out(transactional_id, now):
                await self._broker.flushes.make_early_room(log)
            transaction = self._timed_out(transactional_id, now)
            if log is not None and transaction is not None:
                limit = transaction.timeout_ms
                _log.info("transaction %s is aborted: its %d ms are over", transactional_id, limit)
                await self._keep(log, machine.fence(transaction, now))

    def _timed_out(self, transactional_id: str, now_ms: int) -> Transaction | None:
        transaction = self._transactions.get(transactional_id)
        return transaction if transaction is not None and machine.is_timed_out(transaction, now_ms) else None

    def _expire(self) -> Iterator[PartitionLog | None]:
        """Steps of `LogFlushes.take`."""
        before = self._now_ms() - self._broker.config.transactional_id_expiration_ms
        for transactional_id in list(self._transactions):
            transaction = self._transactions.get(transactional_id)
            if transaction is None or not machine.is_expired(transaction, before):
                yield None
                continue
            log = self._log(transactional_id)
            yield log
            is_there = log is not None and self._transactions.get(transactional_id) is transaction
            if log is not None and is_there and not self._append(log, transactional_id, None):
                del self._transactions[transactional_id]


def _read(transactions: dict[str, Transaction], unread: set[str], log: PartitionLog) -> None:
    """Read a partition of __transaction_state; later records win.

    A record that does not decode is logged. It concerns one transactional id, which goes to `unread`: serving an older
    state of it could give its producer an epoch that is fenced. `KlogError` if batches are damaged, OSError.
    """
    for item in stored_rows(log):
        for key, value in item.rows if isinstance(item, Rows) else ():
            _read_row(transactions, unread, key, value, log.directory.name)
    _log.info("loaded %d transactions from %s", len(transactions), log.directory.name)


def _read_row(
    transactions: dict[str, Transaction], unread: set[str], key: bytes | None, value: bytes | None, where: str
) -> None:
    try:
        transactional_id = decode_key(key) if key else None
    except DecodeError as error:
        _log.error("%s: the key %r of a record can't be read, the record is left out: %s", where, key, error)
        return
    if transactional_id is None:
        return
    transactions.pop(transactional_id, None)
    unread.discard(transactional_id)
    if value is None:
        return
    try:
        transactions[transactional_id] = decode_value(transactional_id, value)
    except DecodeError as error:
        _log.error("%s: transactional id %r can't be read, and is not served: %s", where, transactional_id, error)
        unread.add(transactional_id)
