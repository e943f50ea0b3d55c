"""The topic that a registry keeps its state in: read to its end, followed, and written.

A thread reads the topic. `append` returns once the thread has read back what was written, so that the state never says
more than the log, and a reader sees its own writes. If the topic is another one, since it was deleted or its offsets
went back, the state begins again with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, TimeoutError as FutureTimeout
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from uuid import UUID

from spark_klog.errors import (
    ConfigError,
    DeliveryPending,
    ErrorCode,
    KlogError,
    LogTruncated,
    OffsetOutOfRange,
    ProtocolError,
    RecordTooLargeToSend,
    TopicRecreated,
    WokenUp,
    is_retriable,
)
from spark_klog.registry.errors import bare, schema_too_large, store_failed, timed_out
from spark_klog.registry.records import NOOP, RESTORED, Key, Record, dumps
from spark_klog.registry.state import State
from spark_klog.wire.http import Workers

if TYPE_CHECKING:
    from spark_klog.client import Admin, Consumer, Producer

_log = logging.getLogger(__name__)
TOPIC: Final = "_schemas"
#: Seconds until a write is read back.
WRITE_SECONDS: Final = 30.0
#: Seconds that a start may take to read the topic.
START_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 1.0
_BACK_OFF_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 10.0
_ABANDON_SECONDS: Final = 1.0
_MOST_WRITES: Final = 100
#: Seconds between two looks whether the topic is still the same.
_CHECK_SECONDS: Final = 2.0
#: Seconds between looks that somebody waits for, for their answers, and of who reads while the topic is read again.
_SOON_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 5.0
#: Seconds for which what brokers said of the topic is taken for true.
_FRESH_SECONDS: Final = 0.05
_BEHIND_SECONDS: Final = 2.0
#: The offset of a consumer's `assign` that means the first record.
_FIRST: Final = -2


class SchemaLog:
    """The topic, and the `State` that its records make.

    `admin` and `consumer` (with auto.offset.reset=none) are the log's own from now on: `close` closes them.
    `make_producer` is called for the first write and after a failed one. Hold `lock` to use `state`, which is another
    object after the topic was replaced.
    """

    def __init__(
        self, admin: Admin, consumer: Consumer, make_producer: Callable[[], Producer], topic: str = TOPIC
    ) -> None:
        """`ConfigError` if the topic is there and is not compacted, or has several partitions; `KlogError`."""
        self.topic = topic
        self.state = State()
        self.lock = threading.Condition(threading.RLock())
        self._admin, self._consumer, self._make_producer = admin, consumer, make_producer
        self._producer: Producer | None = None
        #: One thread, so that records are in the log in the order in which they were decided. Not the caller's: a call
        #: of the producer may take longer than the caller has.
        self._writer = Workers("klog-schemas-write", 1, _MOST_WRITES)
        #: The offset after the last record in `state`.
        self._position = 0
        self._failure: KlogError | None = None
        #: Why the topic is no longer read; nothing that is written is read back then.
        self._end: BaseException | None = None
        self._is_closing = False
        #: Whether `state` has begun again, and lacks records that were in the topic then.
        self._is_behind = False
        self._checked_at = time.monotonic()
        _create_topic(admin, topic)
        #: None of brokers before 2.8.
        self._topic_id: UUID | None = admin.describe_topic(topic).topic_id
        self.cluster_id = admin.describe_cluster().cluster_id
        self._thread = threading.Thread(target=self._follow, name="klog-schemas", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self._read()
        except BaseException as error:
            _log.exception("the schemas' topic %s is no longer read: changes are refused until a restart", self.topic)
            with self.lock:
                self._end = error
                self.lock.notify_all()

    def _read(self) -> None:
        state: State | None = None
        end: int | None = None
        check_at = time.monotonic() + _CHECK_SECONDS
        while not self._is_closing:
            try:
                if state is not self.state:
                    state, end = self.state, None
                    self._consumer.assign([(self.topic, 0, _FIRST)])
                records = self._consumer.poll(_SOON_SECONDS if self._is_behind else _POLL_SECONDS)
                position = self._consumer.position(self.topic, 0)
                if not records and time.monotonic() >= check_at:
                    self._check_topic()
                    check_at = time.monotonic() + _CHECK_SECONDS
                if self._is_behind and end is None and state is self.state:
                    partition = (self.topic, 0)
                    end = self._admin.list_offsets({partition: "latest"}).check()[partition].offset
            except (TopicRecreated, OffsetOutOfRange, LogTruncated) as error:
                self._begin_again(state, str(error))
                continue
            except WokenUp:
                continue
            except KlogError as error:
                if self._is_closing:
                    return
                _log.warning("reading the schemas' topic %s: %s", self.topic, error)
                with self.lock:
                    self._failure = error
                    self.lock.notify_all()
                time.sleep(_BACK_OFF_SECONDS)
                continue
            for record in records:
                is_restored = any(name == RESTORED for name, _ in record.headers)
                with self.lock:  # not for all of them: others read
                    if state is self.state:
                        state.apply(record.key, record.value, record.timestamp, is_restored=is_restored)
            with self.lock:
                if state is self.state:
                    self._failure = None
                    self._position = position
                    self._is_behind = self._is_behind and (end is None or position < end)
                    self.lock.notify_all()

    def _check_topic(self) -> None:
        """Begin again if the topic is another one; create it if it is gone. `KlogError`, `ConfigError` of a new one."""
        state = self.state
        for is_last in (False, True):  # a broker that has just begun may not know it yet
            try:
                topic_id, is_gone = self._admin.describe_topic(self.topic).topic_id, False
                break
            except ProtocolError as error:
                if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
                topic_id, is_gone = None, True
                if not is_last:
                    time.sleep(_SOON_SECONDS)
        self._checked_at = time.monotonic()
        if is_gone or topic_id != self._topic_id:
            self._begin_again(state, f"topic {self.topic} was deleted")
            _create_topic(self._admin, self.topic)
            self._topic_id = self._admin.describe_topic(self.topic).topic_id

    def _begin_again(self, state: State | None, why: str) -> None:
        """Forget a state, unless that has happened already."""
        with self.lock:
            if self.state is state:
                _log.warning("%s: the registry reads it from its first record on, and forgets what it had", why)
                self.state, self._position, self._is_behind = State(), 0, True
                self.lock.notify_all()
        self._consumer.wakeup()

    def check_topic(self) -> None:
        """Begin again if the topic is another one than a moment ago, as far as brokers say so soon."""
        if time.monotonic() < self._checked_at + _FRESH_SECONDS:
            return
        with suppress(KlogError, CancelledError, queue.Full):
            with self.lock:
                checking = self._writer.submit(self._check_topic)
            try:
                checking.result(_ANSWER_SECONDS)
            except FutureTimeout:  # brokers are away: others need not wait for them, too
                checking.cancel()
                self._checked_at = time.monotonic() + _ANSWER_SECONDS

    def wait_until_read(self) -> None:
        """Return when `state` has what was in the topic as it began again; `RegistryRefusal` if that takes long."""
        with self.lock:
            if not self.lock.wait_for(lambda: not self._is_behind or self._is_closing, _BEHIND_SECONDS):
                raise bare(HTTPStatus.SERVICE_UNAVAILABLE, f"topic {self.topic} is being read again: try again later")

    def catch_up(self, deadline: float) -> None:
        """Return when the state has all that was in the log at the call.

        `RegistryRefusal` if it has not by `deadline`, a time of `time.monotonic`.
        """
        state = None
        while state is not self.state:
            state = self.state
            self._append([Record(Key(NOOP), None)], deadline, checks_topic=True)

    def append(self, records: Sequence[Record], deadline: float) -> None:
        """Write records, in order, and return when `state` has them.

        `RegistryRefusal` if that fails. They may be in the log nevertheless, and then are read later.
        """
        state = self.state
        self._append(records, deadline)
        if state is not self.state:
            raise timed_out(f"topic {self.topic} was replaced meanwhile: try again")

    def _append(self, records: Sequence[Record], deadline: float, *, checks_topic: bool = False) -> None:
        self._check_end()
        with self.lock:
            writing = self._writer.submit(self._write, records, deadline, checks_topic)
        try:
            last = writing.result(max(0.0, deadline - time.monotonic()))
        except CancelledError:
            raise timed_out("the registry is closing") from None
        except FutureTimeout:
            writing.cancel()
            raise timed_out(f"topic {self.topic} was not written to: not in time") from None
        with self.lock:
            while self._position <= last:
                self._check_end()
                left = deadline - time.monotonic()
                if self._is_closing or left <= 0:
                    why = "the registry is closing" if self._is_closing else self._failure or "not in time"
                    raise timed_out(f"topic {self.topic} was written to, but not read back: {why}")
                self.lock.wait(left)

    def _check_end(self) -> None:
        with self.lock:
            if self._end is not None:
                raise store_failed(
                    f"topic {self.topic} is no longer read, after {self._end!r}: see the log, and restart the registry"
                )

    def _write(self, records: Sequence[Record], deadline: float, checks_topic: bool) -> int:
        """Write records; the offset of the last one."""
        if time.monotonic() >= deadline or self._is_closing:
            raise timed_out(f"topic {self.topic} was not written to: not in time")
        try:
            if checks_topic:  # a write to a topic that is gone would create another one, as brokers do by default
                self._check_topic()
        except KlogError as error:
            raise timed_out(f"topic {self.topic} was not written to: {error}") from error
        with self.lock:
            spelled = [
                (
                    self.state.spelled(record.key),
                    None if record.value is None else dumps(record.value),
                    ((RESTORED, b""),) if record.is_restored else (),
                )
                for record in records
            ]
        try:
            if self._producer is None:
                self._producer = self._make_producer()
            producer = self._producer
            sent = [
                producer.send(self.topic, value, key, partition=0, headers=headers) for key, value, headers in spelled
            ]
            return max(delivery.result(max(0.0, deadline - time.monotonic())).offset for delivery in sent)
        except RecordTooLargeToSend as error:
            raise schema_too_large(str(error)) from error
        except KlogError as error:
            self._abandon_producer()
            if isinstance(error, ProtocolError) and error.code == ErrorCode.MESSAGE_TOO_LARGE:
                raise schema_too_large(str(error)) from error
            refusal = timed_out if is_retriable(error) or isinstance(error, DeliveryPending) else store_failed
            raise refusal(f"writing to topic {self.topic}: {error}") from error

    def _abandon_producer(self) -> None:
        """After a failed write, whose records may be in the log or not, a producer writes no more."""
        producer, self._producer = self._producer, None
        if producer is not None:
            _end(producer.abort)

    def close(self) -> None:
        """Stop following the topic. May be called twice, from any thread but the log's."""
        with self.lock:
            self._is_closing = True
            self.lock.notify_all()
        self._consumer.wakeup()
        self._thread.join(_CLOSE_SECONDS)
        self._consumer.close()
        _end(self._admin.close)
        self._writer.close()
        self._abandon_producer()  # which ends a write that waits for brokers


def _end(call: Callable[[], object]) -> None:
    """End a client. Without brokers it takes as long as a request may: nobody waits for that."""
    ending = threading.Thread(target=call, name="klog-schemas-end", daemon=True)
    ending.start()
    ending.join(_ABANDON_SECONDS)


def _create_topic(admin: Admin, topic: str) -> None:
    """Create the topic, or check the one that is there."""
    from spark_klog.client.admin.admin import create_compacted, settings_of_compacted

    if create_compacted(admin, topic, lambda _: {}):
        return
    count = len(admin.describe_topic(topic).partitions)
    if count != 1:
        raise ConfigError(f"topic {topic} has {count} partitions: a registry's topic must have one")
    settings_of_compacted(admin, topic, "schemas")
