"""What producers have in common, whether threads or an event loop drive them: what gathers, and in which states."""

from __future__ import annotations

import atexit
import logging
import math
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spark_klog.base.names import TopicPartition
from spark_klog.client.calls import OfSettings
from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.intake import Gatherings, PartitionChoice, Serializers
from spark_klog.client.producer.sender import Sender
from spark_klog.client.producer.transactions import State, Transactions
from spark_klog.client.requests import Steps
from spark_klog.client.serialization import split_settings
from spark_klog.client.settings import check_settings, without_effect
from spark_klog.errors import BufferExhausted, ConfigError, KlogError, ProducerClosed, TransactionAborted

_log = logging.getLogger(__name__)
#: Seconds for all producers together that are not closed at the interpreter's exit.
_SECONDS_AT_EXIT = 10.0
#: Seconds at least that the interpreter's exit waits for a callback that another thread calls.
_LAST_CALLBACKS = 1.0
#: Time for the abort of a transaction that an exception has ended.
LAST_ABORT_MS = 5_000


def producer_settings(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], Serializers | None]:
    """The settings of the cluster client, and the serializers; raises what `check_settings` raises."""
    check_settings("Producer", settings)
    of_client, serialization = split_settings(settings, "serializer")
    serializers = None if serialization is None else Serializers(serialization)
    if ignored := without_effect(of_client):
        _log.warning("these settings have no effect on a producer: %s", ", ".join(ignored))
    return of_client, serializers


class ProducerCore(OfSettings):
    """The records that gather, the sender and the transactions of a producer. Its calls must take turns."""

    def _begin(self, cluster: Cluster, serializers: Serializers | None, *, creates_topics: bool) -> None:
        self._cluster, self._serializers = cluster, serializers
        #: Whether calls are refused.
        self._is_closed = False
        config = cluster.config
        name = config.transactional_id
        self._transactions = None if name is None else Transactions(cluster, name)
        self._sender = Sender(cluster, self._transactions)
        self._linger = config.linger_ms / 1000
        self._max_block = config.max_block_ms / 1000
        self._gathering = Gatherings()
        #: Bytes of records in a batch before compression; a record is never split.
        self.batch_size = max(1, config.batch_size)
        #: Bytes of records that may wait.
        self._room = max(1, config.buffer_memory)
        #: The most bytes of a batch with a single record, and the setting that says so, as the user writes it.
        self._size_limit = config.max_request_size, config.named("max.request.size")
        if config.buffer_memory < config.max_request_size:
            self._size_limit = config.buffer_memory, config.named("buffer.memory")
        self._choice = PartitionChoice(cluster, self.batch_size, creates_topics=creates_topics)

    def _check(self, call: str) -> None:
        """Raise the producer's earlier error, `ProducerClosed`, or `InvalidTransactionState` without a transaction."""
        self._check_open(call)
        self._sender.check()
        if self._transactions is not None:
            self._transactions.check_open(call)

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise ProducerClosed(f"{call}: the producer is closed")

    def _exhausted(self, waiting: int, what: str) -> BufferExhausted:
        """The error for a record for which there was no room."""
        config = self._cluster.config
        return BufferExhausted(
            f"{waiting} bytes of records wait to be sent, {config.named('buffer.memory')}={config.buffer_memory}, and "
            f"none was confirmed within {self._max_block:g} s ({config.named('max.block.ms')}): {what} is not sent"
        )

    def _due(self, now: float) -> Iterator[TopicPartition]:
        """Partitions of which records have gathered for linger.ms.

        Not while a batch of theirs waits to be sent: at a broker that is slow, or throttles, more records join.
        """
        return (key for key, each in self._gathering.items() if each.due <= now and not self._sender.has_unsent(key))

    @property
    def _next_due(self) -> float:
        """When `_due` has a partition, if no batch is sent before: a reading of `time.monotonic`."""
        dues = (each.due for key, each in self._gathering.items() if not self._sender.has_unsent(key))
        return min(dues, default=math.inf)

    def _finish(self, key: TopicPartition, until: float = math.inf) -> None:
        """Make a batch of what has gathered for a partition; `until`: see `Sender.make_room`."""
        gathering = self._gathering.remove(key)
        count, _, last = gathering.whole
        if count:
            self._sender.add_records(key, gathering.body, count, gathering.first_timestamp, last, gathering.receipt)
        else:  # the first one could not be encoded
            self._sender.receipts.drop(gathering.receipt)
        self._sender.make_room(until)

    def _finish_all(self, until: float = math.inf) -> None:
        for key in list(self._gathering):
            self._finish(key, until)

    def _transactional(self, call: str) -> Transactions:
        self._check_open(call)
        if self._transactions is None:
            raise ConfigError(f"{self._cluster.config.named('transactional.id')} is not set: it names the transactions")
        return self._transactions

    def _in_transaction(self, call: str) -> Transactions:
        """The transactions, of which one is open; raises the error of an earlier record first, as `send` does.

        But without a transaction it says so: a commit that an interrupt has ended may have been done.
        """
        transactions = self._transactional(call)
        if not transactions.is_open:
            transactions.check_open(call)
        self._sender.check()
        transactions.check_open(call)
        return transactions

    def _aborting(self) -> Steps[None]:
        """The steps that drop unsent records and abort the transaction."""
        transactions = self._transactional("abort_transaction")
        if not transactions.is_open:
            yield from transactions.abort()  # says why not
        self._gathering.clear()
        aborted = TransactionAborted(f"the transaction of {transactions.transactional_id} was aborted")
        if not self._sender.is_idle:
            self._sender.fail(aborted)  # nothing more is sent, also if these steps are not made to the end
        if transactions.state is State.FAILED:
            yield from self._sender.reset()  # another epoch numbers its batches from 0 on
        self._sender.receipts.fail_all(aborted)
        yield from transactions.abort()

    def _whole(self) -> AbstractContextManager[None]:
        """A block whose records are all of the open transaction, or it can't be committed."""
        return nullcontext() if self._transactions is None else self._transactions.failing()

    def _exclusively(self) -> AbstractContextManager[None]:
        """A block in which no other call uses the producer; `RequestTimedOut` if one does for too long."""
        return nullcontext()

    @property
    def _gathered(self) -> int:
        """The number of records that are in no batch yet."""
        return self._gathering.records

    def finish_at_exit(self, until: float) -> None:
        """Write what is left, up to `until`, a reading of `time.monotonic`; warn of what is lost.

        Not of a transaction, which nobody will commit.
        """
        if self._is_closed or self._transactions is not None:
            return
        seconds = max(0.0, until - time.monotonic())
        reason = "the time was over"
        try:
            with self._exclusively(), self._cluster.within(1000 * seconds, "the time at exit"):
                self._finish_all(until)
                self._sender.flush(until)
        except KlogError as error:
            reason = str(error)
        self._sender.receipts.call_back_within(max(_LAST_CALLBACKS, until - time.monotonic()))
        lost = self._sender.unconfirmed + self._gathered
        if lost:
            _log.warning("the program ends with %d records not confirmed: call flush or close before; %s", lost, reason)


#: Producers that `finish_at_exit` is called of, unless they are closed.
unclosed: weakref.WeakSet[ProducerCore] = weakref.WeakSet()


@atexit.register
def _finish_all_at_exit() -> None:
    until = time.monotonic() + _SECONDS_AT_EXIT
    for producer in list(unclosed):
        try:
            producer.finish_at_exit(until)
        except Exception:  # the others have their turn
            _log.exception("records that a producer had not written at exit are lost")
