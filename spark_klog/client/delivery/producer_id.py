"""Producer ids and sequence numbers, by which brokers detect duplicate batches (KIP-98, KIP-360)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from spark_klog.client.answers import check_code
from spark_klog.client.cluster import Cluster
from spark_klog.errors import ConnectionFailed, ErrorCode, RequestTimedOut, UnsupportedVersionError
from spark_klog.protocol.apis import INIT_PRODUCER_ID

_log = logging.getLogger(__name__)
_LAST_EPOCH = 0x7FFF
_MAX_INT32 = 0x7FFFFFFF


@dataclass
class Numbering:
    """The producer id, epoch and next sequence of a partition; a batch has the sequence of its first record.

    Each partition has its own epoch, since brokers compare epochs only within a partition.
    """

    producer_id: int
    epoch: int
    next_sequence: int = 0

    def take(self, count: int) -> int:
        """Take the sequence for a batch of `count` records; after 2^31 - 1 it wraps to 0."""
        sequence = self.next_sequence
        self.next_sequence = (sequence + count) & _MAX_INT32
        return sequence


class ProducerIds:
    """Give each partition a numbering from one producer id, or none if the producer is not idempotent.

    It is not idempotent with enable.idempotence=false, without acks=all, or with brokers before 0.11; the latter raise
    `UnsupportedVersionError` if enable.idempotence=true is set.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_idempotent = cluster.config.is_idempotent
        self._current: tuple[int, int] | None = None

    def numbering(self) -> Numbering | None:
        """A numbering from 0; the first call asks a broker for a producer id, within delivery.timeout.ms."""
        if not self._is_idempotent:
            return None
        if self._current is None:
            try:
                self._current = self._cluster.attempt(
                    self._ask, self._cluster.config.delivery_timeout_ms, "delivery.timeout.ms"
                )
            except (ConnectionFailed, RequestTimedOut) as error:
                seconds = self._cluster.config.delivery_timeout_ms / 1000
                limit = self._cluster.config.named("delivery.timeout.ms")
                raise RequestTimedOut(f"no producer id within {seconds:g} s ({limit}): {error}") from error
            except UnsupportedVersionError as error:
                if self._cluster.config.enable_idempotence:
                    raise
                _log.info("records may be written twice when a request is sent again: %s", error)
                self._is_idempotent = False
                return None
        return Numbering(*self._current)

    def renewed(self, numbering: Numbering) -> Numbering:
        """A numbering from 0 that the leader accepts in any state: with the next epoch, or with a new producer id."""
        if numbering.epoch < _LAST_EPOCH:
            return Numbering(numbering.producer_id, numbering.epoch + 1)
        if self._current is not None and self._current[0] == numbering.producer_id:
            self._current = None
        renewed = self.numbering()
        assert renewed is not None
        return renewed

    def _ask(self) -> tuple[int, int]:
        message = {"transactional_id": None, "transaction_timeout_ms": _MAX_INT32}
        answer = self._cluster.any_broker(INIT_PRODUCER_ID, lambda _: message)
        without = self._cluster.config.named("enable.idempotence=false")
        code = answer["error_code"]
        rights = (
            "the user needs WRITE on a topic, or before Kafka 2.8 IDEMPOTENT_WRITE on the cluster; "
            if code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            else ""
        )
        check_code(INIT_PRODUCER_ID, code, f"no producer id ({rights}{without} does without one)")
        return answer["producer_id"], answer["producer_epoch"]
