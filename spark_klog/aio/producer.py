"""The producer on asyncio's loop.

`send` gathers records as the synchronous producer does. Three requests of the driver do what its thread does: one makes
batches of what is full or due, one sends them and settles their records' futures, and one for each topic that is not
known yet asks for its partitions, and its schema, while the topic's records wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from spark_klog.aio.driver import SLICE, LoopDriver, settle
from spark_klog.base.names import TopicPartition
from spark_klog.client.arguments import mapping_of, name_of, partition_of
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import Committed, GroupMetadata
from spark_klog.client.producer.core import LAST_ABORT_MS, ProducerCore, producer_settings, unclosed
from spark_klog.client.producer.intake import (
    AsItIs,
    Gathering,
    check_bytes,
    check_headers,
    check_size,
    check_timestamp,
)
from spark_klog.client.producer.receipts import OnDelivery, Receipt, RecordMetadata, fresh
from spark_klog.client.producer.transactions import PreparedTransaction, State
from spark_klog.client.requests import Steps, Wait, run
from spark_klog.client.settings import client_config
from spark_klog.errors import (
    BufferExhausted,
    InvalidTransactionState,
    KlogError,
    ProducerClosed,
    TransactionAborted,
)
from spark_klog.records import kernels
from spark_klog.records.contract import Headers
from spark_klog.tracing import trace_client
from spark_klog.wire.primitives import Buffer

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.columns.encode import Placement

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: What a record counts for until its future is settled, apart from its bytes.
_OVERHEAD = 300


#: Records whose futures are settled at once; it takes about a millisecond.
_CHUNK = 512
#: What becomes of a record: its future, its callback, and its timestamp.
_Outcome = tuple["asyncio.Future[RecordMetadata]", OnDelivery | None, int]
#: Topic, value, key, partition, timestamp and headers of a record.
_Arguments = tuple[str, Any, Any, int | None, int, Headers]


@dataclass(slots=True, eq=False)
class _Record:
    """A record that waits for its topic; `size` is what it counts for. `is_awaited`: its call raises its error."""

    arguments: _Arguments
    outcome: _Outcome
    size: int
    is_awaited: bool
    is_added: bool = False


class Producer(ProducerCore):
    """Write records to partitions' leaders, on asyncio's loop.

        async with Producer({"bootstrap.servers": "localhost:9092"}) as producer:
            print((await producer.send("clicks", b"value", key=b"key")).offset)

    Settings, errors, serializers and transactions are those of `spark_klog.client.Producer`. `async with` connects;
    without it the first call does. `send` waits until the record is confirmed; `send_nowait` returns a future, which
    makes throughput. Records of a partition are written in the order of these calls.

    Memory is bounded by buffer.memory: `send` waits for room up to max.block.ms, `send_nowait` raises `BufferExhausted`
    at once. Schemas are looked up, batches beyond some 16 KB (gzip) to 128 KB compressed, and passwords hashed in
    threads of the producer. Functions of yours (serializers, on_delivery) are called on the loop.

    A task that is cancelled in a call ends it there: a record that `send` has taken may be written or not, others are
    not affected. After a cancelled `commit_transaction` call it again; `abort_transaction` raises
    `InvalidTransactionState` if the coordinator may have committed. A cancelled `abort_transaction` is called again.

    A producer belongs to the loop of its first call: `ConcurrentUse` in another one, `ConfigError` without one (in a
    thread, or with Trio), `ProducerClosed` in a process forked since. What is not confirmed when the program ends is
    written at the interpreter's exit, for 10 s at most, as by the synchronous producer.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings` by Kafka's names; raises what `client_config` raises."""
        of_client, serializers = producer_settings(settings)
        self._begin(Cluster(client_config(of_client)), serializers, creates_topics=True)
        trace_client(self, self._cluster, "send", "send_nowait", "send_arrow")
        self._driver = LoopDriver("producer", ProducerClosed)
        self._kernel = kernels.load()
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Batches that are full, oldest first, and the bytes of these and of one that is being compressed.
        self._full: deque[tuple[TopicPartition, Gathering]] = deque()
        self._full_bytes = 0
        #: Futures of records that are added and not settled.
        self._untold = 0
        #: Records whose topic is not known yet, and their bytes.
        self._arrivals: dict[str, deque[_Record]] = {}
        self._arrived_bytes = 0
        #: Calls of `send` that wait for room, and the bytes of those that may go on.
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._admitted_bytes = 0
        #: When the next batch is looked for, a reading of `time.monotonic`.
        self._looks_at = math.inf
        #: What a call makes of the open transaction.
        self._ending: State | None = None
        #: Whether no transaction may begin any more, as `close` has ended the last one.
        self._is_closing = False
        unclosed.add(self)

    async def __aenter__(self) -> Producer:
        """Connect; raises what `spark_klog.client.Producer` raises."""
        self._driver.check_loop()
        try:
            await self._run("open", self._cluster.asking_metadata([]))
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
            return
        try:
            if self._transactions is not None and not self._driver.is_forked:
                with suppress(KlogError, asyncio.TimeoutError):  # else readers wait for its timeout
                    await asyncio.wait_for(self._end_transaction(), LAST_ABORT_MS / 1000)
        finally:
            self._end()

    async def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
        on_delivery: OnDelivery | None = None,
    ) -> RecordMetadata:
        """Write a record, and return its place when it is confirmed; arguments and errors as of `client.Producer.send`.

        Waits up to max.block.ms for room in buffer.memory (`BufferExhausted`).
        """
        timestamp, headers = self._checked(topic, timestamp, headers)
        arguments = topic, value, key, partition, timestamp, headers
        if not self._must_wait:
            return await self._take(arguments, on_delivery, is_awaited=True)
        size = _size(key, value)
        await self._admission(size, topic)
        self._admitted_bytes -= size
        try:
            self._check("send")
            future = self._take(arguments, on_delivery, is_awaited=True)
        finally:
            self._let_in()
            self._driver.wake()  # others may still wait, for what gathers
        return await future

    def send_nowait(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
        on_delivery: OnDelivery | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Add a record, and return a future with its place, or its error. `BufferExhausted` if buffer.memory is full.

        If the topic is not known yet, what the brokers or the registry say of it, and what the record raises then, are
        errors of the future; within a transaction they fail it.
        """
        timestamp, headers = self._checked(topic, timestamp, headers)
        if self._must_wait:
            self._driver.wake()
            config = self._cluster.config
            raise BufferExhausted(
                f"{self._used} bytes of records wait to be sent, {config.named('buffer.memory')}="
                f"{config.buffer_memory}: a record for {topic} is not sent; `await send` waits for room"
            )
        return self._take((topic, value, key, partition, timestamp, headers), on_delivery, is_awaited=False)

    async def send_arrow(
        self, rows: pa.Table | pa.RecordBatch, topic: str | None = None, *, is_any_time: bool = False
    ) -> None:
        """Add the rows of an Arrow table or record batch, as `client.Producer.send_arrow`; `flush` confirms them.

        Rows are checked, serialized and encoded in threads. Waits for room as `send`. If the task is cancelled, part of
        the rows may be written; a transaction can only be aborted then.
        """
        steps = self._adding_rows(rows, topic, is_any_time=is_any_time)
        await self._run("send_arrow", steps if self._transactions is None else self._adding(steps))

    def _adding_rows(self, rows: pa.Table | pa.RecordBatch, topic: str | None, *, is_any_time: bool) -> Steps[None]:
        from spark_klog.columns.encode import Placement, by_topic
        from spark_klog.columns.rows import RecordRows

        self._check("send_arrow")
        in_thread, choice = self._driver.in_thread, self._choice
        if self._serializers is not None:
            rows = yield from in_thread(self._serializers.table, rows, topic)
        checked = yield from in_thread(partial(RecordRows, rows, topic, self._size_limit, is_any_time=is_any_time))
        yield from choice.renewing()
        for name in checked.topics:
            yield from choice.looking_up(name)
        counts = {name: choice.count(name) for name in checked.topics}
        yield from in_thread(checked.check_partitions, counts)
        batches = iter(checked)
        with self._whole():
            while (batch := (yield from in_thread(next, batches, None))) is not None:
                parts = yield from in_thread(lambda rows: list(by_topic(rows, checked.topic)), batch[1])
                for name, part in parts:
                    placement = yield from in_thread(
                        Placement, part, counts[name], self.batch_size, choice.partitioning
                    )
                    encoded = partial(self._encoded, placement, choice.turns(name, placement.turns))
                    for partition, gathering in (yield from in_thread(encoded)):
                        yield from self._adding_batch((name, partition), *gathering)

    def _encoded(self, placement: Placement, turns: list[int]) -> list[tuple[int, tuple[Buffer, int, int, int]]]:
        """The bodies of rows by partition, each with the number of its records, its first and its last timestamp."""
        encoded = []
        for partition, columns in placement.records(turns):
            row = 0
            while row < columns.count:
                body, following, base, maximum = self._kernel.encode(columns, row, self.batch_size)
                encoded.append((partition, (body, following - row, base, maximum)))
                row = following
        return encoded

    def _adding_batch(self, place: TopicPartition, body: Buffer, count: int, base: int, maximum: int) -> Steps[None]:
        """Have a batch built behind what has gathered for its partition, when there is room."""
        until = time.monotonic() + self._max_block
        while self._used >= self._room:
            self._check("send_arrow")
            if time.monotonic() >= until:
                raise self._exhausted(self._used, f"a batch for {place[0]}-{place[1]}")
            yield Wait(None, until)
        self._check("send_arrow")
        if place in self._gathering:
            self._is_full(place)
        whole, receipt = (count, len(body), maximum), self._sender.receipts.new(place)
        self._full.append((place, Gathering(receipt, 0.0, bytearray(body), base, whole)))
        self._full_bytes += len(body)
        self._driver.wake()

    def _is_full(self, place: TopicPartition) -> None:
        """Have what has gathered for a partition built."""
        gathering = self._gathering.remove(place)
        self._full.append((place, gathering))
        self._full_bytes += gathering.whole[1]
        self._driver.wake()

    def _checked(self, topic: str, timestamp: int | None, headers: Headers) -> tuple[int, Headers]:
        """The timestamp and the headers of a record; what `send` raises before it takes one."""
        if type(topic) is not str:
            name_of("send: the topic", topic)
        if headers != ():
            headers = check_headers(headers)
        if self._is_closed or self._transactions is not None or self._sender.has_failed:
            self._check("send")
        self._loop_of_call()
        return time.time_ns() // 1_000_000 if timestamp is None else check_timestamp(timestamp), headers

    def _take(
        self,
        arguments: _Arguments,
        on_delivery: OnDelivery | None,
        *,
        is_awaited: bool,
    ) -> asyncio.Future[RecordMetadata]:
        """Add a record, now or when its topic is known."""
        assert self._loop is not None
        future: asyncio.Future[RecordMetadata] = self._loop.create_future()
        if on_delivery is not None:
            on_delivery = partial(copy_context().run, on_delivery)  # type: ignore[call-arg]  # a ParamSpec in a partial
        topic, outcome = arguments[0], (future, on_delivery, arguments[4])
        if topic not in self._arrivals and self._choice.knows(topic) and self._is_ready(arguments):
            self._add(arguments, outcome)
            return future
        record = _Record(arguments, outcome, _size(arguments[1], arguments[2]), is_awaited)
        self._arrived_bytes += record.size
        if topic in self._arrivals:
            self._arrivals[topic].append(record)
        else:
            self._arrivals[topic] = deque([record])
            self._driver.start(self._admitting(topic)).add_done_callback(self._interrupted)
        return future

    def _is_ready(self, arguments: _Arguments) -> bool:
        """Whether the record needs no schema registry."""
        topic, value, key = arguments[:3]
        return self._serializers is None or AsItIs in (type(value), type(key)) or self._serializers.knows(topic)

    def _add(self, arguments: _Arguments, outcome: _Outcome) -> None:
        """Add a record of a topic that is known to those that gather."""
        topic, value, key, partition, timestamp, headers = arguments
        if self._serializers is not None:
            key, value, headers = self._serializers.record(topic, key, value, headers)
        if type(value) is not bytes:
            check_bytes("value", value)
        if key is not None:
            check_bytes("key", key)
        check_size(topic, key, value, headers, *self._size_limit)
        partition, is_free = self._choice.of(topic, key, partition)
        place = topic, partition
        gathering = self._gathering.get(place)
        if gathering is None:
            gathering = self._gather(place)
        index, size = gathering.add_record(timestamp, key, value, headers)
        outcomes = gathering.outcomes
        if not index % _CHUNK:
            outcomes = gathering.outcomes = []
            settle_chunk = partial(self._settle_chunk, gathering.receipt, index, outcomes)
            gathering.receipt.callbacks.append((settle_chunk, index, 0))
        outcomes.append(outcome)
        self._untold += 1
        self._gathering.bytes += size
        if is_free:
            self._choice.filled(topic, size)
        if gathering.whole[1] >= self.batch_size:
            self._is_full(place)

    def _gather(self, place: TopicPartition) -> Gathering:
        """Begin a batch, and have it sent after linger.ms."""
        due = time.monotonic() + self._linger
        gathering = self._gathering[place] = Gathering(self._sender.receipts.new(place), due)
        if due < self._looks_at:
            self._looks_at = due
            self._driver.wake()
        return gathering

    # Room

    @property
    def _used(self) -> int:
        """What records count for that are not confirmed, or that may be added now."""
        gathered = self._gathering.bytes + self._full_bytes + self._arrived_bytes
        return gathered + self._admitted_bytes + self._sender.size + _OVERHEAD * self._untold

    @property
    def _must_wait(self) -> bool:
        """Whether there is no room, or other calls that have waited for some are before this one."""
        return self._used >= self._room or bool(self._waiting or self._admitted_bytes)

    async def _admission(self, size: int, topic: str) -> None:
        """Wait for room for a record, behind the calls that wait already; it is counted then."""
        loop = self._loop_of_call()
        admitted: asyncio.Future[None] = loop.create_future()
        self._waiting.append((size, admitted))
        self._driver.wake()  # what gathers is sent now

        def expire() -> None:
            settle(admitted, self._exhausted(self._used, f"a record for {topic}"))

        timer = loop.call_later(self._max_block, expire)
        try:
            await admitted
        except BaseException:
            with suppress(ValueError):
                self._waiting.remove((size, admitted))
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self._admitted_bytes -= size  # it was let in, and does not come
            self._let_in()
            raise
        finally:
            timer.cancel()

    def _let_in(self) -> None:
        """Have calls that wait for room go on as far as there is some, and all if no record is taken any more."""
        is_refused = self._is_closed or self._sender.has_failed
        while self._waiting and (is_refused or self._used < self._room):
            size, admitted = self._waiting.popleft()
            if not admitted.done():
                self._admitted_bytes += size
                settle(admitted, None)

    # The requests of the driver that take the place of a thread

    def _loop_of_call(self) -> asyncio.AbstractEventLoop:
        """The loop that runs; from the first call on the producer works on it. Raises what `LoopDriver.loop` does."""
        loop = asyncio._get_running_loop()  # None in a forked process
        if loop is not None and loop is self._loop:
            return loop
        loop = self._driver.loop
        if self._loop is None and not self._is_closed:
            self._loop = loop
            _in_use.difference_update([producer for producer in list(_in_use) if producer._is_left_with_nothing])
            _in_use.add(self)
            self._sender.work_on()
            for steps in (self._building(), self._sending()):
                self._driver.start(steps).add_done_callback(self._interrupted)
        return loop

    async def _run(self, call: str, steps: Steps[_T]) -> _T:
        self._check_open(call)
        self._loop_of_call()
        return await self._driver.run(steps)

    def _admitting(self, topic: str) -> Steps[None]:
        """Have a topic known, then add its records, in slices."""
        arrivals = self._arrivals[topic]
        failure: Exception | None = None
        try:
            yield from self._choice.looking_up(topic)
        except Exception as error:
            failure = error
        until = time.monotonic() + SLICE
        while arrivals:
            record = arrivals[0]  # until it is added: an interrupt leaves it to those that are told of the end
            try:
                if failure is None and not self._is_ready(record.arguments):
                    failure = yield from self._preparing(topic)
                if not record.outcome[0].done():  # cancelled, or of a transaction that was aborted
                    if failure is not None:
                        raise failure
                    self._sender.check()  # an error that came meanwhile is not told to records that are added after it
                    self._add(record.arguments, record.outcome)
            except Exception as error:
                if self._transactions is not None and not record.is_awaited:
                    self._sender.fail(error if isinstance(error, KlogError) else KlogError(str(error)))
                _settle_outcome(record.outcome, error, None, topic)
            arrivals.popleft()
            self._arrived_bytes -= record.size
            record.is_added = True
            if time.monotonic() >= until:
                yield Wait(None, 0.0)
                until = time.monotonic() + SLICE
        del self._arrivals[topic]
        self._let_in()

    def _preparing(self, topic: str) -> Steps[Exception | None]:
        assert self._serializers is not None
        try:
            yield from self._driver.in_thread(self._serializers.prepare, topic)
        except Exception as error:
            return error
        return None

    def _building(self) -> Steps[None]:
        """Make batches of what is full or due; long compressions are done in threads."""
        until = time.monotonic() + SLICE
        while True:
            now, self._looks_at = time.monotonic(), -math.inf
            while (following := self._next_to_build(now)) is not None:
                try:
                    yield from self._build(*following)
                except KlogError as error:  # the next call raises it
                    _log.warning("records are not written: %s", error)
                except Exception as error:
                    self._fail(error)
                if time.monotonic() >= until:
                    yield Wait(None, 0.0)
                    until = time.monotonic() + SLICE
            self._looks_at = self._next_due
            yield Wait(None, self._looks_at)
            until = time.monotonic() + SLICE

    def _next_to_build(self, now: float) -> tuple[TopicPartition, Gathering] | None:
        if self._full:
            return self._full.popleft()
        key = next(iter(self._gathering) if self._makes_room else self._due(now), None)
        if key is not None:
            gathering = self._gathering.remove(key)
            self._full_bytes += gathering.whole[1]
            return key, gathering
        return None

    @property
    def _makes_room(self) -> bool:
        """Whether calls wait for room, and what gathers takes most of it."""
        if not self._must_wait:
            return False
        return 2 * (self._gathering.bytes + _OVERHEAD * self._gathering.records) >= self._room

    def _build(self, key: TopicPartition, gathering: Gathering) -> Steps[None]:
        count, size, last = gathering.whole
        body: Any = gathering.body
        try:
            if not count:  # the first one could not be encoded
                self._sender.receipts.drop(gathering.receipt)
                return
            if is_long := self._sender.compresses_long(size):
                body = yield from self._driver.in_thread(self._sender.compressed, bytes(body))
            if gathering.receipt.done.is_set():
                return  # an error, or an abort, has come meanwhile
            first, receipt = gathering.first_timestamp, gathering.receipt
            self._sender.add_records(key, body, count, first, last, receipt, is_compressed=is_long)
        except GeneratorExit:  # while it is compressed: the program's exit writes it
            self._full.appendleft((key, gathering))
            raise
        finally:
            self._full_bytes -= size

    def _sending(self) -> Steps[None]:
        """Send batches, and settle the futures of their records."""
        while True:
            wait = Wait(None, math.inf)
            if not self._sender.has_failed:
                try:
                    self._choice.renew_soon()
                    pause, connections = self._sender.step()
                    now = time.monotonic()
                    until = min(now + pause, self._choice.look_at)
                    wait = Wait(None, until, others=(*connections, *self._choice.connections))
                    if (due := self._next_due) < self._looks_at:  # a batch that was sent has held it up
                        self._looks_at = due
                        self._driver.wake()
                except KlogError as error:  # the next call raises it
                    _log.warning("records are not written: %s", error)
                except Exception as error:
                    self._fail(error)
            if not self._sender.receipts.call_back(time.monotonic() + SLICE):
                wait = wait._replace(until=0.0)
            self._let_in()
            yield wait

    def _settle_chunk(self, receipt: Receipt, first: int, outcomes: list[_Outcome], *_: object) -> None:
        """Tell records of a batch, of which the first one has this place in it, what has become of them."""
        for index, outcome in enumerate(outcomes, first):
            error = receipt.error_of(index)
            metadata = None if error is not None else receipt.metadata(index, outcome[2])
            try:
                _settle_outcome(outcome, error, metadata, *receipt.key)
            except BaseException:  # an interrupt: the next call goes on
                told = index - first + outcome[0].done()
                left = partial(self._settle_chunk, receipt, first + told, outcomes[told:])
                receipt.callbacks.appendleft((left, index, 0))
                self._untold -= told
                raise
        self._untold -= len(outcomes)
        outcomes.clear()

    def _interrupted(self, ended: asyncio.Future[None]) -> None:
        """Close the producer after an interrupt (Ctrl-C, SystemExit in a callback) in what takes a thread's place."""
        if not (self._is_closed or ended.cancelled() or ended.exception() is None):
            _log.error("an interrupt has ended the producer: records that are not confirmed may be written or not")
            self._end()

    def _fail(self, error: Exception) -> None:
        _log.exception("records are not written")
        self._sender.fail(KlogError(f"the producer has failed: {error!r}"))

    # Calls

    async def partitions(self, topic: str) -> int:
        """The number of partitions of a topic. The broker may create a missing topic; otherwise `ProtocolError`."""
        name_of("partitions: the topic", topic)

        def steps() -> Steps[None]:
            yield from self._choice.renewing()
            yield from self._choice.looking_up(topic)

        await self._run("partitions", steps())
        return self._choice.count(topic)

    async def flush(self, timeout: float | None = None) -> None:
        """Send all records, and wait until those of earlier calls are confirmed, and their futures and callbacks done.

        With `timeout`, return after so many seconds: what is not confirmed by then stays under way.
        """
        await asyncio.sleep(0)  # also if there is nothing to send: others have their turn
        await self._run("flush", self._flushing(math.inf if timeout is None else time.monotonic() + timeout))

    def _flushing(self, until: float = math.inf) -> Steps[None]:
        """The steps of `flush`; they raise what a record that waits for its topic fails with, too."""
        arrivals = self._records_that_wait()
        last = [records[-1] for records in self._arrivals.values() if records]
        receipts: list[Receipt] = []
        self._send_gathered()
        while True:
            self._sender.check()
            if last and all(record.is_added for record in last):
                last = []
                if (error := next(filter(None, map(_error_of, arrivals)), None)) is not None:
                    raise fresh(error) if isinstance(error, KlogError) else error
                self._send_gathered()
            if not last and not receipts:
                receipts = list(self._sender.receipts.open)
            while receipts and receipts[-1].done.is_set():
                receipts.pop()
            if not last and not receipts:
                break
            if time.monotonic() >= until:
                return
            yield Wait(None, until)
        self._sender.check()
        yield from self._calling_back()
        yield from self._sender.flushing_unanswered(until)

    def _send_gathered(self) -> None:
        """Have what gathers now built at once; what comes later waits for linger.ms, though a call flushes."""
        for gathering in self._gathering.values():
            gathering.due = 0.0
        self._driver.wake()

    def _calling_back(self) -> Steps[None]:
        """Settle the futures of all records that are confirmed or have failed."""
        while not self._sender.receipts.call_back(time.monotonic() + SLICE):
            yield Wait(None, 0.0)

    async def init_transactions(self, known: PreparedTransaction | None = None) -> None:
        """As of the synchronous producer: call it once, first, and after `prepare_transaction`."""

        def steps() -> Steps[None]:
            yield from self._transactional("init_transactions").init(known)
            yield from self._sender.reset()  # another epoch numbers its batches from 0 on

        await self._run("init_transactions", self._in_turn(steps()))

    async def begin_transaction(self) -> None:
        """Begin a transaction. The broker learns of it with the first record."""

        def steps() -> Steps[None]:
            self._transactional("begin_transaction").begin()
            return
            yield

        await self._run("begin_transaction", self._in_turn(steps()))

    async def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, int | Committed], group: str | GroupMetadata
    ) -> None:
        """Add a group's offsets to the transaction, as of the synchronous producer."""
        call = "send_offsets_to_transaction"
        member = GroupMetadata(group) if isinstance(group, str) else group
        wanted = {partition_of(call, key): offset for key, offset in mapping_of(f"{call}: offsets", offsets).items()}

        def steps() -> Steps[None]:
            yield from self._in_transaction(call).send_offsets(wanted, member)

        await self._run(call, self._adding(steps()))

    async def commit_transaction(self) -> None:
        """Flush and commit; meanwhile no record is taken.

        After `RequestTimedOut`, `ConnectionFailed` or a cancellation the outcome is open: call it again.
        `InvalidTransactionState` then says that the first call has committed.
        """

        def steps() -> Steps[None]:
            transactions = self._transactional("commit_transaction")
            if transactions.state is not State.COMMITTING:  # else the answer to a commit has not come
                self._in_transaction("commit_transaction")
                yield from self._flushing()
                self._in_transaction("commit_transaction")
            yield from transactions.commit()

        await self._run("commit_transaction", self._in_turn(steps(), State.COMMITTING))

    async def prepare_transaction(self) -> PreparedTransaction | None:
        """Flush, and leave the transaction to another process, as of the synchronous producer."""

        def steps() -> Steps[PreparedTransaction | None]:
            transactions = self._in_transaction("prepare_transaction")
            yield from self._flushing()
            self._in_transaction("prepare_transaction")
            return transactions.prepare()

        return await self._run("prepare_transaction", self._in_turn(steps(), State.COMMITTING))

    async def abort_transaction(self) -> None:
        """Drop unsent records and abort the transaction. After an error, or a cancellation, call it again."""

        await self._run("abort_transaction", self._in_turn(self._aborting_all(), State.ABORTING))

    def _aborting_all(self) -> Steps[None]:
        if self._transactional("abort_transaction").is_open:
            self._full_bytes -= sum(gathering.whole[1] for _, gathering in self._full)
            self._full.clear()
            aborted = TransactionAborted("the transaction was aborted before the record's topic was known")
            for record in self._records_that_wait():
                _settle_outcome(record.outcome, aborted, None, record.arguments[0])
        yield from self._aborting()
        yield from self._calling_back()

    async def _end_transaction(self) -> None:
        """Abort what is open after the calls of other tasks: a commit that has begun goes on, later ones do not."""

        def steps() -> Steps[None]:
            if not self._is_closing and self._transactional("close").is_open:
                yield from self._aborting_all()
            self._is_closing = True

        await self._run("close", self._in_turn(steps(), State.ABORTING))

    def _check_open(self, call: str) -> None:
        super()._check_open(call)
        if self._is_closing:
            raise ProducerClosed(f"{call}: the producer is closed")

    def _check(self, call: str) -> None:
        super()._check(call)
        if self._ending is not None and self._transactions is not None:
            raise InvalidTransactionState(call, self._transactions.transactional_id, self._ending.value)

    def _adding(self, steps: Steps[_T]) -> Steps[_T]:
        """Make the steps in turn; if they are cancelled, also before, the open transaction can only be aborted."""
        try:
            return (yield from self._in_turn(steps))
        except GeneratorExit:
            if self._ending is None and self._transactions is not None:
                self._transactions.fail()
            raise

    def _in_turn(self, steps: Steps[_T], ending: State | None = None) -> Steps[_T]:
        """Make the steps when no other call uses the transactions; no record is taken meanwhile if they end one."""

        def marked() -> Steps[_T]:
            self._ending = ending
            try:
                return (yield from steps)
            finally:
                self._ending = None

        limit = self._cluster.config.named("max.block.ms")
        late = f"other calls have used the transaction for {self._max_block:g} s ({limit})"
        return self._driver.in_turn(marked(), self._max_block, late)

    async def close(self) -> None:
        """Flush and close the connections; abort an open transaction. A second call does nothing.

        A commit of another task is waited for, up to max.block.ms.
        """
        if self._is_closed or self._is_closing:
            return
        self._driver.check_loop()
        try:
            if self._driver.is_forked:
                pass
            elif self._driver.has_lost_its_loop:
                until = time.monotonic() + self._max_block
                await asyncio.to_thread(self.finish_at_exit, until)  # no other call can be under way
            elif self._transactions is None:
                await self.flush()
            else:
                await self._end_transaction()
        finally:
            self._end()

    def _end(self) -> None:
        """Close the connections. What is not confirmed may or may not be written."""
        if self._is_closed:
            return
        self._is_closed = True
        unclosed.discard(self)
        _in_use.discard(self)
        if self._driver.is_forked:
            self._cluster.close()
            return
        closed = ProducerClosed("the producer was closed before the record was confirmed")
        self._sender.stop()
        self._driver.close(closed)
        self._cluster.close()
        for record in self._records_that_wait():
            _settle_outcome(record.outcome, closed, None, record.arguments[0])
        self._sender.receipts.fail_all(closed)
        self._sender.receipts.call_back()
        self._let_in()

    def _records_that_wait(self) -> list[_Record]:
        """Those whose topic is not known yet."""
        return [record for records in self._arrivals.values() for record in records]

    def finish_at_exit(self, until: float) -> None:
        if not self._driver.is_forked and not self._is_closed:
            self._driver.close(ProducerClosed("the program ends"))  # the loop is closed, or will not run again
            super().finish_at_exit(until)

    def _finish_all(self, until: float = math.inf) -> None:
        for topic, records in self._arrivals.items():
            with suppress(KlogError):
                run(self._choice.looking_up(topic))
                while records:
                    record = records.popleft()
                    try:
                        self._add(record.arguments, record.outcome)
                    except Exception as error:
                        _log.warning("a record for %s is not written: %s", topic, error)
                        _settle_outcome(record.outcome, error, None, topic)
        for key, gathering in self._full:
            count, _, last = gathering.whole
            self._sender.add_records(key, gathering.body, count, gathering.first_timestamp, last, gathering.receipt)
        self._full.clear()
        super()._finish_all(until)

    @property
    def _is_left_with_nothing(self) -> bool:
        return self._loop is not None and self._loop.is_closed() and not self._used

    @property
    def _gathered(self) -> int:
        full = sum(gathering.whole[0] for _, gathering in self._full)
        return super()._gathered + full + len(self._records_that_wait())


#: Producers that are not closed: what they have not written is written at exit, though nothing else refers to them.
_in_use: set[Producer] = set()


def _size(*parts: object) -> int:
    """What a record that waits counts for; a serializer may make more or less of its key and value."""
    return _OVERHEAD + sum(len(part) for part in parts if isinstance(part, bytes | bytearray | memoryview | str))


def _error_of(record: _Record) -> BaseException | None:
    future = record.outcome[0]
    return None if not future.done() or future.cancelled() else future.exception()


def _settle_outcome(
    outcome: _Outcome, error: Exception | None, metadata: RecordMetadata | None, *place: str | int
) -> None:
    """Give a record's future and its callback its place, or its error."""
    future, on_delivery, _ = outcome
    error = fresh(error) if isinstance(error, KlogError) else error  # each future raises its own
    settle(future, error, metadata)
    if on_delivery is not None:
        try:
            on_delivery(error, metadata)  # type: ignore[arg-type]  # other errors are those of a serializer
        except Exception:
            _log.exception("on_delivery of a record of %s failed", "-".join(map(str, place)))
