"""An OAuth token server for the client_credentials grant, and unsigned tokens, which Kafka accepts by default."""

from __future__ import annotations

import json
import ssl
import threading
import time
from base64 import b64decode, urlsafe_b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.servers.certificates import KEY_PASSWORD, Certificates
from tests.support.servers.kafka import HOST


def unsigned_token(user: str, lifetime: float = 3600.0) -> str:
    """A JWS without signature; a negative lifetime makes it expired."""

    def part(value: dict[str, Any]) -> str:
        return urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    now = time.time()
    claims = {"sub": user, "iat": now - 7200, "exp": now + lifetime}
    return f"{part({'alg': 'none'})}.{part(claims)}."


class TokenServer:
    """Issues tokens for `lifetime` seconds to the client `client_id` with `secret`; `given` counts them.

    With `certificates` it serves HTTPS.
    """

    client_id, secret = "klog-client", "client:secret/1"

    def __init__(self, lifetime: float = 3600.0, certificates: Certificates | None = None) -> None:
        self.given = 0
        self.lifetime = lifetime
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = self.rfile.read(int(self.headers["Content-Length"])).decode()
                pair = b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
                if pair != f"{server.client_id}:{server.secret}" or "grant_type=client_credentials" not in form:
                    self._answer(401, {"error": "invalid_client", "error_description": f"not {pair}"})
                    return
                server.given += 1
                token = unsigned_token("alice", server.lifetime)
                self._answer(200, {"access_token": token, "expires_in": server.lifetime, "token_type": "Bearer"})

            def _answer(self, code: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._scheme = "http" if certificates is None else "https"
        if certificates is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates.server, password=KEY_PASSWORD)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://{HOST}:{self._server.server_address[1]}/token"

    def __enter__(self) -> TokenServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
