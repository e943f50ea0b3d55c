"""The writer of exactly-once batch writes, which have a name (option writeId) instead of a checkpoint.

The protocol and its steps are those of streams: `exactly_once.py`, `exactly_once_driver.py`. The decision log is always
that of a topic, with the `writeId` in its key. A write without a `writeVersion` is the only one of its log, number 0.
`spark_klog.write_updates` gives each micro-batch as a version, with a hash of the offsets that Spark has planned for
it: in a checkpoint that is restored, or a copy, those of the micro-batch that was decided last may be others.

Spark makes the writer once, in a Python process, and pickles it twice: for the tasks, and for `commit` or `abort`,
which run in other processes. The data source claims the log before it returns the writer. (Spark would show an error
while it pickles the writer as one of pickling.) The parts of the plan before the last shuffle may have run by then. If
the job or `commit` fails, Spark calls `abort`, with None for each task that has not reported.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_klog.base.names import DECISION_TOPIC
from spark_klog.errors import ConfigError, ErrorWithFields
from spark_klog.records.kernels import warn_if_slow
from spark_klog.spark.worker_process import prepare_worker
from spark_klog.spark.write.decisions.decision_log import DecisionLog
from spark_klog.spark.write.decisions.decision_place import DecisionPlace
from spark_klog.spark.write.decisions.entries import Identity
from spark_klog.spark.write.exactly_once import PLAN, Claim, DecidedButAborted, Decision, Superseded, begin, finish
from spark_klog.spark.write.exactly_once_driver import (
    Claimed,
    NotDecided,
    WrittenInTransaction,
    check_still_open,
    check_time_left,
    last_time_to_decide,
    run_program,
    settle,
    step_admin,
    transactions_of,
    write_in_transaction,
    written_by,
)
from spark_klog.spark.write.sink import BatchQueryWriter, Written, log_progress
from spark_klog.spark.write.sink_options import NamedWrite, SinkOptions

_log = logging.getLogger(__name__)


class OtherRunOfWrite(ErrorWithFields):
    """Another run of the same write has begun since. It finishes what this one has decided, and aborts the rest."""

    def __init__(self, write: str) -> None:
        self.write = write
        super().__init__(
            f"{write}: another run of this write has begun since, and goes on. Nothing has to be done unless that one "
            "fails: then run the write again"
        )


class EarlierWrite(ErrorWithFields):
    """A version of a write is older than the last decided one. Nothing of it is written."""

    def __init__(self, write: str, version: int, decided: int) -> None:
        self.write, self.version, self.decided = write, version, decided
        super().__init__(
            f"{write}: version {version} can't be written after version {decided}, nothing of it is written. A version "
            "of write_updates is a micro-batch: its query's checkpoint is older than what is written (restored, or a "
            "copy that runs elsewhere), or another run uses it. Restore a newer checkpoint, or stop one of two runs. "
            "To write the rows again, give the write another name"
        )


class ReplannedWrite(ErrorWithFields):
    """A version of a write was decided with another plan (option writePlan). Nothing of it is written."""

    def __init__(self, write: str) -> None:
        self.write = write
        super().__init__(
            f"{write}: this version was written before, made of other offsets than it has now; nothing of it is "
            "written. A version of write_updates is a micro-batch: its query's checkpoint is older than what is "
            "written (restored, lost its last file in offsets, or a copy that runs elsewhere), or another run uses it. "
            "Restore a newer checkpoint, or stop one of two runs. To write the rows again, give the write another name"
        )


class PartlyWritten(ErrorWithFields):
    """The broker aborted transactions of a write that was decided: they timed out before they were committed."""

    def __init__(self, write: str, version: int, tasks: tuple[int, ...]) -> None:
        self.write, self.version, self.tasks = write, version, tasks
        super().__init__(
            f"{write}, version {version}: the rows of task {', '.join(map(str, tasks))} are not written: the broker "
            "aborted their transactions after kafka.transaction.timeout.ms. The rows of its other tasks are written. "
            "To write all of its rows again, those for the second time, give the write another name"
        )


@dataclass
class WrittenInBatch(WrittenInTransaction):
    """What a task wrote; `opened_at` is the clock of its worker before its transaction, in seconds since 1970."""

    opened_at: float


class ExactlyOnceBatchWriter(BatchQueryWriter):
    """`df.write.format("klog").option("deliveryGuarantee", "exactly-once").option("writeId", ...)`."""

    def __init__(self, options: SinkOptions, write: NamedWrite, schema: StructType) -> None:
        super().__init__(options, schema)
        self._write, self._number = write, write.version or 0
        self._target = "column topic" if options.topic is None else f"topic {options.topic}"
        #: What the decision keeps.
        self._planned = self._target if write.plan is None else f"{PLAN}{write.plan}"
        self._place = DecisionPlace(options.decision_topic or DECISION_TOPIC, f"write/{write.id}")
        self._claimed: Claimed | None = None

    def claim(self) -> None:
        """Begin the write, for the tasks that this writer is pickled for, and finish what an earlier run has decided.

        Raises `EarlierWrite`, `ReplannedWrite`, `OtherRunOfWrite`, `PartlyWritten`; `ConfigError` if the write went to
        another topic; and what `begin`, the decision log and the brokers' answers raise.
        """
        log = self._log(Identity(self._options.id_prefix))
        # a write that is refused does not stop another one
        for entry in log.read(may_lag=True).entries:
            if isinstance(entry, Decision):
                self._check(entry.batch, entry.planned)
        at = time.time()
        with self._errors(), step_admin(self._options.client) as admin:
            begun = run_program(begin(), log, admin)
        self._check(begun.decided, begun.planned)
        self._claimed = Claimed(begun, log.identity, self._place, at)
        if self._is_decided(self._claimed):
            _log.warning("%s was written before: this run writes nothing", self._write)

    def _check(self, decided: int, planned: str) -> None:
        if self._number < decided:
            raise EarlierWrite(str(self._write), self._number, decided)
        if decided != self._number or planned == self._planned:
            return
        if planned.startswith(PLAN) and self._planned.startswith(PLAN):
            raise ReplannedWrite(str(self._write))
        if self._write.version is None:
            raise ConfigError(
                f"{self._write} was written to the {planned} before, and this one is for the {self._target}: give it a "
                "writeId of its own"
            )

    def _is_decided(self, claimed: Claimed) -> bool:
        return self._number <= claimed.begun.decided

    def _log(self, identity: Identity, *, is_claimed: bool = False, decide_by: float = math.inf) -> DecisionLog:
        return self._place.open(self._options.client, identity, is_claimed=is_claimed, decide_by=decide_by)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        prepare_worker()
        warn_if_slow()
        claimed, opened_at = self._own_claim(), time.time()
        if self._is_decided(claimed):
            for _ in iterator:  # in foreachBatch, operators update their state with the rows that they give
                pass
            return Written({})
        written = write_in_transaction(self._options, claimed, iterator, str(self._write))
        return WrittenInBatch(written.counts, claimed, written.transaction, opened_at)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit what the tasks wrote. Raises `OtherRunOfWrite`, `NotDecided`, `PartlyWritten`, and what `finish` does.

        After any of these `abort` follows.
        """
        claimed = self._own_claim()
        if self._is_decided(claimed):
            return
        written = written_by(WrittenInBatch, messages)
        transactions = transactions_of(written)
        opened = [task.opened_at for task in written if task.transaction is not None]
        decide_by = last_time_to_decide(self._options.client, min(opened, default=math.inf))
        log = self._log(claimed.identity, is_claimed=True, decide_by=decide_by)
        with self._errors(), step_admin(self._options.client) as admin:
            try:
                if opened:  # else nothing can time out
                    check_time_left(self._options.client, min(opened), str(self._write))
                check_still_open(admin, str(self._write), transactions)
            except NotDecided:
                if self._is_superseded(log, claimed):
                    raise Superseded from None
                raise
            run_program(finish(claimed.begun, self._number, transactions, self._planned), log, admin)
        log_progress(messages, self._write.version)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transactions of the write, unless `commit` has decided it: then commit them."""
        claimed = self._own_claim()
        if self._is_decided(claimed):
            return
        settle(self._options.client, claimed, transactions_of(written_by(WrittenInBatch, messages)))

    def _own_claim(self) -> Claimed:
        assert self._claimed is not None, "the data source has claimed the write"
        return self._claimed

    def _is_superseded(self, log: DecisionLog, claimed: Claimed) -> bool:
        seen = log.read()
        return seen.first > claimed.begun.number or Claim() in seen.entries[claimed.begun.number - seen.first :]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the protocol's errors with the name of the write."""
        try:
            yield
        except Superseded:
            raise OtherRunOfWrite(str(self._write)) from None
        except DecidedButAborted as error:
            tasks = tuple(task.task for task in error.lost)
            raise PartlyWritten(str(self._write), error.batch, tasks) from None
