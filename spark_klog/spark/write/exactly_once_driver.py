"""The writer of exactly-once streams: the protocol's programs against the decision log and the brokers.

Before the tasks of each micro-batch Spark makes the writer in a Python process and pickles it for the tasks; the data
source calls `ExactlyOnceWriter.claim` there, before it returns the writer. (Spark would show an error while it pickles
the writer as one of pickling.) Then each task calls `write`; and Spark makes another writer for `commit` or `abort`,
which learns of the claim by the tasks' messages.

Each step (`claim`, `decide`, `settle`) runs a program of `exactly_once.py`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_klog.client.admin.admin import Admin
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError, ErrorCode, ErrorWithFields, KlogError, ProtocolError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.options import PREFIX
from spark_klog.spark.worker_process import cluster_of, prepare_worker
from spark_klog.spark.write.decisions.decision_log import DecisionLog
from spark_klog.spark.write.decisions.decision_place import DecisionPlace, decision_place, planned
from spark_klog.spark.write.decisions.entries import Identity
from spark_klog.spark.write.exactly_once import (
    Abort,
    Append,
    Begun,
    Commit,
    Decision,
    Program,
    ReadLog,
    Superseded,
    Transaction,
    begin,
    finish,
    give_up,
)
from spark_klog.spark.write.producers import PRODUCERS
from spark_klog.spark.write.sink import StreamWriter, Written, log_progress, send_all
from spark_klog.spark.write.sink_options import SinkOptions

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Message = TypeVar("_Message", bound="WrittenInTransaction")
_ONGOING = "Ongoing"
#: EndTxn's answers about a transaction that has ended the other way, or whose producer has another epoch by now.
_NOT_COMMITTED = frozenset(
    {ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH}
)  # fmt: skip
#: The local property of a task that has the number of its micro-batch.
_BATCH = "streaming.sql.batchId"
#: The driver decides no micro-batch that took more than half of the transactions' timeout. Warnings come after a
#: quarter: of a task that writes still, and of a micro-batch that was late but will be decided.
_CURE = (
    "read_committed readers of its topics wait meanwhile, and after half of kafka.transaction.timeout.ms (%g s) "
    "nothing is written: write less at a time, or set it higher"
)


@contextmanager
def step_admin(settings: Mapping[str, str]) -> Iterator[Admin]:
    """The client of a step, which looks the coordinators of its transactions up once.

    It is connected before the step begins: `ConnectionFailed`. If the step fails, its connections are closed.
    """
    cluster = cluster_of(settings)
    try:
        if not cluster.nodes:
            cluster.metadata([])
        admin = Admin(cluster)
        with admin.same_coordinators():
            yield admin
    except BaseException:
        cluster.close()
        raise


class NotDecided(KlogError):
    """A write or micro-batch that must not be committed. Nothing of it is written, and it can run again."""


@dataclass(frozen=True)
class Claimed:
    """A claim as tasks get it: `identity` is the decision log's, `at` the driver's clock, in seconds since 1970.

    `place` is where the log is. `is_replanned`: the last decided micro-batch has other offsets in the checkpoint now
    than when it was decided; always False if this machine can't read the checkpoint.
    """

    begun: Begun
    identity: Identity
    place: DecisionPlace
    at: float
    is_replanned: bool = False


def claim(settings: Mapping[str, str], place: DecisionPlace, prefix: str) -> Claimed:
    """Begin a micro-batch; `prefix` is that of the query's transactional ids.

    Raises what `begin`, the decision log and the brokers' answers raise; `UnsupportedVersionError` before Kafka
    3.0, which has no ListTransactions.
    """
    at = time.time()
    with step_admin(settings) as admin:
        log = place.open(settings, Identity(prefix))
        begun = run_program(begin(), log, admin)
    now = planned(place.folder, begun.decided)
    return Claimed(begun, log.identity, place, at, bool(begun.planned and now and begun.planned != now))


def decide(settings: Mapping[str, str], claimed: Claimed, batch: int, transactions: Sequence[Transaction]) -> None:
    """Commit a micro-batch. Raises `NotDecided`, and what `finish` and the brokers' answers raise."""
    place = claimed.place
    decide_by = last_time_to_decide(settings, claimed.at) if transactions else math.inf
    log = place.open(settings, claimed.identity, is_claimed=True, decide_by=decide_by)
    with step_admin(settings) as admin:
        if transactions and batch > claimed.begun.decided:
            check_time_left(settings, claimed.at, f"micro-batch {batch}")
            check_still_open(admin, f"micro-batch {batch}", transactions)
        run_program(finish(claimed.begun, batch, tuple(transactions), planned(place.folder, batch)), log, admin)


def settle(settings: Mapping[str, str], claimed: Claimed, transactions: Sequence[Transaction] = ()) -> None:
    """Abort what a failed micro-batch has written, unless it is decided.

    If another run has begun, it aborts only `transactions`, which its tasks told, and only if nobody can decide them.
    """
    log = claimed.place.open(settings, claimed.identity, is_claimed=True)
    with step_admin(settings) as admin, suppress(Superseded):
        run_program(give_up(claimed.begun, tuple(transactions)), log, admin)


def continue_at(settings: Mapping[str, str], place: DecisionPlace, prefix: str, batch: int) -> None:
    """Note that micro-batch `batch` is the next one of a stopped query, whatever its decision log says until now."""
    log = place.open(settings, Identity(prefix))
    if not log.append(log.end(), Decision(batch - 1, ())):
        raise Superseded


def check_time_left(settings: Mapping[str, str], begin_at: float, what: str) -> None:
    """Raise `NotDecided`, about `what` is written, after half of the transactions' time since a time.

    The other half is for restarts: a decided transaction that times out is lost.
    """
    timeout_ms = client_config(settings, PREFIX).transaction_timeout_ms
    took = time.time() - begin_at
    if took > timeout_ms / 2000:
        raise NotDecided(
            f"{what} took {took:.1f} s, more than half of kafka.transaction.timeout.ms; nothing of it is written: set "
            "it higher, up to the brokers' transaction.max.timeout.ms, or write less at a time"
        )
    warn_if_late(took, timeout_ms, what)


def last_time_to_decide(settings: Mapping[str, str], begin_at: float) -> float:
    """When a decision must be confirmed: a quarter of the transactions' time since `begin_at` is left for commits.

    Both are seconds since 1970.
    """
    return begin_at + client_config(settings, PREFIX).transaction_timeout_ms * 0.75 / 1000


def check_still_open(admin: Admin, what: str, transactions: Sequence[Transaction]) -> None:
    """Raise `NotDecided`, about `what` is written, if the broker has aborted a transaction already."""
    described = admin.describe_transactions([txn.transactional_id for txn in transactions])
    for txn in transactions:
        now = described[txn.transactional_id]
        if isinstance(now, KlogError):
            raise now
        if (now.state, now.producer_id, now.producer_epoch) != (_ONGOING, txn.producer_id, txn.epoch):
            raise NotDecided(
                f"{what}: the transaction of task {txn.task} is over before it was decided, after "
                "kafka.transaction.timeout.ms or by an administrator; nothing of it is written"
            )


def run_program(program: Program[_T], log: DecisionLog, admin: Admin) -> _T:
    result: Any = None
    while True:
        try:
            action = program.send(result)
        except StopIteration as stop:
            value: _T = stop.value
            return value
        if isinstance(action, ReadLog):
            result = log.read(may_lag=action.may_lag)
        elif isinstance(action, Append):
            result = log.append(action.number, action.entry)
        elif isinstance(action, Commit):
            result = _commit(admin, action.transactions)
        elif isinstance(action, Abort):
            for transaction in action.transactions:
                _log.info("aborting a transaction that no micro-batch has: %s", transaction)
            for error in admin.fence_transactions(action.transactions).failures.values():
                raise error
        else:
            result = _open_transactions(admin, log.identity.id_prefix)


def _commit(admin: Admin, transactions: Sequence[Transaction]) -> tuple[bool, ...]:
    """Whether each is committed; raises the error of one if the brokers' answer decides nothing about it."""
    results = []
    failures = admin.end_transactions(transactions, commits=True).failures
    for transaction in transactions:
        error = failures.get(transaction)
        if isinstance(error, ProtocolError) and error.code == ErrorCode.INVALID_PRODUCER_ID_MAPPING:
            raise ProtocolError(
                error.code,
                error.what,
                advice="the brokers have forgotten this transaction (transactional.id.expiration.ms), so nobody knows "
                "whether it was committed: look for its rows, then see docs/recipes/exactly-once.md, DecidedButAborted",
            )
        is_aborted = isinstance(error, ProtocolError) and error.code in _NOT_COMMITTED
        if error is not None and not is_aborted:
            raise error
        results.append(error is None)
    return tuple(results)


def _open_transactions(admin: Admin, prefix: str) -> tuple[Transaction, ...]:
    listed = admin.list_transactions(states=[_ONGOING])
    names = [transaction.transactional_id for transaction in listed if transaction.transactional_id.startswith(prefix)]
    still_open = []
    for name, described in admin.describe_transactions(names).items():
        if isinstance(described, KlogError):
            if isinstance(described, ProtocolError) and described.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                continue
            raise described
        if described.state == _ONGOING:
            still_open.append(Transaction(name, described.producer_id, described.producer_epoch))
    return tuple(still_open)


@dataclass
class WrittenInTransaction(Written):
    """What a task wrote, in a transaction that is open; None if it wrote nothing."""

    claimed: Claimed
    transaction: Transaction | None


def write_in_transaction(
    options: SinkOptions, claimed: Claimed, iterator: Iterator[pa.RecordBatch], what: str
) -> WrittenInTransaction:
    """Write a task's rows in a transaction of this attempt, and leave it open; errors as of the client's producer.

    `what` it writes is for a warning. Raises `ConfigError` for rows to the topic of the decisions.
    """
    context = TaskContext.get()
    assert context is not None, "Spark runs tasks with a context"
    client, task = options.client, context.partitionId()
    with (
        warning_of_open_transaction(client_config(client, PREFIX).transaction_timeout_ms, what, task),
        PRODUCERS.borrow_transactional(client, claimed.identity.id_prefix, claimed.begun.number) as producer,
    ):
        counts = send_all(producer, options, iterator)
        if claimed.place.topic in counts:
            raise ConfigError(f"column 'topic' has {claimed.place.topic}, the topic of the decisions: drop these rows")
        prepared = producer.prepare_transaction()
    transaction = None if prepared is None else Transaction(**vars(prepared), task=task)
    return WrittenInTransaction(counts, claimed, transaction)


class CheckpointMismatch(ErrorWithFields):
    """Spark's micro-batch is neither the last decided one nor the next one, or has other rows than it had then.

    Nothing of it is written. `decided` is -1 if there is no decision; `place` is the decision log's topic and key.
    """

    def __init__(self, batch: int, decided: int, place: str) -> None:
        self.batch, self.decided, self.place = batch, decided, place
        advance = f"stop the query and call spark_klog.spark.decisions.continue_at(OPTIONS, {batch})"
        runs = f"Spark runs micro-batch {batch}, but the last decision in {place} is of {decided}"
        some = "some of its rows may be there already"
        if batch == decided:
            told = (
                f"Spark has planned micro-batch {batch} again, with other offsets than those that {place} says are "
                "written: the file of the micro-batch in the checkpoint's offsets was lost or changed since. "
                f"To go on, {advance}; {some}"
            )
        elif batch < decided:
            told = (
                f"{runs}: another run of this query uses the checkpoint, or the checkpoint is older than its decision "
                "log, as one that was restored. Stop one of two runs, and start this one again if it is the other. "
                f"Only if there was no other, {advance}: the rows of micro-batches {batch} to {decided} are there "
                "already, and are written again"
            )
        elif decided < 0:
            told = (
                f"Spark runs micro-batch {batch}, but {place} has no decision of this checkpoint: it is a copy, or was "
                "moved here, or decisionTopic or the brokers were others until now (set them again), or the query "
                f"wrote at-least-once. To go on all the same, {advance}; {some}"
            )
        else:
            told = f"{runs}: the query wrote at-least-once meanwhile. To go on, {advance}; {some}"
        super().__init__(told)


class ExactlyOnceWriter(StreamWriter):
    """`df.writeStream.format("klog").option("deliveryGuarantee", "exactly-once")`."""

    def __init__(self, options: SinkOptions, schema: StructType, *, is_for_tasks: bool = True) -> None:
        super().__init__(options, schema, is_for_tasks=is_for_tasks)
        self._claimed: Claimed | None = None

    def claim(self) -> None:
        """Claim the micro-batch for the tasks that this writer is pickled for.

        Raises what `decision_place` and `claim` do.
        """
        options = self._options
        assert options.checkpoint is not None, "exactly-once options have a checkpoint"
        place = decision_place(options.checkpoint, options.decision_topic)
        self._claimed = claim(options.client, place, options.id_prefix)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenInTransaction:
        prepare_worker()
        warn_if_slow()
        claimed, context = self._claimed, TaskContext.get()
        assert claimed is not None, "the data source has claimed the micro-batch"
        assert context is not None, "Spark runs tasks with a context"
        number = context.getLocalProperty(_BATCH)
        assert number is not None, f"Spark sets {_BATCH} in streams"
        batch, decided = int(number), claimed.begun.decided
        if batch not in (decided, decided + 1) or (batch == decided and claimed.is_replanned):
            raise CheckpointMismatch(batch, decided, claimed.place.told)
        if batch == decided:  # by an earlier run
            for _ in iterator:  # operators before the sink update their state with the rows that they give
                pass
            return WrittenInTransaction({}, claimed, None)
        return write_in_transaction(self._options, claimed, iterator, f"micro-batch {batch}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        if written := written_by(WrittenInTransaction, messages):
            decide(self._options.client, written[0].claimed, batchId, transactions_of(written))
            log_progress(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Abort the transactions of the micro-batch, unless `commit` has decided it; otherwise the next run does."""
        if written := written_by(WrittenInTransaction, messages):
            settle(self._options.client, written[0].claimed, transactions_of(written))


def written_by(kind: type[_Message], messages: Sequence[WriterCommitMessage | None]) -> list[_Message]:
    """What the tasks that have reported wrote."""
    return [message for message in messages if isinstance(message, kind)]


def transactions_of(written: Sequence[WrittenInTransaction]) -> tuple[Transaction, ...]:
    return tuple(task.transaction for task in written if task.transaction is not None)


def _warned_after(timeout_ms: int) -> float:
    return timeout_ms / 4000


@contextmanager
def warning_of_open_transaction(timeout_ms: int, what: str, task: int) -> Iterator[None]:
    """Log a warning if the block, in which a task writes, takes a quarter of the transaction's timeout.

    A thread does so, as the task may wait for its next row for long.
    """
    seconds = _warned_after(timeout_ms)
    text = f"task %d of %s has written for %g s: {_CURE}"
    timer = threading.Timer(seconds, _log.warning, (text, task, what, seconds, timeout_ms / 2000))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn_if_late(took: float, timeout_ms: int, what: str) -> None:
    """Log a warning if what is written took more than a quarter of the timeout in seconds until its decision."""
    if took > _warned_after(timeout_ms):
        _log.warning(f"%s took %.1f s until it was decided: {_CURE}", what, took, timeout_ms / 2000)
