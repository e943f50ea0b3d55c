"""Streams of messages: bounded queues between the connector's thread and the threads that iterate.

A message counts as consumed when its stream is asked for the next one, or when the thread that has it commits or shuts
the connector down. So a crash, or another member that takes over, repeats messages rather than losing one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_klog.base.names import TopicPartition
from spark_klog.client.consumer.decoding import ConsumerRecord
from spark_klog.client.producer.receipts import fresh
from spark_klog.errors import ConsumerTimeout, KlogError

if TYPE_CHECKING:
    from spark_klog.classic.member import Member

Decoder = Callable[[bytes], Any]


@dataclass(slots=True, eq=False)
class Held:
    """A partition from when this member takes it over until it releases it.

    `consumed` is the offset after the last consumed message, None if it is not known yet. `committed` is the offset
    that was committed last, `fetched` the next one to fetch.
    """

    key: TopicPartition
    thread: str
    stream: KafkaStream
    member: Member
    consumed: int | None
    committed: int | None
    fetched: int | None
    is_released: bool = False


class _Chunk(NamedTuple):
    held: Held
    records: Sequence[ConsumerRecord]
    end: int


class KafkaStream:
    """Iterate over the messages of the partitions that this stream has; each is a `ConsumerRecord`.

        for message in stream:
            print(message.topic, message.partition, message.offset, message.key, message.value)

    For one thread. The iteration waits for messages: it ends when the connector is shut down, and raises
    `ConsumerTimeout` after consumer.timeout.ms without a message; iterate again to go on. It also raises what the
    decoders raise, and errors of reading that no retry mends, for example `DecodeError` or `AuthenticationError`.
    """

    def __init__(
        self,
        queued_max_chunks: int,
        timeout: float | None,
        decoders: tuple[Decoder | None, Decoder | None],
        check: Callable[[], None],
    ) -> None:
        """`check` raises where the stream may not be used."""
        self._most, self._timeout, self._decoders, self._check = queued_max_chunks, timeout, decoders, check
        #: To enter and leave by itself: an interrupt may keep the lock of a `Condition` that is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._chunks: deque[_Chunk] = deque()
        #: Taken from `_chunks` and not begun; an interrupt leaves it to the next `_take`.
        self._taken: _Chunk | None = None
        self._failure: KlogError | None = None
        self._is_closed = False
        self._held: Held | None = None
        self._rest: Iterator[ConsumerRecord] = iter(())
        self._end = 0
        #: The thread that has the message of `_held`; None between messages.
        self._user: int | None = None
        self._messages = self._run()

    def __iter__(self) -> Iterator[ConsumerRecord]:
        self._check()
        if self._messages.gi_frame is None and not self._is_closed:  # ended by an error
            self._messages = self._run()
        messages: Iterator[ConsumerRecord] = self._messages
        return messages

    def __next__(self) -> ConsumerRecord:
        return next(self.__iter__())

    def _run(self) -> Any:
        key_decoder, value_decoder = self._decoders
        has_decoders = self._decoders != (None, None)
        while True:
            if (held := self._held) is not None:
                for record in self._rest:
                    if held.is_released:
                        break
                    held.consumed = record.offset
                    if has_decoders:
                        try:
                            decoded = _decoded(record, key_decoder, value_decoder)
                        except Exception:
                            raise  # the next message follows
                        except BaseException:  # an interrupt: this one is the next message
                            self._rest = chain((record,), self._rest)
                            raise
                        yield decoded
                    else:
                        yield record
                if not held.is_released:
                    held.consumed = self._end
                self._held, self._user = None, None
            chunk = self._take()
            if chunk is None:
                return
            self._rest, self._end, self._user = iter(chunk.records), chunk.end, threading.get_ident()
            self._held, self._taken = chunk.held, None

    def _take(self) -> _Chunk | None:
        """Wait for the next chunk; None if the connector is shut down."""
        self._check()  # before the lock, which a thread of the parent may have held
        until = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            with self._lock:
                while self._taken is None and not self._chunks and self._failure is None and not self._is_closed:
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise ConsumerTimeout(f"no message for {self._timeout:g} s (consumer.timeout.ms)")
                    self._changed.wait(left)
                if self._is_closed:
                    return None
                if self._taken is None:
                    if not self._chunks:
                        assert self._failure is not None
                        raise fresh(self._failure)
                    self._taken = self._chunks[0]
                    del self._chunks[0]  # nothing is called since: it is in one of the two
            held = self._taken.held
            held.member.has_room()
            if held.member.may_give_out(held, self._taken.end):
                return self._taken
            self._taken = None

    def consumed(self, held: Held, *, counts_own: bool) -> int | None:
        """The offset up to which `held` is consumed; `counts_own`: with the message that the calling thread has."""
        offset = held.consumed
        if counts_own and offset is not None and self._held is held and self._user == threading.get_ident():
            return offset + 1
        return offset

    @property
    def is_full(self) -> bool:
        return len(self._chunks) >= self._most

    def put(self, held: Held, records: Sequence[ConsumerRecord], end: int) -> None:
        """Add messages of one fetch; `end` is the offset after them."""
        with self._lock:
            self._chunks.append(_Chunk(held, records, end))
            self._changed.notify()

    def drop_released(self) -> None:
        with self._lock:
            self._chunks = deque(chunk for chunk in self._chunks if not chunk.held.is_released)

    def fail(self, error: KlogError) -> None:
        """Raise an error after the messages that are in the queue."""
        with self._lock:
            self._failure = error
            self._changed.notify()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._changed.notify()


def _decoded(record: ConsumerRecord, key: Decoder | None, value: Decoder | None) -> ConsumerRecord:
    changed: dict[str, Any] = {}
    if key is not None and record.key is not None:
        changed["key"] = key(record.key)
    if value is not None and record.value is not None:
        changed["value"] = value(record.value)
    return record._replace(**changed)
