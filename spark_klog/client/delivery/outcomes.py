"""What becomes of a batch that was sent, by the leader's answer.

    no error, DUPLICATE_SEQUENCE_NUMBER     confirmed
    a retriable error                       retried after a pause, at the leader in fresh metadata
    no answer: a lost connection, a
    timeout, a partition left out           retried; a broker that has a numbered batch drops the duplicate
    OUT_OF_ORDER_SEQUENCE_NUMBER,
    UNKNOWN_PRODUCER_ID                     if an earlier batch of the partition is unconfirmed: retried after it;
                                            else renumbered from 0 in the next epoch and retried (KIP-360); final if
                                            the batch has no number or is in a transaction, or if it is out of order
                                            because the batch that it is split from may be written
    MESSAGE_TOO_LARGE                       if the batch has several records: split and sent again (see `splitting`)
    any other error                         final: the producer fails

Errors after which a batch is retried are final once it was sent again `retries` times.
"""

from __future__ import annotations

import logging

from spark_klog.client.answers import answer_error
from spark_klog.client.config import ClientConfig
from spark_klog.client.delivery.queues import Batch, Queue
from spark_klog.client.delivery.receipts import Receipts, fresh
from spark_klog.client.delivery.retries import Retries
from spark_klog.client.delivery.splitting import split
from spark_klog.errors import ErrorCode, KlogError, ProtocolError
from spark_klog.protocol.apis import PRODUCE
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
_CONFIRMED = frozenset({ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER})
_RENUMBERED = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID})
_MAY_BE_WRITTEN = (
    "the records are probably written: the answer was lost, and then their batch was too large for the topic, whose "
    "max.message.bytes may have been lowered. They are not sent again: look for them in the topic"
)


class Outcomes:
    """Confirm, split, retry or fail batches, and count what is not confirmed."""

    def __init__(self, config: ClientConfig, retries: Retries, *, is_transactional: bool) -> None:
        self._config, self._retries, self._is_transactional = config, retries, is_transactional
        #: Of all batches.
        self.bytes = 0
        #: Records that no leader has confirmed.
        self.unconfirmed = 0
        self.receipts = Receipts()

    def clear(self) -> None:
        """Count nothing: all batches are dropped."""
        self.bytes = self.unconfirmed = 0

    def settle(self, queue: Queue, batch: Batch, entry: Message) -> KlogError | None:
        """Process the response for one partition; return a final error, if any."""
        code = entry["error_code"]
        if code in _CONFIRMED:
            self.confirm(queue, batch, entry["base_offset"], entry["log_append_time_ms"])
            return None
        reason = f" ({entry['error_message']})" if entry["error_message"] else ""
        size = f", {len(batch.data)} bytes" if code == ErrorCode.MESSAGE_TOO_LARGE else ""
        error = answer_error(PRODUCE, code, f"produce to {queue.name}{size}{reason}")
        must_split = code == ErrorCode.MESSAGE_TOO_LARGE and batch.count > 1 and batch.first is not None
        if (error.retriable or code in _RENUMBERED or must_split) and batch is not queue.batches[0]:
            queue.is_open = False  # an earlier batch has failed: both are sent again, and it counts the attempt
            return None
        if must_split:
            self._split(queue)
            return None
        may_renumber = queue.numbering is not None and not self._is_transactional
        if batch.may_be_written and code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            error, may_renumber = ProtocolError(code, error.what, advice=_MAY_BE_WRITTEN), False
        if code in _RENUMBERED and may_renumber:
            queue.must_renumber = True
        elif not error.retriable or code in _RENUMBERED:
            if batch.receipt is not None:
                batch.receipt.fail(fresh(error))  # in a transaction, the partition has lost records of it
            return error
        return self._retries.resend([queue], error)

    def _split(self, queue: Queue) -> None:
        batch = queue.batches[0]
        parts = split(batch, self._config)
        queue.replace_oldest(parts)
        self.bytes += sum(len(part.data) for part in parts) - len(batch.data)
        # a warning at the first batch, then seldom: if batch.size is too large, each batch is split
        level = logging.INFO if queue.splits & (queue.splits - 1) else logging.WARNING
        hint = f"raise that, or lower {self._config.named('batch.size')}={self._config.batch_size}, to avoid it"
        what = f"a batch of {batch.count} records and {len(batch.data)} bytes for {queue.name}"
        _log.log(level, "%s is larger than the topic's max.message.bytes and is split: %s", what, hint)

    def confirm(self, queue: Queue, batch: Batch, base_offset: int = -1, append_time: int = -1) -> None:
        """The leader has the batch, at this offset and log append time (ms), if it says so."""
        batch.base_offset, batch.append_time = base_offset, append_time
        self.bytes -= len(batch.data)
        self.unconfirmed -= batch.count
        for confirmed in queue.confirm(batch):
            if confirmed.receipt is not None:
                part = confirmed.first or 0, confirmed.count
                self.receipts.confirm(confirmed.receipt, confirmed.base_offset, confirmed.append_time, part)
