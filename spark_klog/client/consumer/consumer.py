"""The public consumer."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from spark_klog.base.extras import require
from spark_klog.base.interrupts import CallLock
from spark_klog.base.names import TopicPartition
from spark_klog.client.consumer.commits import Offsets
from spark_klog.client.consumer.core import ConsumerCore
from spark_klog.client.consumer.decoding import ConsumerRecord
from spark_klog.client.consumer.group import CLOSE_SECONDS
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.forks import Maker
from spark_klog.client.net.waiting import Waker
from spark_klog.client.offsets import Committed
from spark_klog.client.requests import Steps, run
from spark_klog.errors import ConcurrentUse, ConsumerClosed, KlogError, WokenUp

if TYPE_CHECKING:
    import pyarrow as pa


_T = TypeVar("_T")
#: The longest wait between two results of `read_ranges`.
_RANGE_SECONDS = 0.1


class Guard(CallLock):  # type: ignore[misc]  # as `CallLock`
    """Admits one thread at a time to a consumer. Any thread may call `wakeup` and `closing`.

    Each call begins with `mend`, which undoes what an interrupt of the one before has left halfway.
    """

    def __init__(self, waker: Waker, mend: Callable[[], None]) -> None:
        self._waker, self._mend = waker, mend
        self.maker = Maker("consumer", ConsumerClosed)
        #: The threads that close the consumer, by their ids: one may begin to while another one's `close` waits.
        self._closers: set[int] = set()
        self._is_woken = False
        self._is_closing = False

    def used(self) -> Guard:
        """A block for a call: `ConcurrentUse` if another thread is in one, `ConsumerClosed` after `closing` or a fork.

        A listener may call (for example commit) until its own call ends, even if that is `close`.
        """
        self.maker.check()
        if self._is_closing and not self.is_held:
            raise ConsumerClosed("the consumer is closed")
        return self

    def closing(self) -> Guard:
        """A block that ends the call of another thread, then admits this one alone and for good."""
        self._closers.add(threading.get_ident())
        self._is_closing = True
        self._waker.wake()
        return self

    def _begin(self, *, is_nested: bool) -> None:
        is_closer = threading.get_ident() in self._closers
        if not self.acquire(blocking=is_closer):
            raise ConcurrentUse("another thread is using this consumer: give each thread its own")
        if not is_nested:
            if self._is_closing and not is_closer:
                raise ConsumerClosed("the consumer is closed")
            self._mend()

    def wakeup(self) -> None:
        """Make `check` raise `WokenUp` in the call that waits, or else in the next one."""
        self.maker.check()
        self._is_woken = True
        self._waker.wake()

    def check(self) -> None:
        """Raise `ConsumerClosed` or `WokenUp` if another thread has called `closing` or `wakeup`."""
        if self._is_closing:
            raise ConsumerClosed("the consumer is closed")
        if self._is_woken:
            self._is_woken = False
            raise WokenUp("the consumer was woken up")

    def waited(self) -> None:
        self._waker.clear()
        self.check()


class Consumer(ConsumerCore):
    """Read topics as Arrow record batches (`poll_arrow`) or as records (`poll`).

        with Consumer({"bootstrap.servers": "127.0.0.1:9092", "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([("clicks", 0), ("clicks", 1, 4711)])
            while True:
                batch = consumer.poll_arrow(1.0)
                if batch is not None:
                    ...

    After an interrupt (Ctrl-C, what a signal handler raises) in a call the next one goes on as if it had not been made.
    An interrupt in the middle of a rebalance makes the member join again, at its committed offsets.

    At the end of the block the consumer is closed. If an exception ends the block, enable.auto.commit does not commit:
    the last records may not have been processed, and are read again.

    `settings` have Kafka's names and defaults; `ConfigError` names an unknown or wrong one. With `include_headers`,
    Arrow batches have the column headers. Their timestamps are in us, as Spark has them, and a record of a time beyond
    the year 294,247 is an error; with `timestamp_unit="ms"` they are in ms, which have room for all times.

    key.deserializer and value.deserializer make more than bytes of keys and values, with schema.registry.url and
    value.schema, value.schema.id or value.subject by a schema: see docs/reference/consumer.md. Without them keys and
    values are bytes.

    Not thread-safe: concurrent calls raise `ConcurrentUse`. Only `wakeup` and `close` may be called from any thread.
    In a process forked since every call raises `ConsumerClosed`, and `close` neither commits nor leaves the group: make
    a new consumer there.
    Retriable failures, for example of a broker that can't be reached, are logged as warnings and retried. If a
    partition, or the group's coordinator, fails for default.api.timeout.ms, `poll` and `poll_arrow` raise the last
    error; call again to continue.
    Errors that can't be retried are raised at once:

    * `AuthenticationError`, and `ProtocolError` as brokers answer, for example TOPIC_AUTHORIZATION_FAILED,
    * `ProtocolError` UNKNOWN_TOPIC_OR_PARTITION if no broker knows a partition given to `assign`: a call that has no
      records waits up to 1 s to be sure of that, whatever its timeout,
    * `OffsetOutOfRange` and `NoOffsetForPartition` with auto.offset.reset=none,
    * `LogTruncated` with auto.offset.reset=none if a new leader does not have the records before a position; otherwise
      reading goes on where the logs diverge, with a warning,
    * `TopicRecreated` with auto.offset.reset=none if a topic was deleted and created again (brokers from 2.8 on tell);
      otherwise the new topic is read as that setting says, with a warning,
    * `RecordTooLarge` for a record batch larger than twice fetch.max.bytes (at least 64 MiB),
    * `DecodeError` for corrupt data, after the records before it: `seek` past it to continue, or set check.crcs=false,
    * `RecordDeserializationError`, a `DecodeError`, for a record that a deserializer does not take, after the records
      before it: the position stays there until a `seek`,
    * `SchemaError`, `RegistryError` if there is no schema to read records by; `ConnectionFailed` if the registry gives
      no answer for default.api.timeout.ms: `poll` waits so long, whatever its timeout,
    * `MemberFenced` if another member of the group has the same group.instance.id,
    * `WokenUp`, `ConsumerClosed`.

    With `group.id` a consumer can `subscribe`. It joins the group within `poll`, and a background thread sends
    heartbeats (`session.timeout.ms`, `heartbeat.interval.ms`) unless `poll` is not called for `max.poll.interval.ms`.
    With `group.protocol=consumer` the coordinator assigns the partitions (KIP-848), and a rebalance stops nobody.
    With `enable.auto.commit`, positions are committed by `poll` every `auto.commit.interval.ms`, before a rebalance,
    and by `close`: records that `poll` has returned count as processed.

    With dead.letter.topic, `dead_letter` and `retry` take records that can't be processed out of the way, with
    dead.letter.deserialization.errors also those that do not deserialize: see docs/recipes/dead-letters.md.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        include_headers: bool = False,
        timestamp_unit: Literal["us", "ms"] = "us",
    ) -> None:
        self._waker = Waker()
        self._waited = (self._waker,)
        self._guard: Guard = Guard(self._waker, self._mend)
        try:
            self._begin(settings, include_headers, timestamp_unit, self._waker.wake)
        except BaseException:
            self._waker.close()
            raise

    def make(self, steps: Steps[_T]) -> _T:
        with self._guard.used():
            return run(steps)

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, int | Committed] | None = None,
        on_done: Callable[[Offsets, KlogError | None], None] | None = None,
    ) -> None:
        """Like `commit`, without waiting or retries: a later poll or commit calls `on_done(offsets, error)`."""
        with self._guard.used(), self._joining:
            run(self._committing_async(offsets, on_done))

    def poll_arrow(self, timeout: float = 1.0) -> pa.RecordBatch | None:
        """The next records of one partition as an Arrow record batch, or None if there are none within `timeout` s.

        Columns are those of the Spark source: key, value (binary, or what deserializers make of them), topic,
        partition, offset, timestamp, timestampType, and headers with `include_headers`. A batch has at most 65,536 rows
        or about 8 MiB. A call that needs metadata or offsets may take a second longer, and one more for each 5,000
        partitions whose leaders it looks for. Errors: see the class.
        `ConfigError` with retry.topics, whose records wait one by one.
        """
        self._check_arrow()
        if not self._decodes_arrow:
            require("Consumer.poll_arrow", "pyarrow")
        return self._next(self._arrow.parts, True, timeout)

    def poll(self, timeout: float = 1.0) -> list[ConsumerRecord]:
        """The next records of one partition, at most max.poll.records; [] if there are none within `timeout` s.

        For many records `poll_arrow` is much faster. Errors: see the class.
        """
        return self._next(self._parts, False, timeout) or []

    def poll_chunk(self, timeout: float = 1.0) -> Fetched | None:
        """For the package's own use: the next fetched batches as they are, or None if none come within `timeout` s.

        CRCs are not checked. The chunk's bytes are valid until the next call. Errors: see the class.
        """
        return self._next(lambda chunk: iter([(chunk, chunk.next_offset)]), False, timeout)

    def _next(self, decode: Callable[[Fetched], Iterator[tuple[_T, int]]], is_arrow: bool, timeout: float) -> _T | None:
        with self._guard.used():
            self._moving.__enter__()
            try:
                self._begin_reading(is_arrow)
                records = run(self._read(decode, time.monotonic() + timeout))
            except BaseException as error:
                self._moving.__exit__(type(error), error, None)
                raise
        self._moving.mended()  # from here on no interrupt can keep the records from the caller
        self._returned = None
        return records

    def _mend(self) -> None:
        """Undo what an interrupt has left halfway, at the beginning of the next call."""
        if self._moving.is_torn:
            self._cluster.end_deadlines()
            if self._group is not None:
                self._group.cluster.end_deadlines()
            # to the position of the last call that has returned: nothing is lost or returned twice
            if self._returned is not None:
                state, run, position, epoch = self._returned
                if state.run == run:
                    state.position, state.epoch = position, epoch
            self._returned = self._decoding = None
            self._fetches.abandon()
            self._moving.mended()
        if self._joining.is_torn:
            if self._group is not None:
                self._group.mend()
            self._joining.mended()

    def wakeup(self) -> None:
        """Make a waiting call of another thread, or else the next call, raise `WokenUp`. Any thread may call it."""
        self._guard.wakeup()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Commit if enable.auto.commit is set, leave the group unless the member is static, close all connections.

        The requests for that take up to `timeout` s or request.timeout.ms, and some 2 s if no broker can be reached: a
        warning tells what was not committed then. Any thread may call it: a waiting call raises `ConsumerClosed`. Calls
        `on_revoked` first, and raises what it raises when all is closed.
        """
        self._close(timeout, commits=True)

    def _close(self, timeout: float, *, commits: bool) -> None:
        if self._guard.maker.is_forked:
            if self._group is not None:
                self._group.close_sockets()
            self._cluster.close()
            self._waker.close()
            return
        with self._guard.closing():
            if self._waker.closed:
                return
            self._decoding = None
            try:
                if self._group is not None:
                    run(self._group.close(timeout, commits=commits))
            finally:
                if self._letters is not None:
                    self._letters.close()
                self._fetches.close()
                self._cluster.close()
                self._waker.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._close(CLOSE_SECONDS, commits=kind is None)


def read_ranges(
    consumer: Consumer, ranges: Mapping[TopicPartition, tuple[int, int]], *, as_arrow: bool = True
) -> Iterator[tuple[Any, dict[TopicPartition, int]]]:
    """Assign and read ranges [start, stop): what each poll brings, and the offsets that are left by partition.

    A poll brings an Arrow batch or None, or without `as_arrow` a list of records.
    """
    left = {key: stop - start for key, (start, stop) in ranges.items() if start < stop}
    consumer.assign([(*key, ranges[key][0]) for key in left])
    while left:
        records: Any
        if as_arrow:
            records = consumer.poll_arrow(_RANGE_SECONDS)
            if records is not None:
                _, stop = ranges[records.column("topic")[0].as_py(), records.column("partition")[0].as_py()]
                offsets = records.column("offset")
                if offsets[-1].as_py() >= stop:
                    records = records.slice(0, bisect_left(offsets.to_pylist(), stop))  # `to_numpy` would import pandas
        elif records := consumer.poll(_RANGE_SECONDS):
            _, stop = ranges[records[0].topic, records[0].partition]
            if records[-1].offset >= stop:
                records = [record for record in records if record.offset < stop]
        now_left = {key: ranges[key][1] - consumer.position(*key) for key in left}
        consumer.pause([key for key, count in now_left.items() if count <= 0])
        left = {key: count for key, count in now_left.items() if count > 0}
        yield records, left
