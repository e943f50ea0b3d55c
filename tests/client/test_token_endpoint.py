"""The endpoint of OAuth tokens: where the client's secret goes."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spark_klog.client.security.sasl.mechanisms import OAuthBearer
from spark_klog.client.security.sasl.tokens import token_of
from spark_klog.client.security.settings.config import OAuthConfig
from spark_klog.errors import SaslError
from tests.support.token_server import TokenServer


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
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            endpoint = f"http://127.0.0.1:{server.server_address[1]}/token"
            config = OAuthConfig(endpoint=endpoint, client_id=elsewhere.client_id, client_secret=elsewhere.secret)
            with pytest.raises(SaslError, match=r"answers 302") as caught:
                token_of(config, "127.0.0.1", time.monotonic() + 20, str)
            assert elsewhere.secret not in str(caught.value)
            direct = OAuthConfig(endpoint=elsewhere.url, client_id=elsewhere.client_id, client_secret=elsewhere.secret)
            assert token_of(direct, "127.0.0.1", time.monotonic() + 20, str).value
        finally:
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize("answer", [b"[" * 100_000, b"{", b"7", b"\xff"])
def test_a_refusal_that_is_not_as_it_should_be(answer: bytes) -> None:
    exchange = OAuthBearer("token")
    exchange.first()
    assert exchange.step(answer) == b"\1"
    with pytest.raises(SaslError, match="the broker refuses the token"):
        exchange.step(b"\1")
