"""What keeps pages of other sites, and records, from using the server: checks of requests, headers of responses.

* The Host header must name this server, so that another site's name that points here (DNS rebinding) is refused.
* Requests that a browser marks as another site's (Sec-Fetch-Site) are refused.
* A change is a POST of JSON with the session's token, which other sites can't read, and without a foreign Origin.
* The content security policy allows our files only: no inline script or style, no other server.
* A client that keeps the server waiting, for a request or for an answer to be read, holds a connection for a bounded
  time, and only while there are others left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from spark_klog.client import Admin
from spark_klog.errors import ConnectionFailed, KlogError, ProtocolError
from spark_klog.wire.listening import RequestRefused, is_own_host

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
_BACKOFF = logging.getLogger("spark_klog.client.retry")
TOKEN_HEADER = "x-klog-token"
_MAX_CONNECTIONS = 200
#: How long a client may take for a request's head, for its body, and for reading a part of an answer.
_REQUEST_SECONDS, _READ_SECONDS, _LOOK_SECONDS = 10.0, 30.0, 1.0
#: A produced value is base64 in JSON.
_MAX_BODY = 2 * 1024 * 1024
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


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

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        _BACKOFF.removeFilter(_is_of_others)


class Guard:
    """ASGI middleware: refuses foreign requests, and adds the security headers to all responses."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in _HEADERS]
                message["headers"] = [*kept, *_HEADERS.items()]
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reason = self._refusal(Request(scope))
        if reason is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await JSONResponse({"error": reason}, 403, {"Connection": "close"})(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> str | None:
        if not is_own_host(request.headers.get("host", ""), self._host):
            return "the Host header names another server"
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return "the request comes from a page of another site"
        return None


class GuardedConnection(H11Protocol):
    """Uvicorn's protocol, with bounds of time and number for connections whose clients are silent."""

    _awaited: object = None
    _since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            others = [each for each in self.connections if isinstance(each, GuardedConnection) and each is not self]
            if silent := [each for each in others if each._look() is not None]:
                longest = min(silent, key=lambda each: each._since)
                longest.transport.abort()
                self.connections.discard(longest)
            else:
                self.app = service_unavailable
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        awaited, now = self._look(), self.loop.time()
        if awaited is not None and now - self._since > (
            _READ_SECONDS if isinstance(awaited, int) else _REQUEST_SECONDS
        ):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_LOOK_SECONDS, self._watch)

    def _look(self) -> object:
        """What the client has to do next, since `_since`: read bytes (a number), or send a request or its body.

        None if the server has to do something.
        """
        cycle = self.cycle
        awaited: object = self.transport.get_write_buffer_size()
        if not awaited:
            is_over = cycle is None or cycle.response_complete
            awaited = (cycle, is_over) if is_over or cycle.more_body else None
        if awaited != self._awaited or not self._since:
            self._awaited, self._since = awaited, self.loop.time()
        return awaited


class Session:
    """The token that changes need; a new one for each start of the server."""

    def __init__(self, allows_changes: bool) -> None:
        self.allows_changes = allows_changes
        self.token = secrets.token_urlsafe(24) if allows_changes else ""

    async def body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a change; `RequestRefused` if the change is not allowed."""
        if not self.allows_changes:
            raise RequestRefused(403, "the page is read-only: start klog ui with --allow-changes")
        if not secrets.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), self.token.encode()):
            raise RequestRefused(403, "the token is missing or of an earlier start: load the page again")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise RequestRefused(403, "the request comes from a page of another site")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RequestRefused(415, "the Content-Type must be application/json")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > _MAX_BODY:
                raise RequestRefused(413, f"the body has more than {_MAX_BODY:,} bytes")
        try:
            value = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise RequestRefused(400, f"the body is not JSON: {error}") from None
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestRefused(400, "the body has a half of a surrogate pair, which has no form in UTF-8") from None
        if not isinstance(value, dict):
            raise RequestRefused(400, "the body must be a JSON object")
        return value
