"""Dead letters and retries of a consumer: they are written with the commit of the offset after their record.

A letter waits until that commit, which then is a transaction: the letters of the records before the committed offsets,
and these offsets. So whatever dies between any two lines, a record is processed again, or its letter is there once. It
has the promise of a commit as well: a member that another one has replaced writes neither.

A retry is a letter to a topic that the group reads, too, with the time from which on its record is due. A partition of
such a topic stands still until its next record is due.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from uuid import uuid4

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Bounds, Cluster
from spark_klog.client.consumer.assignment import Assigned, Assignment
from spark_klog.client.consumer.decoding import AHEAD, STOP, ConsumerRecord
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.dead_letters import CONVERTERS, PROCESSING, DeadLetter, split, told
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.offsets import Committed, GroupMetadata, GroupOffsets
from spark_klog.client.producer.core import LAST_ABORT_MS, ProducerCore
from spark_klog.client.producer.intake import AsItIs, Gathering, check_bytes, check_size
from spark_klog.client.producer.transactions import State
from spark_klog.client.requests import Steps, Wait, paused
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import (
    BufferExhausted,
    CommitFailed,
    ConfigError,
    ConnectionFailed,
    ErrorCode,
    KlogError,
    ProtocolError,
    RecordDeserializationError,
    RequestTimedOut,
)
from spark_klog.protocol.tables.records import LATEST
from spark_klog.records.contract import Headers

if TYPE_CHECKING:
    from collections.abc import Mapping

    Offsets = Mapping[TopicPartition, Committed]

_log = logging.getLogger(__name__)
#: Bytes of a letter: as much as a consumer fetches.
_MOST_BYTES = 64 * 1024 * 1024
#: Letters at which a consumer that commits by itself does so.
_MANY = 1000
#: How long a transaction may be open, in ms, of a consumer that dies: its partitions' next one waits for its offsets.
_TRANSACTION_MS = 15_000


#: A record's topic, partition and offset.
_Place = tuple[str, int, int]


class NotDue(Exception):
    """The next record of a partition is due at `until`, a reading of `time.monotonic`."""

    def __init__(self, until: float) -> None:
        self.until = until


class _Letter(NamedTuple):
    """A record for a topic; `term` is that of the assignment in which it was read."""

    term: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int
    size: int


class DeadLetters:
    """The letters and retries of a consumer that are not committed yet.

    Only the consumer's thread uses it, and for `undecodable` the one that deserializes.
    """

    def __init__(self, config: ConsumerConfig, assignment: Assignment, secrets: Collection[str]) -> None:
        self._config, self._assignment, self._secrets = config, assignment, secrets
        self._delays = dict(zip(config.retry_topics or (), config.retry_delays_ms or (), strict=True))
        self._attempts = len(self._delays) if config.retry_attempts is None else config.retry_attempts
        #: Held where `_pending` and `_size` change, or are looked through.
        self._lock = threading.RLock()
        #: By topic, partition and offset of the record.
        self._pending: dict[_Place, _Letter] = {}
        #: Partitions that were lost with letters, each with the last letter's offset, until that is read again.
        self._lost: dict[TopicPartition, int] = {}
        #: Bytes of the letters that wait for a commit.
        self._size = 0
        #: The first record of a partition that was not due, and until when it waits.
        self._waiting: dict[TopicPartition, tuple[int, float]] = {}
        # no topic of letters, whose name is in the id of its replays, and no other member has this one
        own = quote(config.group_instance_id or uuid4().hex, safe="")
        name = config.client.transactional_id or f"klog-dead-letters.{config.group_id}/{own}"
        #: Whether an earlier process may have left a transaction open, which positions have to wait for.
        self._must_open = config.client.transactional_id is not None or config.group_instance_id is not None
        self._client = replace(
            config.client,
            transactional_id=name,
            acks=-1,
            enable_idempotence=True,
            max_request_size=_MOST_BYTES,
            buffer_memory=_MOST_BYTES,
            max_block_ms=config.default_api_timeout_ms,
            delivery_timeout_ms=config.default_api_timeout_ms,
            transaction_timeout_ms=min(config.client.transaction_timeout_ms, _TRANSACTION_MS),
        )
        self._writer: _Writer | None = None
        #: The one that writes now, and its `Cluster.patience`.
        self._busy: _Writer | None = None
        self._patience = math.inf
        #: Of a transaction of which the commit was not answered: offsets that show whether it is committed, those that
        #: were there before if nothing marks them, and its letters.
        self._doubt: tuple[Offsets, Offsets, list[_Place]] | None = None

    def add(self, record: Any, reason: str | BaseException, producer: ProducerCore | None = None) -> None:
        """See `Consumer.dead_letter`."""
        self._add("dead_letter", record, self._config.dead_letter_topic, reason, producer)

    def retry(
        self, record: Any, after: float | None, reason: str | BaseException, producer: ProducerCore | None
    ) -> str:
        """See `Consumer.retry`."""
        if not self._delays:
            raise ConfigError("retry: retry.topics is not set: the topics in which records wait, with retry.delays.ms")
        before = split(record.headers)[0] if record.topic in self._delays else None
        tried = 1 if before is None else max(1, before.attempts) + 1
        if tried > self._attempts:
            self._add("retry", record, self._config.dead_letter_topic, reason, producer)
            return str(self._config.dead_letter_topic)
        topics = list(self._delays)
        topic = topics[min(tried, len(topics)) - 1]
        if after is not None:
            if not 0 <= after < math.inf:
                raise ConfigError(f"retry: after={after!r} must be seconds, 0 or more")
            topic = next((each for each in topics if self._delays[each] >= 1000 * after), topics[-1])
        delay_ms = self._delays[topic] if after is None else min(round(1000 * after), self._delays[topic])
        self._add("retry", record, topic, reason, producer, due=system_ms() + delay_ms)
        return topic

    def undecodable(self, failure: RecordDeserializationError) -> bool:
        """Have a record that does not deserialize become a letter; raises the failure if it is a letter already.

        Returns whether letters should be committed before more of them come.
        """
        if failure.topic == self._config.dead_letter_topic:
            raise failure from failure.__cause__
        self._add("poll", failure, self._config.dead_letter_topic, failure.__cause__ or failure, None)
        return self.is_filling

    def _add(
        self,
        call: str,
        record: Any,
        target: str | None,
        reason: str | BaseException,
        producer: ProducerCore | None,
        due: int = -1,
    ) -> None:
        if target is None:
            raise ConfigError(f"{call}: dead.letter.topic is not set: the topic for records that can't be processed")
        if record.topic == target and due < 0:
            raise ConfigError(f"{call}: {target} is dead.letter.topic itself: set another topic for letters of letters")
        if not isinstance(reason, str | BaseException):
            raise TypeError(f"{call}: the reason must be text or an exception, not {type(reason).__name__}")
        raw: Any = getattr(record, "raw", record)
        for name, content in (("key", raw.key), ("value", raw.value)):
            check_bytes(f"{call}: the {name} of a record that `poll` has not returned as it is", content)
        column = record.column if isinstance(record, RecordDeserializationError) else None
        known, own = split(raw.headers) if record.topic in self._delays else (None, raw.headers)
        place = record if known is None else known
        error, why, trace = told(reason, self._secrets)
        letter = DeadLetter(
            place.topic,
            place.partition,
            place.offset,
            reader=self._config.group_id or "",
            task="0",
            stage=PROCESSING if column is None else CONVERTERS[column],
            where="spark_klog.client.Consumer",
            error=error,
            reason=why,
            trace=trace,
            time=system_ms(),
            attempts=1 if known is None else max(1, known.attempts) + 1,
            due=due,
        )
        headers = own + letter.headers
        if producer is not None:
            # without a span, whose context would be a header
            kind: Any = type(producer)
            send = getattr(kind, "send_nowait", kind.send)  # of a producer on asyncio's loop
            as_they_are = (None if content is None else AsItIs(content) for content in (raw.value, raw.key))
            send(producer, target, *as_they_are, timestamp=raw.timestamp, headers=headers)
            return
        check_size(target, raw.key, raw.value, headers, _MOST_BYTES, "the limit of dead letters")
        state = self._assignment.partitions.get((record.topic, record.partition))
        if state is None:
            raise CommitFailed(f"{call}: {record.topic}-{record.partition} is not assigned to this consumer any more")
        size = len(raw.key or b"") + len(raw.value or b"") + sum(len(name) + len(data or b"") for name, data in headers)
        key = record.topic, record.partition, record.offset
        with self._lock:
            former = self._pending.get(key)
            others = self._size - (0 if former is None else former.size)
            if column is None:  # else records were left out before this one: `is_filling` ends that, then `check_room`
                self.check_room(call, others + size)
            self._pending[key] = _Letter(state.term, target, raw.key, raw.value, headers, raw.timestamp, size)
            self._size = others + size

    def check_room(self, call: str = "poll", size: int | None = None) -> None:
        """Raise `BufferExhausted` if there is no room for letters of so many bytes, by default for those there are."""
        if (self._size if size is None else size) > self._config.client.buffer_memory:
            raise BufferExhausted(
                f"{call}: dead letters and retries of {self._size} bytes wait for a commit, "
                f"buffer.memory={self._config.client.buffer_memory}: call commit"
            )

    @property
    def is_filling(self) -> bool:
        """Whether to commit soon."""
        return len(self._pending) > _MANY or 2 * self._size > self._config.client.buffer_memory

    def forget(self, state: Assigned, offset: int) -> None:
        """Drop the letters of records that are read again, as the position is `offset` now; those before it stay."""
        if offset != LATEST:  # the end is behind them all
            with self._lock:
                self._drop([key for key, each in self._pending.items() if each.term == state.term and key[2] >= offset])

    def due_parts(
        self, parts: Callable[[Fetched], Iterator[tuple[list[ConsumerRecord], int]]]
    ) -> Callable[[Fetched], Iterator[tuple[list[ConsumerRecord], int]]]:
        """A decoder that ends with `NotDue` in front of a record of a retry topic that has to wait."""
        if not self._delays:
            return parts

        def due(
            chunk: Fetched, parts: Iterator[tuple[list[ConsumerRecord], int]]
        ) -> Iterator[tuple[list[ConsumerRecord], int]]:
            for part, end in parts:
                if part is STOP or part is AHEAD:
                    yield part, end
                    continue
                until, count = self._first_waiting(part) if chunk.topic in self._delays else (0.0, len(part))
                if count:
                    yield part[:count], end if count == len(part) else part[count].offset
                if count < len(part):
                    raise NotDue(until)

        return lambda chunk: due(chunk, parts(chunk))  # which begins it now, as if nothing waited

    def _first_waiting(self, part: list[ConsumerRecord]) -> tuple[float, int]:
        """Until when the first record that is not due has to wait, and how many records are before it."""
        now_ms, now = system_ms(), time.monotonic()
        for count, record in enumerate(part):
            known, _ = split(record.headers)
            if known is None or known.due <= now_ms:
                continue
            key = record.topic, record.partition
            offset, until = self._waiting.get(key, (-1, 0.0))
            if offset != record.offset:  # clocks differ: it waits for the topic's delay at most
                until = now + min(known.due - now_ms, self._delays[record.topic]) / 1000
                self._waiting[key] = record.offset, until
            if now < until:
                return until, count
        return 0.0, len(part)

    def due(self, offsets: Offsets) -> list[_Place]:
        """The letters that a commit of these offsets has to write; others of partitions that were lost are dropped."""
        terms = {key: state.term for key, state in self._assignment.partitions.items()}
        with self._lock:
            lost = [key for key, letter in self._pending.items() if terms.get(key[:2]) != letter.term]
            for topic, partition, offset in lost:
                self._lost[topic, partition] = max(offset, self._lost.get((topic, partition), -1))
            self._drop(lost)
            return sorted(key for key in self._pending if key[:2] in offsets and key[2] < offsets[key[:2]].offset)

    def concern(self, offsets: Offsets) -> bool:
        """Whether a commit of these offsets is for `settling`: of letters that are due, or that were lost."""
        return bool(self.due(offsets) or self._outdated(offsets))

    def _outdated(self, offsets: Offsets) -> list[TopicPartition]:
        """Partitions that were lost with letters, and whose offsets are behind records that are to be read again."""
        outdated: list[TopicPartition] = []
        for key in sorted(self._lost.keys() & offsets.keys()):
            state = self._assignment.partitions.get(key)
            position = None if state is None else state.position
            if position is not None and position > self._lost[key]:
                del self._lost[key]
            elif position is None or position < offsets[key].offset:
                outdated.append(key)
        return outdated

    def opening(self, timeout_ms: float, limit: str) -> Steps[None]:
        """Have a transaction ended that a process of the same name has left: positions wait for that.

        If brokers do not answer, they wait, and the next call tries again.
        """
        if self._must_open:
            writer = self._new_writer()
            try:
                with writer.cluster.within(timeout_ms, limit):
                    yield from writer.beginning()
                self._writer, self._must_open = writer, False
            except (ConnectionFailed, RequestTimedOut) as error:
                _log.info("the last transaction of %s: %s", self._client.transactional_id, error)
            finally:
                if self._writer is not writer:
                    writer.close()

    def settling(self, offsets: Offsets, committer: Callable[[], GroupMetadata], bounds: Bounds) -> Steps[None]:
        """Write the letters that are due and commit the offsets, in one transaction.

        Raises what a producer does, and `CommitFailed` for partitions that were lost with letters. Nothing is written
        then, or all of it, which the next call finds out. A member whose epoch is outdated is tried again until the
        bounds.
        """
        attempts = 0
        if self.concern(offsets) and (outdated := self._outdated(offsets)):
            names = ", ".join(f"{topic}-{partition}" for topic, partition in outdated)
            raise CommitFailed(
                f"commit: {names} had letters, which were dropped when this consumer lost it: they are read again"
            )
        while keys := self.due(offsets):
            try:
                yield from self._writing(keys, offsets, committer(), bounds)
            except ProtocolError as error:
                if error.code != ErrorCode.STALE_MEMBER_EPOCH or time.monotonic() > bounds.deadline:
                    raise
                attempts += 1
                yield from paused(time.monotonic() + pause_seconds(self._config.client, attempts))

    def _writing(self, keys: list[_Place], offsets: Offsets, member: GroupMetadata, bounds: Bounds) -> Steps[None]:
        writer, self._writer = self._writer or self._new_writer(), None
        self._busy = writer
        mark = f"klog-dead-letters:{uuid4().hex}"
        marked = {key: each if each.metadata else each._replace(metadata=mark) for key, each in offsets.items()}
        before: Offsets = {}
        try:
            with writer.cluster.within(1000 * (bounds.deadline - time.monotonic()), bounds.limit):
                yield from writer.beginning()
                stored = GroupOffsets(writer.cluster, member.group, is_stable=True)
                if self._doubt is not None:
                    sent, earlier, written = self._doubt
                    there = yield from stored.asking_committed(list(sent))
                    shown = ((_shown(each), _shown(sent[key]), _shown(earlier.get(key))) for key, each in there.items())
                    if any(now == wanted != then for now, wanted, then in shown):
                        self._drop(written)
                    self._doubt = None
                if all(each.metadata for each in offsets.values()):  # it is the program's
                    before = yield from stored.asking_committed(list(offsets))
                keys = [key for key in keys if key in self._pending]  # a seek may have come, or it was in doubt
                yield from writer.writing([self._pending[key] for key in keys], marked, member, bounds)
        except BaseException as error:
            if writer.is_committing:
                telling = {key: each for key, each in marked.items() if each.metadata == mark} or marked
                self._doubt = telling, before, keys
            try:
                if isinstance(error, KlogError) and not writer.is_committing:
                    yield from writer.aborting()
            finally:
                writer.close()
            raise
        finally:
            self._busy = None
        self._writer = writer
        self._drop(keys)

    def _new_writer(self) -> _Writer:
        writer = _Writer(Cluster(self._client))
        writer.cluster.patience = self._patience
        return writer

    def hurry(self, patience: float) -> None:
        """Give up from now on if no broker has answered for so many seconds."""
        self._patience = patience
        for writer in filter(None, (self._writer, self._busy)):
            writer.cluster.patience = patience

    def _drop(self, keys: Collection[_Place]) -> None:
        with self._lock:
            for key in keys:
                if (letter := self._pending.pop(key, None)) is not None:
                    self._size -= letter.size

    def close(self) -> None:
        """Close the connections; letters that are not committed are those of records that are read again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _shown(committed: Committed | None) -> tuple[int, str | None] | None:
    return None if committed is None else (committed.offset, committed.metadata)


class _Writer(ProducerCore):
    """A transactional producer without a thread, in steps."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._begin(cluster, None, creates_topics=True)
        self._sender.work_on()
        self._is_new = True

    @property
    def is_committing(self) -> bool:
        """Whether the commit has begun, so that its outcome is not known if it fails."""
        return self._transactional("commit").state is State.COMMITTING

    def beginning(self) -> Steps[None]:
        """Have the last transaction of this id ended."""
        if self._is_new:
            yield from self._transactional("init").init()
            yield from self._sender.reset()
            self._is_new = False

    def writing(self, letters: list[_Letter], offsets: Offsets, member: GroupMetadata, bounds: Bounds) -> Steps[None]:
        for topic in dict.fromkeys(letter.topic for letter in letters):
            yield from self._choice.looking_up(topic)
        transactions = self._transactional("commit")
        transactions.begin()
        yield from transactions.send_offsets(offsets, member)
        for letter in letters:
            partition, is_free = self._choice.of(letter.topic, letter.key, None)
            key = letter.topic, partition
            if key not in self._gathering:
                self._gathering[key] = Gathering(self._sender.receipts.new(key), math.inf)
            _, size = self._gathering[key].add_record(letter.timestamp, letter.key, letter.value, letter.headers)
            if is_free:
                self._choice.filled(letter.topic, size)
            if self._gathering[key].whole[1] >= self.batch_size:
                self._queue(key)
        for key in list(self._gathering):
            self._queue(key)
        while self._sender.size:
            pause, connections = self._sender.step()
            if self._sender.size:
                if time.monotonic() > bounds.deadline:
                    raise RequestTimedOut(f"dead letters were not confirmed within {bounds.limit}")
                yield Wait(None, min(bounds.deadline, time.monotonic() + pause), others=tuple(connections))
        self._sender.check()
        yield from transactions.commit()

    def _queue(self, key: TopicPartition) -> None:
        gathering = self._gathering.remove(key)
        count, _, last = gathering.whole
        self._sender.add_records(key, gathering.body, count, gathering.first_timestamp, last, gathering.receipt)

    def aborting(self) -> Steps[None]:
        """Abort an open transaction, without errors: its timeout ends it as well."""
        if self._transactional("abort").is_open:
            try:
                with self.cluster.within(LAST_ABORT_MS):
                    yield from self._aborting()
            except KlogError:
                pass

    def close(self) -> None:
        self._is_closed = True
        self._sender.stop()
        self.cluster.close()
