"""Whether the cluster answers: a small request again and again, beside the page's own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from spark_klog.client import Admin
from spark_klog.errors import ConnectionFailed, KlogError, ProtocolError

_log = logging.getLogger(__name__)
_THREAD = "klog-ui-outage"
#: Deadline of a request, and the pause before the next one: an outage is known after their sum.
_TIMEOUT_SECONDS, _PAUSE_SECONDS = 2.0, 0.5
#: An outage that lasts so long is logged, and views do not try any more: one request may be slow.
_LASTING_SECONDS = 15.0
_TIMEOUTS = (
    "default.api.timeout.ms",
    "request.timeout.ms",
    "socket.connection.setup.timeout.ms",
)
#: Says "still trying"; of each request here that would be a line every three seconds.
_BACKOFF = logging.getLogger("spark_klog.client.backoff")


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.threadName != _THREAD


class OutageWatch:
    """A daemon thread that asks for the cluster's brokers; a context manager."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        limit = str(round(1000 * _TIMEOUT_SECONDS))
        self._settings = {**settings, **dict.fromkeys(_TIMEOUTS, limit)}
        self._servers = settings["bootstrap.servers"]
        self._is_ended = threading.Event()
        self._outage: dict[str, Any] | None = None
        self._began = 0.0
        self._is_logged = False

    def outage(self) -> dict[str, Any] | None:
        """{"since": ms, "servers", "error"} of the outage that lasts; None if the last request was answered."""
        return self._outage

    def check(self) -> None:
        """Raise `ConnectionFailed` if an outage lasts: requests that wait for brokers would wait one after another."""
        outage = self._outage
        if outage is not None and self._lasts():
            raise ConnectionFailed(f"the brokers at {self._servers} do not answer: {outage['error']}")

    def _lasts(self) -> bool:
        return time.monotonic() - self._began > _LASTING_SECONDS

    def _work(self) -> None:
        with ExitStack() as stack:
            admin: Admin | None = None
            while not self._is_ended.is_set():
                began, now = time.monotonic(), time.time()
                try:
                    if admin is None:
                        admin = stack.enter_context(Admin(self._settings))
                    admin.describe_cluster()
                except ProtocolError:
                    self._end_outage()  # a refusal is an answer
                except (KlogError, OSError) as error:
                    self._note(error, began, now)
                else:
                    self._end_outage()
                self._is_ended.wait(_PAUSE_SECONDS)

    def _note(self, error: Exception, began: float, now: float) -> None:
        since = round(1000 * now)
        if self._outage is None:
            self._began = began
        else:
            since = self._outage["since"]
        self._outage = {"since": since, "servers": self._servers, "error": str(error)}
        if not self._is_logged and self._lasts() and not self._is_ended.is_set():
            self._is_logged = True
            _log.warning("the brokers at %s do not answer: %s", self._servers, error)

    def _end_outage(self) -> None:
        self._outage = None
        if self._is_logged:
            self._is_logged = False
            _log.warning("the brokers at %s answer again", self._servers)

    def __enter__(self) -> OutageWatch:
        _BACKOFF.addFilter(_is_of_others)
        threading.Thread(target=self._work, name=_THREAD, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ended.set()
        _BACKOFF.removeFilter(_is_of_others)
