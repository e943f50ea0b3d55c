"""What the consumers have in common: the synchronous one, and that of `spark_klog.aio` on an event loop."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar
from uuid import UUID

from spark_klog.base.interrupts import ORDERLY, Section
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
from spark_klog.client.calls import Calls, call
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.assignment import Assigned, Assignment, Troubles
from spark_klog.client.consumer.classic_group import ClassicGroup
from spark_klog.client.consumer.commits import Offsets
from spark_klog.client.consumer.consumer_protocol_group import ConsumerProtocolGroup
from spark_klog.client.consumer.dead_letters import DeadLetters, NotDue
from spark_klog.client.consumer.decoding import AHEAD, STOP, ArrowDecoder, ConsumerRecord, Deserializers, RecordDecoder
from spark_klog.client.consumer.fetches import Fetches
from spark_klog.client.consumer.group import Beside, ConsumerGroup, RebalanceListener, more_for
from spark_klog.client.consumer.positions import UNKNOWN_SECONDS, Positions
from spark_klog.client.consumer.settings import CLASSIC, CONSUMER, consumer_config
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.net.waiting import Waited
from spark_klog.client.offsets import Committed, GroupMetadata
from spark_klog.client.requests import Steps, Wait
from spark_klog.client.retry import CALL_TIMEOUT
from spark_klog.client.serialization import split_settings
from spark_klog.client.settings import check_settings, setting_texts
from spark_klog.errors import ConfigError, KlogError, RecordDeserializationError, RequestTimedOut
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.security.config import is_secret, resolved
from spark_klog.tracing import trace_client

if TYPE_CHECKING:
    from spark_klog.client.producer.core import ProducerCore

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Seconds that requests for metadata and offsets may take even if a call's timeout is shorter, and a second more for so
#: many partitions that are looked up: an answer about 50,000 takes longer, and would be asked for again and again.
LEAST_SECONDS, _IN_A_SECOND = 1.0, 5000
#: Seconds between two looks at the positions and the fetches while there are records to return.
_STEP = 0.001


class Decoding(NamedTuple):
    """A chunk being returned to the caller; the run is the partition's, unless e.g. a seek has begun another."""

    state: Assigned
    parts: Iterator[tuple[Any, int]]
    chunk: Fetched


class Turns(Protocol):
    """Admits the calls of a consumer."""

    def used(self) -> AbstractContextManager[object]:
        """A block for a call; raises why it is not admitted."""

    def check(self) -> None:
        """Raise `ConsumerClosed` or `WokenUp` if that is to end a call that waits."""

    def waited(self) -> None:
        """Like `check`, after a wait."""


class ConsumerCore(Calls):
    """The calls of a consumer, and the steps of those that return records; a subclass says how they are made."""

    _guard: Turns
    #: What ends a wait, besides connections.
    _waited: tuple[Waited, ...] = ()

    def _begin(
        self,
        settings: Mapping[str, Any],
        include_headers: bool,
        timestamp_unit: Literal["us", "ms"],
        wake: Callable[[], None],
        beside: Beside | None = None,
    ) -> None:
        """`wake` ends a wait; `beside`: see `Beside`."""
        unit = one_of("timestamp_unit", timestamp_unit, ("us", "ms"))
        check_settings("Consumer", settings)
        settings, serialization = split_settings(settings, "deserializer")
        self._config = consumer_config(settings)
        self._wake, self._beside = wake, beside
        #: Whether a poll without assigned partitions was logged.
        self._has_warned = False
        self._cluster = Cluster(self._config.client)
        self._assignment = Assignment()
        #: What moves positions; a poll is halfway until the caller has its records. What changes the group's state.
        #: Steps that are closed where they wait leave nothing halfway.
        self._moving, self._joining = Section(*ORDERLY, GeneratorExit), Section(*ORDERLY, GeneratorExit)
        self._troubles = Troubles()
        self._letters: DeadLetters | None = None
        if self._config.dead_letter_topic is not None:
            secrets = [value for name, value in resolved(setting_texts(settings)).items() if is_secret(name)]
            self._letters = DeadLetters(self._config, self._assignment, secrets)
        self._deserializers: Deserializers | None = None
        if serialization is not None:
            is_asked = self._letters is not None and self._config.dead_letter_deserialization_errors
            on_bad = self._letters.undecodable if self._letters is not None and is_asked else None
            self._deserializers = Deserializers(serialization, on_bad, keeps_raw=self._letters is not None)
        self._group = None if self._config.group_id is None else self._new_group()
        self._positions = Positions(self._cluster, self._config, self._assignment, self._troubles)
        self._fetches = Fetches(self._cluster, self._config, self._assignment, self._troubles)
        limit, checks_crcs = self._config.client.decompressed_max_bytes, self._config.check_crcs
        self._arrow = ArrowDecoder(limit, include_headers, checks_crcs, unit, self._deserializers)
        self._records = RecordDecoder(limit, self._config.max_poll_records, checks_crcs, self._deserializers)
        #: Decodes a chunk into lists of records.
        self._parts = self._records.slices if self._letters is None else self._letters.due_parts(self._records.slices)
        trace_client(self, self._cluster, "_read", group=self._config.group_id)
        self._decoding: Decoding | None = None
        #: When fetches are looked at though records are at hand, a reading of `time.monotonic`.
        self._steps_at = 0.0
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
        group = kind(self._config, self._assignment, self._wake, self._troubles, self._beside)
        group.commits.letters = self._letters
        if self._letters is not None:
            self._letters.hurry(math.inf)  # the close of the last group has set another patience
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

    @call
    def unsubscribe(self) -> Steps[None]:
        """Leave the group and drop all partitions; with enable.auto.commit commit the positions first."""
        with self._moving, self._joining:
            try:
                if self._group is not None:
                    yield from self._group.close()
            finally:  # even if the listener raises: the member has left
                if self._group is not None:
                    self._group = self._new_group()
                self._assignment.set([])

    @call
    def commit(self, offsets: Mapping[TopicPartition, int | Committed] | None = None) -> Steps[None]:
        """Commit these offsets, or all positions, for the group; waits up to default.api.timeout.ms.

        `CommitFailed` if the group has rebalanced meanwhile or this subscribed consumer is not a member, `MemberFenced`
        if another member has this group.instance.id, `ProtocolError`, `ConnectionFailed`, `RequestTimedOut`.
        """
        with self._joining:
            group = self._in_group()
            wanted = self._consumed() if offsets is None else offsets_of("commit", offsets)
            yield from group.commits.commit(wanted)

    def _consumed(self) -> dict[TopicPartition, Committed]:
        """The positions that a commit is of."""
        return self._in_group().consumed()

    def _committing_async(
        self,
        offsets: Mapping[TopicPartition, int | Committed] | None,
        on_done: Callable[[Offsets, KlogError | None], None] | None,
    ) -> Steps[None]:
        """The steps of `commit_async`; what is to be committed is read at once."""
        group = self._in_group()
        if on_done is not None and not callable(on_done):
            raise TypeError(f"commit_async: on_done must be a function, not {type(on_done).__name__}")
        return group.commits.begin(
            self._consumed() if offsets is None else offsets_of("commit_async", offsets), on_done
        )

    def dead_letter(
        self,
        record: ConsumerRecord | RecordDeserializationError,
        reason: str | BaseException,
        *,
        producer: ProducerCore | None = None,
    ) -> None:
        """Have a record that can't be processed written to dead.letter.topic, as it was, with the reason in headers.

        It is written by the commit of an offset behind it, in one transaction with the offsets: of `commit` or
        `commit_async`, or with enable.auto.commit. Until then this call may be repeated, with another reason. A record
        that is read again because nothing was committed has no letter yet.

        `producer`, of either client, writes it at once, for programs whose transactions have the offsets, too
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
        producer: ProducerCore | None = None,
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

    @call
    def committed(self, partitions: Iterable[TopicPartition]) -> Steps[dict[TopicPartition, Committed]]:
        """The group's committed offsets of the partitions that have one; waits up to default.api.timeout.ms."""
        with self._joining:
            return (yield from self._in_group().committed(partitions_of("committed", partitions)))

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

    @call
    def position(self, topic: str, partition: int) -> Steps[int]:
        """The offset of the next record that `poll` returns.

        Asks brokers if it is not known yet: `RequestTimedOut` after default.api.timeout.ms, or what `poll` raises.
        """
        with self._moving:
            state = self._assignment.assigned(*partition_of("position", (topic, partition)))
            deadline = time.monotonic() + self._config.default_api_timeout_ms / 1000
            while state.position is None:
                yield from self._find_positions(deadline)
                self._raise_failures()
                if state.position is None:
                    if time.monotonic() >= deadline:
                        raise state.failure or RequestTimedOut(f"the position of {state.name} was not found in time")
                    yield from self._wait(deadline)
            return state.position

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Return no records of these partitions until `resume`; they stay assigned."""
        with self._guard.used(), self._moving:
            for state in [self._assignment.assigned(*key) for key in partitions_of("pause", partitions)]:
                state.stir()
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

    def expect(self, topic_ids: Mapping[str, UUID]) -> None:
        """For the package's own use: the positions in assigned partitions of these topics belong to these ids."""
        with self._guard.used(), self._moving:
            for state in self._assignment.partitions.values():
                if state.topic in topic_ids:
                    state.belong(topic_ids[state.topic])

    def _check_arrow(self) -> None:
        if self._config.retry_topics:
            raise ConfigError("poll_arrow can't read retry.topics, whose records wait one by one: call poll")

    def _begin_reading(self, is_arrow: bool) -> None:
        if is_arrow is not self._decodes_arrow:  # a chunk decoded into the other kind is fetched again
            self._decodes_arrow, self._decoding = is_arrow, None
            self._fetches.rewind()
        self._returned = None
        while self._assignment.dropped:
            self._arrow.forget(self._assignment.dropped.pop())

    def _read(self, decode: Callable[[Fetched], Iterator[tuple[_T, int]]], deadline: float) -> Steps[_T | None]:
        self._guard.check()
        part: _T | None = None
        last = self._decoding
        if last is not None and last.state.position == last.chunk.next_offset:
            part = yield from self._next_part()  # none, but then the next response may take the buffer
        if part is STOP:
            return None
        if part is not None:
            return part
        while True:
            if not (yield from self._prepare(deadline)):
                return None
            if self._letters is not None:
                self._letters.check_room()
            if is_due := (begin := time.monotonic()) >= self._steps_at:
                self._fetches.step()
                now = time.monotonic()
                self._steps_at = now + max(_STEP, now - begin)  # it looks at all partitions without a leader
            while True:
                if self._decoding is not None:
                    part = yield from self._next_part()
                if part is STOP:
                    return None
                if part is not None:
                    return part
                chunk = self._fetches.take()
                if chunk is None:
                    break
                state = self._assignment.partitions[chunk.topic, chunk.partition]
                self._decoding = Decoding(state, decode(chunk), chunk)
            if not is_due:
                self._steps_at = 0.0
                continue
            until = max(deadline, self._raise_failures())
            if time.monotonic() >= until:
                return None
            yield from self._wait(until)

    def _prepare(self, deadline: float) -> Steps[bool]:
        """Take part in the group, and find the positions that are not known; False if that is not done in time."""
        if self._group is not None:
            with self._joining:
                yield from self._group.step(*self._patience(deadline, self._group.lacking))
        now = time.monotonic()
        if now >= self._steps_at and self._positions.look_at() <= now:
            yield from self._find_positions(deadline)
        return True

    def _decoded(self, decoding: Decoding) -> Steps[None]:
        """Wait until the next part of a chunk is decoded, if something else does that."""
        return
        yield

    def _is_current(self, state: Assigned, run: int) -> bool:
        """Whether records that were fetched in this run are still to be returned."""
        return self._assignment.partitions.get(state.key) is state and state.run == run

    def _next_part(self) -> Steps[Any]:
        """The next part of the current chunk, which moves the partition's position; None at its end.

        `STOP` where there are so many dead letters that they should be committed before the rest is decoded.
        """
        while (decoding := self._decoding) is not None:
            state, _, chunk = decoding
            yield from self._decoded(decoding)
            if not self._is_current(state, chunk.run):
                self._release()
                return None
            try:
                part, position = next(decoding.parts, (None, chunk.next_offset))
            except NotDue as waits:
                self._release()
                self._fetches.keep(state, chunk, waits.until)
                return None
            except RecordDeserializationError:
                self._release()
                self._fetches.keep(state, chunk)
                raise
            except BaseException:  # an interrupt, too: an iterator that has raised looks like one at its end
                self._release()
                state.rewind()
                raise
            if part is AHEAD:
                continue
            self._returned = state, state.run, state.position, state.epoch
            state.position, state.epoch = position, chunk.leader_epoch
            if position == chunk.next_offset:
                state.held_run = -1
            if part is None:
                self._release()
            elif part is STOP or len(part):
                return part
        return None

    def _release(self) -> None:
        self._decoding = self._fetches.taken = None

    def _find_positions(self, deadline: float) -> Steps[None]:
        if self._letters is not None:
            yield from self._letters.opening(*self._patience(deadline))
        lacking = max(len(self._assignment.restless), more_for(self._positions.late))
        with self._cluster.within(*self._patience(deadline, lacking)):
            yield from self._positions.step(self._group, lambda: self._patience(deadline))

    def _patience(self, deadline: float, lacking: int = 0) -> tuple[float, str]:
        """Milliseconds that a step may wait for brokers, and what limits them.

        An answer about `lacking` partitions takes its time: a short call would drop it, and so would the next.
        """
        left = 1000 * max(LEAST_SECONDS + lacking / _IN_A_SECOND, deadline - time.monotonic())
        longest = max(1000 * LEAST_SECONDS, self._config.default_api_timeout_ms)
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
        for state in self._assignment.restless:
            is_unknown = is_assigned and self._positions.refreshed_at >= state.unknown_since + UNKNOWN_SECONDS
            failure = state.failure
            if failure is not None and (is_unknown or now > state.failing_since + longest):
                for other in self._assignment.restless:  # one error for all that fail alike, not one in each call
                    if type(other.failure) is type(failure):
                        other.failure = None
                state.failure, state.unknown_since = None, math.inf
                raise failure
            if is_assigned and state.unknown_since < math.inf:
                until = max(until, state.unknown_since + LEAST_SECONDS)
        return until

    def _wait(self, deadline: float) -> Steps[None]:
        """Wait for events up to the deadline; `WokenUp`, `ConsumerClosed`."""
        fetched_at, connections = self._fetches.awaited()
        until = min(deadline, self._positions.look_at(), fetched_at)
        if self._group is not None:
            # a long call polls all the time
            until = min(until, self._group.look_at(), time.monotonic() + self._config.max_poll_interval_ms / 2000)
        yield Wait(None, until, others=(*self._waited, *connections))
        self._guard.waited()
