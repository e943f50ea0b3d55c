"""OAuth token endpoints: redirects, certificates, bad responses; errors do not show the client's secret."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spark_klog.errors import KlogError, SaslError
from spark_klog.security.config import OAuthConfig
from spark_klog.security.sasl import OAuthBearer
from spark_klog.security.tokens import token_of
from tests.support.servers.certificates import make_certificates
from tests.support.servers.token_server import TokenServer


def test_a_redirect_gets_no_secret() -> None:
    with TokenServer() as elsewhere:

        class Redirects(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.send_response(302)
                self.send_header("Location", elsewhere.url)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Redirects)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            endpoint = f"http://127.0.0.1:{server.server_address[1]}/token"
            config = OAuthConfig(endpoint=endpoint, client_id=elsewhere.client_id, client_secret=elsewhere.secret)
            with pytest.raises(SaslError, match=r"answers 302") as caught:
                token_of(config, "127.0.0.1", time.monotonic() + 20, str)
            assert elsewhere.secret not in str(caught.value)
            direct = OAuthConfig(endpoint=elsewhere.url, client_id=elsewhere.client_id, client_secret=elsewhere.secret)
            assert token_of(direct, "127.0.0.1", time.monotonic() + 20, str)
        finally:
            server.shutdown()
            server.server_close()


def test_an_endpoint_with_an_authority_of_its_own(tmp_path: Path) -> None:
    """By default openssl makes an authority without the key usage that Python requires by default since 3.13."""
    certificates = make_certificates(tmp_path)
    with TokenServer(certificates=certificates) as server:
        config = OAuthConfig(server.url, client_id=server.client_id, client_secret=server.secret)
        with pytest.raises(SaslError, match=r"is not trusted: .*; set https\.ca\.location to"):
            token_of(config, "127.0.0.1", time.monotonic() + 20, str)
        config = replace(config, ca=str(certificates.ca))
        assert token_of(config, "127.0.0.1", time.monotonic() + 20, str)
        assert server.given == 1


def _answered(answer: bytes, byte_seconds: float = 0.0) -> KlogError:
    """The error if an endpoint sends `answer`, byte by byte if there is a pause between bytes, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                request = b""
                while not request.endswith(b"grant_type=client_credentials"):  # unread bytes would make close a reset
                    request += connection.recv(65536)
                for part in [answer] if not byte_seconds else (bytes([byte]) for byte in answer):
                    connection.sendall(part)
                    time.sleep(byte_seconds)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        config = OAuthConfig(f"http://127.0.0.1:{server.getsockname()[1]}/t", client_id="a", client_secret="top-secret")
        with pytest.raises(KlogError) as caught:
            token_of(config, "127.0.0.1", time.monotonic() + (1.0 if byte_seconds else 20.0), str)
        assert "top-secret" not in str(caught.value)
        return caught.value


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"\x15\x03\x01\x00\x02\x02P", "does not answer by HTTP (BadStatusLine): is it the right port?"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer by HTTP (BadStatusLine)"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "does not answer by HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "answers without an access_token"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\n{}", "answers 503"),
        (b"", "gives no answer"),
    ],
)
def test_an_endpoint_that_answers_rubbish(answer: bytes, why: str) -> None:
    assert why in str(_answered(answer))


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad"])
def test_an_endpoint_that_drips_has_the_callers_deadline(status: bytes) -> None:
    began = time.monotonic()
    head = b"HTTP/1.1 " + status + b"\r\nContent-Length: 1000\r\n\r\n"
    assert "did not answer in time" in str(_answered(head + b" " * 1000, 0.05))
    assert time.monotonic() - began < 30  # the whole answer would take a minute


@pytest.mark.parametrize("answer", [b"[" * 100_000, b"{", b"7", b"\xff"])
def test_a_refusal_that_is_not_as_it_should_be(answer: bytes) -> None:
    exchange = OAuthBearer("token")
    exchange.first()
    assert exchange.step(answer) == b"\1"
    with pytest.raises(SaslError, match="the broker refuses the token"):
        exchange.step(b"\1")


def test_who_fetches_no_token_does_not_import_urllib() -> None:
    """That would be a tenth of a broker's start."""
    modules = (
        "spark_klog.broker.net.server",
        "spark_klog.client.producer.producer",
        "spark_klog.schemas.registry.client",
    )
    program = f"import sys; before = {{*sys.modules}}; import {', '.join(modules)}; print(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert {*modules} < {*done.stdout.split()}
    assert "urllib.request" not in done.stdout.split()
