"""Sends events in a thread of its own: whoever has an event never waits for OpenLineage's server, nor fails with it.

The queue has a bound. If the server is slow or down, the oldest RUNNING events are dropped first: those of a run's
start and end tell more. The first event that is lost causes one warning; `dropped` and `failed` count them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import RunEvent, RunState

from spark_klog.base.in_a_thread import within
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)
#: Events that wait to be sent.
_MOST_EVENTS = 1000


class Emitter:
    """Events on their way to OpenLineage, in order, each sent once. Thread-safe.

    Without a `client` it makes one, which finds its settings as in all programs that use OpenLineage's Python client:
    OPENLINEAGE_URL, OPENLINEAGE_CONFIG, openlineage.yml, OPENLINEAGE__TRANSPORT__TYPE and others; with
    OPENLINEAGE_DISABLED=true nothing is sent. `ConfigError` if they are wrong.
    """

    def __init__(self, client: OpenLineageClient | None = None, bound: int = _MOST_EVENTS) -> None:
        self._is_own_client = client is None
        try:
            self._client = client if client is not None else OpenLineageClient()
        except Exception as error:  # of many kinds; its text may show settings
            raise ConfigError(
                f"OpenLineage's client refuses its settings ({type(error).__name__}): check OPENLINEAGE_URL, "
                "openlineage.yml and the variables that begin with OPENLINEAGE__"
            ) from None
        self.is_disabled = self._client.transport.kind == "noop"
        self._bound = bound
        self._changed = threading.Condition()
        self._queue: deque[RunEvent] = deque()
        self._thread: threading.Thread | None = None
        self._is_sending = self._is_closed = self._has_warned = False
        #: Events that the transport has taken.
        self.sent = 0
        #: Events that found no place in the queue, or no time at the end.
        self.dropped = 0
        #: Events that the transport has refused, after its own retries.
        self.failed = 0

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

    def _send_all(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._changed.wait()
                event = self._queue.popleft()
                self._is_sending = True
            failure = ""
            try:
                self._client.emit(event)
            except Exception as error:  # of any library; its text may show an address with a password
                failure = type(error).__name__
            with self._changed:
                self._is_sending = False
                if failure:
                    self.failed += 1
                    self._warn(failure)
                else:
                    self.sent += 1
                self._changed.notify_all()

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
        if self.dropped or self.failed:
            _log.warning("%d OpenLineage events sent, %d dropped, %d refused", self.sent, self.dropped, self.failed)
        return is_done
