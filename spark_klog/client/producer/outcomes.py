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
    MESSAGE_TOO_LARGE                       if the batch has several records: split and sent again (see `queues.split`)
    INVALID_PRODUCER_EPOCH                  in a transaction: final, `ProducerFenced`
    any other error                         final: the producer fails

Errors after which a batch is retried are final once it was sent again `retries` times.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.numbering import ProducerIds
from spark_klog.client.producer.queues import Batch, Queue, split
from spark_klog.client.producer.receipts import Receipts, fresh
from spark_klog.client.requests import PendingRequest
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import ConnectionFailed, DecodeError, ErrorCode, KlogError, ProtocolError, RequestTimedOut
from spark_klog.protocol.apis import METADATA, PRODUCE
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
#: What a request raises if no answer has come.
UNREACHABLE = (ConnectionFailed, RequestTimedOut, DecodeError)
_CONFIRMED = frozenset({ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER})
_RENUMBERED = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID})
_MAY_BE_WRITTEN = (
    "the records are probably written: the answer was lost, and then their batch was too large for the topic, whose "
    "max.message.bytes may have been lowered. They are not sent again: look for them in the topic"
)


class Outcomes:
    """Confirm, split, retry or fail batches, and count what is not confirmed; say which may be sent to which leader."""

    def __init__(self, cluster: Cluster, fenced: KlogError | None) -> None:
        """`fenced` is the error of an outdated epoch in transactions, None without them."""
        self._cluster, self._config, self._fenced = cluster, cluster.config, fenced
        self._producer_ids = ProducerIds(cluster)
        #: The request for the leaders of partitions that wait for it.
        self._metadata: PendingRequest[dict[str, Message]] = PendingRequest()
        self._metadata_topics: frozenset[str] = frozenset()
        #: Of all batches.
        self.bytes = 0
        #: Records that no leader has confirmed.
        self.unconfirmed = 0
        self.receipts = Receipts()

    def new_queue(self, key: TopicPartition) -> Queue:
        """A queue for a partition, without a transaction."""
        queue = Queue(key, self._producer_ids.renewed(None))
        queue.must_renumber = self._producer_ids.must_wait(None)  # batches are numbered when the producer id has come
        return queue

    @property
    def asking(self) -> tuple[PendingRequest[Any], ...]:
        """The requests that partitions may wait for: for their leaders, and for a producer id."""
        return self._metadata, self._producer_ids.asking

    def by_leader(self, queues: list[Queue]) -> dict[int, list[Queue]]:
        """The queues whose partitions have a leader, and batches with sequences that it accepts, by the leader's id.

        The others wait for a producer id or for metadata, or are retried after a pause; or they wait for answers of
        another broker.
        """
        if renumbered := [queue for queue in queues if queue.must_renumber]:
            waiting = self._renumber(renumbered)
            queues = [queue for queue in queues if queue not in waiting]
        leaders: dict[int, list[Queue]] = {}
        unknown = self._group(queues, leaders)
        if self._metadata.under_way and not any(queue.key[0] in self._metadata_topics for queue in unknown):
            self._metadata.close()  # nothing waits for it any more
        if unknown:
            self._look_for_leaders(unknown)
            self._group(unknown, leaders)
        return leaders

    def _group(self, queues: list[Queue], leaders: dict[int, list[Queue]]) -> list[Queue]:
        """Add queues to those of their leaders; return the queues without one."""
        unknown: list[Queue] = []
        for queue in queues:
            node = self._cluster.last_leader(*queue.key)
            if node is None:
                unknown.append(queue)
            elif not queue.in_flight or queue.node == node:
                leaders.setdefault(node, []).append(queue)
        return unknown

    def _renumber(self, queues: list[Queue]) -> list[Queue]:
        """Give batches sequences that the leader accepts; return the queues that wait for a producer id."""
        waiting = [queue for queue in queues if self._producer_ids.must_wait(queue.numbering)]
        if waiting:
            try:
                if self._producer_ids.step():
                    waiting = []
            except (*UNREACHABLE, ProtocolError) as error:
                if isinstance(error, ProtocolError) and not error.retriable:
                    raise
                self.put_off(waiting, error)
        for queue in queues:
            if queue not in waiting:
                queue.renumber(self._producer_ids.renewed(queue.numbering))
        return waiting

    def _look_for_leaders(self, unknown: list[Queue]) -> None:
        """Ask for the leaders of partitions without waiting; put those off that have none."""
        while unknown:
            if not self._metadata.under_way:
                self._metadata_topics = frozenset(queue.key[0] for queue in unknown)
            asked = [queue for queue in unknown if queue.key[0] in self._metadata_topics]
            try:
                metadata = self._metadata.step(lambda: self._cluster.asking_metadata(self._metadata_topics))
            except UNREACHABLE as error:
                self.put_off(asked, error)
            else:
                if metadata is None:
                    return
                self._judge([queue for queue in asked if self._cluster.last_leader(*queue.key) is None], metadata)
            unknown = [queue for queue in unknown if queue not in asked]

    def _judge(self, queues: list[Queue], metadata: Mapping[str, Message]) -> None:
        """Put off the partitions that have no leader in the metadata, or raise why they will not have one."""
        without: dict[int, list[Queue]] = {}
        for queue in queues:
            topic = metadata.get(queue.key[0])
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic["error_code"]
            without.setdefault(code or ErrorCode.LEADER_NOT_AVAILABLE, []).append(queue)
        for code, group in without.items():
            refusal = answer_error(METADATA, code, f"partition {group[0].name}")
            if not refusal.retriable:
                raise refusal
            self.put_off(group, refusal)

    def resend(self, queues: Collection[Queue], error: KlogError) -> KlogError | None:
        """Retry the partitions' batches, which were sent; return the error if one has had all its retries."""
        for queue in queues:
            queue.resent += 1
        if any(queue.resent > self._cluster.config.retries for queue in queues):
            return error
        if queues:
            self.put_off(queues, error)
        return None

    def put_off(self, queues: Collection[Queue], error: Exception) -> None:
        """Retry the partitions' batches after a pause, at the leaders in fresh metadata."""
        for queue in queues:
            queue.attempts += 1
            queue.failure = error
            queue.is_open = False
            self._cluster.forget_leader(*queue.key)
        # one pause for all, so that they share one metadata request
        attempts = max(queue.attempts for queue in queues)
        pause = pause_seconds(self._cluster.config, attempts)
        not_before = time.monotonic() + pause
        for queue in queues:
            queue.not_before = not_before
        names = ", ".join(sorted(queue.name for queue in queues))
        # a warning at attempts 1, 2, 4, 8, ...: a broker whose disk is full refuses each partition once a second
        level = logging.INFO if attempts & (attempts - 1) else logging.WARNING
        _log.log(level, "records for %s are sent again in %.1f s (attempt %d): %s", names, pause, attempts, error)

    def settle(self, queue: Queue, batch: Batch, entry: Message) -> KlogError | None:
        """Process the response for one partition; return a final error, if any."""
        code = entry["error_code"]
        if code in _CONFIRMED:
            self.confirm(queue, batch, entry["base_offset"], entry["log_append_time_ms"])
            return None
        if code == ErrorCode.INVALID_PRODUCER_EPOCH and self._fenced is not None:
            if batch.receipt is not None:
                batch.receipt.fail(fresh(self._fenced))
            return fresh(self._fenced)
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
        may_renumber = queue.numbering is not None and self._fenced is None
        if batch.may_be_written and code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            error, may_renumber = ProtocolError(code, error.what, advice=_MAY_BE_WRITTEN), False
        if code in _RENUMBERED and may_renumber:
            queue.must_renumber = True
        elif not error.retriable or code in _RENUMBERED:
            if batch.receipt is not None:
                batch.receipt.fail(fresh(error))  # in a transaction, the partition has lost records of it
            return error
        return self.resend([queue], error)

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
