"""Fetches that the broker remembers: those that wait for records, and incremental fetch sessions (KIP-227).

A client of a session names its partitions once, and later only changes:

    session id  epoch   meaning
    0           -1      a full fetch without a session
    0           0       a new session
    N           0       a new session that replaces N
    N           -1      the end of N, with a full fetch
    N           E > 0   request number E of N: adds or changes the partitions named, removes the forgotten ones

An incremental response contains partitions with records, an error, or a high watermark or log start that differs from
the last one sent. Partitions that had records move to the end, so that none is starved. A client that gets no session
goes on with full fetches. Sessions do no I/O: callers pass the
clock.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import INT32_MAX
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import FINAL_EPOCH, INITIAL_EPOCH

#: Memory of a partition beside its topic's name: an upper estimate.
_PARTITION_BYTES = 600
#: Fetches that are answered in one round of the loop: some 5 ms.
_WOKEN_AT_ONCE = 32


class Purgatory:
    """Waiters by topic-partition. For one event loop."""

    def __init__(self) -> None:
        #: The futures of waiters: whether they were woken before their time was over.
        self._waiting: dict[TopicPartition, set[asyncio.Future[bool]]] = defaultdict(set)
        #: Number of waiters.
        self.waiting = 0
        #: Futures to be woken in the next rounds of the loop.
        self._woken: deque[asyncio.Future[bool]] = deque()
        self._is_waking = False
        #: Set when the broker stops: nobody may wait any more.
        self.is_closed = False

    def close(self) -> None:
        """Wake all waiters, and let nobody wait from now on."""
        self.is_closed = True
        for key in list(self._waiting):
            self.wake(key)

    def wake(self, key: TopicPartition) -> None:
        """Wake the waiters of a partition, after an append or because it is gone."""
        waiters = self._waiting.pop(key, None)
        if not waiters:
            return
        self._woken += waiters
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        """Wake the next ones in each round of the loop, which answers other requests between."""
        woken = 0
        while self._woken and woken < _WOKEN_AT_ONCE:
            waiter = self._woken.popleft()
            if not waiter.done():  # as one of several partitions may be
                waiter.set_result(True)
                woken += 1
        self._is_waking = bool(self._woken)
        if self._is_waking:
            asyncio.get_running_loop().call_soon(self._wake_some)

    async def wait(self, keys: Collection[TopicPartition], timeout: float) -> bool:
        """Wait until one of the partitions is woken; False after `timeout` seconds, or if the purgatory is closed."""
        if self.is_closed:
            return False
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout, _time_out, waiter)  # asyncio.wait would cost more than the rest
        for key in keys:
            self._waiting[key].add(waiter)
        self.waiting += 1
        try:
            return await waiter
        finally:
            timer.cancel()
            self.waiting -= 1
            for key in keys:
                waiters = self._waiting.get(key)
                if waiters is not None:
                    waiters.discard(waiter)
                    if not waiters:
                        del self._waiting[key]


class PartitionKey(NamedTuple):
    """A partition as the request names it: its topic by name, from version 13 by id."""

    topic: str
    topic_id: UUID
    partition: int


class _Cached:
    """A partition of a session: the request's entry, and the offsets sent last."""

    __slots__ = ("entry", "sent")

    def __init__(self, entry: dict[str, Any]) -> None:
        self.entry = entry
        self.sent: tuple[int, int] | None = None


def _time_out(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class FetchSession:
    """The partitions that a client has named, in the order in which they are read."""

    def __init__(
        self, session_id: int, partitions: Iterable[tuple[PartitionKey, dict[str, Any]]], now: float, has_ids: bool
    ) -> None:
        self.id = session_id
        self.has_ids = has_ids
        self.next_epoch = 1
        self.used_at = now
        self._partitions: OrderedDict[PartitionKey, _Cached] = OrderedDict()
        #: Memory in bytes, about.
        self.size = 0
        self.update(partitions, ())

    @property
    def partitions(self) -> list[tuple[PartitionKey, dict[str, Any]]]:
        """All partitions with their request entries."""
        return [(key, cached.entry) for key, cached in self._partitions.items()]

    def update(
        self, requested: Iterable[tuple[PartitionKey, dict[str, Any]]], forgotten: Iterable[PartitionKey]
    ) -> None:
        """Apply an incremental request."""
        for key in forgotten:
            if self._partitions.pop(key, None) is not None:
                self.size -= _size(key)
        for key, entry in requested:
            cached = self._partitions.get(key)
            if cached is None:
                self._partitions[key] = _Cached(entry)
                self.size += _size(key)
            else:
                cached.entry = entry

    def note(self, key: PartitionKey, answer: Message) -> bool:
        """Whether the response must include this partition; if so, remember what is sent."""
        cached = self._partitions[key]
        sent = answer["high_watermark"], answer.get("log_start_offset", -1)
        failed, has_records = answer["error_code"] != ErrorCode.NONE, len(answer["records"]) > 0
        is_new = failed or has_records or sent != cached.sent
        cached.sent = None if failed else sent
        if has_records:
            self._partitions.move_to_end(key)
        return is_new


def _size(key: PartitionKey) -> int:
    return _PARTITION_BYTES + len(key.topic)


class FetchSessions:
    """The sessions of a broker, at most `slots` of at most `max_bytes` together.

    A session unused for `evict_after` s may be replaced by a new one.
    """

    def __init__(self, slots: int, evict_after: float, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._slots = slots
        self._evict_after = evict_after
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def find(
        self,
        session_id: int,
        epoch: int,
        requested: list[tuple[PartitionKey, dict[str, Any]]],
        forgotten: list[PartitionKey],
        now: float,
        *,
        has_ids: bool = False,
    ) -> tuple[FetchSession | None, bool] | ErrorCode:
        """(session, whether the request is incremental); None if the client wants no session or gets none.

        `has_ids`: the request names topics by id. Errors, after which the client starts a new session:
        FETCH_SESSION_ID_NOT_FOUND, also if the session grows beyond the limit of bytes, INVALID_FETCH_SESSION_EPOCH,
        and FETCH_SESSION_TOPIC_ID_ERROR if the session's topics are named by name and the request's by id, or the
        reverse.
        """
        if epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            self._drop(session_id)
            return (self._make(requested, now, has_ids) if epoch == INITIAL_EPOCH else None), False
        session = self._sessions.get(session_id)
        if session is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if epoch != session.next_epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if has_ids != session.has_ids:
            return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
        session.next_epoch = epoch + 1 if epoch < INT32_MAX else 1
        session.used_at = now
        self._sessions.move_to_end(session_id)
        before = session.size
        session.update(requested, forgotten)
        self._bytes += session.size - before
        if session.size > before and self._bytes > self._max_bytes:
            self._drop(session_id)
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        return session, True

    def _make(
        self, requested: list[tuple[PartitionKey, dict[str, Any]]], now: float, has_ids: bool
    ) -> FetchSession | None:
        session = FetchSession(0, requested, now, has_ids)
        while len(self._sessions) >= self._slots or self._bytes + session.size > self._max_bytes:
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or now - oldest.used_at < self._evict_after:
                return None
            self._drop(oldest.id)
        session_id = random.randint(1, INT32_MAX)
        while session_id in self._sessions:
            session_id = random.randint(1, INT32_MAX)
        session.id = session_id
        self._sessions[session_id] = session
        self._bytes += session.size
        return session

    def _drop(self, session_id: int) -> None:
        if (session := self._sessions.pop(session_id, None)) is not None:
            self._bytes -= session.size
