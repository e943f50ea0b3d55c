"""Our registry's answers beside those of franz-go's fake of Confluent's registry, request by request.

The fake keeps texts as they are sent, answers registrations with the id alone, deletes for good what was not deleted
before, gives the same ids in all contexts, finds every schema compatible, and has another code for one that is in use:
in that it is not as the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.schemas.registry.asking import ask, record, with_default
from tests.support.clients.srfake import running_srfake

pytestmark = pytest.mark.peer


def _compact(text: str) -> str:
    return json.dumps(json.loads(text), separators=(",", ":"))


_A, _AB = {"schema": _compact(record("a"))}, {"schema": _compact(record("a", with_default("b")))}
_ENUM = {"schema": '{"type":"enum","name":"Kind","symbols":["A"]}'}
_REFERENCE = {"name": "Kind", "subject": "kind", "version": 1}
_USER = {"schema": _compact(record({"name": "kind", "type": "Kind"})), "references": [_REFERENCE]}
_JSON = {"schema": '{"type":"object"}', "schemaType": "JSON"}
_PROTO = {"schema": 'syntax = "proto3";\n\nmessage M {\n  int32 a = 1;\n}\n', "schemaType": "PROTOBUF"}

#: In this order; each depends on those before.
_REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/subjects", None),
    ("POST", "/subjects/s/versions", _A),
    ("POST", "/subjects/s/versions", _A),
    ("POST", "/subjects/t/versions", _A),
    ("POST", "/subjects/s/versions", _AB),
    ("POST", "/subjects/kind/versions", _ENUM),
    ("POST", "/subjects/user/versions", _USER),
    ("POST", "/subjects/json/versions", _JSON),
    ("POST", "/subjects/proto/versions", _PROTO),
    ("GET", "/subjects", None),
    ("GET", "/subjects/s/versions", None),
    ("GET", "/subjects/s/versions/1", None),
    ("GET", "/subjects/s/versions/latest", None),
    ("GET", "/subjects/user/versions/latest", None),
    ("GET", "/subjects/json/versions/latest", None),
    ("GET", "/subjects/s/versions/9", None),
    ("GET", "/subjects/none/versions", None),
    ("POST", "/subjects/s", _A),
    ("POST", "/subjects/s", _ENUM),
    ("POST", "/subjects/none", _A),
    ("GET", "/schemas/ids/1", None),
    ("GET", "/schemas/ids/1/subjects", None),
    ("GET", "/schemas/ids/2/versions", None),
    ("GET", "/schemas/ids/4", None),
    ("GET", "/schemas/ids/99", None),
    ("GET", "/schemas?subjectPrefix=s", None),
    ("GET", "/subjects/kind/versions/1/referencedby", None),
    ("GET", "/subjects?subjectPrefix=s", None),
    ("GET", "/config", None),
    ("PUT", "/config", {"compatibility": "FULL"}),
    ("GET", "/config", None),
    ("PUT", "/config/s", {"compatibility": "NONE"}),
    ("GET", "/config/s", None),
    ("GET", "/config/t?defaultToGlobal=true", None),
    ("GET", "/mode", None),
    ("PUT", "/mode/s", {"mode": "READONLY"}),
    ("GET", "/mode/s", None),
    ("PUT", "/mode/s", {"mode": "READWRITE"}),
    ("PUT", "/mode/s", {"mode": "NO"}),
    ("POST", "/subjects/s/versions", {"schema": "{"}),
    ("POST", "/compatibility/subjects/s/versions/latest", _A),
    ("DELETE", "/subjects/s/versions/1", None),
    ("GET", "/subjects/s/versions", None),
    ("GET", "/subjects/s/versions?deleted=true", None),
    ("GET", "/subjects/s/versions?deletedOnly=true", None),
    ("DELETE", "/subjects/t", None),
    ("GET", "/subjects", None),
    ("GET", "/subjects?deleted=true", None),
    ("GET", "/schemas/ids/1", None),
    ("DELETE", "/subjects/t?permanent=true", None),
    ("GET", "/subjects?deleted=true", None),
    ("DELETE", "/subjects/s/versions/1?permanent=true", None),
    ("GET", "/subjects/s/versions?deleted=true", None),
    ("GET", "/contexts", None),
]


@pytest.fixture(scope="module")
def srfake() -> Iterator[str]:
    with running_srfake() as url:
        yield url


def _comparable(answer: Any) -> Any:
    """An answer without what only one of them has: times, the type AVRO, texts for people."""
    if isinstance(answer, list):
        return [_comparable(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    if "error_code" in answer:
        return {"error_code": answer["error_code"]}
    if "id" in answer and "subject" not in answer:
        return {"id": answer["id"]}
    made = {name: value for name, value in answer.items() if name not in ("ts", "guid", "deleted")}
    return {name: value for name, value in made.items() if (name, value) != ("schemaType", "AVRO")}


def test_the_same_requests(registry: str, srfake: str) -> None:
    differing = {}
    for number, (method, path, body) in enumerate(_REQUESTS):
        ours, theirs = (ask(url, method, path, body) for url in (registry, srfake))
        ours, theirs = ((status, _comparable(answer)) for status, answer in (ours, theirs))
        if ours != theirs:
            differing[number, method, path] = ours, theirs
    assert differing == {}
