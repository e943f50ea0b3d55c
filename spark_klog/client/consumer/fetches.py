"""Fetches of a consumer, in sessions: one request in flight per broker, sent before the last response is decoded.

The records of a response stay in the connection's buffer, so a broker's next response is received only after all of
them are taken: memory is bounded by `fetch.max.bytes` per broker, besides the sockets' buffers.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import INT32_MAX
from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.assignment import Assigned, Assignment, Troubles
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.fetch.entries import (
    LEAST_BYTES,
    Fetched,
    FetchParameters,
    Larger,
    Limits,
    entries_of,
    read_entry,
    too_large,
    topics_to_fetch,
    without_ids,
)
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import (
    DecodeError,
    ErrorCode,
    FrameTooLarge,
    KlogError,
    ProtocolError,
    RequestTimedOut,
    is_retriable,
)
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import FETCH_WITH_TOPIC_IDS, INITIAL_EPOCH, NO_SESSION

_log = logging.getLogger(__name__)
#: The errors of a broker that has dropped the session.
LOST_SESSION = (
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
)
#: In place of a broker's node id, where chunks are that are kept.
_KEPT = -2


class FetchSession:
    """The client's side of an incremental fetch session with one broker (KIP-227): later requests contain only changes.

        session id  epoch   the request
        0 or N      0       all partitions; the broker opens a new session (and drops N), or answers with id 0: none
        N           E > 0   new, changed and forgotten partitions

    Brokers before Fetch 7 have no sessions: each request is a full one. From Fetch 13 on topics are named by id
    (KIP-516), all of a session or none. Call `request` and `accept` in turn, `restart` if there is no answer.
    """

    def __init__(self) -> None:
        self._id = NO_SESSION
        self._epoch = INITIAL_EPOCH
        #: Whether the last request names topics by id.
        self.has_ids = False
        #: The current fetch parameters of each partition in the session.
        self.requested: dict[TopicPartition, FetchParameters] = {}

    def request(self, partitions: Mapping[TopicPartition, FetchParameters]) -> Message:
        """The session fields and partitions of a Fetch request, in the order of `partitions`.

        Topics are named by id if all have one.
        """
        has_ids = None not in map(attrgetter("topic_id"), partitions.values())
        if has_ids != self.has_ids:
            self.restart()
            self.has_ids = has_ids
        if not has_ids:
            partitions = without_ids(partitions)
        changed = partitions
        forgotten: dict[tuple[str, UUID | None], list[int]] = {}
        if self._epoch != INITIAL_EPOCH and partitions == self.requested:  # of an idle consumer: saves the loops below
            changed = {}
        elif self._epoch != INITIAL_EPOCH:
            changed = {key: asked for key, asked in partitions.items() if self.requested.get(key) != asked}
            for key, asked in self.requested.items():
                if key not in partitions or partitions[key].topic_id != asked.topic_id:
                    forgotten.setdefault((key[0], asked.topic_id), []).append(key[1])
        self.requested = dict(partitions)
        return {
            "session_id": self._id,
            "session_epoch": self._epoch,
            "topics": topics_to_fetch(changed),
            "forgotten_topics_data": [
                {"topic": topic, "topic_id": topic_id, "partitions": numbers}
                for (topic, topic_id), numbers in forgotten.items()
            ],
        }

    def accept(self, answer: Message, what: str) -> dict[TopicPartition, Message]:
        """The answer's entries by partition; in an incremental session only those with news.

        `ProtocolError` for the answer's top-level error code, `DecodeError` if it does not match the request. After an
        error call `restart`.
        """
        if code := answer["error_code"]:
            if code in LOST_SESSION:
                self._id = NO_SESSION
            raise answer_error(FETCH, code, what)
        result = entries_of(answer, self.requested, is_incremental=self._epoch != INITIAL_EPOCH)
        self._id = answer["session_id"]
        if self._id == NO_SESSION:
            self._epoch = INITIAL_EPOCH
        else:
            self._epoch = 1 if self._epoch == INT32_MAX else self._epoch + 1
        return result

    def restart(self) -> None:
        """Start over with a full request, which also ends the broker's session if it still exists."""
        self._epoch = INITIAL_EPOCH
        self.requested = {}


@dataclass(slots=True, eq=False)
class _Source:
    """One broker: its fetch session, the request in flight, and the chunks not yet taken."""

    node: int
    session: FetchSession = field(default_factory=FetchSession)
    connection: Connection | None = None
    handle: Handle | None = None
    is_opening: bool = False
    #: The deadline of the answer, a reading of `time.monotonic`.
    until: float = 0.0
    chunks: deque[Fetched] = field(default_factory=deque)
    attempts: int = 0
    retry_at: float = 0.0


class Fetches:
    """Fetches for an `Assignment`. Nothing here waits.

    Retriable failures are noted in the partition (see `Assigned.failed`), the others in `troubles`.
    """

    def __init__(self, cluster: Cluster, config: ConsumerConfig, assignment: Assignment, troubles: Troubles) -> None:
        self._cluster, self._config = cluster, config
        self._assignment = assignment
        self._troubles = troubles
        #: Bytes to ask of a partition.
        self._least_bytes = max(config.client.partition_fetch_bytes, LEAST_BYTES)
        self._most_bytes = config.client.response_max_bytes
        self._sources: dict[int, _Source] = {}
        #: The broker whose chunk was taken last: its buffer must stay valid until this is None.
        self.taken: _Source | None = None
        #: When to call `step` again if nothing arrives, a reading of `time.monotonic`.
        self._look_at = math.inf

    def step(self) -> None:
        """Receive responses that have arrived, and send the next requests."""
        for source in list(self._sources.values()):
            if source.handle is not None and not source.chunks and source is not self.taken:
                self._receive(source)
        self._assignment.settle()
        by_node: dict[int, list[Assigned]] = {}
        now, self._look_at = time.monotonic(), math.inf
        for state in self._assignment.restless:
            if state.position is None or state.is_paused or state.leader is None or state.is_unchecked:
                continue
            if now < max(state.retry_at, state.due_at):
                self._look_at = min(self._look_at, max(state.retry_at, state.due_at))
                continue
            state.due_at = 0.0
            if state.held_run == state.run:
                continue
            by_node.setdefault(state.node(now), []).append(state)
        for node in [*self._assignment.calm, *(by_node.keys() - self._assignment.calm)]:
            if node not in self._sources:
                self._sources[node] = _Source(node)
            source = self._sources[node]
            if source.handle is not None:
                continue
            states = by_node.get(node, []) + list(self._assignment.calm.get(node, {}).values())
            if states and now >= source.retry_at:
                self._send(source, states)
            elif states:
                self._look_at = min(self._look_at, source.retry_at)

    def _parameters(self, states: Iterable[Assigned]) -> dict[TopicPartition, FetchParameters]:
        """What to fetch of these partitions, as far as they are assigned."""
        there, least = self._assignment.partitions, self._least_bytes
        return {
            state.key: FetchParameters(
                state.fetch_offset, max(state.max_bytes, least), state.leader_epoch, state.topic_id
            )
            for state in states
            if there.get(state.key) is state
        }

    def _send(self, source: _Source, states: list[Assigned]) -> None:
        config, now = self._config, time.monotonic()
        try:
            if source.connection is None or source.connection.closed:
                source.session.restart()
                source.connection = self._cluster.begin_connection(source.node)
            connection = source.connection
            if connection.must_renew:
                if source.chunks or source is self.taken:
                    return  # SASL answers would overwrite the buffer that holds them
                connection.renew()
            source.is_opening = not connection.open_step()
            if source.is_opening or connection.is_throttled:
                until = connection.look_at if source.is_opening else connection.throttled_until
                self._look_at = min(self._look_at, until)
                return
            partitions = self._parameters(states)
            if not partitions:
                return
            if not connection.speaks(FETCH, FETCH_WITH_TOPIC_IDS):
                partitions = without_ids(partitions)
            request = source.session.request(partitions) | {
                "max_wait_ms": config.fetch_max_wait_ms,
                "min_bytes": config.fetch_min_bytes,
                "max_bytes": max(config.client.fetch_max_bytes, *map(attrgetter("max_bytes"), partitions.values())),
                "isolation_level": config.client.isolation_level,
                "rack_id": config.client_rack,
            }
            version = FETCH_WITH_TOPIC_IDS if source.session.has_ids else None
            source.handle = connection.send(FETCH, request, version=version)
            source.until = now + (config.client.request_timeout_ms + config.fetch_max_wait_ms) / 1000
        except KlogError as error:
            self._failed(source, error)

    def _receive(self, source: _Source) -> None:
        connection, handle = source.connection, source.handle
        assert connection is not None
        assert handle is not None
        try:
            if not connection.poll(handle):
                if time.monotonic() < source.until:
                    return
                connection.close()
                raise RequestTimedOut(f"broker {connection.address} did not answer a fetch in time")
            source.handle = None
            requested = source.session.requested
            entries = source.session.accept(connection.receive(handle), f"fetch from broker {source.node}")
        except FrameTooLarge as error:
            first, *others = source.session.requested.items()
            oversized: KlogError = too_large(first[0], first[1].offset, error)
            if others:  # one of these has the record batch
                names = ", ".join(f"{topic}-{partition}" for topic, partition in source.session.requested)
                oversized = FrameTooLarge(error.size, error.limit, f"fetch of {names}")
            self._failed(source, oversized)
            return
        except KlogError as error:
            self._failed(source, error)
            return
        source.attempts, source.retry_at = 0, 0.0
        failures: dict[Assigned, KlogError] = {}
        for key, entry in entries.items():
            state = self._assignment.partitions.get(key)
            if (
                state is None
                or state.is_paused
                or state.position is None
                or state.fetch_offset != requested[key].offset
            ):
                continue  # a seek or pause came meanwhile
            if requested[key].topic_id not in (None, state.topic_id):
                continue  # the topic was created again meanwhile
            if state.is_unchecked or (state.leader is not None and state.leader.epoch != requested[key].leader_epoch):
                continue  # another leader came meanwhile
            try:
                chunk = self._chunk(state, entry, requested[key], is_shared=len(entries) > 1)
            except KlogError as error:
                failures[state] = error
                continue
            if chunk is not None:
                state.fetch_offset = chunk.next_offset
                state.max_bytes = 0
                self._assignment.fetch_last(state)
                source.chunks.append(chunk)
        self._troubles.note_all({state: failure for state, failure in failures.items() if is_retriable(failure)})
        self._troubles.final += [failure for failure in failures.values() if not is_retriable(failure)]
        for state, failure in failures.items():
            self._pause(state, failure)

    def _failed(self, source: _Source, error: KlogError) -> None:
        """Handle a lost answer: restart the session, and retry after a pause."""
        source.handle, source.is_opening = None, False
        requested = list(source.session.requested)
        source.session.restart()
        source.attempts += 1
        if isinstance(error, ProtocolError) and error.code in LOST_SESSION and source.attempts == 1:
            return  # normal if a broker has many clients: send a full request at once
        source.retry_at = time.monotonic() + pause_seconds(self._config.client, source.attempts)
        self._look_at = min(self._look_at, source.retry_at)
        if not is_retriable(error):
            self._troubles.final.append(error)
            return
        is_away = not isinstance(error, ProtocolError)
        if is_away:
            self._cluster.suspect(source.node)
        self._troubles.note(f"broker {source.node}", error)
        for state in self._assignment.of_node(source.node):
            if is_away or state.key in requested:
                self._pause(state, error)

    def _pause(self, state: Assigned, error: KlogError) -> None:
        state.replica = None
        state.failed(error, self._config.client)

    def _chunk(self, state: Assigned, entry: Message, requested: FetchParameters, *, is_shared: bool) -> Fetched | None:
        code = entry["error_code"]
        if code and state.replica is not None:
            # the follower may lag behind or be gone: ask the leader
            _log.info("fetching %s from its leader again: error %d from broker %d", state.name, code, state.replica)
            state.replica = None
            return None
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            state.stir()
            # earlier fetched records may not have been taken yet
            if state.position == state.fetch_offset:
                state.out_of_range = requested.offset
            state.retry_at = time.monotonic() + pause_seconds(self._config.client, 1)
            return None
        if code:
            raise answer_error(FETCH, code, f"fetch of {state.name} at offset {requested.offset}")
        state.succeeded()
        if entry["preferred_read_replica"] >= 0:
            state.stir()
            state.replica = entry["preferred_read_replica"]
            state.replica_until = time.monotonic() + self._config.client.metadata_max_age_ms / 1000
        limits = Limits(requested.max_bytes, self._most_bytes, is_shared)
        chunk = read_entry(state.key, entry, requested.offset, limits)
        if isinstance(chunk, Larger):
            _log.info("%s at offset %d: a batch of %d bytes, fetching again", state.name, requested.offset, chunk.size)
            state.max_bytes = chunk.size
        if not isinstance(chunk, Fetched):
            return None
        if chunk.is_corrupt:
            for damage in chunk.damaged.values():
                raise DecodeError(f"{state.name} at offset {requested.offset}: {damage}")
        chunk.run = state.run
        return chunk

    def take(self) -> Fetched | None:
        """The next fetched records; their buffer is valid until the next call, or until `taken` is reset."""
        self.taken = None
        for node, source in list(self._sources.items()):
            for chunk in list(source.chunks):
                state = self._assignment.partitions.get((chunk.topic, chunk.partition))
                is_current = state is not None and state.run == chunk.run
                if state is not None and is_current and state.position != chunk.offset:
                    continue  # the records before it wait at the former leader
                if state is not None and is_current and time.monotonic() < state.due_at:
                    continue
                source.chunks.remove(chunk)
                if is_current:
                    self._sources[node] = self._sources.pop(node)  # to the end: the others come first next time
                    self.taken = source
                    return chunk
        return None

    def keep(self, state: Assigned, chunk: Fetched, due_at: float = 0.0) -> None:
        """Keep the rest of a chunk, whose next record does not deserialize, or is not due: it is taken again.

        That holds after a `seek`, too. Until its end nothing more of the partition is fetched. Chunks beyond
        fetch.max.bytes in all are not kept, but fetched again.
        """
        if due_at:
            state.stir()
            state.due_at, self._look_at = due_at, min(self._look_at, due_at)
        state.rewind()
        source = self._sources.setdefault(_KEPT, _Source(_KEPT))
        runs = {other.run for other in self._assignment.partitions.values()}
        source.chunks = deque(held for held in source.chunks if held.run in runs)
        if state.position is None or sum(map(len, source.chunks)) + len(chunk) > self._most_bytes:
            return
        data = chunk.data if type(chunk.data.obj) is bytes else memoryview(bytes(chunk.data))
        self._hold(source, state, replace(chunk, data=data))

    def seek(self, state: Assigned, offset: int) -> None:
        """Continue at an offset. In a chunk that is kept nothing is fetched again."""
        source = self._sources.get(_KEPT)
        kept = None
        if source is not None and not state.is_recreated:
            kept = next((held for held in source.chunks if held.run == state.run), None)
        state.seek(offset)
        if source is not None and kept is not None and kept.offset <= offset < kept.next_offset:
            source.chunks.remove(kept)
            self._hold(source, state, kept)

    def _hold(self, source: _Source, state: Assigned, chunk: Fetched) -> None:
        """Let a chunk be the next one of a partition, from its position on."""
        assert state.position is not None
        source.chunks.append(replace(chunk, offset=state.position, run=state.run))
        state.stir()
        state.fetch_offset, state.held_run = chunk.next_offset, state.run

    def awaited(self) -> tuple[float, list[Connection]]:
        """Until when `step` can do nothing, a reading of `time.monotonic`, unless one of the connections is ready."""
        until, connections = self._look_at, list[Connection]()
        for source in self._sources.values():
            if source.connection is not None and (source.handle is not None or source.is_opening):
                connections.append(source.connection)
                if source.handle is not None:
                    until = min(until, source.until)
        return until, connections

    def rewind(self) -> None:
        """Drop all fetched records that were not returned; they are fetched again."""
        self.taken = None
        for source in self._sources.values():
            source.chunks.clear()
        for assigned in self._assignment.partitions.values():
            assigned.rewind()

    def abandon(self) -> None:
        """Like `rewind` after an interrupt: a connection or session may be left in the middle of a request."""
        self.rewind()
        for state in self._assignment.partitions.values():
            state.stir()
        for source in self._sources.values():
            if source.connection is not None:
                source.connection.close()
        self._sources.clear()

    def close(self) -> None:
        self.taken = None
        for source in self._sources.values():
            source.chunks.clear()
            if source.connection is not None and source.handle is not None:
                source.connection.forget(source.handle)
        self._sources.clear()
