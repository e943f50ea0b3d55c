"""A proxy before an HTTP server of this machine that refuses requests, holds them, and loses their answers.

    with HttpProxy(port) as proxy:
        proxy.set_fates("good", "lost")  # of the next requests that change something
        ...  # clients use proxy.address

It is a process of its own, as deltalake holds Python's lock while it reads a history:

    python -m tests.support.servers.http_proxy TARGET [tokens|glue|gcs]
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import parse_qs, unquote

HOST = "127.0.0.1"
#: What happens to a request: it is carried out and answered; not carried out, with an error as answer; carried out, and
#: answered with an error; carried out, and the connection ends; carried out half a second after an error as answer;
#: carried out, and answered too late.
Fate = Literal["good", "refused", "lost", "cut", "late", "held"]
#: Checks that requests have a token that has not ended; only requests of Glue that commit have fates; what
#: fake-gcs-server lacks of Google's XML API, uploads and `start-after` of lists, is made of what it has.
Way = Literal["tokens", "glue", "gcs"]
_SECONDS = 60
_LATE_SECONDS, _HELD_SECONDS = 0.5, 5.0
_CHANGES = ("POST", "PUT", "PATCH", "DELETE")
#: Headers that are of one connection.
_OWN = ("connection", "keep-alive", "transfer-encoding", "content-length", "expect")
_KEY = re.compile(rb"<Contents><Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
_CONTROL = "/of-the-proxy-itself"
_TOKEN = "until-"
_ENDED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_NONE = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def vended(seconds: float) -> tuple[str, int]:
    """A token that says when it ends, and that time in ms since the epoch. programs/rest_catalog makes the same."""
    end = int((time.time() + seconds) * 1000)
    return f"{_TOKEN}{end}", end


class HttpProxy:
    """Forwards requests to port `target`, their heads and bodies as they are, so that signatures stay right."""

    def __init__(self, target: int, *ways: Way) -> None:
        command = [sys.executable, "-m", __name__, str(target), *ways]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3], env=os.environ)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def set_fates(self, *fates: Fate) -> None:
        """Of the next requests that change something, in order; "good" afterwards."""
        self._control({"fates": fates})

    @property
    def tokens(self) -> tuple[int, int]:
        """How many tokens there were, and how many requests with one that had ended."""
        seen = self._control({})
        return seen["tokens"], seen["late"]

    def _control(self, value: Any) -> Any:
        request = urllib.request.Request(f"http://{self.address}{_CONTROL}", json.dumps(value).encode())
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def __enter__(self) -> HttpProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: int, ways: list[str]) -> None:
        super().__init__((HOST, 0), _Handler)
        self.target, self.ways = target, ways
        self.fates: deque[str] = deque()
        self.tokens: set[str] = set()
        self.late = 0
        self.lock = threading.Lock()

    def handle_error(self, *_: Any) -> None:
        """Nothing: clients go when they have waited for long."""

    def control(self, value: Mapping[str, Any]) -> bytes:
        with self.lock:
            if "fates" in value:
                self.fates = deque(value["fates"])
            return json.dumps({"tokens": len(self.tokens), "late": self.late}).encode()

    def refusal(self, headers: Mapping[str, str]) -> tuple[int, bytes] | None:
        """The answer to a request whose token is missing, or has ended."""
        if "tokens" not in self.ways:
            return None
        token = headers.get("x-amz-security-token", "")
        with self.lock:
            if not token.startswith(_TOKEN):
                return 403, _NONE
            if int(token.removeprefix(_TOKEN)) < time.time() * 1000:
                self.late += 1
                return 400, _ENDED
            self.tokens.add(token)
            return None

    def fate(self, method: str, headers: Mapping[str, str]) -> str:
        operation = headers.get("x-amz-target", "")
        is_change = operation.endswith(("Table", "Database")) and "Get" not in operation
        if not (is_change if "glue" in self.ways else method in _CHANGES):
            return "good"
        with self.lock:
            return self.fates.popleft() if self.fates else "good"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def _handle(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._body()
        if self.path == _CONTROL:
            self._answer(200, {}, self.server.control(json.loads(body)))
            return
        if (refusal := self.server.refusal(headers)) is not None:
            self._answer(refusal[0], {"content-type": "application/xml"}, refusal[1])
            return
        fate = self.server.fate(self.command, headers)
        if fate == "refused":
            self._answer(503, {}, b"")
            return
        if fate == "late":
            self.close_connection = True
            self._answer(504, {}, b"")
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            time.sleep(_LATE_SECONDS)
        try:
            status, kept, content = self._carried_out(headers, body)
        except OSError:
            if fate != "late":
                self._answer(502, {}, b"")
            return
        if fate == "held":
            time.sleep(_HELD_SECONDS)
        if fate in ("good", "held"):
            self._answer(status, kept, content)
        elif fate == "lost":
            self._answer(504, {}, b"")
        elif fate == "cut":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _handle

    def _carried_out(self, headers: Mapping[str, str], body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """The server's answer: status, headers, content."""
        path, is_of_google = self.path, "gcs" in self.server.ways
        if is_of_google:
            headers = {**headers, "host": f"{HOST}:{self.server.target}"}  # by which it knows the XML API
        is_upload = is_of_google and self.command == "PUT" and not path.startswith(("/upload/", "/storage/"))
        if is_upload:
            path, headers, body = _json_upload(path, headers, body)
        connection = http.client.HTTPConnection(HOST, self.server.target, timeout=_SECONDS)
        method = "POST" if is_upload else self.command
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if name not in _OWN:
                connection.putheader(name, value)
        if body or method in _CHANGES:
            connection.putheader("content-length", str(len(body)))
        connection.putheader("connection", "close")
        connection.endheaders(body or None)
        response = connection.getresponse()
        content = response.read()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in _OWN}
        if self.command == "HEAD" and (length := response.getheader("content-length")):
            kept["Content-Length"] = length
        if is_of_google and (after := parse_qs(self.path.partition("?")[2]).get("start-after")):
            content = _KEY.sub(lambda match: b"" if unescape(match[1].decode()) <= after[0] else match[0], content)
        if is_upload and response.status == 200:
            made = json.loads(content)
            kept |= {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}
        return response.status, kept, content

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        has_body = status not in (204, 304)
        if has_body and "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if has_body and self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing: there are many requests."""


def _json_upload(path: str, headers: Mapping[str, str], body: bytes) -> tuple[str, dict[str, str], bytes]:
    """An upload by Google's XML API as its JSON API has it: path, headers, body of a POST."""
    bucket, _, name = path.partition("?")[0].lstrip("/").partition("/")
    own = "x-goog-meta-"
    metadata = {each.removeprefix(own): value for each, value in headers.items() if each.startswith(own)}
    described = json.dumps({"name": unquote(name), "metadata": metadata}).encode()
    kind = b"\r\nContent-Type: application/"
    parts = [b"--part", kind, b"json\r\n\r\n", described, b"\r\n--part", kind, b"octet-stream\r\n\r\n", body]
    condition = headers.get("x-goog-if-generation-match")
    query = "uploadType=multipart" + ("" if condition is None else f"&ifGenerationMatch={condition}")
    new = {"host": headers["host"], "content-type": "multipart/related; boundary=part"}
    return f"/upload/storage/v1/b/{bucket}/o?{query}", new, b"".join([*parts, b"\r\n--part--\r\n"])


def main(target: str, *ways: str) -> None:
    proxy = _Proxy(int(target), list(ways))
    print(proxy.server_address[1], flush=True)  # noqa: T201
    proxy.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
