"""The public consumer."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from uuid import UUID

from spark_klog.base.extras import require
from spark_klog.base.interrupts import ORDERLY, CallLock, Section
from spark_klog.base.names import TopicPartition
from spark_klog.client.arguments import (
    offset_of,
    offsets_of,
    one_of,
    partition_of,
    partitions_of,
    starts_of,
    topics_of,
)
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.assignment import Assigned, Assignment, Troubles
from spark_klog.client.consumer.classic_group import ClassicGroup
from spark_klog.client.consumer.commits import Offsets
from spark_klog.client.consumer.consumer_protocol_group import ConsumerProtocolGroup
from spark_klog.client.consumer.dead_letters import DeadLetters, NotDue
from spark_klog.client.consumer.decoding import ArrowDecoder, ConsumerRecord, Deserializers, RecordDecoder
from spark_klog.client.consumer.fetches import Fetches
from spark_klog.client.consumer.group import CLOSE_SECONDS, ConsumerGroup, RebalanceListener
from spark_klog.client.consumer.positions import UNKNOWN_SECONDS, Positions
from spark_klog.client.consumer.settings import CLASSIC, CONSUMER, consumer_config
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.forks import Maker
from spark_klog.client.net.waiting import Waker
from spark_klog.client.offsets import Committed, GroupMetadata
from spark_klog.client.requests import run
from spark_klog.client.retry import CALL_TIMEOUT
from spark_klog.client.serialization import split_settings
from spark_klog.client.settings import check_settings, setting_texts
from spark_klog.errors import (
    ConcurrentUse,
    ConfigError,
    ConsumerClosed,
    KlogError,
    RecordDeserializationError,
    RequestTimedOut,
    WokenUp,
)
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.security.config import is_secret, resolved
from spark_klog.tracing import trace_client

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.client.producer.producer import Producer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Seconds that requests for metadata and offsets may take even if a call's timeout is shorter.
_LEAST_SECONDS = 1.0
#: The longest wait between two results of `read_ranges`.
_RANGE_SECONDS = 0.1


class _Decoding(NamedTuple):
    """A chunk being returned to the caller; the run is the partition's, unless e.g. a seek has begun another."""

    state: Assigned
    parts: Iterator[tuple[Any, int]]
    chunk: Fetched


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


class Consumer:
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
        unit = one_of("timestamp_unit", timestamp_unit, ("us", "ms"))
        check_settings("Consumer", settings)
        settings, serialization = split_settings(settings, "deserializer")
        self._config = consumer_config(settings)
        #: Whether a poll without assigned partitions was logged.
        self._has_warned = False
        self._cluster = Cluster(self._config.client)
        self._assignment = Assignment()
        self._waker = Waker()
        self._guard = Guard(self._waker, self._mend)
        #: What moves positions; a poll is halfway until the caller has its records. What changes the group's state.
        self._moving, self._joining = Section(*ORDERLY), Section(*ORDERLY)
        self._troubles = Troubles()
        self._letters: DeadLetters | None = None
        if self._config.dead_letter_topic is not None:
            secrets = [value for name, value in resolved(setting_texts(settings)).items() if is_secret(name)]
            self._letters = DeadLetters(self._config, self._assignment, secrets)
        deserializers = None
        if serialization is not None:
            is_asked = self._letters is not None and self._config.dead_letter_deserialization_errors
            on_bad = self._letters.undecodable if self._letters is not None and is_asked else None
            deserializers = Deserializers(serialization, on_bad, keeps_raw=self._letters is not None)
        self._group = None if self._config.group_id is None else self._new_group()
        self._positions = Positions(self._cluster, self._config, self._assignment, self._troubles)
        self._fetches = Fetches(self._cluster, self._config, self._assignment, self._waker, self._troubles)
        limit, checks_crcs = self._config.client.decompressed_max_bytes, self._config.check_crcs
        self._arrow = ArrowDecoder(limit, include_headers, checks_crcs, unit, deserializers)
        self._records = RecordDecoder(limit, self._config.max_poll_records, checks_crcs, deserializers)
        trace_client(self, self._cluster, "_read", group=self._config.group_id)
        self._decoding: _Decoding | None = None
        #: Whether `_decoding` is from the Arrow decoder.
        self._decodes_arrow = False
        #: What the part being returned has changed, to undo it: (partition, run, position, epoch). None once the caller
        #: has the part.
        self._returned: tuple[Assigned, int, int | None, int] | None = None

    def assign(self, partitions: Iterable[tuple[str, int] | tuple[str, int, int]]) -> None:
        """Read exactly these partitions: (topic, partition), or (topic, partition, offset) to begin there.

        Offset -2 is the first record, -1 the end. Without an offset, a partition assigned before continues at its
        position; a new one begins at the committed offset, or else as auto.offset.reset says.
        """
        with self._guard.used(), self._moving:
            wanted = starts_of("assign", partitions)
            if self._group is not None and self._group.is_subscribed:
                raise ConfigError("this consumer has subscribed to topics: call unsubscribe before assign")
            changed: dict[TopicPartition, Assigned] = {}
            for topic, partition, offset in wanted:
                if offset is not None:
                    changed[topic, partition] = self._assignment.copy_of((topic, partition))
                    self._seek(changed[topic, partition], offset)
            self._assignment.set([(topic, partition) for topic, partition, _ in wanted], changed)
            self._positions.look_at_once()

    def _new_group(self) -> ConsumerGroup:
        kind = ClassicGroup if self._config.group_protocol == CLASSIC else ConsumerProtocolGroup
        group = kind(self._config, self._assignment, self._waker.wake, self._troubles)
        group.commits.letters = self._letters
        return group

    def subscribe(
        self, topics: Collection[str] | str | re.Pattern[str], listener: RebalanceListener | None = None
    ) -> None:
        """Read topics as a member of the group `group.id`, joined within `poll`; replaces the last subscription.

        A pattern selects all topics whose full name matches, including later ones, but no internal topics. Text that
        begins with ^ is a pattern too, for the beginning of names; lists may contain some. With
        group.protocol=consumer the coordinator resolves such text, in RE2's syntax: `poll` raises `ProtocolError`
        INVALID_REGULAR_EXPRESSION for what is not.
        A warning names topics that do not exist; they are read as soon as they do.
        `partition.assignment.strategy` says how the members share partitions. Reading begins at the committed offsets,
        or else as auto.offset.reset says. The topics of retry.topics are read, too.
        """
        with self._guard.used(), self._joining:
            group = self._in_group()
            if self._assignment.partitions and not group.is_subscribed:
                raise ConfigError("partitions are assigned to this consumer: call assign([]) before subscribe")
            names, pattern = topics_of(topics, is_text_kept=self._config.group_protocol == CONSUMER)
            names = list(dict.fromkeys([*names, *(self._config.retry_topics or ())]))
            if listener is not None and not isinstance(listener, RebalanceListener):
                raise TypeError(f"subscribe: listener must be a RebalanceListener, not {type(listener).__name__}")
            group.subscribe(names, pattern, listener or RebalanceListener())

    def unsubscribe(self) -> None:
        """Leave the group and drop all partitions; with enable.auto.commit commit the positions first."""
        with self._guard.used(), self._moving, self._joining:
            try:
                if self._group is not None:
                    self._group.close()
            finally:  # even if the listener raises: the member has left
                if self._group is not None:
                    self._group = self._new_group()
                self._assignment.set([])

    def commit(self, offsets: Mapping[TopicPartition, int | Committed] | None = None) -> None:
        """Commit these offsets, or all positions, for the group; waits up to default.api.timeout.ms.

        `CommitFailed` if the group has rebalanced meanwhile or this subscribed consumer is not a member, `MemberFenced`
        if another member has this group.instance.id, `ProtocolError`, `ConnectionFailed`, `RequestTimedOut`.
        """
        with self._guard.used(), self._joining:
            group = self._in_group()
            group.commits.commit(group.consumed() if offsets is None else offsets_of("commit", offsets))

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, int | Committed] | None = None,
        on_done: Callable[[Offsets, KlogError | None], None] | None = None,
    ) -> None:
        """Like `commit`, without waiting or retries: a later poll or commit calls `on_done(offsets, error)`."""
        with self._guard.used(), self._joining:
            group = self._in_group()
            if on_done is not None and not callable(on_done):
                raise TypeError(f"commit_async: on_done must be a function, not {type(on_done).__name__}")
            wanted = group.consumed() if offsets is None else offsets_of("commit_async", offsets)
            group.commits.begin(wanted, on_done)

    def dead_letter(
        self,
        record: ConsumerRecord | RecordDeserializationError,
        reason: str | BaseException,
        *,
        producer: Producer | None = None,
    ) -> None:
        """Have a record that can't be processed written to dead.letter.topic, as it was, with the reason in headers.

        It is written by the commit of an offset behind it, in one transaction with the offsets: of `commit` or
        `commit_async`, or with enable.auto.commit. Until then this call may be repeated, with another reason. A record
        that is read again because nothing was committed has no letter yet.

        `producer` writes it at once, for programs whose transactions have the offsets, too
        (`send_offsets_to_transaction`). An error of a deserializer may stand for its record.

        `CommitFailed` if its partition is not assigned to this consumer any more, `BufferExhausted` if letters of
        buffer.memory wait for a commit, `ConfigError`, `TypeError`. The commit raises what the topic's brokers answer.
        """
        with self._guard.used(), self._joining:
            self._in_letters("dead_letter").add(record, reason, producer)

    def retry(
        self,
        record: ConsumerRecord,
        reason: str | BaseException = "",
        *,
        after: float | None = None,
        producer: Producer | None = None,
    ) -> str:
        """Have a record processed again later; returns the topic in which it waits.

        The first time it waits in the first one of retry.topics, for its delay, then in the next ones; with `after`
        seconds in the topic with the least delay that is as long, but no longer than the longest. After retry.attempts
        it becomes a dead letter. Its partition of the retry topic waits with it: records behind it do not overtake it.
        It is not in order with the records of its first topic. All else as of `dead_letter`.
        """
        with self._guard.used(), self._joining:
            return self._in_letters("retry").retry(record, after, reason, producer)

    def _in_letters(self, call: str) -> DeadLetters:
        if self._letters is None:
            raise ConfigError(f"{call}: dead.letter.topic is not set: the topic for records that can't be processed")
        return self._letters

    def group_metadata(self) -> GroupMetadata:
        """This member in its generation, for `Producer.send_offsets_to_transaction`; take it for each transaction.

        `CommitFailed` if the consumer has subscribed and is not a member now.
        """
        with self._guard.used():
            return self._in_group().metadata()

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Committed]:
        """The group's committed offsets of the partitions that have one; waits up to default.api.timeout.ms."""
        with self._guard.used(), self._joining:
            return self._in_group().committed(partitions_of("committed", partitions))

    def _in_group(self) -> ConsumerGroup:
        if self._group is None:
            raise ConfigError("group.id is not set: a consumer without a group can neither subscribe nor commit")
        return self._group

    def assignment(self) -> list[TopicPartition]:
        """The assigned partitions, sorted."""
        with self._guard.used():
            return sorted(self._assignment.partitions)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue reading an assigned partition at an offset; -2 is its first record, -1 its end."""
        with self._guard.used(), self._moving:
            offset = offset_of("seek", offset)
            self._seek(self._assignment.assigned(*partition_of("seek", (topic, partition))), offset)

    def _seek(self, state: Assigned, offset: int) -> None:
        if self._letters is not None:
            self._letters.forget(state, offset)
        if offset in (EARLIEST, LATEST):
            state.restart(offset)
        else:
            self._fetches.seek(state, offset)
        state.succeeded()

    def position(self, topic: str, partition: int) -> int:
        """The offset of the next record that `poll` returns.

        Asks brokers if it is not known yet: `RequestTimedOut` after default.api.timeout.ms, or what `poll` raises.
        """
        with self._guard.used(), self._moving:
            state = self._assignment.assigned(*partition_of("position", (topic, partition)))
            deadline = time.monotonic() + self._config.default_api_timeout_ms / 1000
            while state.position is None:
                self._find_positions(deadline)
                self._raise_failures()
                if state.position is None:
                    if time.monotonic() >= deadline:
                        raise state.failure or RequestTimedOut(f"the position of {state.name} was not found in time")
                    self._wait(deadline)
            return state.position

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Return no records of these partitions until `resume`; they stay assigned."""
        with self._guard.used(), self._moving:
            for state in [self._assignment.assigned(*key) for key in partitions_of("pause", partitions)]:
                state.is_paused = True
                state.rewind()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Continue with paused partitions."""
        with self._guard.used():
            for state in [self._assignment.assigned(*key) for key in partitions_of("resume", partitions)]:
                state.is_paused = False

    def paused(self) -> list[TopicPartition]:
        """The assigned partitions that are paused, sorted."""
        with self._guard.used():
            return sorted(state.key for state in self._assignment.partitions.values() if state.is_paused)

    def poll_arrow(self, timeout: float = 1.0) -> pa.RecordBatch | None:
        """The next records of one partition as an Arrow record batch, or None if there are none within `timeout` s.

        Columns are those of the Spark source: key, value (binary, or what deserializers make of them), topic,
        partition, offset, timestamp, timestampType, and headers with `include_headers`. A batch has at most 65,536 rows
        or about 8 MiB. A call that needs metadata or offsets may take a second longer. Errors: see the class.
        `ConfigError` with retry.topics, whose records wait one by one.
        """
        if self._config.retry_topics:
            raise ConfigError("poll_arrow can't read retry.topics, whose records wait one by one: call poll")
        if not self._decodes_arrow:
            require("Consumer.poll_arrow", "pyarrow")
        return self._next(self._arrow.parts, True, timeout)

    def poll(self, timeout: float = 1.0) -> list[ConsumerRecord]:
        """The next records of one partition, at most max.poll.records; [] if there are none within `timeout` s.

        For many records `poll_arrow` is much faster. Errors: see the class.
        """
        parts = self._records.parts if self._letters is None else self._letters.due_parts(self._records.parts)
        return self._next(parts, False, timeout) or []

    def expect(self, topic_ids: Mapping[str, UUID]) -> None:
        """For the package's own use: the positions in assigned partitions of these topics belong to these ids."""
        with self._guard.used(), self._moving:
            for state in self._assignment.partitions.values():
                if state.topic in topic_ids:
                    state.belong(topic_ids[state.topic])

    def poll_chunk(self, timeout: float = 1.0) -> Fetched | None:
        """For the package's own use: the next fetched batches as they are, or None if none come within `timeout` s.

        CRCs are not checked. The chunk's bytes are valid until the next call. Errors: see the class.
        """
        return self._next(lambda chunk: iter([(chunk, chunk.next_offset)]), False, timeout)

    def _next(self, decode: Callable[[Fetched], Iterator[tuple[_T, int]]], is_arrow: bool, timeout: float) -> _T | None:
        with self._guard.used():
            self._moving.__enter__()
            try:
                if is_arrow is not self._decodes_arrow:  # a chunk decoded into the other kind is fetched again
                    self._decodes_arrow, self._decoding = is_arrow, None
                    self._fetches.rewind()
                self._returned = None
                while self._assignment.dropped:
                    self._arrow.forget(self._assignment.dropped.pop())
                records = self._read(decode, time.monotonic() + timeout)
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

    def _read(self, decode: Callable[[Fetched], Iterator[tuple[_T, int]]], deadline: float) -> _T | None:
        self._guard.check()
        part: _T | None = None
        last = self._decoding
        if last is not None and last.state.position == last.chunk.next_offset:
            part = self._next_part()  # none, but then the next response may take the buffer
        if part is not None:
            return part
        while True:
            if self._group is not None:
                with self._joining:
                    self._group.step(*self._patience(deadline))
            if self._positions.look_at() <= time.monotonic():
                self._find_positions(deadline)
            self._fetches.step()
            while True:
                if self._decoding is not None:
                    part = self._next_part()
                if part is not None:
                    return part
                chunk = self._fetches.take()
                if chunk is None:
                    break
                state = self._assignment.partitions[chunk.topic, chunk.partition]
                self._decoding = _Decoding(state, decode(chunk), chunk)
            until = max(deadline, self._raise_failures())
            if time.monotonic() >= until:
                return None
            self._wait(until)

    def _next_part(self) -> Any:
        """The next part of the current chunk, which moves the partition's position; None at its end."""
        while (decoding := self._decoding) is not None:
            state, _, chunk = decoding
            if self._assignment.partitions.get(state.key) is not state or state.run != chunk.run:
                self._release()
                return None
            try:
                part, position = next(decoding.parts, (None, chunk.next_offset))
            except NotDue as waits:
                self._release()
                state.rewind()
                state.due_at = waits.until
                return None
            except RecordDeserializationError:
                self._release()
                self._fetches.keep(state, chunk)
                raise
            except BaseException:  # an interrupt, too: an iterator that has raised looks like one at its end
                self._release()
                state.rewind()
                raise
            self._returned = state, state.run, state.position, state.epoch
            state.position, state.epoch = position, chunk.leader_epoch
            state.held_run = -1
            if part is None:
                self._release()
            elif len(part):
                return part
        return None

    def _release(self) -> None:
        self._decoding = self._fetches.taken = None

    def _find_positions(self, deadline: float) -> None:
        if self._letters is not None:
            run(self._letters.opening(*self._patience(deadline)))
        with self._cluster.within(*self._patience(deadline)):
            self._positions.step(self._group)

    def _patience(self, deadline: float) -> tuple[float, str]:
        """Milliseconds that a step may wait for brokers, and what limits them."""
        left = 1000 * max(_LEAST_SECONDS, deadline - time.monotonic())
        longest = max(1000 * _LEAST_SECONDS, self._config.default_api_timeout_ms)
        return (left, CALL_TIMEOUT) if left < longest else (longest, "default.api.timeout.ms")

    def _raise_failures(self) -> float:
        """Raise what has failed.

        Return until when a call waits even if its timeout is shorter, a reading of `time.monotonic`: a partition that
        no broker knows is an error of the first call.
        """
        if self._troubles.final:
            raise self._troubles.final.popleft()
        longest = self._config.default_api_timeout_ms / 1000
        is_assigned = self._group is None or not self._group.is_subscribed
        if is_assigned and not self._assignment.partitions and not self._has_warned:
            self._has_warned = True
            _log.warning("poll returns nothing: no partitions are assigned, call assign or subscribe first")
        now, until = time.monotonic(), -math.inf
        for state in self._assignment.partitions.values():
            is_unknown = is_assigned and self._positions.refreshed_at >= state.unknown_since + UNKNOWN_SECONDS
            if state.failure is not None and (is_unknown or now > state.failing_since + longest):
                failure, state.failure, state.unknown_since = state.failure, None, math.inf
                raise failure
            if is_assigned and state.unknown_since < math.inf:
                until = max(until, state.unknown_since + _LEAST_SECONDS)
        return until

    def _wait(self, deadline: float) -> None:
        """Wait for events up to the deadline; `WokenUp`, `ConsumerClosed`."""
        until, coordinator = min(deadline, self._positions.look_at()), None
        if self._group is not None:
            until, coordinator = min(until, self._group.look_at()), self._group.connection
        self._fetches.wait(max(0.0, until - time.monotonic()), coordinator)
        self._waker.clear()
        self._guard.check()

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
                    self._group.close(timeout, commits=commits)
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
