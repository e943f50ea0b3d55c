"""The queue of an asynchronous classic producer, and the thread that sends batches from it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from spark_klog.classic.producing.messages import CallbackHandler, KeyedMessage
from spark_klog.classic.producing.settings import ProducerConfig
from spark_klog.errors import ProducerClosed, QueueFull

_log = logging.getLogger(__name__)
#: Seconds.
_LONGEST_WAIT = 1.0


class ProducerQueue:
    """A queue of at most queue.size messages; `handle` gets batch.size of them, or fewer after queue.time."""

    def __init__(
        self, config: ProducerConfig, callbacks: CallbackHandler, handle: Callable[[Sequence[KeyedMessage]], None]
    ) -> None:
        self._config, self._callbacks, self._handle = config, callbacks, handle
        #: To enter and leave by itself: an interrupt may keep the lock of a `Condition` that is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._messages: deque[KeyedMessage] = deque()
        #: When the batch is sent even if it is not full, a reading of `time.monotonic`.
        self._due = 0.0
        self._is_closed = False
        self.dropped = self.failed = 0
        self._thread = threading.Thread(target=self._run, name="klog-classic-producer", daemon=True)
        self._thread.start()

    def add(self, messages: Sequence[KeyedMessage]) -> None:
        """Add messages; `QueueFull` for the first one that does not fit in time."""
        for number, message in enumerate(messages):
            changed = self._callbacks.before_enqueue(message)
            added = self._add(changed)
            self._callbacks.after_enqueue(changed, added)
            if not added:
                rest = len(messages) - number
                with self._lock:
                    self.dropped += rest
                raise QueueFull(
                    f"{rest} messages for {message.topic} are dropped ({self.dropped} so far): "
                    f"{self._config.queue_size} wait (queue.size), and none left the queue within "
                    f"{self._config.enqueue_timeout_ms} ms (queue.enqueueTimeout.ms)"
                )

    def _add(self, message: KeyedMessage) -> bool:
        config = self._config
        with self._lock:
            seconds = None if config.enqueue_timeout_ms < 0 else config.enqueue_timeout_ms / 1000
            self._changed.wait_for(lambda: self._is_closed or len(self._messages) < config.queue_size, seconds)
            if self._is_closed:
                raise ProducerClosed("send: the producer is closed")
            if len(self._messages) >= config.queue_size:
                return False
            if not self._messages:
                self._due = time.monotonic() + config.queue_ms / 1000
            self._messages.append(message)
            if len(self._messages) in (1, config.batch_size):
                self._changed.notify_all()
            return True

    def _next(self) -> list[KeyedMessage] | None:
        """Wait for a batch; None if the queue is closed and empty."""
        size = self._config.batch_size
        with self._lock:
            while not self._is_closed and len(self._messages) < size:
                # an interrupt may end `_add` before it has notified
                left = self._due - time.monotonic() if self._messages else _LONGEST_WAIT
                if left <= 0:
                    break
                self._changed.wait(left)
            if not self._messages:
                return None
            batch = [self._messages.popleft() for _ in range(min(size, len(self._messages)))]
            self._changed.notify_all()
            return batch

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._send(batch)
        try:
            last = self._callbacks.last_batch_before_close()
        except Exception:
            _log.exception("last_batch_before_close failed")
        else:
            if last:
                self._send(last)

    def _send(self, batch: Sequence[KeyedMessage]) -> None:
        try:
            batch = self._callbacks.after_dequeuing_existing_data(batch)
            self._handle(self._callbacks.before_sending_data(batch))
        except Exception as error:
            self.failed += len(batch)
            _log.error("%d messages are not sent (%d so far): %s", len(batch), self.failed, error)

    def close(self) -> None:
        """Send what is in the queue; returns when that is done, at most after the timeouts of its requests."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
