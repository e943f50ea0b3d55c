"""Requests that nobody should send: each gets an answer, and none a fault of the server."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.embedded import EmbeddedCluster
from spark_klog.registry import work
from spark_klog.registry.api import answer
from spark_klog.registry.formats.avro import AvroSchema
from spark_klog.registry.records import CONFIG, SCHEMA, Key, Record
from spark_klog.registry.registry import Registry
from spark_klog.schema_registry import SchemaRegistry
from tests.schemas.registry.asking import ask, ask_whole, register
from tests.schemas.registry.memory_log import MemoryLog
from tests.support.waiting import wait_until

_NAMES = """subjects versions schemas ids guids schema types compatibility config mode contexts metadata latest
referencedby a :.x:a :.: :*: .x 1 0 -1 999999999999 %00 %2F"""
_WORDS = st.one_of(st.sampled_from(_NAMES.split()), st.text(max_size=5))
_PATHS = st.one_of(
    st.lists(_WORDS, max_size=6).map(lambda words: "/" + "/".join(words)),
    st.sampled_from(
        ["/subjects/a/versions", "/subjects/a", "/compatibility/subjects/a/versions", "/config", "/mode/a"]
    ),
)
_QUERIES = st.sampled_from(
    [
        "",
        "deleted=true",
        "permanent=true&force=true",
        "format=resolved",
        "offset=-1&limit=x",
        "verbose=true",
        "subject=:.:",
        "%",
    ]
)
_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=8),
        st.sampled_from(["record", "int", "R", "a", "AVRO", "FULL", "IMPORT"]),
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "name",
                    "fields",
                    "items",
                    "symbols",
                    "default",
                    "size",
                    "properties",
                    "tags",
                    "x",
                    "aliases",
                    "namespace",
                ]
            ),
            below,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
_FIELDS = st.dictionaries(
    st.sampled_from(
        [
            "schema",
            "schemaType",
            "references",
            "metadata",
            "ruleSet",
            "id",
            "version",
            "compatibility",
            "mode",
            "normalize",
        ]
    ),
    st.one_of(_JSON, _JSON.map(json.dumps)),
    max_size=5,
)
_BODIES = st.one_of(
    st.binary(max_size=10),
    _FIELDS.map(lambda fields: json.dumps(fields).encode()),
    _JSON.map(lambda value: json.dumps({"schema": json.dumps(value)}).encode()),
)
_METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_METHODS, _PATHS, _QUERIES, _BODIES), min_size=1, max_size=8))
def test_every_request_gets_an_answer(requests: list[tuple[Any, ...]]) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    for method, path, query, body in requests:
        made = answer(registry, method, path, query, body)
        assert made.status in (200, 204, 400, 404, 405, 409, 422), (method, path, query, body)
        if made.status >= 400:
            refusal = json.loads(made.body)
            assert int(str(refusal["error_code"])[:3]) == made.status


_DIGITS = "1" * 5000


def _ask(registry: Registry, method: str, path: str, body: Any = None, query: str = "") -> tuple[int, Any]:
    made = answer(registry, method, path, query, b"" if body is None else json.dumps(body).encode())
    return made.status, json.loads(made.body or b"null")


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", f"/subjects/a/versions/{_DIGITS}", None, 42202),
        ("GET", f"/schemas/ids/{_DIGITS}", None, 404),
        ("GET", "/schemas/ids/-1", None, 40403),
        ("GET", "/schemas/ids/-1/versions", None, 40403),
        ("GET", "/schemas/ids/x", None, 404),
        ("PUT", "/config", {"compatibilityGroup": ["x"]}, 422),
        ("PUT", "/config", {"alias": 1}, 422),
        ("PUT", "/config", {"defaultMetadata": 5}, 422),
        ("PUT", "/config", {"defaultMetadata": {"properties": 5}}, 422),
        ("PUT", "/config", {"normalize": 1}, 422),
        ("POST", "/subjects/b/versions", {"schema": '"int"', "id": 5_000_000_000, "version": 1}, 422),
        ("POST", "/subjects/b/versions", {"schema": '"int"', "id": 1, "version": 1 << 31}, 422),
        ("POST", "/subjects/b/versions", {"schema": '"int"', "id": True}, 422),
        (
            *("POST", "/subjects/b/versions"),
            {"schema": '"int"', "references": [{"name": "a", "subject": "a", "version": True}]},
            422,
        ),
    ],
)
def test_numbers_and_types_that_do_not_do(method: str, path: str, body: Any, code: int) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    assert _ask(registry, "PUT", "/mode/b", {"mode": "IMPORT"})[0] == 200
    status, refused = _ask(registry, method, path, body)
    assert (status, refused["error_code"]) == (int(str(code)[:3]), code)
    assert _ask(registry, "GET", "/subjects", query=f"limit={_DIGITS}&offset={_DIGITS}") == (200, [])
    assert _ask(registry, "POST", "/subjects/a/versions", {"schema": '"int"'})[1]["id"] == 1


def test_the_last_id() -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    assert _ask(registry, "PUT", "/mode/b", {"mode": "IMPORT"})[0] == 200
    last = {"schema": '"int"', "id": (1 << 31) - 1, "version": (1 << 31) - 1}
    assert _ask(registry, "POST", "/subjects/b/versions", last)[0] == 200
    status, refused = _ask(registry, "POST", "/subjects/a/versions", {"schema": '"long"'})
    assert (status, refused["error_code"]) == (422, 42205)
    assert "used up" in refused["message"]


def _record(name: str, *fields: dict[str, Any], reference: bool = False) -> dict[str, Any]:
    schema = json.dumps({"type": "record", "name": name, "fields": list(fields)})
    references = [{"name": "User", "subject": "user", "version": 1}] if reference else []
    return {"schema": schema, "references": references}


def _gone(registry: Registry, subject: str) -> None:
    for query in ("", "permanent=true"):
        assert _ask(registry, "DELETE", f"/subjects/{subject}", query=query)[0] == 200


def test_a_reference_whose_number_gets_another_schema() -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    user, more = {"name": "u", "type": "User"}, {"name": "k", "type": "int", "default": 0}
    for kind in ("int", "string"):
        named = _record("User", {"name": "n", "type": kind})
        assert _ask(registry, "POST", "/subjects/user/versions", named)[0] == 200
        for fields in ([user], [user, more]):
            body = _record("A", *fields, reference=True)
            assert _ask(registry, "POST", "/subjects/a/versions", body)[0] == 200
        for subject in ("a", "user"):
            _gone(registry, subject)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_reference_that_goes_while_a_schema_is_registered(monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    assert _ask(registry, "POST", "/subjects/user/versions", _record("User"))[0] == 200
    canonical = registry._canonical

    def slowly(*arguments: Any, **named: Any) -> Any:
        made = canonical(*arguments, **named)
        monkeypatch.setattr(registry, "_canonical", canonical)
        _gone(registry, "user")
        if replaced:
            assert _ask(registry, "POST", "/subjects/user/versions", _record("Other"))[0] == 200
        return made

    monkeypatch.setattr(registry, "_canonical", slowly)
    body = _record("A", {"name": "u", "type": ["null", "User"]}, reference=True)
    status, refused = _ask(registry, "POST", "/subjects/a/versions", body)
    assert (status, refused["error_code"]) == (422, 42201)
    assert ("neither an Avro type nor a name" if replaced else "No schema reference found") in refused["message"]
    assert _ask(registry, "GET", "/subjects", query="deleted=true") == (200, ["user"] if replaced else [])


def test_a_list_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    for name in ("A", "B"):
        assert _ask(registry, "POST", f"/subjects/{name}/versions", _record(name))[0] == 200
    assert len(_ask(registry, "GET", "/schemas", query="format=resolved")[1]) == 2
    monkeypatch.setattr("spark_klog.registry.api._LIST_SECONDS", 0.0)
    status, refused = _ask(registry, "GET", "/schemas", query="format=resolved")
    assert (status, refused["error_code"]) == (500, 50002)


def test_a_long_row_of_references() -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    registry.configure(None, {"compatibilityLevel": "NONE"})
    status = 200
    for n in range(1, 300):
        fields = [{"name": "f", "type": f"R{n - 1}"}] if n > 1 else []
        body = {"schema": json.dumps({"type": "record", "name": f"R{n}", "fields": fields})}
        body["references"] = [{"name": f"R{n - 1}", "subject": f"s{n - 1}", "version": 1}] if n > 1 else []
        status, refused = _ask(registry, "POST", f"/subjects/s{n}/versions", body)
        if status != 200:
            break
    assert (status, n) == (422, 202), refused
    assert "refer each to the next one" in refused["message"]


def test_the_parsed_schemas_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_MOST_LETTERS", 100)
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    for n in range(9):
        body = _record("A", *({"name": f"f{m}", "type": "int", "default": 0} for m in range(n)))
        assert _ask(registry, "POST", "/subjects/a/versions", body)[0] == 200
    assert len(work._parsed_schemas) == 1


def test_schemas_that_are_nested_too_deeply_to_compare() -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    made = []
    for kind in ("integer", "string"):
        schema: dict[str, Any] = {"type": kind}
        for _ in range(150):
            schema = {"items": schema, "type": ["array", "null"]}
        body = {"schema": json.dumps(schema), "schemaType": "JSON"}
        made.append(_ask(registry, "POST", "/subjects/a/versions", body))
    assert made[0][0] == 200
    assert made[1][0] == 409
    assert "nested too deeply" in made[1][1]["message"]


def test_requests_that_hang_hold_up_neither_reading_nor_the_end(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0", "hanging") as registry:
        register(registry.url, "a", '"int"')
        is_over = threading.Event()
        monkeypatch.setattr(Registry, "incompatibilities", lambda *_, **__: is_over.wait(60))
        url = registry.url
        with ThreadPoolExecutor(12) as pool, suppress(OSError):
            path = "/compatibility/subjects/a/versions/latest"
            asked = [pool.submit(ask, url, "POST", path, {"schema": '"long"'}) for _ in range(12)]
            try:
                time.sleep(0.5)
                assert ask(url, "GET", "/schemas/ids/1")[0] == 200
                assert register(url, "b", '"long"') == 2
                started = time.monotonic()
                registry.close()
                assert time.monotonic() - started < 30
            finally:
                is_over.set()
            for future in asked:
                assert isinstance(future.exception(60), OSError)


def test_requests_that_wait_leave_connections_for_those_that_read(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr("spark_klog.registry.service._MOST_WAITING", 3)
    monkeypatch.setattr(Registry, "formatted", lambda *_, **__: is_over.wait(60) and "{}")
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0", "waiting") as registry:
        url = registry.url
        register(url, "a", '"int"')
        with ThreadPoolExecutor(3) as pool:
            path = "/subjects/a/versions/1?form%61t=resolved"  # as the server reads it
            asked = [pool.submit(ask, url, "GET", path) for _ in range(3)]
            try:
                wait_until(lambda: registry._waiting == 3)
                status, _, headers = ask_whole(url, "POST", "/subjects/a", {"schema": '"int"'})
                assert (status, headers["retry-after"]) == (503, "1")
                assert ask(url, "GET", "/%73chemas")[0] == 503
                assert ask(url, "GET", "/schemas/ids/1")[0] == 200
            finally:
                is_over.set()
            assert [future.result(60)[0] for future in asked] == [200] * 3
        assert ask(url, "POST", "/subjects/a", {"schema": '"int"'})[0] == 200


def test_bodies_that_do_not_come_keep_out_no_others(registry: str) -> None:
    place = urlsplit(registry)
    large = {"schema": json.dumps({"type": "record", "name": "R", "fields": [], "doc": "x" * 70_000})}
    with ExitStack() as stack:
        for size in (0, 70_000) * 6:  # those of the second kind stand still in their turn
            silent = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=30))
            silent.sendall(b"POST /subjects/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n")
            silent.sendall(b" " * size)
        connection = HTTPConnection(str(place.hostname), place.port, timeout=30)
        stack.callback(connection.close)
        parts = iter([json.dumps({"schema": '"int"'}).encode()])
        connection.request("POST", "/subjects/small/versions", parts, encode_chunked=True)
        assert connection.getresponse().status == 200
        assert ask(registry, "POST", "/subjects/large/versions", large)[0] == 200


def test_bodies_in_chunks(registry: str) -> None:
    place = urlsplit(registry)
    body = json.dumps({"schema": _record("Chunked")["schema"]}).encode()
    connection = HTTPConnection(str(place.hostname), place.port, timeout=30)
    parts = iter([body[:10], body[10:]])
    connection.request("POST", "/subjects/chunked/versions", parts, encode_chunked=True)
    assert connection.getresponse().status == 200
    assert ask(registry, "GET", "/subjects/chunked/versions") == (200, [1])


_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (_CHUNKED + b"x\r\n", 400),
        (_CHUNKED + b"-1\r\n", 400),
        (_CHUNKED + b"2\r\n{}}\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"2;" + b"x" * 20_000, 400),
        (_CHUNKED + b"0\r\n" + b"a: b\r\n" * 100, 400),
        (_CHUNKED + b"FFFFFFFF\r\n", 413),
        (_CHUNKED + b"2;a=b\r\n{}\r\n0\r\na: b\r\n\r\n", 422),  # a body: an empty schema
        (b"Content-Length: 2\r\n" + _CHUNKED, 400),
        (b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"Content-Length: " + b"1" * 5000 + b"\r\n\r\n", 413),
        (b"Content-Length: x\r\n\r\n", 400),
    ],
)
def test_bodies_that_do_not_do(registry: str, rest: bytes, status: int) -> None:
    place = urlsplit(registry)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        with suppress(OSError):  # the answer may come before all is sent
            connection.sendall(b"POST /subjects/x/versions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + rest)
        assert connection.recv(100).split(b" ")[1] == str(status).encode()


def test_schemas_are_compared_while_others_register(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    assert _ask(registry, "POST", "/subjects/a/versions", _record("A"))[0] == 200
    unreadable, compared = AvroSchema.unreadable, []

    def slowly(reader: AvroSchema, writer: AvroSchema) -> list[str]:
        assert not registry._changing.locked()
        compared.append((reader.canonical(), writer.canonical()))
        if len(compared) == 1:  # meanwhile
            more = _record("A", {"name": "x", "type": "string", "default": ""})
            assert _ask(registry, "POST", "/subjects/a/versions", more)[1]["version"] == 2
        return unreadable(reader, writer)

    monkeypatch.setattr(AvroSchema, "unreadable", slowly)
    registry.configure(None, {"compatibilityLevel": "BACKWARD_TRANSITIVE"})
    slow = _record("A", {"name": "x", "type": "int", "default": 0})
    status, refused = _ask(registry, "POST", "/subjects/a/versions", slow)
    assert (status, refused["error_code"]) == (409, 409)  # with the version that came meanwhile
    assert len(compared) == len(set(compared)) == 3  # none twice


def test_a_subject_that_changes_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_klog.registry.registry._MOST_TRIES", 3)
    numbers = iter(range(100))

    def run(function: Any, *arguments: Any, deadline: float) -> Any:
        if function is work.unreadable:
            key, value = Key(SCHEMA, "a", number := next(numbers) + 2), {"schema": f'"{"x" * number}"'}
            log.append([Record(key, {"subject": "a", "version": number, "id": number, "deleted": False, **value})])
            return []
        return function(*arguments)

    log = MemoryLog()
    registry = Registry(log, run)  # type: ignore[arg-type]
    assert _ask(registry, "POST", "/subjects/a/versions", _record("A"))[0] == 200
    status, refused = _ask(registry, "POST", "/subjects/a/versions", _record("B"))
    assert (status, refused["error_code"], next(numbers)) == (500, 50002, 3)
    assert "subject a changed each time" in refused["message"]
    assert _ask(registry, "POST", "/subjects/b/versions", _record("B"))[0] == 200


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"\\ud800"', "[" * 100_000, "1" * 10_000]
)
def test_what_cannot_be_sent_as_json_is_not_stored(text: str) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    requests = [
        ("PUT", "/config", '{"defaultRuleSet": {"x": %s}}'),
        ("PUT", "/config/a", '{"overrideMetadata": {"x": [%s]}}'),
        ("POST", "/subjects/a/versions", '{"schema": "\\"int\\"", "metadata": {"x": %s}}'),
        ("POST", "/subjects/a/versions", '{"schema": "\\"int\\"", "ruleSet": {"x": {"y": %s}}}'),
    ]
    for method, path, body in requests:
        made = answer(registry, method, path, "", (body % text).encode())
        assert made.status == 400, (method, path, text[:20])
        json.loads(made.body.decode(), parse_constant=_no_json)
        in_utf_16 = answer(registry, method, path, "", (body % text).encode("utf-16-le"))
        assert in_utf_16.status == 400


@pytest.mark.parametrize("coding", ["utf-8", "utf-16-le", "utf-32-le"])
def test_bodies_with_half_of_a_surrogate_pair(coding: str) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    body = '{"defaultRuleSet": {"x": "\ud800"}}'.encode(coding, "surrogatepass")
    made = answer(registry, "PUT", "/config", "", body)
    assert made.status == 400
    assert "half of a surrogate pair" in json.loads(made.body)["message"]


def _no_json(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def test_stored_values_that_are_not_json_are_null() -> None:
    """As earlier releases took them."""
    log = MemoryLog()
    log.records = [
        (
            Key(SCHEMA, "a", 1).encode(),
            b'{"subject":"a","version":1,"id":1,"schema":"\\"int\\"","ruleSet":{"x":NaN},"deleted":false}',
            False,
        ),
        (Key(CONFIG).encode(), b'{"compatibilityLevel":"FULL","defaultMetadata":{"x":[1e999,-Infinity,1.5]}}', False),
    ]
    log.replayed(log.records, log.state)
    registry = Registry(log)  # type: ignore[arg-type]
    for path in ("/schemas", "/subjects/a/versions/1", "/schemas/ids/1", "/config"):
        made = answer(registry, "GET", path, "", b"")
        assert made.status == 200
        json.loads(made.body.decode(), parse_constant=_no_json)
    assert json.loads(answer(registry, "GET", "/config", "", b"").body)["defaultMetadata"] == {"x": [None, None, 1.5]}
    assert _ask(registry, "POST", "/subjects/a/versions", {"schema": '"int"'})[1]["id"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {"schema": '{"type":"record","name":"R","doc":"\\ud800","fields":[]}'},
        {"schema": '{"type":"record","name":"R\\udc00","fields":[]}'},
        {"schema": '"\\ud800"'},
        {"schema": '{"title":"\\ud800"}', "schemaType": "JSON"},
        {"schema": '{"type":"\\ud800"}', "schemaType": "JSON"},
        {"schema": '{"$ref":"\\ud800"}', "schemaType": "JSON"},
    ],
)
def test_schemas_with_half_of_a_surrogate_pair(body: dict[str, Any]) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    for method, path in (
        ("POST", "/subjects/a/versions"),
        ("POST", "/subjects/a"),
        ("POST", "/compatibility/subjects/a/versions"),
    ):
        status, refused = _ask(registry, method, path, body)
        assert (status, refused["error_code"]) == (422, 42201)
    assert _ask(registry, "GET", "/schemas") == (200, [])
