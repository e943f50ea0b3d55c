"""Requests to a schema registry, and schemas to send."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"


def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status of a request and the JSON of its answer; the text if that is no JSON."""
    status, data, _ = ask_whole(url, method, path, body, **headers)
    try:
        return status, json.loads(data)
    except ValueError:
        return status, data.decode()


def ask_whole(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """The status, the body and the headers of an answer."""
    place = urlsplit(url)
    assert place.hostname
    connection = HTTPConnection(place.hostname, place.port, timeout=60)
    try:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": CONTENT_TYPE} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def record(*fields: str | dict[str, Any], name: str = "Click") -> str:
    """The text of an Avro record; a field that is a name is an int."""
    made = [{"name": field, "type": "int"} if isinstance(field, str) else field for field in fields]
    return json.dumps({"type": "record", "name": name, "fields": made})


def with_default(name: str) -> dict[str, Any]:
    return {"name": name, "type": "int", "default": 0}


def register(url: str, subject: str, schema: str, schema_type: str = "AVRO", **more: Any) -> int:
    """Register a schema; its id."""
    body = {"schema": schema, "schemaType": schema_type} | more
    status, answer = ask(url, "POST", f"/subjects/{subject}/versions", body)
    assert status == 200, answer
    return int(answer["id"])
