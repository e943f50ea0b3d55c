"""The writer of exactly-once streams, in the four processes that Spark runs its methods in.

Before the tasks of each micro-batch Spark makes the writer in a Python process and pickles it for the tasks; the data
source calls `claim` there, before it returns the writer. (Spark would show an error while it pickles the writer as one
of pickling.) Then each task calls `write`; and Spark makes another writer for `commit` or `abort`, which learns of the
claim by the tasks' messages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_klog.errors import KlogError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.exactly_once.decision_log import checkpoint_folder
from spark_klog.spark.exactly_once.driver import Claimed, claim, decide, settle
from spark_klog.spark.exactly_once.protocol import Transaction
from spark_klog.spark.options.writes import SinkOptions
from spark_klog.spark.producer_cache import PRODUCERS
from spark_klog.spark.sink import StreamWriter, Written, log_progress, send_all
from spark_klog.spark.tasks.worker_process import prepare_worker

_log = logging.getLogger(__name__)
#: The local property of a task that has the number of its micro-batch.
_BATCH = "streaming.sql.batchId"


@dataclass
class WrittenInTransaction(Written):
    """What a task wrote, in a transaction that is open; None if it wrote nothing."""

    claimed: Claimed
    transaction: Transaction | None


class CheckpointMismatch(KlogError):
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

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.batch, self.decided)


class ExactlyOnceWriter(StreamWriter):
    """`df.writeStream.format("klog").option("deliveryGuarantee", "exactly-once")`."""

    def __init__(self, options: SinkOptions, checkpoint: str, schema: StructType) -> None:
        """Raise `ConfigError` unless the checkpoint is a local folder."""
        super().__init__(options, schema)
        self._checkpoint = checkpoint_folder(checkpoint)
        self._claimed: Claimed | None = None

    def claim(self) -> None:
        """Claim the micro-batch for the tasks that this writer is pickled for; raises what `driver.claim` raises."""
        self._claimed = claim(self._options.client, self._checkpoint, self._options.id_prefix)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenInTransaction:
        prepare_worker()
        warn_if_slow()
        claimed, context = self._claimed, TaskContext.get()
        assert claimed is not None, "the data source has claimed the micro-batch"
        assert context is not None, "Spark runs tasks with a context"
        batch, decided = _batch_of(context), claimed.begun.decided
        if (decided >= 0 and batch not in (decided, decided + 1)) or (batch == decided and claimed.is_replanned):
            raise CheckpointMismatch(batch, decided)
        if batch == decided:  # by an earlier run
            for _ in iterator:  # operators before the sink update their state with the rows that they give
                pass
            return WrittenInTransaction({}, claimed, None)
        options, number = self._options, claimed.begun.number
        with PRODUCERS.borrow_transactional(options.client, claimed.identity.id_prefix, number) as producer:
            counts = send_all(producer, options, iterator)
            found = producer.prepare_transaction()
        if found is None:
            return WrittenInTransaction(counts, claimed, None)
        transaction = Transaction(found.transactional_id, found.producer_id, found.epoch, context.partitionId())
        return WrittenInTransaction(counts, claimed, transaction)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Decide and commit the micro-batch."""
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
    """The messages of tasks that have ended."""
    return [message for message in messages if isinstance(message, WrittenInTransaction)]


def _batch_of(context: TaskContext) -> int:
    number = context.getLocalProperty(_BATCH)
    assert number is not None, f"Spark sets {_BATCH} in streams"
    return int(number)
