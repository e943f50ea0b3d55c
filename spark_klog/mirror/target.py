"""The target's side of a mirror: batches and offsets are written, with exactly-once in transactions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.net.connection import Connection
from spark_klog.client.producer.receipts import Receipt
from spark_klog.client.producer.sender import Sender
from spark_klog.client.producer.transactions import Transactions
from spark_klog.client.security.config import Settings
from spark_klog.errors import ConfigError, ErrorCode, ProducerFenced
from spark_klog.mirror.batches import OutBatch
from spark_klog.mirror.progress import progress_batches, progress_topic
from spark_klog.mirror.settings import MirrorSettings


class Target:
    """Writes to the target. Not thread-safe; it works only during calls.

    With exactly-once the constructor fences an earlier process of this name and slot, and waits until its last
    transaction has ended. Raises what `Cluster.connect`, `Sender` and `Transactions` raise; make a new one then.
    """

    def __init__(self, settings: MirrorSettings, name: str, slot: int) -> None:
        self._prefix = settings.prefix
        self._progress = progress_topic(name), slot
        own = settings.target_producer()
        if settings.exactly_once:
            own = Settings({**own, "transactional.id": f"{progress_topic(name)}-{slot}"})
        self._cluster = Cluster.connect(own)
        self._transactions: Transactions | None = None
        #: When the open transaction began, a reading of `time.monotonic`.
        self._began_at: float | None = None
        try:
            self._check_interval(settings)
            if self._cluster.config.transactional_id is not None:
                self._transactions = Transactions(self._cluster, self._cluster.config.transactional_id)
                self._transactions.init()
        except BaseException:
            self._cluster.close()
            raise
        self._sender = Sender(self._cluster, self._transactions)

    def _check_interval(self, settings: MirrorSettings) -> None:
        timeout = self._timeout_seconds
        if settings.exactly_once and settings.commit_seconds >= timeout:
            raise ConfigError(
                f"--commit-interval {settings.commit_seconds:g} needs a transaction.timeout.ms of the target above it, "
                f"not {1000 * timeout:.0f}: the broker would abort the transactions"
            )

    @property
    def _timeout_seconds(self) -> float:
        return self._cluster.config.transaction_timeout_ms / 1000

    @property
    def has_expired(self) -> bool:
        """Whether the open transaction is older than transaction.timeout.ms: the broker aborts and fences it then."""
        return self._began_at is not None and time.monotonic() - self._began_at >= self._timeout_seconds

    def fenced(self, error: BaseException | None) -> ProducerFenced | None:
        """The error for an outdated epoch: a leader answers INVALID_PRODUCER_EPOCH where a coordinator fences."""
        if self._transactions is None or getattr(error, "code", None) != ErrorCode.INVALID_PRODUCER_EPOCH:
            return None
        return ProducerFenced(self._transactions.transactional_id)

    @property
    def is_transactional(self) -> bool:
        return self._transactions is not None

    @property
    def is_idle(self) -> bool:
        """Whether all records are confirmed."""
        return self._sender.is_idle

    def has_room(self, size: int) -> bool:
        """Whether `send` of a batch of this size does not have to wait."""
        return self._sender.has_room(size)

    def send(self, key: TopicPartition, batch: OutBatch) -> Receipt:
        """Queue a batch for a partition, named as at the source; waits while too much is queued."""
        return self._send((self._prefix + key[0], key[1]), batch.data, batch.count)

    def send_progress(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Queue records (key, value) of the mirror's topic."""
        for data, count in progress_batches(rows):
            self._send(self._progress, data, count)

    def _send(self, key: TopicPartition, data: bytearray, count: int) -> Receipt:
        if self._transactions is not None and self._began_at is None:
            self._transactions.begin()
            self._began_at = time.monotonic()
        receipt = self._sender.receipts.new(key)
        self._sender.add_batch(key, data, count, receipt)
        self._sender.make_room()
        return receipt

    def step(self) -> tuple[float, list[Connection]]:
        """Do what can be done without waiting; return seconds and connections to wait for until the next step."""
        return self._sender.step()

    def flush(self) -> None:
        """Wait until all records are confirmed."""
        self._sender.flush()

    def commit(self) -> None:
        """Wait until all records are confirmed, and commit the transaction, if any."""
        self._sender.flush()
        if self._transactions is not None and self._began_at is not None:
            self._transactions.commit()
            self._began_at = None

    def close(self) -> None:
        """Close the connections. An open transaction stays: the next process of this name aborts it."""
        self._sender.stop()
        self._cluster.close()
