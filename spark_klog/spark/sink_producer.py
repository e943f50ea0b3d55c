"""A producer that writes to topics that exist, or creates them first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import pyarrow as pa

from spark_klog.client.admin.admin import Admin
from spark_klog.client.admin.topics import NewTopic
from spark_klog.client.answers import answer_error
from spark_klog.client.backoff import pause_seconds
from spark_klog.client.cluster import Cluster
from spark_klog.client.delivery.transactions import PreparedTransaction
from spark_klog.client.producer import Producer
from spark_klog.columns.rows import check_rows, record_rows, topic_names
from spark_klog.errors import ErrorCode, InvalidRecords, KlogError, ProducerFenced, ProtocolError, RecordTooLargeToSend
from spark_klog.protocol.apis import METADATA
from spark_klog.records.topic_names import check_topic_name
from spark_klog.spark.options.names import PREFIX

#: Seconds. A topic that was created just now may be missing in the metadata of some brokers.
_GRACE = 1.0
_LAST_ABORT_MS = 5_000
#: States of a committed transaction (DescribeTransactions): its markers may still be under way.
_COMMITTED = ("PrepareCommit", "CompleteCommit")


class SinkProducer:
    """Write Arrow rows to topics. Unlike `Producer` it does not let the broker create topics: a name may be wrong."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """`settings` by Kafka's names; raises what `Cluster.connect` and `Producer` raise."""
        self._cluster = Cluster.connect(settings, PREFIX)
        self._producer = Producer(self._cluster, creates_topics=False)
        #: Whether no transaction has used the producer's epoch.
        self._has_new_epoch = False
        #: The last transaction that was prepared.
        self.prepared: PreparedTransaction | None = None

    def send_arrow(self, rows: pa.RecordBatch, topic: str | None, create_partitions: int | None, first: int) -> None:
        """Add rows as `Producer.send_arrow` does.

        A topic that does not exist gets `create_partitions` partitions, or is a `ProtocolError` that names it.
        `InvalidRecords` and `RecordTooLargeToSend` count rows from `first`.
        """
        if rows.num_rows == 0:
            return
        names = [topic] if topic is not None else topic_names(rows.column("topic"), first)
        self.require(names, create_partitions)
        try:
            self._producer.send_arrow(rows, topic)
        except InvalidRecords as error:
            if error.row is not None:
                for start, part in record_rows(rows, first):
                    check_rows(part, start, topic, self._producer.partitions)
            raise
        except RecordTooLargeToSend as error:
            row = first + (error.row or 0)
            raise RecordTooLargeToSend(error.topic, error.size, error.limit, error.setting, row) from None

    def require(self, names: list[str], create_partitions: int | None) -> None:
        """Make sure that the topics exist; see `send_arrow`."""
        unknown = self._producer.unknown(names)
        missing = self._missing(unknown) if unknown else []
        for name in missing:
            check_topic_name(name)  # brokers answer one that is illegal as one that does not exist
        seconds = _GRACE if create_partitions is None else self._cluster.config.request_timeout_ms / 1000
        deadline, attempts = time.monotonic() + seconds, 0
        while missing and time.monotonic() < deadline:
            if attempts:
                time.sleep(pause_seconds(self._cluster.config, attempts))
            attempts += 1
            if create_partitions is not None:
                self._create(missing, create_partitions)
            missing = self._missing(missing)
        if missing:
            hint = "option createTopics=PARTITIONS creates topics"
            if create_partitions is not None:
                hint = f"not there {seconds:g} s after it was created: is a topic of this name being deleted?"
            what = f"topic{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise answer_error(METADATA, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{what} ({hint})")

    def _missing(self, names: list[str]) -> list[str]:
        found = self._cluster.attempt(lambda: self._cluster.partitions(names, missing_ok=True))
        return [name for name in names if name not in found]

    def _create(self, names: list[str], partitions: int) -> None:
        """Create topics with the brokers' default.replication.factor.

        Kafka answers TOPIC_ALREADY_EXISTS also while it deletes a topic that it no longer tells clients about.
        """
        outcomes = Admin(self._cluster).create_topics([NewTopic(name, partitions) for name in names])
        for error in outcomes.failures.values():
            # else another task has created the topic, or it will have to be created later
            if not isinstance(error, ProtocolError) or error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
                raise error

    def flush(self) -> None:
        """Send all rows and wait until they are confirmed."""
        self._producer.flush()

    def begin_transaction(self, known: PreparedTransaction | None) -> None:
        """Begin a transaction with another epoch, the next one of `known`, the last transaction of this id, if any.

        That one must have ended. `ProducerFenced` if it is not committed: someone has fenced this id.
        """
        if not self._has_new_epoch:
            if known is not None:
                self._check_committed(known)
            self._producer.init_transactions(known)
        self._producer.begin_transaction()

    def _check_committed(self, known: PreparedTransaction) -> None:
        """By the state, as Kafka 4 (transaction.version 2, KIP-890) raises the epoch by one for a commit, too.

        InitProducerId with the epoch before is a repeated request there, be the id committed or fenced.
        """
        name = known.transactional_id
        now = Admin(self._cluster).describe_transactions([name])[name]
        if isinstance(now, ProtocolError) and now.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            raise ProducerFenced(name)
        if isinstance(now, KlogError):
            raise now
        if now.producer_id != known.producer_id or now.state not in _COMMITTED:
            raise ProducerFenced(name)

    def prepare_transaction(self) -> PreparedTransaction | None:
        """As `Producer.prepare_transaction`."""
        found = self._producer.prepare_transaction()
        self._has_new_epoch = found is None
        self.prepared = found or self.prepared
        return found

    def abort_transaction(self) -> None:
        """Abort what the task has written, for readers not to wait for it; within 5 s, and without errors.

        Records may be in flight: brokers refuse them then. The producer can only be closed.
        """
        with suppress(KlogError), self._cluster.within(_LAST_ABORT_MS):
            found = self._producer.transaction_under_way()
            Admin(self._cluster).fence_transactions([] if found is None else [found])

    def refresh(self) -> bool:
        """As `Producer.refresh`; topics that are gone since have to be created again."""
        self._cluster.forget_leaders()
        return self._producer.refresh()

    def abort(self) -> None:
        """Close the connections. Rows that were not flushed may or may not be written."""
        self._producer.abort()
