"""The calls of a producer that are about its transactions."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.delivery.background import Turns
from spark_klog.client.delivery.gathering import Gatherings
from spark_klog.client.delivery.sender import Sender
from spark_klog.client.delivery.transactions import PreparedTransaction, Transactions
from spark_klog.client.offsets import GroupMetadata
from spark_klog.errors import ConfigError, TransactionAborted


class TransactionCalls:
    """The base of `Producer`, which gives it everything that the calls need."""

    _cluster: Cluster
    #: Records that are in no batch yet.
    _gathering: Gatherings
    _sender: Sender
    _transactions: Transactions | None
    _turns: Turns

    def _check_open(self, call: str) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

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

    def init_transactions(self, known: PreparedTransaction | None = None) -> None:
        """Fence other producers with this transactional.id and abort their transactions.

        Call it once, first, and after `prepare_transaction` before the next transaction. With `known`, the last
        transaction of this id, it fences nobody: it raises `ProducerFenced` if the id has another epoch (Kafka 2.5).
        With transaction.version 2 (Kafka 4) the epoch that follows is the same after a commit and after an abort:
        who must know which asks `Admin.describe_transactions` first.
        """
        with self._turns, self._turns.section:
            self._transactional("init_transactions").init(known)
            self._sender.reset()  # another epoch numbers its batches from 0 on

    def begin_transaction(self) -> None:
        """Begin a transaction. The broker learns of it with the first record."""
        with self._turns, self._turns.section:
            self._transactional("begin_transaction").begin()

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, int],
        group: str | GroupMetadata,
    ) -> None:
        """Add a group's offsets, by (topic, partition), to the transaction: committed with it (KIP-447).

        Offsets of a consumer that has subscribed need its `group_metadata()`: with the group's name alone the offsets
        of a member whose partitions another one reads already are accepted, too. `ProtocolError` (ILLEGAL_GENERATION,
        UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID) if it is outdated: abort the transaction. `UnsupportedVersionError` for
        a member if the group's coordinator is older than Kafka 2.5: it would not compare the generation.
        """
        found = GroupMetadata(group) if isinstance(group, str) else group
        with self._turns, self._turns.section:
            transactions = self._in_transaction("send_offsets_to_transaction")
            transactions.send_offsets(offsets, found.group, found.generation, found.member, found.instance)

    def commit_transaction(self) -> None:
        """Flush and commit. After `RequestTimedOut` or `ConnectionFailed` the outcome is open: call it again.

        After an interrupt, too: `InvalidTransactionState` then says that the first call has committed.
        """
        try:
            with self._turns, self._turns.section:
                transactions = self._transactional("commit_transaction")
                if not transactions.is_ending:
                    self._in_transaction("commit_transaction")
                    self._flush()
                transactions.commit()
        finally:
            self._sender.receipts.call_back()

    def prepare_transaction(self) -> PreparedTransaction | None:
        """Flush, and leave the transaction to another process, which calls `Admin.end_transactions`.

        None if nothing was written: there is nothing to end. Brokers abort the transaction after
        transaction.timeout.ms. `init_transactions` makes the producer usable again; call it when the transaction has
        ended, as it aborts a transaction that has not. Any version of Kafka with transactions (compare KIP-939).
        """
        try:
            with self._turns, self._turns.section:
                transactions = self._in_transaction("prepare_transaction")
                self._flush()
                return transactions.prepare()
        finally:
            self._sender.receipts.call_back()

    def transaction_under_way(self) -> PreparedTransaction | None:
        """What `Admin.fence_transactions` aborts this producer's transaction by; None if nothing was written."""
        with self._turns:
            return self._transactional("transaction_under_way").under_way

    def abort_transaction(self) -> None:
        """Drop unsent records and abort the transaction. After an error call it again."""
        try:
            with self._turns, self._turns.section:
                self._abort_transaction(self._transactional("abort_transaction"))
        finally:
            self._sender.receipts.call_back()

    def _abort_transaction(self, transactions: Transactions) -> None:
        if not transactions.is_open:
            transactions.abort()  # says why not
        self._gathering.clear()
        if not self._sender.is_idle:
            transactions.fail()
        if transactions.has_failed:
            self._sender.reset()  # another epoch numbers its batches from 0 on
        aborted = TransactionAborted(f"the transaction of {transactions.transactional_id} was aborted")
        self._sender.receipts.fail_all(aborted)
        transactions.abort()
