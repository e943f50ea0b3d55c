"""Sends events in a thread of its own: whoever has an event never waits for OpenLineage's server, nor fails with it.

The queue has a bound. If the server is slow or down, the oldest RUNNING events are dropped first: those of a run's
start and end tell more. The first event that is lost causes one warning; `dropped` and `failed` count them. From then
on the warnings of the transport's own loggers about events of that thread are not shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import RunEvent, RunState
from openlineage.client.transport import CompositeTransport, KafkaTransport, TransformTransport, Transport

from spark_klog.base.addresses import without_user
from spark_klog.base.in_a_thread import within
from spark_klog.lineage.client import is_disabled, open_client

_log = logging.getLogger(__name__)
#: Events that wait to be sent.
_MOST_EVENTS = 1000
#: Loggers that warn of each event that is lost: those below these names.
_LIBRARIES = ("openlineage", "urllib3")


class Emitter:
    """Events on their way to OpenLineage, in order, each sent once. Thread-safe.

    Without a `client` it makes one by `conf`, the settings of a Spark session, and by those of the environment: see
    `open_client`, which also says what it raises. With OPENLINEAGE_DISABLED=true, or spark.openlineage.disabled=true,
    nothing is sent.
    """

    def __init__(
        self,
        client: OpenLineageClient | None = None,
        bound: int = _MOST_EVENTS,
        conf: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._is_own_client = client is None
        self._client = client if client is not None else open_client(conf)
        self.is_disabled = is_disabled(conf) or self._client.transport.kind == "noop"
        self._bound = bound
        self._changed = threading.Condition()
        self._queue: deque[RunEvent] = deque()
        self._thread: threading.Thread | None = None
        self._is_sending = self._is_closed = self._has_warned = False
        self._current = _Sending()
        #: Events that the transport has taken. `async_http`, and `kafka` with `flush: false`, only queue them.
        self.sent = 0
        #: Events that found no place in the queue, or no time at the end.
        self.dropped = 0
        #: Events that the transport has refused, after its own retries, or that Kafka did not acknowledge.
        self.failed = 0
        for transport in _transports(self._client.transport):
            if isinstance(transport, KafkaTransport) and transport.producer is not None:
                transport.producer = cast(Any, _Producer(transport.producer, self))

    def emit(self, event: RunEvent) -> None:
        """Queue an event; returns at once."""
        if self.is_disabled:
            return
        with self._changed:
            if self._is_closed or (len(self._queue) >= self._bound and not self._has_dropped_running()):
                self._drop(1, "the queue is full: the server is slow or down")
                return
            self._queue.append(event)
            if self._thread is None:
                thread = threading.Thread(target=self._send_all, name="klog-lineage", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends
                    self._queue.clear()
                    self._drop(1, "the program ends")
                    return
                self._thread = thread
            self._changed.notify_all()

    def _has_dropped_running(self) -> bool:
        for place, event in enumerate(self._queue):
            if event.eventType == RunState.RUNNING:
                del self._queue[place]
                self._drop(1, "the queue is full: the server is slow or down")
                return True
        return False

    def _drop(self, count: int, reason: str) -> None:
        self.dropped += count
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "OpenLineage events are lost by the transport %s (%s); jobs go on, and further losses are only counted",
                *(self._client.transport.kind, reason),
            )
            _hush()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._changed.wait()
                event = self._queue.popleft()
                self._is_sending = True
                sending = self._current = _Sending()
                _in_thread.is_quiet = self._has_warned
            failure = ""
            try:
                self._client.emit(event)
            except Exception as error:  # of any library; its text may show an address with a password
                failure = _why(error)
            with self._changed:
                self._is_sending = False
                if failure:
                    self._lose(sending, failure)
                elif not sending.is_lost:
                    sending.is_counted = True
                    self.sent += 1
                self._changed.notify_all()

    def of_thread(self) -> _Sending | None:
        """The event that the calling thread sends; None if this is not the emitter's thread."""
        return self._current if threading.current_thread() is self._thread else None

    def not_delivered(self, sending: _Sending, reason: str) -> None:
        """Kafka has not acknowledged an event that its producer had taken."""
        with self._changed:
            self._lose(sending, reason)

    def _lose(self, sending: _Sending, reason: str) -> None:
        if not sending.is_lost:
            sending.is_lost = True
            self.failed += 1
            self.sent -= sending.is_counted
        self._warn(reason)

    def flush(self, seconds: float) -> bool:
        """Wait until all queued events are sent or refused; False if `seconds` are over before."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._queue or self._is_sending:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, seconds: float) -> bool:
        """Flush, and end. Events that are left are dropped; False if there are any. May be called twice."""
        deadline = time.monotonic() + seconds
        is_done = self.flush(seconds)
        with self._changed:
            if self._is_closed:
                return is_done
            self._is_closed = True
            if self._queue:
                left = len(self._queue)
                self._queue.clear()
                self._drop(left, "the server did not take them in time")
            self._changed.notify_all()
        if self._is_own_client and is_done:
            try:  # a transport may have a queue of its own
                is_done = within(deadline, lambda: self._client.close(max(0.0, deadline - time.monotonic())), "lineage")
            except Exception:
                is_done = False
            if not is_done:
                self._warn("it had not sent all at its end")
        if self.dropped or self.failed:
            _log.warning("%d OpenLineage events sent, %d dropped, %d refused", self.sent, self.dropped, self.failed)
        return is_done


@dataclass
class _Sending:
    """An event that the transport has got."""

    is_counted: bool = False
    is_lost: bool = False


class _Producer:
    """The producer of OpenLineage's transport for Kafka, whose own callback only logs what is not delivered."""

    def __init__(self, producer: Any, emitter: Emitter) -> None:
        self._producer, self._emitter = producer, emitter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def produce(self, *arguments: Any, on_delivery: Any = None, **options: Any) -> None:
        emitter, sending = self._emitter, self._emitter.of_thread()

        def delivered(error: Any, message: Any) -> None:
            if error is not None and sending is not None:
                emitter.not_delivered(sending, error.name())
            if on_delivery is not None:
                on_delivery(error, message)

        self._producer.produce(*arguments, on_delivery=delivered, **options)


def _transports(transport: Transport) -> Iterator[Transport]:
    """The transport and those that it sends by."""
    yield transport
    if isinstance(transport, CompositeTransport):
        for inner in transport.transports:
            yield from _transports(inner)
    elif isinstance(transport, TransformTransport):
        yield from _transports(transport.transport)


def _why(error: BaseException) -> str:
    """What an error says, without its text, which may have secrets: its class, the status of HTTP, a file's name."""
    cause: BaseException | None = error
    while cause is not None:
        name, response = type(cause).__name__, getattr(cause, "response", None)
        if response is not None:
            return f"{name}: status {response.status_code}"
        if isinstance(cause, OSError) and cause.strerror and isinstance(cause.filename, str):
            return f"{name}: {cause.strerror}: {without_user(cause.filename)}"
        cause = cause.__cause__
    return type(error).__name__


_in_thread = threading.local()


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING or not getattr(_in_thread, "is_quiet", False)


def _hush() -> None:
    """Let the loggers of the transport's libraries show no more warnings of threads that have lost an event."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).addFilter(_is_shown)  # the same one twice is one
