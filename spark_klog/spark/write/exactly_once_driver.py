"""The writer of exactly-once streams: the protocol's programs against the checkpoint and the brokers.

Before the tasks of each micro-batch Spark makes the writer in a Python process and pickles it for the tasks; the data
source calls `ExactlyOnceWriter.claim` there, before it returns the writer. (Spark would show an error while it pickles
the writer as one of pickling.) Then each task calls `write`; and Spark makes another writer for `commit` or `abort`,
which learns of the claim by the tasks' messages.

Each step (`claim`, `decide`, `settle`) runs a program of `exactly_once.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_klog.client.admin.admin import Admin
from spark_klog.client.settings import client_config
from spark_klog.errors import ErrorCode, ErrorWithFields, KlogError, ProtocolError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.options import PREFIX, SinkOptions
from spark_klog.spark.worker_process import cluster_of, prepare_worker
from spark_klog.spark.write.decision_log import DecisionLog, Identity
from spark_klog.spark.write.exactly_once import (
    Abort,
    Append,
    Begun,
    Commit,
    Program,
    ReadLog,
    Superseded,
    Transaction,
    begin,
    finish,
    give_up,
)
from spark_klog.spark.write.hard_link_log import HardLinkLog, checkpoint_folder, planned
from spark_klog.spark.write.producers import PRODUCERS
from spark_klog.spark.write.sink import StreamWriter, Written, log_progress, send_all

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_ONGOING = "Ongoing"
#: EndTxn's answers about a transaction that has ended the other way, or whose producer has another epoch by now.
_NOT_COMMITTED = frozenset(
    {ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH}
)  # fmt: skip
#: The local property of a task that has the number of its micro-batch.
_BATCH = "streaming.sql.batchId"


@contextmanager
def _admin(settings: Mapping[str, str]) -> Iterator[Admin]:
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
    """A micro-batch that must not be committed. Nothing of it is written, and Spark runs it again after a restart."""


@dataclass(frozen=True)
class Claimed:
    """A claim as tasks get it: `identity` is the decision log's, `at` the driver's clock, in seconds since 1970.

    `is_replanned`: the last decided micro-batch has other offsets in the checkpoint now than when it was decided.
    """

    begun: Begun
    identity: Identity
    at: float
    is_replanned: bool = False


def claim(settings: Mapping[str, str], folder: Path, prefix: str) -> Claimed:
    """Begin a micro-batch; `folder` is the query's checkpoint, `prefix` that of its transactional ids.

    Raises what `begin`, `DecisionLog` and the brokers' answers raise; `UnsupportedVersionError` before Kafka
    3.0, which has no ListTransactions.
    """
    log = HardLinkLog(folder, Identity(prefix))
    at = time.time()
    with _admin(settings) as admin:
        begun = _run(begin(), log, admin)
    now = planned(folder, begun.decided)
    return Claimed(begun, log.identity, at, bool(begun.planned and now and begun.planned != now))


def decide(
    settings: Mapping[str, str], folder: Path, claimed: Claimed, batch: int, transactions: Sequence[Transaction]
) -> None:
    """Commit a micro-batch. Raises `NotDecided`, and what `finish` and the brokers' answers raise."""
    log = HardLinkLog(folder, claimed.identity, is_claimed=True)
    with _admin(settings) as admin:
        if batch > claimed.begun.decided:
            _check_time(settings, claimed, batch)
            _check_open(admin, batch, transactions)
        _run(finish(claimed.begun, batch, tuple(transactions), planned(folder, batch)), log, admin)


def settle(settings: Mapping[str, str], folder: Path, claimed: Claimed) -> None:
    """Abort what a failed micro-batch has written, unless it is decided or another run of the query has begun."""
    log = HardLinkLog(folder, claimed.identity, is_claimed=True)
    with _admin(settings) as admin, suppress(Superseded):
        _run(give_up(claimed.begun), log, admin)


def _check_time(settings: Mapping[str, str], claimed: Claimed, batch: int) -> None:
    """Leave half of the transactions' time for restarts: a decided transaction that times out is lost."""
    most = client_config(settings, PREFIX).transaction_timeout_ms / 2000
    took = time.time() - claimed.at
    if took > most:
        raise NotDecided(
            f"micro-batch {batch} took {took:.1f} s, more than half of kafka.transaction.timeout.ms; nothing of it is "
            "written: set it higher, up to the brokers' transaction.max.timeout.ms, or make micro-batches smaller"
        )


def _check_open(admin: Admin, batch: int, transactions: Sequence[Transaction]) -> None:
    """Raise `NotDecided` if the broker has aborted a transaction already."""
    described = admin.describe_transactions([one.transactional_id for one in transactions])
    for one in transactions:
        now = described[one.transactional_id]
        if isinstance(now, KlogError):
            raise now
        if (now.state, now.producer_id, now.producer_epoch) != (_ONGOING, one.producer_id, one.epoch):
            raise NotDecided(
                f"micro-batch {batch}: the transaction of task {one.task} is over before it was decided, after "
                "kafka.transaction.timeout.ms or by an administrator; nothing of the micro-batch is written"
            )


def _run(program: Program[_T], log: DecisionLog, admin: Admin) -> _T:
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
            for one in action.transactions:
                _log.info("aborting a transaction that no micro-batch has: %s", one)
            for error in admin.fence_transactions(action.transactions).failures.values():
                raise error
        else:
            result = _open_transactions(admin, log.identity.id_prefix)


def _commit(admin: Admin, transactions: Sequence[Transaction]) -> tuple[bool, ...]:
    """Whether each is committed; raises the error of one if the brokers' answer decides nothing about it."""
    results = []
    failures = admin.end_transactions(transactions, commits=True).failures
    for one in transactions:
        error = failures.get(one)
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
    names = [one.transactional_id for one in listed if one.transactional_id.startswith(prefix)]
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


class CheckpointMismatch(ErrorWithFields):
    """Spark's micro-batch is neither the last decided one nor the next one, or has other rows than it had then.

    Nothing of it is written.
    """

    def __init__(self, batch: int, decided: int) -> None:
        self.batch, self.decided = batch, decided
        empty = f"empty the directory klog_sink to write from micro-batch {batch} on"
        runs = f"Spark runs micro-batch {batch}, but the last decision in klog_sink of the checkpoint is of {decided}"
        some = "some of its rows may be there already"
        if batch == decided:
            told = (
                f"Spark has planned micro-batch {batch} again, with other offsets than those that klog_sink of the "
                "checkpoint says are written: the file of the micro-batch in offsets was lost or changed since. "
                f"To go on, {empty}; {some}"
            )
        elif batch < decided:
            told = (
                f"{runs}: another run of this query uses the checkpoint, or the checkpoint is older than its decision "
                "log. Stop one of two runs, and start this one again if it is the other. Only if there was no other, "
                f"{empty}: the rows of micro-batches {batch} to {decided} are there already, and are written again"
            )
        else:
            told = f"{runs}: the query wrote at-least-once meanwhile. To go on, {empty}; {some}"
        super().__init__(told)


class ExactlyOnceWriter(StreamWriter):
    """`df.writeStream.format("klog").option("deliveryGuarantee", "exactly-once")`."""

    def __init__(self, options: SinkOptions, checkpoint: str, schema: StructType, *, is_for_tasks: bool = True) -> None:
        """Raise `ConfigError` unless the checkpoint is a local folder."""
        super().__init__(options, schema, is_for_tasks=is_for_tasks)
        self._checkpoint = checkpoint_folder(checkpoint)
        self._claimed: Claimed | None = None

    def claim(self) -> None:
        """Claim the micro-batch for the tasks that this writer is pickled for; raises what `claim` does."""
        self._claimed = claim(self._options.client, self._checkpoint, self._options.id_prefix)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenInTransaction:
        prepare_worker()
        warn_if_slow()
        claimed, context = self._claimed, TaskContext.get()
        assert claimed is not None, "the data source has claimed the micro-batch"
        assert context is not None, "Spark runs tasks with a context"
        number = context.getLocalProperty(_BATCH)
        assert number is not None, f"Spark sets {_BATCH} in streams"
        batch, decided = int(number), claimed.begun.decided
        if (decided >= 0 and batch not in (decided, decided + 1)) or (batch == decided and claimed.is_replanned):
            raise CheckpointMismatch(batch, decided)
        if batch == decided:  # by an earlier run
            for _ in iterator:  # operators before the sink update their state with the rows that they give
                pass
            return WrittenInTransaction({}, claimed, None)
        client, prefix = self._options.client, claimed.identity.id_prefix
        with PRODUCERS.borrow_transactional(client, prefix, claimed.begun.number) as producer:
            counts = send_all(producer, self._options, iterator)
            prepared = producer.prepare_transaction()
        transaction = None if prepared is None else Transaction(**vars(prepared), task=context.partitionId())
        return WrittenInTransaction(counts, claimed, transaction)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = _written(messages)
        if written:
            transactions = [one.transaction for one in written if one.transaction is not None]
            decide(self._options.client, self._checkpoint, written[0].claimed, batchId, transactions)
            log_progress(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Abort the transactions of the micro-batch, unless `commit` has decided it; otherwise the next run does."""
        written = _written(messages)
        if written:
            settle(self._options.client, self._checkpoint, written[0].claimed)


def _written(messages: list[WriterCommitMessage | None]) -> list[WrittenInTransaction]:
    return [message for message in messages if isinstance(message, WrittenInTransaction)]
