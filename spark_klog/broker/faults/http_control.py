"""HTTP control of the fault script, for test suites in any language.

    GET    /faults        -> {"faults": [{"id": 1, "fault": FAULT, "fired": 0}, ...]}
    POST   /faults        {"faults": [FAULT, ...]} -> 201 {"ids": [1, ...]}
    DELETE /faults        forgets all; DELETE /faults/ID one -> {"removed": 2}

    {"do": {"kind": "ErrorAnswer", "code": "NOT_LEADER_OR_FOLLOWER"}, "api": "Produce", "topic": "orders", "count": 2}

When the answer is sent, the change applies to all further requests. Errors are {"error": "why"} with status 400 to 503.

Pages of other sites must not reach it through a browser: the Host header must name this server, a request with an
Origin header is refused, and POST takes application/json only. A request has 5 seconds and a body of at most 1 MiB; at
most 16 connections are served at a time, and a script has at most 10,000 faults.
"""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spark_klog.broker.faults.script import Fault, FaultScript
from spark_klog.errors import ConfigError
from spark_klog.wire.listening import bind, is_loopback, is_own_host, parse_listen

_log = logging.getLogger(__name__)
_OPTION = "--control"
_LOOPBACK = "127.0.0.1"
_MAX_BODY = 1024 * 1024
_MAX_CONNECTIONS = 16
_MAX_FAULTS = 10_000
_SECONDS = 5.0
_PATH = "/faults"


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class FaultControl:
    """Serves a script at http://ADDRESS/faults until `close`.

    `address` is HOST:PORT, or a port of 127.0.0.1; another host needs `is_remote_allowed`, as everybody who reaches the
    port may change the script. Raises `ConfigError`.
    """

    def __init__(self, script: FaultScript, address: str, is_remote_allowed: bool = False) -> None:
        host, port = parse_listen(address, _OPTION, _LOOPBACK)
        if not is_remote_allowed and not is_loopback(host):
            raise ConfigError(
                f"{_OPTION} {address} is not a loopback address, and everybody who reaches it may break the broker's "
                "answers: give --allow-remote-control if that is what you want"
            )
        listener = bind(host, port, _OPTION)
        self._server = _ControlServer(host, _Handler, script)
        self._server.socket.close()
        self._server.socket = listener
        found = listener.getsockname()
        self.address = f"[{found[0]}]:{found[1]}" if ":" in found[0] else f"{found[0]}:{found[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="klog-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _ControlServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, handler: type[BaseHTTPRequestHandler], script: FaultScript) -> None:
        super().__init__((host, 0), handler, bind_and_activate=False)
        self.host, self.script = host, script
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the fault control disconnected", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _ControlServer
    timeout = _SECONDS
    server_version, sys_version = "klog", ""

    def do_GET(self) -> None:
        self._serve(self._list)

    def do_POST(self) -> None:
        self._serve(self._add)

    def do_DELETE(self) -> None:
        self._serve(self._remove)

    def _serve(self, work: Any) -> None:
        try:
            if not is_own_host(self.headers.get("Host", ""), self.server.host):
                raise _Refused(403, "the Host header names another server")
            if self.headers.get("Origin") is not None:
                raise _Refused(403, "requests of web pages are refused")
            status, answer = work(self.path.partition("?")[0].rstrip("/"))
        except _Refused as refused:
            status, answer = refused.status, {"error": str(refused)}
        except (ConfigError, ValueError, TypeError) as error:
            status, answer = 400, {"error": str(error)}
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _list(self, path: str) -> tuple[int, Any]:
        if path != _PATH:
            raise _Refused(404, f"{path or '/'} is unknown; the faults are at {_PATH}")
        listed = self.server.script.listed()
        return 200, {"faults": [{"id": one.id, "fault": one.fault.to_json(), "fired": one.fired} for one in listed]}

    def _add(self, path: str) -> tuple[int, Any]:
        if path != _PATH:
            raise _Refused(404, f"{path or '/'} is unknown; faults are added at {_PATH}")
        found = json.loads(self._body())
        if not isinstance(found, dict) or not isinstance(found.get("faults"), list) or len(found) != 1:
            raise ConfigError('the body must be {"faults": [FAULT, ...]}')
        if not all(isinstance(values, dict) for values in found["faults"]):
            raise ConfigError("each fault must be an object")
        faults = [Fault.from_json(values) for values in found["faults"]]
        if len(self.server.script.listed()) + len(faults) > _MAX_FAULTS:
            raise ConfigError(f"a script has at most {_MAX_FAULTS:,} faults: remove some")
        return 201, {"ids": self.server.script.add(faults)}

    def _remove(self, path: str) -> tuple[int, Any]:
        if path == _PATH:
            return 200, {"removed": self.server.script.clear()}
        number = path.removeprefix(f"{_PATH}/")
        if not path.startswith(f"{_PATH}/") or not number.isdecimal():
            raise _Refused(404, f"{path or '/'} is unknown; a fault is at {_PATH}/ID")
        if not self.server.script.remove(int(number)):
            raise _Refused(404, f"there is no fault {number}")
        return 200, {"removed": 1}

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "the Content-Type must be application/json")
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal():
            raise _Refused(411, "a Content-Length is required")
        if int(size) > _MAX_BODY:
            raise _Refused(413, f"the body has more than {_MAX_BODY:,} bytes")
        return self.rfile.read(int(size))

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
