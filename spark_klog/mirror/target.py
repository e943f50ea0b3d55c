"""The target's side of a mirror: batches and offsets are written, with exactly-once in transactions."""

from __future__ import annotations

from collections.abc import Iterable

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.connection import Connection
from spark_klog.client.delivery.receipts import Receipt
from spark_klog.client.delivery.sender import Sender
from spark_klog.client.delivery.transactions import Transactions
from spark_klog.client.security.secrets import Settings
from spark_klog.mirror.batches import OutBatch
from spark_klog.mirror.offset_map import Run
from spark_klog.mirror.progress import progress_topic, run_batches
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
        self._is_begun = False
        try:
            if self._cluster.config.transactional_id is not None:
                self._transactions = Transactions(self._cluster, self._cluster.config.transactional_id)
                self._transactions.init()
        except BaseException:
            self._cluster.close()
            raise
        self._sender = Sender(self._cluster, self._transactions)

    @property
    def is_transactional(self) -> bool:
        return self._transactions is not None

    @property
    def is_idle(self) -> bool:
        """Whether all records are confirmed."""
        return self._sender.is_idle

    def send(self, key: TopicPartition, batch: OutBatch) -> Receipt:
        """Queue a batch for a partition, named as at the source; waits while too much is queued."""
        return self._send((self._prefix + key[0], key[1]), batch.data, batch.count)

    def send_runs(self, runs: Iterable[tuple[TopicPartition, Run]]) -> None:
        """Queue the records of runs."""
        for data, count in run_batches(runs):
            self._send(self._progress, data, count)

    def _send(self, key: TopicPartition, data: bytearray, count: int) -> Receipt:
        if self._transactions is not None and not self._is_begun:
            self._transactions.begin()
            self._is_begun = True
        receipt = self._sender.receipts.new(key)
        self._sender.add_batch(key, data, count, receipt)
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
        if self._transactions is not None and self._is_begun:
            self._transactions.commit()
            self._is_begun = False

    def close(self) -> None:
        """Close the connections. An open transaction stays: the next process of this name aborts it."""
        self._sender.stop()
        self._cluster.close()
