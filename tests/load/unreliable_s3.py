"""An S3 server for tests: moto's, a request at a time, behind what a network does to requests and their answers."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from werkzeug.serving import WSGIRequestHandler, make_server

#: What happens to a request: it is carried out and answered; not carried out; carried out, but the answer is an error;
#: carried out after the answer, an error, has been sent and `late` more requests have come.
Fate = Literal["good", "refused", "lost", "late"]
_LATE = 2


class UnreliableS3:
    """moto is not made for requests at the same moment: two conditional puts would both succeed."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app  # half a second of each collection

        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        #: Of the next requests, in order; "good" afterwards.
        self.fates: deque[Fate] = deque()
        #: Whether it knows If-None-Match.
        self.has_conditions = True
        self._late: list[tuple[int, dict[str, Any]]] = []
        self.requests: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        is_chunked = environ.get("wsgi.input_terminated")
        body = environ["wsgi.input"].read(*() if is_chunked else (int(environ.get("CONTENT_LENGTH") or 0),))
        with self._lock:
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            if not self.has_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            fate = self.fates.popleft() if self.fates else "good"
            for due, late in [*self._late]:
                if due <= len(self.requests):
                    self._late.remove((due, late))
                    self._carry_out(late)
            request = {**environ, "body": body}
            if fate == "good":
                return self._carry_out(request, start_response)
            if fate == "lost":
                self._carry_out(request)
            elif fate == "late":
                self._late.append((len(self.requests) + _LATE, request))
        start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", "0")])
        return []

    def _carry_out(self, request: dict[str, Any], start_response: Any = lambda *_: lambda data: None) -> list[bytes]:
        environ = {**request, "wsgi.input": io.BytesIO(request["body"])}
        return list(self._app(environ, start_response))

    def carry_out_late(self) -> None:
        """Carry out what is still on its way."""
        with self._lock:
            late, self._late = self._late, []
            for _, request in late:
                self._carry_out(request)


@contextmanager
def serving(app: Callable[..., Any]) -> Iterator[str]:
    """The address HOST:PORT at which a WSGI application is served."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Nothing: there are many requests."""
