"""Registries that answer as none should, or as others than Confluent's do."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConnectionFailed, RegistryError, TlsError
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.schemas.registry import client as client_module
from spark_klog.schemas.registry.client import RegistryClient
from spark_klog.schemas.registry.settings import registry_config
from spark_klog.security.config import Settings


class _Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str] = {}


class _Server:
    """Answers with the first of `answers` whose path begins the request's; `{authorization}` is the header's."""

    def __init__(self, url: str, answers: dict[str, _Answer]) -> None:
        self.url, self.answers = url, answers
        self.asked: list[str] = []


@contextmanager
def _serving(answers: dict[str, _Answer]) -> Iterator[_Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            serving.asked.append(self.path)
            answer = next(answer for path, answer in answers.items() if self.path.startswith(path))
            data = answer.body.replace(b"{authorization}", (self.headers["Authorization"] or "").encode())
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = _Server(f"http://127.0.0.1:{server.server_port}", answers)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield serving
    finally:
        server.shutdown()
        server.server_close()


def _client(url: str, **settings: str) -> RegistryClient:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return RegistryClient(registry_config({"url": url, **named}))


_INT = json.dumps({"subject": "s", "version": 1, "id": 1, "schema": '"int"'}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        _Answer(404, b'{"error_code": 404, "message": "HTTP 404 Not Found"}'),
        _Answer(404, b'{"detail": "Not Found"}'),
        _Answer(404, b"404 page not found\n"),
        _Answer(404, b'{"error_code": 40403, "message": "Schema not found"}'),
    ],
)
def test_what_a_registry_does_not_have_makes_records_bad(answer: _Answer) -> None:
    """Whatever its code is: a registry before GUIDs has none of theirs."""
    with _serving({"/subjects": _Answer(200, _INT), "/schemas": answer}) as server:
        source = ColumnFormat("value", "avro", RegistrySettings(Settings({"url": server.url})), subject="s")
        values = [b"\0\0\0\0\1\6", b"\0\0\0\0\7\6", b"\1 begins with a byte 1", b"\0\xff\xff\xff\xff\6"]
        decoded = source.reader().decoder().decode(pa.array(values, pa.binary()), None)
        assert decoded.values.to_pylist() == [3, None, None, None]
        assert [row for row, _ in decoded.bad] == [1, 2, 3]
        assert all("does not have it" in reason for _, reason in decoded.bad[:2])
        assert decoded.bad[2].reason == "schema id -1: no schema has a negative id"
        assert len(server.asked) == 3


def test_no_registry() -> None:
    with _serving({"/": _Answer(404, b"<html>default backend</html>")}) as server:
        with pytest.raises(RegistryError, match="is it the URL of a schema registry") as caught:
            _client(server.url).schema(7)
        assert caught.value.status == 404


def test_a_registry_that_can_not_serve_is_away() -> None:
    """What it said before counts, unless it refuses the client."""
    with _serving({"/": _Answer(200, b'["s"]')}) as server:
        client = _client(server.url, retries_deadline_ms="50")

        def asked(key: bytes) -> list[str]:
            return client.or_before(key, lambda: client.subjects(""))

        assert asked(b"a") == asked(b"b") == ["s"]
        server.answers["/"] = _Answer(503, b"no available server")
        assert asked(b"a") == ["s"]
        with pytest.raises(RegistryError, match="answers 503"):
            asked(b"c")
        server.answers["/"] = _Answer(403, b"{}")
        with pytest.raises(RegistryError, match="answers 403"):
            asked(b"b")


@pytest.mark.parametrize("settings", [{"basic_auth_user_info": "alice:s3cret"}, {"bearer_auth_token": "s3cret"}])
def test_an_echo_of_the_credentials_is_not_shown(settings: dict[str, str]) -> None:
    body = json.dumps({"error_code": 401, "message": "wrong header {authorization}"}).encode()
    with _serving({"/": _Answer(401, body)}) as server:
        with pytest.raises(RegistryError, match="answers 401") as caught:
            _client(server.url, **settings).schema(7)
        assert "s3cret" not in str(caught.value)
        assert "YWxpY2U6" not in str(caught.value)


def test_no_text() -> None:
    with (
        _serving({"/": _Answer(200, b'{"schema": null}')}) as server,
        pytest.raises(RegistryError, match="the schema is NoneType, not a text"),
    ):
        _client(server.url).schema(7)


def test_reasons_are_cut() -> None:
    """They name the types of a schema that can't be read: of records of 5 bytes each."""
    kinds = [{"type": "fixed", "size": 1, "name": "a" * 240 + str(number)} for number in range(100)]
    field = {"name": "n", "type": {"type": "array", "items": kinds}}
    text = json.dumps({"type": "record", "name": "C", "fields": [field]})
    other = json.dumps({"id": 2, "schema": text}).encode()
    reader = {"type": "record", "name": "C", "fields": [{"name": "n", "type": "long"}]}
    latest = json.dumps({"subject": "s", "version": 1, "id": 1, "schema": json.dumps(reader)}).encode()
    with _serving({"/subjects": _Answer(200, latest), "/schemas/ids/2": _Answer(200, other)}) as server:
        source = ColumnFormat("value", "avro", RegistrySettings(Settings({"url": server.url})), subject="s")
        decoded = source.reader().decoder().decode(pa.array([b"\0\0\0\0\2"] * 3, pa.binary()), None)
    assert [len(reason) for _, reason in decoded.bad] == [1000 + len("schema id 2: ...")] * 3


def test_a_redirection_is_not_followed() -> None:
    moved = _Answer(301, b"", {"Location": "https://user:pw@registry.example/schemas/ids/7"})
    with _serving({"/": moved}) as server, pytest.raises(RegistryError) as caught:
        _client(server.url, basic_auth_user_info="alice:s3cret").schema(7)
    text = "answers 301, a redirection to https://registry.example, which is not followed: set the URL that it leads to"
    assert str(caught.value).endswith(text)
    assert len(server.asked) == 1


@pytest.mark.parametrize("seconds", [40, 3600])
def test_retry_after(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(slept), sleep=slept.append)
    monkeypatch.setattr(client_module, "time", clock)
    slow = _Answer(429, b'{"error_code": 429, "message": "slow down"}', {"Retry-After": str(seconds)})
    with _serving({"/": slow}) as server:
        client = _client(server.url, retries_wait_ms="1", retries_deadline_ms="70000")
        with pytest.raises(RegistryError, match="slow down"):
            client.schema(7)
        assert slept == ([40] if seconds == 40 else [])
        assert len(server.asked) == len(slept) + 1


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "set basic.auth.username and basic.auth.password, or bearer.auth.token"),
        ({"basic.auth.user.info": "a:b"}, "check basic.auth.user.info, and"),
        ({"basic.auth.username": "a", "basic.auth.password": "b"}, "check basic.auth.username, and"),
        ({"bearer.auth.token": "abc"}, "check bearer.auth.token, and"),
    ],
)
def test_who_is_refused(settings: dict[str, str], names: str) -> None:
    with _serving({"/": _Answer(401, b"{}")}) as server:
        client = RegistryClient(registry_config({"url": server.url, **settings}, ""))
        with pytest.raises(RegistryError, match=f"answers 401: {names}"):
            client.schema(7)


def test_what_does_not_change_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up: Callable[..., Any] = socket.getaddrinfo

    def not_there(host: str, *rest: Any, **more: Any) -> Any:
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", not_there)
    began = time.monotonic()
    with pytest.raises(ConnectionFailed, match=r"check the name in schema\.registry\.url$"):
        _client("http://no-such-host.invalid:8081", retries_deadline_ms="60000").schema(7)
    with _serving({"/": _Answer(200, b"{}")}) as server:
        with pytest.raises(TlsError, match=r"is it an http:// URL\?"):
            _client(server.url.replace("http:", "https:"), retries_deadline_ms="60000").schema(7)
        url = f"http://no-such-host.invalid:8081,{server.url}"
        assert _client(url)._request("GET", "/", "x") == {}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        Thread(target=_alert, args=(listening,), daemon=True).start()
        with pytest.raises(ConnectionFailed, match=r"is it an https:// URL\?; gave up"):
            _client(f"http://127.0.0.1:{listening.getsockname()[1]}", retries_deadline_ms="1000").schema(7)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_broker_at_the_url_of_a_registry(cluster: EmbeddedCluster, scheme: str) -> None:
    client = _client(f"{scheme}://{cluster.bootstrap_servers}", retries_deadline_ms="60000")
    began = time.monotonic()
    with pytest.raises(ConnectionFailed, match=r"; a Kafka broker listens there: set schema\.registry\.url to"):
        client.schema(7)
    assert time.monotonic() - began < 30  # no other try


def test_a_certificate_for_another_name() -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        raise ssl.SSLCertVerificationError(1, "certificate verify failed")
    caught.value.verify_code, caught.value.verify_message = 62, "Hostname mismatch"
    error = _client("https://other.example")._failure("https://other.example", caught.value)
    assert isinstance(error, TlsError)
    assert str(error).endswith("Hostname mismatch; set the URL with a name that it is for, instead of other.example")


def _alert(listening: socket.socket) -> None:
    """Answer as a server of TLS does to what is none: alert 22, and the end."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.recv(1000)
            connection.sendall(b"\x15\x03\x03\x00\x02\x02\x16")


def test_a_forked_process_has_connections_of_its_own() -> None:
    """Two processes that share one read each other's answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            time.sleep(0.02)
            data = json.dumps({"schema": self.path}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        client = _client(f"http://127.0.0.1:{server.server_port}", retries_deadline_ms="2000")
        for number in range(8):
            client.schema(1000 + number)  # a connection that is idle then
            child = os.fork()
            asked = 3000 + number if child else 2000 + number
            is_right = False
            try:
                is_right = client.schema(asked).text == f"/schemas/ids/{asked}"
            finally:
                if not child:
                    os._exit(0 if is_right else 1)
            assert is_right
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_without_tls_that_waits() -> None:
    """It takes the beginning of TLS for one of a request, and waits for the rest."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        for settings in ({}, {"http_connect_timeout_ms": "100"}):
            with pytest.raises(ConnectionFailed, match=r"is it an http:// URL\?; gave up"):
                _client(url, retries_deadline_ms="300", **settings).schema(7)
