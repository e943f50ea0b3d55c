"""The part of Unity Catalog's API that a load asks, by its specification: no registry has the server itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from tests.support.servers.http_proxy import vended

_PREFIX = "/api/2.1/unity-catalog"
TOKEN = "of-unity"


class UnityCatalog:
    """Tables by their names, each as the API describes one; keys for all of them, which end after some seconds."""

    def __init__(self, tables: Mapping[str, Mapping[str, str]], seconds: float) -> None:
        self.tables, self._seconds = tables, seconds
        self.url = ""
        #: How often keys were given out.
        self.given = 0

    def _described(self, name: str) -> dict[str, str]:
        return {"table_id": name, "data_source_format": "DELTA", "table_type": "EXTERNAL", **self.tables[name]}

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path.startswith(f"{_PREFIX}/tables?"):  # a page has a table
            asked = dict(parse_qsl(path.partition("?")[2]))
            schema = f"{asked['catalog_name']}.{asked['schema_name']}."
            names, at = [name for name in self.tables if name.startswith(schema)], int(asked.get("page_token", "0"))
            page = [{"name": name.removeprefix(schema), **self._described(name)} for name in names[at : at + 1]]
            return 200, {"tables": page, **({"next_page_token": str(at + 1)} if at + 1 < len(names) else {})}
        if path.startswith(f"{_PREFIX}/tables/"):
            name = path.rpartition("/")[2]
            if name not in self.tables:
                return 404, {"error_code": "TABLE_NOT_FOUND", "message": f"Table not found: {name}"}
            return 200, self._described(name)
        if path == f"{_PREFIX}/temporary-table-credentials":
            asked = json.loads(body)
            assert asked["operation"] == "READ_WRITE"
            if asked["table_id"] not in self.tables:
                return 404, {"error_code": "NOT_FOUND", "message": "no such table"}
            self.given += 1
            token, end = vended(self._seconds)
            keys = {"access_key_id": "key", "secret_access_key": "secret", "session_token": token}
            return 200, {"aws_temp_credentials": keys, "expiration_time": end}
        return 404, {"error_code": "NOT_FOUND", "message": path}


@contextmanager
def serving_unity(tables: Mapping[str, Mapping[str, str]], seconds: float = 3600) -> Iterator[UnityCatalog]:
    catalog = UnityCatalog(tables, seconds)

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status, value = catalog.answer(self.path, body) if is_known else (401, {"error_code": "UNAUTHENTICATED"})
            content = json.dumps(value).encode()
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _handle

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    catalog.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield catalog
    finally:
        server.shutdown()
        server.server_close()
