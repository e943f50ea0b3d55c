"""The producer: records to batches, partition by partition.

`send` gathers records, and a thread sends them after linger.ms, or when a batch is full. `send_arrow` needs no thread:
it sends when enough rows have gathered, and `flush` sends the rest. With acks=all each record is written exactly once,
in order (idempotence); without idempotence, a request whose response was lost is sent again, and its records may be in
the log twice.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spark_klog.base.names import TopicPartition
from spark_klog.client.arguments import mapping_of, name_of, partition_of
from spark_klog.client.cluster import Cluster
from spark_klog.client.net.waiting import Waited, wait_until_ready
from spark_klog.client.offsets import Committed, GroupMetadata
from spark_klog.client.producer.core import LAST_ABORT_MS, ProducerCore, producer_settings, unclosed
from spark_klog.client.producer.intake import (
    Gathering,
    Serializers,
    check_bytes,
    check_headers,
    check_size,
    check_timestamp,
)
from spark_klog.client.producer.receipts import Delivery, OnDelivery
from spark_klog.client.producer.thread import Background, Turns
from spark_klog.client.producer.transactions import PreparedTransaction, State
from spark_klog.client.requests import PendingRequest, run
from spark_klog.errors import (
    CallInterrupted,
    ConcurrentUse,
    KlogError,
    ProducerClosed,
    RequestTimedOut,
)
from spark_klog.records import kernels
from spark_klog.records.contract import Headers, RecordColumns
from spark_klog.tracing import trace_client

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.columns.rows import RecordRows


#: Seconds before the thread goes on after the process had too many files open.
_PAUSE = 0.1
_log = logging.getLogger(__name__)


class Producer(ProducerCore):
    """Write records to partitions' leaders.

        with Producer({"bootstrap.servers": "localhost:9092"}) as producer:
            print(producer.send("clicks", b"value", key=b"key").result(10).offset)

    Thread-safe: calls of several threads take turns, and wait for each other up to max.block.ms (`RequestTimedOut`).
    Threads that share a transactional producer share its transaction. The first `send` starts a daemon thread; `close`
    ends it. A signal handler may use the producer unless it has interrupted a call: `ConcurrentUse`, nothing is done.
    An interrupt (Ctrl-C, what a signal handler raises) ends a call, whose own records may be written or not. Others are
    not affected, unless it comes in the middle of a change: then every later call raises `CallInterrupted`, as do the
    records that are not confirmed.
    Without `close` or `flush` the interpreter's exit writes what is left, for 10 s at most, and a warning counts what
    is lost; a killed process loses it, as does an exception that leaves the `with` block, which then calls `abort`.
    In a process forked since every call raises `ProducerClosed`, and `close` writes nothing: make a new producer there.

    Settings (Kafka's names): bootstrap.servers, acks, enable.idempotence, max.in.flight.requests.per.connection,
    compression.type and compression.CODEC.level, partitioner.class, partitioner.ignore.keys, librdkafka's partitioner,
    batch.size, linger.ms (of `send`), max.request.size, buffer.memory, max.block.ms, delivery.timeout.ms, retries (of a
    batch, nearly without end by default; 0 turns idempotence off, as in Kafka), metadata.max.age.ms (until new
    partitions are seen), retry.backoff.ms and retry.backoff.max.ms. Any call may raise an error of records sent before:
    a `ProtocolError` naming the partition, or `RequestTimedOut` after delivery.timeout.ms. After an error every later
    call raises it again and nothing more is written; each record that is not confirmed gets the error, and may or may
    not be in the log.

    key.serializer and value.serializer make bytes of keys and values, with schema.registry.url and value.schema, or
    auto.register.schemas, use.latest.version, value.schema.id, value.subject and value.subject.name.strategy, by a
    schema: see docs/reference/producer.md. Without them keys and values are bytes. Threads that share a producer share
    its functions.

    With transactional.id, records are written in transactions (`init_transactions` once, then `begin_transaction` and
    `commit_transaction`); read_committed consumers see all of them or none.

    After an error within a transaction, call `abort_transaction` to continue; after `ProducerFenced` make a new
    producer. The broker aborts transactions that are open longer than transaction.timeout.ms; each transaction call
    waits up to max.block.ms.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Connect with `settings` by Kafka's names; raises what `Cluster.connect` raises."""
        of_client, serializers = producer_settings(settings)
        self._start(Cluster.connect(of_client), serializers, has_thread=True, creates_topics=True)
        trace_client(self, self._cluster, "send", "send_arrow")

    @classmethod
    def of_cluster(cls, cluster: Cluster, *, creates_topics: bool = True) -> Producer:
        """A producer of bytes on a connected cluster, which `close` closes. It starts no thread.

        The caller's thread may use the cluster meanwhile: so records leave in calls, when linger.ms is over or a batch
        is full, and callbacks are called in `flush` and `close`. Without `creates_topics` a missing topic is an error
        also with brokers that would create it.
        """
        producer = cls.__new__(cls)
        producer._start(cluster, None, has_thread=False, creates_topics=creates_topics)
        return producer

    def _start(
        self, cluster: Cluster, serializers: Serializers | None, *, has_thread: bool, creates_topics: bool
    ) -> None:
        self._begin(cluster, serializers, creates_topics=creates_topics)
        self._has_thread = has_thread
        #: Whether nothing is left to close.
        self._has_ended = False
        self._kernel = kernels.load()
        self._background: Background | None = None
        limit = cluster.config.named("max.block.ms")
        self._turns = Turns(cluster.config.max_block_ms, limit, self._wake, self._fail_halfway)
        if has_thread:
            unclosed.add(self)

    def partitions(self, topic: str) -> int:
        """The number of partitions of a topic. The broker may create a missing topic; otherwise `ProtocolError`."""
        with self._turns, self._turns.section:
            self._check_open("partitions")
            run(self._choice.renewing())
            return self._choice.count(topic)

    def unknown(self, topics: Collection[str]) -> list[str]:
        """The topics whose partitions are not known from metadata that is at most metadata.max.age.ms old."""
        with self._turns, self._turns.section:
            self._check_open("unknown")
            run(self._choice.renewing())
            return [topic for topic in topics if not self._choice.knows(topic)]

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
        on_delivery: OnDelivery | None = None,
    ) -> Delivery:
        """Add a record; `timestamp` in ms, None for now, -1 for a record without timestamp.

        `key` and `value` are bytes, or what key.serializer and value.serializer take; None is null. `EncodeError` if
        one does not serialize, `SchemaError`, `RegistryError` or `ConnectionFailed` if there is no schema to do it by:
        nothing has changed then, and the same record may be sent again.

        Without `partition` the murmur2 hash of the key decides, as in Kafka, or what partitioner.class or partitioner
        says; without a key a partition gets a batch, then the next one.
        `TypeError` or `ConfigError` if a value is invalid, `RecordTooLargeToSend` if it is beyond max.request.size
        or buffer.memory, `BufferExhausted` after max.block.ms if buffer.memory is full; the record is then not written.

        The `Delivery` tells when the record is confirmed. `on_delivery(error, metadata)` is called then, one of the two
        being None: in the producer's thread or in a call, in order for each partition. It may call `send`, but not
        wait for a `Delivery`.
        """
        if type(topic) is not str:
            name_of("send: the topic", topic)
        if self._serializers is not None:
            with self._turns:
                self._check("send")
            key, value, headers = self._serializers.record(topic, key, value, check_headers(headers))
        if type(value) is not bytes:
            check_bytes("value", value)
        if key is not None:
            check_bytes("key", key)
        if headers != ():
            headers = check_headers(headers)
        self._look_up(topic, "send")
        with self._turns:
            self._check("send")
            check_size(topic, key, value, headers, *self._size_limit)
            timestamp = time.time_ns() // 1_000_000 if timestamp is None else check_timestamp(timestamp)
            if self._choice.is_due and self._has_thread:
                self._choice.renew_soon()
            elif self._choice.is_due:
                run(self._choice.renewing())
            partition, is_free = self._choice.of(topic, key, partition)
            if self._gathering.bytes + self._sender.size >= self._room:
                self._await_room(topic, partition)
            gathering = self._gathering.get((topic, partition))
            if gathering is None:
                gathering = self._gather((topic, partition))
            index, size = gathering.add_record(timestamp, key, value, headers, on_delivery)
            self._gathering.bytes += size
            if is_free:
                self._choice.filled(topic, size)
            if gathering.whole[1] >= self.batch_size:
                try:
                    with self._turns.section:
                        self._finish((topic, partition), time.monotonic() + self._max_block)
                finally:
                    self._wake()  # also to call what waits for the records of an error
            elif not self._has_thread and gathering.due <= time.monotonic():
                with self._turns.section:
                    self._finish((topic, partition))
                    self._sender.step()
        return Delivery(gathering.receipt, index, timestamp)

    def _look_up(self, topic: str, call: str) -> None:
        """Have a topic's partitions known within request.timeout.ms, before the call's turn.

        Turns are taken for single steps only, so that other threads' calls go on meanwhile.
        """
        if not self._has_thread or self._choice.knows(topic):
            return
        request: PendingRequest[None] = PendingRequest()
        try:
            while True:
                with self._turns, self._turns.section:
                    self._check(call)
                    request.step(lambda: self._choice.looking_up(topic))
                    if not request.under_way:
                        return
                    connections, pause = request.connections, request.look_at - time.monotonic()
                try:
                    wait_until_ready(connections, pause)
                except (OSError, ValueError):  # another thread has closed the connection: the next step says so
                    time.sleep(max(0.0, pause))
        finally:
            if request.under_way:  # an interrupt: dropping the answer may close a connection that others use
                with self._turns:
                    request.close()

    def _gather(self, key: TopicPartition) -> Gathering:
        """Begin a batch, and have the thread send it after linger.ms."""
        due = time.monotonic() + self._linger
        if self._background is None and self._has_thread:
            with self._turns.section:
                self._background = Background(self._turns, self._work, self._sender.receipts.call_back)
                try:
                    self._background.start()
                except RuntimeError:  # no thread can be started now
                    self._background = None
                    raise
                self._sender.work_on()
        elif self._background is not None and due < self._background.looks_at:
            self._background.wake()
        gathering = self._gathering[key] = Gathering(self._sender.receipts.new(key), due)
        return gathering

    def _wake(self) -> None:
        if self._background is not None:
            self._background.wake()

    def _await_room(self, topic: str, partition: int) -> None:
        """Wait until records take less than buffer.memory."""
        until = time.monotonic() + self._max_block
        try:
            with self._turns.section:
                self._finish_all(until)
                self._sender.await_room(until)
        finally:
            self._wake()
        if self._sender.size >= self._room:
            raise self._exhausted(self._sender.size, f"a record for {topic}-{partition}")

    def _work(self) -> tuple[float, Collection[Waited]]:
        """Do what is due, in the thread; return seconds and connections to wait for."""
        if self._is_closed:
            return math.inf, ()
        try:
            now = time.monotonic()
            for key in list(self._due(now)):
                self._finish(key, now)
            pause, connections = self._sender.step()
        except KlogError as error:  # the next call raises it
            _log.warning("records are not written: %s", error)
            return math.inf, ()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                return _PAUSE, ()
            _log.exception("records are not written")
            self._sender.fail(KlogError(f"the producer's thread has failed: {error!r}"))
            return math.inf, ()
        return max(0.0, min(pause, self._next_due - time.monotonic())), connections

    def send_arrow(
        self, rows: pa.Table | pa.RecordBatch, topic: str | None = None, *, is_any_time: bool = False
    ) -> None:
        """Add the rows of an Arrow table or record batch as records, without a Python object per record.

        Columns: value (string or binary) and, if present, key (the same), topic (string; `topic` replaces it),
        partition (an integer), timestamp (a timestamp, or int64 in ms) and headers (list<struct<key: string, value:
        binary>>). A null partition or timestamp is chosen as by `send`. The columns offset and timestampType, as
        `Consumer.poll_arrow` returns them, are ignored. The rows of a call form batches of their own: pass thousands.

        `is_any_time` is for copies of records: it takes timestamps before 1970, as brokers do.

        With key.serializer or value.serializer these columns are rows of any type that fits the schema, which is by
        default made of the column's type.

        `InvalidRecords` names the column and its type, or the row, that is wrong, `RecordTooLargeToSend` a row that is
        beyond max.request.size or buffer.memory; `EncodeError`, `SchemaError` and the registry's errors are as of
        `send`. No row is added then.
        """
        if self._serializers is not None:
            with self._turns:
                self._check("send_arrow")
            rows = self._serializers.table(rows, topic)
        self.send_rows(self.record_rows(rows, topic, is_any_time=is_any_time))

    def record_rows(
        self, rows: pa.Table | pa.RecordBatch, topic: str | None, *, first: int = 0, is_any_time: bool = False
    ) -> RecordRows:
        """The rows for `send_rows`, checked and cast; raises what `send_arrow` raises, rows counted from `first`."""
        from spark_klog.columns.rows import RecordRows

        return RecordRows(rows, topic, self._size_limit, first=first, is_any_time=is_any_time)

    def send_rows(self, rows: RecordRows) -> None:
        """As `send_arrow`, of rows that `record_rows` has checked."""
        from spark_klog.columns.encode import Placement, by_topic

        for name in rows.topics:
            self._look_up(name, "send_arrow")
        with self._turns, self._turns.section:
            self._check("send_arrow")
            choice = self._choice
            run(choice.renewing())
            counts = {name: choice.count(name) for name in rows.topics}
            rows.check_partitions(counts)
            with self._whole():
                for _, batch in rows:
                    for name, part in by_topic(batch, rows.topic):
                        placement = Placement(part, counts[name], self.batch_size, choice.partitioning)
                        for partition, columns in placement.records(choice.turns(name, placement.turns)):
                            self._add_columns((name, partition), columns)
            self._wake()

    def _add_columns(self, key: TopicPartition, columns: RecordColumns) -> None:
        if key in self._gathering:
            self._finish(key)
        row = 0
        while row < columns.count:
            body, following, base, maximum = self._kernel.encode(columns, row, self.batch_size)
            self._sender.add_records(key, body, following - row, base, maximum)
            self._sender.make_room()
            row = following

    def flush(self, timeout: float | None = None) -> None:
        """Send all records and wait until they are confirmed, and `on_delivery` was called for them.

        With `timeout`, return after so many seconds: what is not confirmed by then stays under way.
        """
        try:
            with self._turns, self._turns.section:
                self._flush(math.inf if timeout is None else time.monotonic() + timeout)
        finally:
            self._sender.receipts.call_back()

    def _flush(self, until: float = math.inf) -> None:
        self._check_open("flush")
        if self._gathering:
            self._finish_all(until)
        self._sender.flush(until)

    def refresh(self) -> bool:
        """Fetch partitions and leaders of the topics used since the last call; call `flush` first.

        False if the brokers now belong to another cluster: it may give this producer's id to another producer, so do
        not use this one any more. Raises what `Cluster.partitions` raises.
        """
        with self._turns, self._turns.section:
            self._check_open("refresh")
            return self._choice.refresh()

    def init_transactions(self, known: PreparedTransaction | None = None) -> None:
        """Fence other producers with this transactional.id and abort their transactions.

        Call it once, first, and after `prepare_transaction` before the next transaction. With `known`, the last
        transaction of this id, it fences nobody: it raises `ProducerFenced` if the id has another epoch (Kafka 2.5).
        With transaction.version 2 (Kafka 4) the epoch that follows is the same after a commit and after an abort:
        who must know which asks `Admin.describe_transactions` first.
        """
        with self._turns, self._turns.section:
            run(self._transactional("init_transactions").init(known))
            run(self._sender.reset())  # another epoch numbers its batches from 0 on

    def begin_transaction(self) -> None:
        """Begin a transaction. The broker learns of it with the first record."""
        with self._turns, self._turns.section:
            self._transactional("begin_transaction").begin()

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, int | Committed],
        group: str | GroupMetadata,
    ) -> None:
        """Add a group's offsets, by (topic, partition), to the transaction: committed with it (KIP-447).

        Offsets of a consumer that has subscribed need its `group_metadata()`: with the group's name alone the offsets
        of a member whose partitions another one reads already are accepted, too. `ProtocolError` (ILLEGAL_GENERATION,
        UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID) if it is outdated: abort the transaction. `UnsupportedVersionError` for
        a member if the group's coordinator is older than Kafka 2.5: it would not compare the generation.
        """
        call = "send_offsets_to_transaction"
        member = GroupMetadata(group) if isinstance(group, str) else group
        offsets = {partition_of(call, key): offset for key, offset in mapping_of(f"{call}: offsets", offsets).items()}
        with self._turns, self._turns.section:
            transactions = self._in_transaction(call)
            run(transactions.send_offsets(offsets, member))

    def commit_transaction(self) -> None:
        """Flush and commit. After `RequestTimedOut` or `ConnectionFailed` the outcome is open: call it again.

        After an interrupt, too: `InvalidTransactionState` then says that the first call has committed.
        """
        try:
            with self._turns, self._turns.section:
                transactions = self._transactional("commit_transaction")
                if transactions.state is not State.COMMITTING:  # else the answer to a commit has not come
                    self._in_transaction("commit_transaction")
                    self._flush()
                run(transactions.commit())
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
                run(self._aborting())
        finally:
            self._sender.receipts.call_back()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._turns, self._turns.section:
            yield

    def finish_at_exit(self, until: float) -> None:
        if not self._turns.is_forked:
            self._turns.shorten(max(0.0, until - time.monotonic()))
            super().finish_at_exit(until)

    def close(self) -> None:
        """Flush and close the connections; abort an open transaction. A second call does nothing."""
        if self._is_closed:
            self.abort()  # an interrupt may have ended the first call
            return
        try:
            if self._turns.is_forked:
                pass
            elif self._transactions is None:
                self.flush()
            elif self._transactions.is_open:
                self.abort_transaction()
        except ConcurrentUse:
            raise
        except ProducerClosed:
            return  # by another thread meanwhile
        except BaseException:
            self.abort()
            raise
        self.abort()

    def abort(self) -> None:
        """Close the connections. Records that were not flushed may or may not be written.

        Another thread's call ends with `ProducerClosed`, or without its connection after max.block.ms.
        """
        if self._has_ended:
            return
        if self._turns.is_forked:
            self._is_closed = True
            self._cluster.close()
            return
        self._turns.check()
        self._is_closed = True
        self._sender.stop()
        if self._background is not None:
            self._background.stop()
        try:
            with self._turns:
                self._end()
        except RequestTimedOut:  # the thread ends, too, when that call ends
            self._end()
        else:
            if self._background is not None and not self._sender.receipts.is_calling:
                self._background.join()
        self._sender.receipts.call_back()
        self._has_ended = True

    def _fail_halfway(self) -> None:
        """Write nothing more after an interrupt in the middle of a change: see `Turns`."""
        self._cluster.end_deadlines()
        advice = "close it and make another one"
        if self._transactions is not None:
            advice = "abort the transaction or close it"
        self._sender.fail(
            CallInterrupted(
                "an interrupt has ended a call of this producer halfway, and records that are not confirmed may be "
                f"written or not: {advice}"
            )
        )

    def _end(self) -> None:
        self._cluster.close()
        self._sender.receipts.fail_all(ProducerClosed("the producer was closed before the record was confirmed"))

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            if self._transactions is not None and self._transactions.is_open:
                with suppress(KlogError), self._cluster.within(LAST_ABORT_MS):  # else readers wait for its timeout
                    self.abort_transaction()
        finally:
            self.abort()
