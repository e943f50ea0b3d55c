"""Which batches go to which leader now, and when those that failed are sent again."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from spark_klog.client.answers import answer_error
from spark_klog.client.any_broker import AnyBrokerRequest, MetadataRequest
from spark_klog.client.backoff import pause_seconds
from spark_klog.client.cluster import Cluster
from spark_klog.client.delivery.producer_id import ProducerIds
from spark_klog.client.delivery.queues import Queue
from spark_klog.errors import ConnectionFailed, DecodeError, ErrorCode, KlogError, ProtocolError, RequestTimedOut
from spark_klog.protocol.apis import METADATA
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
#: What a request raises if no answer has come.
UNREACHABLE = (ConnectionFailed, RequestTimedOut, DecodeError)


class Retries:
    """Leaders of partitions, and the pauses of those whose batches wait for another attempt."""

    def __init__(self, cluster: Cluster, producer_ids: ProducerIds) -> None:
        self._cluster, self._producer_ids = cluster, producer_ids
        #: The request for the leaders of partitions that wait for it.
        self._asking: MetadataRequest | None = None

    @property
    def asking(self) -> list[AnyBrokerRequest[Any]]:
        """The requests that partitions wait for: for their leaders, and for a producer id."""
        return [request for request in (self._asking, self._producer_ids.asking) if request is not None]

    def with_numbers(self, queues: list[Queue]) -> list[Queue]:
        """The queues whose batches have sequences that the leader accepts; others wait for a producer id."""
        waiting = [queue for queue in queues if queue.must_renumber and self._producer_ids.must_wait(queue.numbering)]
        if waiting and not self._ask_for_id(waiting):
            queues = [queue for queue in queues if queue not in waiting]
        for queue in queues:
            if queue.must_renumber:
                queue.renumber(self._producer_ids.renewed(queue.numbering))
        return queues

    def _ask_for_id(self, waiting: list[Queue]) -> bool:
        """Return whether there is a producer id for partitions now; put them off if there will not be one soon."""
        try:
            return self._producer_ids.step()
        except UNREACHABLE as error:
            self.put_off(waiting, error)
        except ProtocolError as error:
            if not error.retriable:
                raise
            self.put_off(waiting, error)
        return False

    def with_leaders(self, queues: list[Queue]) -> list[Queue]:
        """The queues whose partitions have a leader; the others wait for metadata, or are retried after a pause."""
        unknown = self._without_leader(queues)
        if self._asking is not None and not any(queue.key[0] in self._asking.topics for queue in unknown):
            self._asking.cancel()  # nothing waits for it any more
            self._asking = None
        while unknown:
            if self._asking is None:
                self._asking = MetadataRequest(self._cluster, {queue.key[0] for queue in unknown})
            asked = [queue for queue in unknown if queue.key[0] in self._asking.topics]
            try:
                found = self._asking.step()
            except UNREACHABLE as error:
                self.put_off(asked, error)
            else:
                if found is None:
                    break
                self._judge(self._without_leader(asked), found)
            self._asking = None
            unknown = [queue for queue in unknown if queue not in asked]
        return [queue for queue in queues if self._cluster.last_leader(*queue.key) is not None]

    def _without_leader(self, queues: list[Queue]) -> list[Queue]:
        return [queue for queue in queues if self._cluster.last_leader(*queue.key) is None]

    def _judge(self, queues: list[Queue], found: Mapping[str, Message]) -> None:
        """Put off the partitions that have no leader in the metadata, or raise why they will not have one."""
        without: dict[int, list[Queue]] = {}
        for queue in queues:
            topic = found.get(queue.key[0])
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
