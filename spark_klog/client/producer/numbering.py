"""Producer ids and sequence numbers, by which brokers detect duplicate batches (KIP-98, KIP-360)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from spark_klog.base.settings import INT32_MAX
from spark_klog.client.answers import check_code
from spark_klog.client.cluster import Cluster
from spark_klog.client.requests import PendingRequest
from spark_klog.errors import ConnectionFailed, ErrorCode, RequestTimedOut, UnsupportedVersionError
from spark_klog.protocol.apis import INIT_PRODUCER_ID
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
_LAST_EPOCH = 0x7FFF


@dataclass
class Numbering:
    """The producer id, epoch and next sequence of a partition; a batch has the sequence of its first record.

    Each partition has its own epoch, since brokers compare epochs only within a partition.
    """

    producer_id: int
    epoch: int
    next_sequence: int = 0

    def take_sequences(self, count: int) -> int:
        """Take the sequence for a batch of `count` records; after 2^31 - 1 it wraps to 0."""
        sequence = self.next_sequence
        self.next_sequence = (sequence + count) & INT32_MAX
        return sequence


class ProducerIds:
    """Give each partition a numbering from one producer id, or none if the producer is not idempotent.

    It is not idempotent with enable.idempotence=false, without acks=all, or with brokers before 0.11; for the latter
    `step` raises `UnsupportedVersionError` if enable.idempotence=true is set.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_idempotent = cluster.config.is_idempotent
        self._current: tuple[int, int] | None = None
        #: The request for a producer id.
        self.asking: PendingRequest[Message] = PendingRequest()

    def must_wait(self, numbering: Numbering | None) -> bool:
        """Whether `renewed` needs a producer id, for which `step` asks."""
        if not self._is_idempotent or (numbering is not None and numbering.epoch < _LAST_EPOCH):
            return False
        return self._current is None or (numbering is not None and numbering.producer_id == self._current[0])

    def renewed(self, numbering: Numbering | None) -> Numbering | None:
        """A numbering from 0 that the leader accepts in any state: with the next epoch, or with another producer id.

        None if the producer is not idempotent, or if it `must_wait`.
        """
        if self.must_wait(numbering) or not self._is_idempotent:
            return None
        if numbering is not None and numbering.epoch < _LAST_EPOCH:
            return Numbering(numbering.producer_id, numbering.epoch + 1)
        assert self._current is not None
        return Numbering(*self._current)

    def step(self) -> bool:
        """Ask any broker for a producer id, without waiting; return whether none must wait for it any more.

        `ConnectionFailed` if no broker answers, `ProtocolError` if one refuses; the next call asks again.
        """
        message = {"transactional_id": None, "transaction_timeout_ms": INT32_MAX}
        try:
            answer = self.asking.step(lambda: self._cluster.asking_any(INIT_PRODUCER_ID, lambda _: message))
        except UnsupportedVersionError as error:
            if self._cluster.config.enable_idempotence:
                raise
            _log.info("records may be written twice when a request is sent again: %s", error)
            self._is_idempotent = False
            return True
        except (ConnectionFailed, RequestTimedOut) as error:
            raise ConnectionFailed(f"no producer id: {error}") from error
        if answer is None:
            return False
        code = answer["error_code"]
        rights = ""
        if code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
            rights = "the user needs WRITE on a topic, or before Kafka 2.8 IDEMPOTENT_WRITE on the cluster; "
        without = self._cluster.config.named("enable.idempotence=false")
        check_code(INIT_PRODUCER_ID, code, f"no producer id ({rights}{without} does without one)")
        self._current = answer["producer_id"], answer["producer_epoch"]
        return True
